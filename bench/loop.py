"""Does the loop help? The same seeded arrivals under three arms, interleaved in one run.

    python bench/loop.py [--seed N] [--json FILE]
    python bench/loop.py --sum FILE …

  off     the default configuration, the loop watching but not acting
  on      the same start, the loop acting
  static  the best of 12 fixed configurations, chosen in hindsight, the loop watching

Control plane, agent, engine and this client run alike in every arm, at the default times: only who
may act, and the configuration, differ. The load is the demo's (scenario `burst`): calm and steady
traffic, then crowds that ask for longer answers, of a mean well below what the engine sustains in
such a house. Whether they wait is then a matter of configuration, not of the machine's speed.

One seed takes a quarter of an hour. `--json` appends what came of it to a file; `--sum` prints the
verdict over such files, of the worst seed.

`bench/quiet.py` is the other half: steady light load.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from plant import (
    CPU_SHARE_MAX,
    CpuMeter,
    drive,
    house,
    say,
    share_inside,
    verdict,
    warm_up,
)

from controlplane.demo.client import good_again_s
from controlplane.demo.house import House
from controlplane.demo.measuring import best_look
from controlplane.demo.pace import NORMAL
from controlplane.demo.scenarios import SCENARIOS, Scenario
from engine.load import Request
from engine.replay import Record, Status, Summary, summarise

BURST = SCENARIOS["burst"]
# 12 fixed configurations around the defaults (32, 2048, 512), on the knobs' own ladders.
STATIC = [
    {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "prefill_chunk_tokens": chunk}
    for seqs in (16, 32, 64, 128)
    for tokens, chunk in ((512, 128), (2048, 512), (4096, 2048))
]
DEFAULTS = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "prefill_chunk_tokens": 512}
SCREENED = (6, 3, 1)  # of them are left after each turn
SCREEN_CALM_S = 1.0  # before its crowds


Row = dict[str, Any]


@dataclass
class Run:
    """One arm under one seed."""

    arm: str
    seed: int
    records: list[Record]
    summary: Summary
    shift_s: float
    incidents: list[dict[str, Any]]
    actions: list[dict[str, Any]]
    cpu_share: dict[str, float]
    started: float

    @property
    def inside(self) -> float:
        return share_inside(self.records)

    def detected_s(self) -> float | None:
        """Seconds from the shift to the first incident's row."""
        times = [stamp(i["opened_at"]) - self.started - self.shift_s for i in self.incidents]
        return min(times, default=None)

    def mitigated_s(self) -> float | None:
        """Seconds from the shift until requests were in time again; None: never bad, or bad to the
        end."""
        seconds = good_again_s(self.records, self.shift_s)
        return None if seconds == float("inf") else seconds


def stamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def one_run(
    arm: str, seed: int, values: dict[str, Any], requests: list[Request], shift_s: float
) -> Run:
    with house(acting=arm == "on", pace=NORMAL) as built:
        built.configure(values, by="bench")
        warm_up(built)
        meter = CpuMeter(built)
        records, replayer, started = drive(built, requests)
        return Run(
            arm, seed, records, summarise(records, replayer.unsolicited), shift_s,
            built.api("incidents/")["incidents"], built.api("actions/")["actions"],
            meter.shares(), started,
        )  # fmt: skip


def capacity_of(built: House, burst: Scenario) -> float:
    """Requests a second its engine sustains beside control plane and agent, with the defaults."""
    warm_up(built)
    return best_look(built, burst, lambda doing: None)


def best_static(burst: Scenario, seconds: float) -> dict[str, int]:
    """The configuration with the largest share inside: all, then ever fewer, under other crowds.

    What they score adds up; where that is equal, the shorter time to first token decides.
    """
    with house(acting=False, pace=NORMAL) as built:
        capacity = capacity_of(built, burst)
        left, scores = STATIC, {describe(values): (0.0, 0.0) for values in STATIC}
        for turn, kept in enumerate(SCREENED):
            requests = burst.requests(1000 + turn, capacity, SCREEN_CALM_S, seconds)
            for values in left:
                built.configure(values, by="bench")
                records, replayer, _ = drive(built, requests)
                inside, name = share_inside(records), describe(values)
                ttft_s = summarise(records, replayer.unsolicited).ttft_p99_s
                scores[name] = (scores[name][0] + inside, scores[name][1] - ttft_s)
                say(f"  static {name:<24} inside {inside:.3f}")
            left = sorted(left, key=lambda v: scores[describe(v)], reverse=True)[:kept]
    return left[0]


def describe(values: dict[str, Any]) -> str:
    return "/".join(str(values[k]) for k in DEFAULTS)


def row(run: Run) -> str:
    counts = {k: n for k, n in run.summary.counts.items() if n}
    detected, mitigated = run.detected_s(), run.mitigated_s()
    changes = [" ".join(f"{k} {c['from']}→{c['to']}" for k, c in a["changes"].items())
               + f" {a['state']}" for a in reversed(run.actions)
               if a["state"] not in ("expired", "rejected")]  # fmt: skip
    return (
        f"  seed {run.seed} {run.arm:<7} inside {run.inside:.3f}  "
        f"TTFT p99 {run.summary.ttft_p99_s:6.2f} s  TPOT p99 {run.summary.tpot_p99_s * 1e3:4.0f} ms"
        f"  detected {'–' if detected is None else f'{detected:.0f} s'}"
        f"  mitigated {'–' if mitigated is None else f'{mitigated:.0f} s'}"
        f"  {counts}  {'; '.join(changes)}"
    )


def compare(options: argparse.Namespace) -> Row:
    """One seed: what each arm came to, as `judge` reads it."""
    began, seed = time.monotonic(), options.seed
    burst = replace(BURST, calm=options.calm, load=options.load)
    static = best_static(burst, options.screen_s)
    say(f"  best static: {describe(static)}")
    # Measured as close to the runs as can be: a shared machine is not as fast now as minutes ago.
    with house(acting=False, pace=NORMAL) as built:
        capacity = capacity_of(built, burst)
    calm, high = options.calm * capacity, options.load * capacity
    say(f"  capacity {capacity:.1f} requests/s: {calm:.1f} for {options.quiet_s:g} s, "
        f"then {high:.1f} in crowds for {options.shift_s:g} s")  # fmt: skip
    requests = burst.requests(seed, capacity, options.quiet_s, options.shift_s)
    arms = [("off", DEFAULTS), ("on", DEFAULTS), ("static", static)]
    runs: dict[str, Run] = {}
    for arm, values in arms[seed % 3 :] + arms[: seed % 3]:
        runs[arm] = run = one_run(arm, seed, values, requests, options.quiet_s)
        say(f"{row(run)}  [{(time.monotonic() - began) / 60:.1f} min]")
        for action in reversed(run.actions):
            say(f"      {action['sentence']}")
    shares = [run.cpu_share for run in runs.values()]
    return {
        "seed": seed,
        "capacity": capacity,
        "inside": {arm: run.inside for arm, run in runs.items()},
        "lost": sum(run.summary.counts.get(Status.LOST, 0) for run in runs.values()),
        "duplicated": sum(run.summary.duplicated for run in runs.values()),
        "cpu_share": max(share["control-plane"] + share["agent"] for share in shares),
        "detected_s": runs["on"].detected_s(),
        "mitigated_s": runs["on"].mitigated_s(),
    }


def judge(rows: Sequence[Row]) -> int:
    def over(arm: str) -> list[float]:
        return [r["inside"]["on"] / max(r["inside"][arm], 1e-9) for r in rows]

    lost, duplicated = sum(r["lost"] for r in rows), sum(r["duplicated"] for r in rows)
    watching = max(r["cpu_share"] for r in rows)
    over_off, over_static = over("off"), over("static")
    say("")
    for name in ("off", "static"):
        say(f"on over {name}: {', '.join(f'{ratio:.3f}' for ratio in over(name))}")
    for name in ("detected", "mitigated"):
        times = [r[f"{name}_s"] for r in rows]
        say(f"{name} after, s: {', '.join('–' if t is None else f'{t:.0f}' for t in times)}")
    passed = [
        verdict("requests_lost", lost, "0", lost == 0),
        verdict("requests_answered_twice", duplicated, "0", duplicated == 0),
        verdict("on_over_best_static_worst", min(over_static), "0.9", min(over_static) >= 0.9),
        verdict("on_over_off_worst", min(over_off), "1.15", min(over_off) >= 1.15),
        # Of the run that cost most
        verdict("cpu_share_worst", watching, f"<={CPU_SHARE_MAX}", watching <= CPU_SHARE_MAX),
    ]
    return 0 if all(passed) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--calm", type=float, default=BURST.calm, help="share of capacity, before")
    parser.add_argument("--load", type=float, default=BURST.load, help="share of capacity, after")
    parser.add_argument("--quiet-s", type=float, default=5)
    parser.add_argument("--shift-s", type=float, default=225)
    parser.add_argument("--screen-s", type=float, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append what came of it")
    parser.add_argument("--sum", type=Path, nargs="+", metavar="FILE", help="judge such files")
    options = parser.parse_args()
    if options.sum:
        return judge([json.loads(line) for each in options.sum for line in each.open()])
    # A bench that is told to stop ends the processes it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = compare(options)
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps(found) + "\n")
    return judge([found])


if __name__ == "__main__":
    sys.exit(main())
