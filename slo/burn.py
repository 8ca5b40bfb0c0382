"""Multi-window, multi-burn-rate pairs (Google SRE workbook, "Alerting on SLOs", way 6).

A pair says: so much of the budget went in the long window, and it is still going in the short one.
The windows are fixed; the factor follows from the objective's window, as Sloth does it:
factor = budget share × objective window ÷ long window, that is 14.4, 6, 3, 1 at 30 days and
13.44, 5.6, 2.8, 0.933 at 28.

A young objective has less history than the long window. The time before its first reading counts
as time in which nothing burned, so a pair needs the same events as it would need later: that share
of the budget really gone. The first minutes of a fresh install are guarded by the control-window
rule (budget.window_is_bad), which needs no history.
"""

from __future__ import annotations

from dataclasses import dataclass

from slo.budget import EVENTS_MIN, Counts, budget_of, burn_rate

HOUR_S = 3_600.0
DAY_S = 86_400.0
# Below it the budget outlasts its window, so the pair would fire on an objective that is met.
# 0.9 leaves room for the 0.933 of 28 days.
FACTOR_MIN = 0.9
PAGE, TICKET = "page", "ticket"  # severities: wakes somebody, or waits for the working day


@dataclass(frozen=True)
class Pair:
    """Windows in seconds; `budget_share` is the part of the budget gone in the long one."""

    name: str
    severity: str
    long_s: float
    short_s: float
    budget_share: float

    def factor(self, window_s: float) -> float:
        """The burn rate that uses `budget_share` of an objective window's budget in `long_s`."""
        return self.budget_share * window_s / self.long_s


PAIRS = (
    Pair("1h/5m", PAGE, HOUR_S, HOUR_S / 12, 0.02),
    Pair("6h/30m", PAGE, 6 * HOUR_S, HOUR_S / 2, 0.05),
    Pair("1d/2h", TICKET, DAY_S, 2 * HOUR_S, 0.10),
    Pair("3d/6h", TICKET, 3 * DAY_S, 6 * HOUR_S, 0.10),
)


@dataclass(frozen=True)
class PairState:
    """One pair now. Burn rates are over the data there is; None without events.

    `covered` is the share of the long window the objective has history for, `enough` whether that
    holds the 20 events a pair wants. `can_fire` is false when the factor is above 1 ÷ budget: not
    even every event failing burns that fast.
    """

    name: str
    severity: str
    long_s: float
    short_s: float
    factor: float
    burn_long: float | None
    burn_short: float | None
    firing: bool
    covered: float = 1.0
    enough: bool = True
    can_fire: bool = True

    @property
    def weighed_long(self) -> float | None:
        """What the factor is compared with: time without history counts as time without burn."""
        return None if self.burn_long is None else self.burn_long * self.covered


def pairs_of(window_days: float) -> tuple[Pair, ...]:
    """The pairs worth watching over this objective window: those whose factor is at least 0.9.

    Seven days keep the two pages (3.36, 1.4); one day keeps none, and the control-window rule
    alone opens incidents.
    """
    return tuple(p for p in PAIRS if p.factor(window_days * DAY_S) >= FACTOR_MIN)


def can_fire(pair: Pair, *, target: float, window_days: float) -> bool:
    """Whether any traffic can exceed the factor: a burn rate is at most 1 ÷ budget."""
    return pair.factor(window_days * DAY_S) * budget_of(target) < 1


def pair_state(
    pair: Pair,
    *,
    target: float,
    window_days: float,
    long: Counts,
    short: Counts,
    history_s: float,
    trusted: bool = True,
) -> PairState:
    """How a pair stands. `history_s` is the time since the first reading.

    Fires when both windows burn faster than the factor, strictly, time without history counted as
    time without burn, and the long window holds at least 20 events. `trusted` false (the newest
    signal is not ok) never fires.
    """
    factor = pair.factor(window_days * DAY_S)
    burn_long, burn_short = burn_rate(long, target), burn_rate(short, target)
    covered = min(history_s / pair.long_s, 1.0)
    enough = long.total >= EVENTS_MIN
    firing = (
        trusted
        and enough
        and burn_long is not None
        and burn_short is not None
        and burn_long * covered > factor
        and burn_short * min(history_s / pair.short_s, 1.0) > factor
    )
    return PairState(
        name=pair.name,
        severity=pair.severity,
        long_s=pair.long_s,
        short_s=pair.short_s,
        factor=factor,
        burn_long=burn_long,
        burn_short=burn_short,
        firing=firing,
        covered=covered,
        enough=enough,
        can_fire=can_fire(pair, target=target, window_days=window_days),
    )
