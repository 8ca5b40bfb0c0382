"""How the requests of a story fared, seen by their client: the control plane has no say in it."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.demo.prepare import OBJECTIVES
from engine.replay import Record, Status

TTFT_S, TPOT_S = (OBJECTIVES[i]["spec"]["threshold_ms"] / 1000 for i in range(2))
IN_TIME = f"TTFT within {TTFT_S * 1000:g} ms and TPOT within {TPOT_S * 1000:g} ms"
WINDOW_S = 5.0
BAD_MAX = 0.856  # share in time below which a window is bad: 14.4 times a budget of 1 % is missed
GOOD_MIN = 0.95


def in_time(record: Record) -> bool:
    """Answered, with TTFT and TPOT within the service's objectives (goodput)."""
    if record.status is not Status.OK or record.ttft_s > TTFT_S:
        return False
    return record.tokens <= 1 or record.tpot_s <= TPOT_S


def good_again_s(records: Sequence[Record], since_s: float) -> float | None:
    """Seconds from `since_s` to the end of the first two good windows in a row after a bad one.

    Of the requests let in: what was refused was told so at once. inf: bad to the end; None: never
    bad.
    """
    late = [r for r in records if r.sent_s >= since_s and r.status is not Status.REJECTED]
    last_s = max((r.sent_s for r in late), default=since_s)
    windows: list[list[bool]] = [[] for _ in range(int((last_s - since_s) / WINDOW_S) + 1)]
    for record in late:
        windows[int((record.sent_s - since_s) / WINDOW_S)].append(in_time(record))
    bad_seen, good = False, 0
    for k, window in enumerate(windows):
        share = sum(window) / len(window) if window else 1.0
        good = good + 1 if share >= GOOD_MIN else 0
        bad_seen = bad_seen or share < BAD_MAX
        if bad_seen and good == 2:
            return (k + 1) * WINDOW_S
    return float("inf") if bad_seen else None
