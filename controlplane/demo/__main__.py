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
from dataclasses import replace
from pathlib import Path

import httpx

from controlplane.demo.closing import ledger, lines, moments
from controlplane.demo.house import House, NotReady, Ports
from controlplane.demo.pace import PACES
from controlplane.demo.play import Play
from controlplane.demo.processes import Died, record
from controlplane.demo.receiver import Receiver
from controlplane.demo.scenarios import CALM, SCENARIOS, Scenario, listed
from controlplane.demo.screen import Screen
from controlplane.demo.story import follow
from engine.load import (
    BURST_LOAD,
    LENGTH_DIVISOR,
    OUTPUT_TOKENS_MAX,
    PROMPT_TOKENS_MAX,
    Request,
    arrivals,
    bursts,
    read_azure_csv,
)
from engine.replay import Record, Replayer, Status, Summary, summarise

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 30.0
WATCH_FOR = (
    "first tokens come late; the page says since when and because of what; a chat message arrives "
    "here; a knob turns; the change is kept or undone by what it did to the requests."
)
LIVE_EVERY_S = 1.0
LIVE_OVER_S = 15.0


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="trimtab demo",
        description="Control plane, engine, agent and load on this machine: watch the loop close.",
        epilog="Arrivals and lengths have the statistics of the Azure LLM inference trace 2023 "
        f"(conversation); lengths ÷ {LENGTH_DIVISOR}, at most {PROMPT_TOKENS_MAX} in and "
        f"{OUTPUT_TOKENS_MAX} out. After the shift, a quarter of the time brings {BURST_LOAD:g} "
        f"times the mean, as when a crowd comes at once.\n\nscenarios:\n{listed()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--scenario", choices=SCENARIOS, metavar="NAME",
        help="play one story to its end and tell it; ends with 0 only if no request was lost",
    )  # fmt: skip
    parser.add_argument(
        "--pace", choices=PACES, default="normal",
        help="fast: every time of the control loop divided by four (default: normal)",
    )  # fmt: skip
    parser.add_argument("--quiet-min", type=float, default=3.0, help="minutes before the shift")
    parser.add_argument(
        "--minutes", type=float, help="minutes in all (default: 30, of a scenario its story)"
    )
    parser.add_argument(
        "--calm",
        type=float,
        help="load before the shift, as a share of this machine's capacity "
        f"(default: the scenario's; without one {CALM:g})",
    )
    parser.add_argument(
        "--load",
        type=float,
        help="load after the shift, likewise (default: the scenario's; without one 0.75, bursts)",
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
        option = f"--{name.replace('_', '-')}-port"
        parser.add_argument(option, type=int, default=port, metavar="PORT")
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
    scenario = SCENARIOS[chosen.scenario] if chosen.scenario else None
    house = house_for(scenario, chosen, ports)
    record(chosen.home / "run", "demo", os.getpid())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    receiver = None
    try:
        receiver = Receiver(ports.receiver, screen.chat)
        if scenario:
            return play(house, scenario, chosen, screen)
        requests, load = shifting_load(house, chosen, screen)
        open_house(house, screen, load, WATCH_FOR)
        asyncio.run(run(house, requests, screen, chosen))
        return 0
    except KeyboardInterrupt:
        return 130 if scenario else 0  # a story that was broken off proves nothing
    except (NotReady, Died, ValueError, OSError, httpx.HTTPError) as error:
        screen.say(f"The demo ended: {error}")
        return 1
    finally:
        screen.live = ""
        screen.say("Stopping.")
        house.stop()
        if receiver:
            receiver.close()
        (chosen.home / "run" / "demo.json").unlink(missing_ok=True)


def house_for(scenario: Scenario | None, chosen: argparse.Namespace, ports: Ports) -> House:
    pace = PACES[chosen.pace]
    return House(
        chosen.home,
        ports,
        settings=pace.settings if scenario else {},
        model=chosen.model,
        scrape_s=pace.scrape_s,
        engine_options=scenario.engine_options if scenario else (),
        faults=scenario is not None,
    )


def shifting_load(
    house: House, chosen: argparse.Namespace, screen: Screen
) -> tuple[list[Request], str]:
    """What to send, and in words."""
    if chosen.trace:
        requests = read_azure_csv(chosen.trace, chosen.scale)
        return requests, f"{chosen.trace.name}, {chosen.scale:g}× as fast"
    capacity = measured(house, screen)
    share = SCENARIOS["burst"].load if chosen.load is None else chosen.load
    quiet = CALM if chosen.calm is None else chosen.calm
    calm, high = quiet * capacity, share * capacity
    quiet_s = chosen.quiet_min * 60
    shifted_s = max(60.0, (chosen.minutes or MINUTES) * 60 - quiet_s)
    phases = [(quiet_s, calm), *bursts(chosen.seed, shifted_s, high)]
    return arrivals(chosen.seed, phases, name="demo"), (
        f"{calm:.0f} requests/s, after {chosen.quiet_min:g} minutes {high:.0f} in bursts "
        f"({quiet:.0%} and {share:.0%} of this machine's {capacity:.0f})"
    )


def measured(house: House, screen: Screen) -> float:
    screen.step("measuring what this machine's engine sustains (6 s)")
    return house.capacity().requests_per_s


def open_house(house: House, screen: Screen, load: str, watch_for: str) -> None:
    """Starts everything and prints the one screen."""
    screen.step("starting control plane, engine, agent")
    house.start()
    reset_knobs(house)
    screen.box("Trimtab", [
        f"Page      {house.web_url}/",
        f"Sign in   {house.secrets['login']}  {house.secrets['password']}",
        f"Load      {load}",
        "",
        f"Watch for: {watch_for}",
        "",
        f"Logs      {house.processes.log}    End: Ctrl-C or make stop",
    ])  # fmt: skip


def play(house: House, scenario: Scenario, chosen: argparse.Namespace, screen: Screen) -> int:
    """One story to its end, and what happened in it; 0 only if no request was lost."""
    pace, quiet_s = PACES[chosen.pace], chosen.quiet_min * 60
    given = {"calm": chosen.calm, "load": chosen.load}
    scenario = replace(scenario, **{k: v for k, v in given.items() if v is not None})
    story_s = scenario.windows * pace.window_s
    if chosen.minutes:
        story_s = max(pace.window_s, chosen.minutes * 60 - quiet_s)
        scenario = replace(scenario, windows=story_s / pace.window_s)
    capacity = measured(house, screen)
    requests = scenario.requests(chosen.seed, capacity, quiet_s, story_s)
    load = (
        f"{scenario.calm * capacity:.0f} requests/s, after {chosen.quiet_min:g} minutes "
        f"{scenario.load * capacity:.0f} ({scenario.load:.0%} of this machine's {capacity:.0f})"
    )
    open_house(house, screen, load, scenario.watch_for)
    played = Play(
        house, scenario, requests, quiet_s, pace, screen.event,
        watch=lambda now: screen.progress(now.replayer.now(), lately(now.replayer)),
    )  # fmt: skip
    summary = asyncio.run(_with_story(played, screen))
    screen.live = ""
    told = moments(played.began_at, played.started_at, *ledger(house))
    events = [(at - played.began_at, event.what) for at, event in played.done]
    screen.box(f"the story of {scenario.name}, in seconds since it began",
               lines(events, told, played.supervisor.outages, summary))  # fmt: skip
    return int(summary.counts[Status.LOST] > 0)


async def _with_story(played: Play, screen: Screen) -> Summary:
    """The play, with every step told as it happens."""
    story = asyncio.create_task(follow(played.house, screen.event))
    try:
        return await played.run()
    finally:
        story.cancel()


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
