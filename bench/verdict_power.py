"""How often is a change proved that helps, and one that does nothing? On recorded crowds.

    python bench/verdict_power.py [--record FILE] [--read FILE …]

Records crowds (engine.load.bursts) on the real engine under a small and a larger running cap, in
turns, for ten minutes. Then it draws trials from the recorded control windows, with replacement,
as neighbouring ones are not correlated (which it prints): two windows before and the four that a
trial of the default length has, judged look by look by controlplane.actions.verify.

Small to large is a change that helps; small to small and large to large do nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from loop import DEFAULTS, capacity_of
from plant import drive, house, say, verdict

from controlplane.actions import verify
from controlplane.demo.pace import NORMAL
from engine.load import arrivals, bursts
from engine.replay import ANSWER_S_MAX
from slo.budget import Counts

SMALL, LARGE = DEFAULTS["max_num_seqs"], 2 * DEFAULTS["max_num_seqs"]
FIRST_TOKEN_S, BUDGET = 0.5, 0.05  # the demo's objective for first tokens
ERROR_MAX = 0.05
BEFORE, AFTER, TRIALS = 2, 4, 2_000

Recorded = dict[str, Any]


def record(seconds: float, load: float) -> list[Recorded]:
    """Runs under either cap: when each request was sent, and its first token came (seconds)."""
    runs: list[Recorded] = []
    with house(acting=False, pace=NORMAL) as built:
        rate = load * capacity_of(built)
        for seed, cap in enumerate((SMALL, LARGE, LARGE, SMALL)):
            built.configure({**DEFAULTS, "max_num_seqs": cap}, by="bench")
            requests = arrivals(seed, bursts(seed, seconds, rate), name="crowd")
            records = drive(built, requests)[0]
            times = [(r.sent_s, r.first_s if r.first_s == r.first_s else None) for r in records]
            runs.append({"cap": cap, "seconds": seconds, "times": times})
            say(f"  cap {cap}: {len(times):,} requests, {rate:.1f}/s")
    return runs


def windows_of(run: Recorded, window_s: float) -> list[Counts]:
    """The run's control windows; a first token that never came is late when it is given up."""
    sent = np.array([sent for sent, _ in run["times"]])
    first = np.array([f if f is not None else s + ANSWER_S_MAX for s, f in run["times"]])
    edges = np.arange(0.0, run["seconds"] + 1e-6, window_s)
    total = np.histogram(first, edges)[0]
    good = np.histogram(first[first - sent < FIRST_TOKEN_S], edges)[0]
    return [Counts(float(g), float(n)) for g, n in zip(good, total, strict=True) if n]


def trial(before: list[Counts], after: list[Counts], window_s: float) -> verify.Verdict | None:
    old, looks = verify.Sample(tuple(before), window_s), len(after) - verify.WINDOWS_MIN + 1
    for count in range(verify.WINDOWS_MIN, len(after) + 1):
        new = verify.Sample(tuple(after[:count]), window_s)
        last = count == len(after)
        found = verify.verdict(old, new, budget=BUDGET, looks=looks, last=last).verdict
        if found is not None:
            return found
    return None


def trials(before: list[Counts], after: list[Counts], window_s: float) -> dict[str, float]:
    """Share of each verdict."""
    rng = np.random.default_rng(7)
    found: Counter[str] = Counter()
    for _ in range(TRIALS):
        old = [before[i] for i in rng.integers(len(before), size=BEFORE)]
        new = [after[i] for i in rng.integers(len(after), size=AFTER)]
        found[str(trial(old, new, window_s))] += 1
    return {name: found[name] / TRIALS for name in ("better", "worse", "inconclusive")}


def judge(runs: list[Recorded], window_s: float) -> int:
    by_cap: dict[int, list[Counts]] = {SMALL: [], LARGE: []}
    for run in runs:
        windows = windows_of(run, window_s)
        by_cap[run["cap"]] += windows
        shares = np.array([window.bad_share or 0.0 for window in windows])
        follows = np.corrcoef(shares[:-1], shares[1:])[0, 1]
        say(f"  cap {run['cap']}: late {shares.mean():.1%} ± {shares.std():.1%} a window of "
            f"{window_s:g} s, correlation with the next {follows:+.2f}")  # fmt: skip
    say("")
    wrong = []
    for before, after in ((SMALL, LARGE), (LARGE, SMALL), (SMALL, SMALL), (LARGE, LARGE)):
        shares_of = trials(by_cap[before], by_cap[after], window_s)
        if before == after:
            wrong.append(shares_of["better"])
        told = ", ".join(f"{name} {share:.1%}" for name, share in shares_of.items())
        say(f"  cap {before} → {after}: {told}")
    worst = max(wrong)
    passed = verdict("better_without_effect", worst, f"<={ERROR_MAX}", worst <= ERROR_MAX)
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=150, help="of each of four runs")
    parser.add_argument("--load", type=float, default=0.75)
    parser.add_argument("--window-s", type=float, default=NORMAL.window_s)
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep what was recorded there")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="judge such files")
    options = parser.parse_args()
    if options.read:
        return judge([run for each in options.read for run in json.loads(each.read_text())],
                     options.window_s)  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs = record(options.seconds, options.load)
    if options.record:
        options.record.write_text(json.dumps(runs))
    return judge(runs, options.window_s)


if __name__ == "__main__":
    sys.exit(main())
