"""Is the right cause named first? Faults on a real engine, drawn by a seed nobody else sees.

    python bench/diagnosis.py [--runs N] [--seed N] [--only NAME …] [--json FILE] [--keep DIR]
    python bench/diagnosis.py --sum FILE …

Each run is a fresh house at the fast pace that may explain but not act: quiet traffic, then

- one of the demo's scenarios that has a cause (controlplane/demo/scenarios.py), in an order and
  under loads drawn by the seed. What counts is the first cause the control plane names for an
  incident; `unknown` and `no incident` are answers too, and wrong, unless the senders saw no
  promise broken either: what nobody felt is told apart. Beside it stand two trivial guesses: the
  cause that goes with the metric whose relative change is the largest, and one drawn at random;
- two faults at once: both are to be named, and nothing else;
- a change ordered on trial, one that mends nothing of a fault and one that does harm: neither may
  be kept, and the harm may not outlast the trial's time.

`--json` appends what came of each run to a file; `--sum` prints the verdict over such files, so
that many runs can be made in slices.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diagnosis_runs import NOT_FELT, PAIRS, cause_run, made_house, pair_run, pair_scenario
from diagnosis_trials import TRIALS, trial_run

from controlplane.demo.measuring import sustained
from controlplane.demo.scenarios import SCENARIOS, Scenario

TARGET = 0.9

Row = dict[str, Any]

CAUSES = [name for name, each in SCENARIOS.items() if each.cause]
NAMES = [*CAUSES, *PAIRS, *TRIALS]


def played(name: str) -> Scenario:
    if name in PAIRS:
        return pair_scenario(name)
    return TRIALS[name].scenario if name in TRIALS else SCENARIOS[name]


def capacities(names: Sequence[str]) -> dict[str, float]:
    """By name, requests a second that a house sustains; alike scenarios are measured once."""
    found: dict[tuple[Any, ...], float] = {}
    for scenario in map(played, names):
        if alike(scenario) not in found:
            with tempfile.TemporaryDirectory() as scratch:
                house = made_house(scenario, Path(scratch))
                capacity = found[alike(scenario)] = sustained(house, Path(scratch), scenario)
            say(f"capacity {capacity:.1f} requests/s, as for {scenario.name}")
    return {name: found[alike(played(name))] for name in names}


def alike(scenario: Scenario) -> tuple[Any, ...]:
    """What decides how much a house sustains: equal for scenarios that are measured together."""
    return scenario.engine_options, scenario.decode_bound, *scenario.knobs.items()


def one_run(name: str, capacity: float, draw: random.Random, keep: Path | None) -> Row:
    seed = draw.randrange(10**6)
    if name in TRIALS:
        return trial_run(name, seed, capacity, keep)
    if name in PAIRS:
        return pair_run(name, seed, capacity, keep)
    row = cause_run(name, seed, capacity, keep)
    return row | {"drawn": draw.choice(sorted({SCENARIOS[n].cause for n in CAUSES}))}


def told(row: Row, minutes: float) -> None:
    if row["kind"] == "cause":
        after = "–" if row["named_after_s"] is None else f"{row['named_after_s']:.0f} s"
        say(f"  {row['planted']:<24} named {row['named']:<24} after {after:<6} largest change "
            f"{row['largest']:<24} [{minutes:.1f} min]")  # fmt: skip
    elif row["kind"] == "pair":
        named = " and ".join(row["named"]) or "nothing"
        say(f"  {' and '.join(row['planted'])}: named {named} [{minutes:.1f} min]")
    else:
        say(f"  {row['name']:<24} {row['change']}: {row['verdict'] or 'no verdict'}, "
            f"{row['state']} {row['lasted_s']:.0f} s of {row['ttl_s']:.0f} s after it was applied "
            f"[{minutes:.1f} min]")  # fmt: skip
    if not right(row) and row.get("named") != NOT_FELT:
        say(f"      {row['because']}")
        for sentence in row["against"]:
            say(f"      against: {sentence}")


def right(row: Row) -> bool:
    if row["kind"] == "cause":
        return bool(row["named"] == row["planted"])
    if row["kind"] == "pair":
        return sorted(row["named"]) == sorted(row["planted"])
    return bool(row["verdict"] in TRIALS[row["name"]].verdicts and row["restored"] and (
        row["lasted_s"] <= row["ttl_s"]))  # fmt: skip


def matrix(rows: Sequence[Row], guess: str) -> None:
    """Planted by row, guessed by column."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["planted"]][row[guess]] += 1
    columns = sorted({cause for row in counts.values() for cause in row} | set(counts))
    say("\n  planted \\ " + guess)
    for i, cause in enumerate(columns):
        say(f"    {chr(97 + i)}  {cause}")
    say(" " * 26 + " ".join(f"{chr(97 + i):>3}" for i in range(len(columns))))
    for planted in sorted(counts):
        cells = " ".join(f"{counts[planted][cause] or '·':>3}" for cause in columns)
        say(f"  {planted:<24}{cells}")


def share(rows: Sequence[Row], guess: str) -> float:
    return sum(row[guess] == row["planted"] for row in rows) / len(rows)


def judge(rows: Sequence[Row]) -> int:
    """Prints the verdict; 0 if every target that was tried is met."""
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("cause", "pair")}
    passed = []
    if causes := kinds["cause"]:
        for guess in ("named", "largest", "drawn"):
            matrix(causes, guess)
        say("")
        unfelt = Counter(row["planted"] for row in causes if row["named"] == NOT_FELT)
        for planted, count in unfelt.items():
            say(f"diagnosis not_felt {planted} {count}: no promise was broken, nothing to explain")
    if causes := [row for row in kinds["cause"] if row["named"] != NOT_FELT]:
        say(f"diagnosis largest_change_right {share(causes, 'largest'):.2f} for comparison")
        say(f"diagnosis random_right {share(causes, 'drawn'):.2f} for comparison")
        passed.append(verdict("right_cause_first", causes, TARGET))
    if pairs := kinds["pair"]:
        passed.append(verdict("both_of_two_named", pairs, TARGET))
    for name in TRIALS:
        if trials := [row for row in rows if row.get("name") == name]:
            counted = Counter(row["verdict"] or "none" for row in trials)
            say(f"diagnosis {name} verdicts " + ", ".join(f"{n} {v}" for v, n in counted.items()))
            passed.append(verdict(f"{name}_not_kept", trials, 1.0))
    lost = sum(row["lost"] for row in rows)
    say(f"diagnosis requests_lost {lost} target 0 {'PASS' if not lost else 'FAIL'}")
    return 0 if all(passed) and not lost else 1


def verdict(what: str, rows: Sequence[Row], target: float) -> bool:
    good = sum(map(right, rows))
    passed = good >= target * len(rows)
    say(f"diagnosis {what} {good / len(rows):.2f} ({good} of {len(rows)}) target {target:g} "
        f"{'PASS' if passed else 'FAIL'}")  # fmt: skip
    return passed


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1, help="of each")
    parser.add_argument("--seed", type=int, help="of order, loads and guesses; default: any")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append what came of each run")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep each run's state there")
    parser.add_argument("--sum", type=Path, nargs="+", metavar="FILE", help="judge such files")
    options = parser.parse_args()
    if options.sum:
        return judge([json.loads(line) for each in options.sum for line in each.open()])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    draw = random.Random(seed)
    plan = [name for name in options.only for _ in range(options.runs)]
    draw.shuffle(plan)
    carries = capacities(plan)
    began = time.monotonic()
    rows: list[Row] = []
    for name in plan:
        row = one_run(name, carries[name], draw, options.keep)
        rows.append(row | {"seed": seed})
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        told(row, (time.monotonic() - began) / 60)
    say(f"\nseed {seed}, {len(rows)} runs")
    return judge(rows)


if __name__ == "__main__":
    sys.exit(main())
