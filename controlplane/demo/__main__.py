"""`trimtab demo`: the whole loop on one machine, under a load that shifts.

Nothing here tells the control plane anything: it starts the same processes an operator would and
sends requests. Load is a share of what this machine's engine sustains, measured first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from controlplane.demo.house import House, NotReady, Ports
from controlplane.demo.processes import Died, record
from controlplane.demo.receiver import Receiver
from controlplane.demo.screen import Screen
from controlplane.demo.story import follow
from engine.replay import (
    BURST_LOAD,
    LENGTH_DIVISOR,
    OUTPUT_TOKENS_MAX,
    PROMPT_TOKENS_MAX,
    Record,
    Replayer,
    Request,
    Status,
    arrivals,
    bursts,
    read_azure_csv,
    summarise,
)

ROOT = Path(__file__).resolve().parents[2]
LIVE_EVERY_S = 1.0
LIVE_OVER_S = 15.0


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="trimtab demo",
        description="Control plane, engine, agent and load on this machine: watch the loop close.",
        epilog="Arrivals and lengths have the statistics of the Azure LLM inference trace 2023 "
        f"(conversation); lengths ÷ {LENGTH_DIVISOR}, at most {PROMPT_TOKENS_MAX} in and "
        f"{OUTPUT_TOKENS_MAX} out. After the shift, a quarter of the time brings {BURST_LOAD:g} "
        "times the mean, as when a crowd comes at once.",
    )
    parser.add_argument("--quiet-min", type=float, default=3.0, help="minutes before the shift")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes in all")
    parser.add_argument(
        "--calm",
        type=float,
        default=0.4,
        help="load before the shift, as a share of this machine's capacity",
    )
    parser.add_argument(
        "--load",
        type=float,
        default=0.75,
        help="load after the shift, likewise: it comes in bursts",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of arrivals and lengths")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay the published Azure CSV instead"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="how much faster than recorded")
    parser.add_argument("--model", default="1.3m", choices=["1.3m", "8m"])
    parser.add_argument(
        "--home",
        type=Path,
        default=Path(os.environ.get("TRIMTAB_HOME", ROOT / "var")),
        help="state folder (default: TRIMTAB_HOME or ./var)",
    )
    for name, port in vars(Ports()).items():
        parser.add_argument(f"--{name}-port", type=int, default=port, metavar="PORT")
    return parser.parse_args(argv)  # fmt: skip


def main() -> int:
    chosen = options()
    screen = Screen()
    ports = Ports(**{name: getattr(chosen, f"{name}_port") for name in vars(Ports())})
    taken = ports.taken()
    if taken:
        screen.say(f"Ports in use: {', '.join(taken)}. Is a demo running? `make stop` ends it. "
                   "Others: make run ARGS='--web-port 8001 …'.")  # fmt: skip
        return 1
    house = House(chosen.home, ports, model=chosen.model)
    record(chosen.home / "run", "demo", os.getpid())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    receiver = None
    try:
        receiver = Receiver(ports.receiver, screen.chat)
        requests = open_house(house, chosen, screen)
        asyncio.run(run(house, requests, screen, chosen))
        return 0
    except KeyboardInterrupt:
        return 0
    except (NotReady, Died, ValueError, OSError) as error:
        screen.say(f"The demo ended: {error}")
        return 1
    finally:
        screen.live = ""
        screen.say("Stopping.")
        house.stop()
        if receiver:
            receiver.close()
        (chosen.home / "run" / "demo.json").unlink(missing_ok=True)


def open_house(house: House, chosen: argparse.Namespace, screen: Screen) -> list[Request]:
    """Starts everything and prints the one screen; returns the requests to send."""
    if chosen.trace:
        requests = read_azure_csv(chosen.trace, chosen.scale)
        load = f"{chosen.trace.name}, {chosen.scale:g}× as fast"
    else:
        screen.step("measuring what this machine's engine sustains (6 s)")
        capacity = house.capacity().requests_per_s
        calm, high = chosen.calm * capacity, chosen.load * capacity
        quiet_s = chosen.quiet_min * 60
        shifted_s = max(60.0, chosen.minutes * 60 - quiet_s)
        phases = [(quiet_s, calm), *bursts(chosen.seed, shifted_s, high)]
        requests = arrivals(chosen.seed, phases, name="demo")
        load = (
            f"{calm:.0f} requests/s, after {chosen.quiet_min:g} minutes {high:.0f} in bursts "
            f"({chosen.calm:.0%} and {chosen.load:.0%} of this machine's {capacity:.0f})"
        )
    screen.step("starting control plane, engine, agent")
    house.start()
    reset_knobs(house)
    screen.box("Trimtab", [
        f"Page      {house.web_url}/",
        f"Sign in   {house.secrets['login']}  {house.secrets['password']}",
        f"Load      {load}",
        "",
        "Watch for: first tokens come late; the page says since when and because of",
        "what; a chat message arrives here; a knob turns; the change is kept or undone",
        "by what it did to the requests.",
        "",
        f"Logs      {house.processes.log}    End: Ctrl-C or make stop",
    ])  # fmt: skip
    return requests


def reset_knobs(house: House) -> None:
    """The engine keeps its configuration over restarts; a demo starts from the defaults."""
    knobs = httpx.get(f"{house.engine_url}/v1/runtime_config", timeout=10).json()["knobs"]
    changed = {n: k["default"] for n, k in knobs.items() if k["value"] != k["default"]}
    if changed:
        house.configure(changed, by="start of the demo")


async def run(
    house: House, requests: list[Request], screen: Screen, chosen: argparse.Namespace
) -> None:
    replayer = Replayer(house.engine_url)
    load = asyncio.create_task(replayer.run(requests))
    story = asyncio.create_task(follow(house, screen.event))
    shifted = bool(chosen.trace)
    while not load.done():
        await asyncio.sleep(LIVE_EVERY_S)
        house.processes.check()
        if not shifted and replayer.now() > chosen.quiet_min * 60:
            shifted = True
            screen.event("The load shifts now.")
        screen.progress(replayer.now(), lately(replayer))
    story.cancel()
    summary = summarise(await load, replayer.unsolicited)
    counts = ", ".join(f"{n:,} {status}" for status, n in summary.counts.items() if n)
    screen.event(f"{summary.sent:,} requests: {counts}; {summary.duplicated} answered twice.")


def lately(replayer: Replayer) -> str:
    """How the last seconds went, seen from the client."""
    since = replayer.now() - LIVE_OVER_S
    recent: list[Record] = []
    for each in reversed(replayer.records):
        if each.sent_s < since - LIVE_OVER_S:
            break
        if each.first_s > since or (each.status is Status.REJECTED and each.end_s > since):
            recent.append(each)
    if not recent:
        return "no answers yet"
    ttft = sorted(r.ttft_s for r in recent if r.first_s > since)
    refused = sum(r.status is Status.REJECTED for r in recent)
    p99 = f"{ttft[int(0.99 * (len(ttft) - 1))] * 1000:,.0f} ms" if ttft else "–"
    return (
        f"{len(recent) / LIVE_OVER_S:.0f} req/s · TTFT p99 {p99} · "
        f"{replayer.pending} in flight · {refused} refused"
    )


if __name__ == "__main__":
    sys.exit(main())
