"""Does the loop leave well alone? Steady load inside the objectives, at the default times.

    python bench/quiet.py [--minutes N] [--load SHARE] [--seed N]

A false alarm an hour may be: below an hour no incident and no action, else as many as there are
hours. Never flapping: no knob set back to a value it had left, no incident of the same objective
and engine opened twice. What watching costs is measured beside it: CPU, and memory after the first
minute and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import Any

from plant import (
    CPU_SHARE_MAX,
    ConfigWatch,
    CpuMeter,
    capacity_here,
    house,
    say,
    share_inside,
    turned_back,
    verdict,
    warm_up,
)

from controlplane.demo.pace import NORMAL
from engine.load import Request, arrivals
from engine.replay import Record, Replayer, Status, summarise

LOOK_EVERY_S = 30.0
WARM_S = 60.0


async def watch(
    replayer: Replayer, requests: list[Request], meter: CpuMeter
) -> tuple[list[Record], dict[str, float]]:
    """What became of the requests, and the memory of each process tree after WARM_S (MiB)."""
    load = asyncio.create_task(replayer.run(requests))
    told, warm = 0, meter.memory_mib()
    while not load.done():
        done, _ = await asyncio.wait([load], timeout=LOOK_EVERY_S)
        if replayer.now() <= WARM_S + LOOK_EVERY_S / 2:
            warm = meter.memory_mib()
        if not done:
            records = [r for r in replayer.records[told:] if r.status is not Status.PENDING]
            told = len(replayer.records)
            say(f"  {replayer.now():5.0f} s  inside {share_inside(records):.4f}")
    return await load, warm


def opened_twice(incidents: Sequence[dict[str, Any]]) -> list[str]:
    """Incidents of an objective on an engine beyond its first, and each reopening."""
    found: list[str] = []
    seen = set()
    for incident in reversed(incidents):
        scope = (incident["objective"], incident["scope"])
        found += [incident["what"]] * (incident["reopened"] + (scope in seen))
        seen.add(scope)
    return found


def quiet(options: argparse.Namespace) -> int:
    rate, seconds = options.rate or options.load * capacity_here(), options.minutes * 60
    say(f"{options.minutes:g} minutes at {rate:.1f} requests/s")
    with house(acting=True, pace=NORMAL) as built:
        warm_up(built)
        knobs = ConfigWatch(built.engine_url)
        knobs.start()
        meter = CpuMeter(built)
        replayer = Replayer(built.engine_url)
        requests = arrivals(options.seed, [(seconds, rate)], name="quiet")
        records, warm = asyncio.run(watch(replayer, requests, meter))
        shares, end = meter.shares(), meter.memory_mib()
        flapped = turned_back(knobs.finish())
        incidents = built.api("incidents/?limit=100")["incidents"]
        actions = built.api("actions/?limit=100")["actions"]
    summary = summarise(records, replayer.unsolicited)
    say(f"inside {share_inside(records):.4f} of {summary.sent:,} requests")
    for name, share in shares.items():
        say(f"  {name:<14} CPU {share:5.1%} of the machine, memory {warm[name]:.0f} MiB after "
            f"{WARM_S:.0f} s, {end[name]:.0f} MiB at the end")  # fmt: skip
    for line in [i["what"] for i in incidents] + [a["sentence"] for a in actions] + flapped:
        say(f"  {line}")
    lost, allowed = summary.counts[Status.LOST], int(options.minutes // 60)
    watching = shares["control-plane"] + shares["agent"]
    flapping = len(flapped) + len(opened_twice(incidents))
    passed = [
        verdict("requests_lost", lost, "0", lost == 0),
        verdict("requests_answered_twice", summary.duplicated, "0", summary.duplicated == 0),
        verdict("incidents", len(incidents), f"<={allowed}", len(incidents) <= allowed),
        verdict("actions", len(actions), f"<={allowed}", len(actions) <= allowed),
        verdict("flapping", flapping, "0", flapping == 0),
        verdict("cpu_share", watching, f"<={CPU_SHARE_MAX}", watching <= CPU_SHARE_MAX),
    ]
    return 0 if all(passed) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="60: as the design asks")
    parser.add_argument("--load", type=float, default=0.4, help="share of the engine's capacity")
    parser.add_argument("--rate", type=float, help="requests/s, whatever the capacity")
    parser.add_argument("--seed", type=int, default=7, help="of the arrivals")
    options = parser.parse_args()
    # A bench that is told to stop ends the processes it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return quiet(options)


if __name__ == "__main__":
    sys.exit(main())
