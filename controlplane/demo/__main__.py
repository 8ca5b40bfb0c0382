"""`trimtab demo`: the whole loop on one machine, under a load that shifts.

Nothing here tells the control plane anything: it starts the same processes an operator would and
sends requests. Load is a share of what such an engine sustains beside what watches it, measured
first.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx

from controlplane.demo import client
from controlplane.demo.closing import (
    TEXT_AT,
    Settings,
    back,
    counted,
    in_short,
    ledger,
    lines,
    moments,
    opened_since,
    settled,
)
from controlplane.demo.house import House, NotReady, Ports, free_port
from controlplane.demo.measuring import measured
from controlplane.demo.options import LOAD_MAX, ROOT, options, port_option
from controlplane.demo.pace import NORMAL, PACES
from controlplane.demo.play import Play
from controlplane.demo.processes import STORIES, Died, closing_line, record, running
from controlplane.demo.receiver import Receiver
from controlplane.demo.scenarios import SCENARIOS, Scenario
from controlplane.demo.story import Story
from controlplane.home import ALLOWED, state_folder
from controlplane.screen import Gone, Screen, hung, width
from engine.load import Request, read_azure_csv
from engine.replay import Replayer, Status, Summary, lately, summarise

WATCH_FOR = (
    "first tokens come late; the page says since when and because of what; a chat message arrives "
    "here; a knob turns; the change is kept or undone by what it did to the requests."
)
MISSED_S, MORE = 120.0, 1.25  # so long after the shift no incident: so much more load would do
CPUS_FEW = 4  # up to here a browser takes from the engine what it would need
LIVE_EVERY_S = 1.0
ENDINGS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
ENDED_EARLY = 130  # as a shell has it after Ctrl-C


def main() -> int:
    chosen = options()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal cannot show a “→”
    screen = Screen()
    ports = Ports(**{name: getattr(chosen, f"{name}_port") for name in vars(Ports())})
    refused = in_the_way(chosen, ports)
    if refused:
        screen.say(*hung("· ", refused, width()))
        return 1
    for number in ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    house: House | None = None
    receiver: Receiver | None = None
    recorded: Path | None = None
    try:
        recorded = record(chosen.home / "run", "demo", os.getpid())
        closing_line(chosen.home).unlink(missing_ok=True)
        scenario = SCENARIOS[chosen.scenario] if chosen.scenario else None
        house = house_for(scenario, chosen, ports)
        receiver = Receiver(ports.receiver, screen.chat)
        if scenario:
            return play(house, scenario, chosen, screen)
        demonstrate(house, chosen, screen)
        return 0
    except (KeyboardInterrupt, Gone):
        return ENDED_EARLY if chosen.scenario else 0  # a story broken off proves nothing
    except (NotReady, Died, ValueError, RuntimeError, OSError, httpx.HTTPError) as error:
        screen.settle()
        first, *rest = f"The demo ended: {error}".splitlines()
        screen.say(*hung("", first, width()), *rest)
        return 1
    finally:
        for number in ENDINGS:  # what was started is ended, however impatient one is
            signal.signal(number, signal.SIG_IGN)
        screen.settle()
        screen.say("Stopping.")
        if house:
            house.stop()
        if receiver:
            receiver.close()
        if recorded:
            recorded.unlink(missing_ok=True)


def in_the_way(chosen: argparse.Namespace, ports: Ports) -> str:
    """Why no demo can be started here and what to do about it; "" when one can."""
    if names := running(chosen.home):
        return (
            f"A demo runs over {chosen.home} already ({', '.join(names)}). `make stop` ends it; "
            "another beside it needs a --home and ports of its own."
        )
    try:
        state_folder(chosen.home)
    except ValueError as error:
        return f"--home (or TRIMTAB_HOME) is {str(chosen.home)!r}: {error}. Allowed: {ALLOWED}."
    if taken := ports.taken():
        named = ", ".join(f"{name} {port}" for name, port in taken.items())
        others = " ".join(f"{port_option(name)} {free_port()}" for name in taken)
        return f"Ports in use: {named}. Free them, or take others: make run ARGS='{others}'"
    return ""


def house_for(scenario: Scenario | None, chosen: argparse.Namespace, ports: Ports) -> House:
    """A scenario's is a new one: what an earlier story left would be part of this one's."""
    pace, home = PACES[chosen.pace], chosen.home
    if scenario:
        home = home / STORIES / scenario.name
        if home.exists():
            shutil.rmtree(home)
    return House(
        home,
        ports,
        settings=pace.settings if scenario or pace is not NORMAL else {},
        model=chosen.model,
        scrape_s=pace.scrape_s,
        engine_options=scenario.engine_options if scenario else (),
        knobs=scenario.knobs if scenario else {},
        objectives=scenario.promises if scenario else (),
        faults=scenario is not None,
    )


def shifting_load(
    house: House, chosen: argparse.Namespace, screen: Screen
) -> tuple[list[Request], str]:
    """What to send, and in words."""
    if chosen.trace:
        requests = read_azure_csv(chosen.trace, chosen.scale)
        if chosen.minutes:
            requests = [each for each in requests if each.at_s < chosen.minutes * 60]
        return requests, f"{chosen.trace.name}, {chosen.scale:g}× as fast"
    burst = with_loads(SCENARIOS["burst"], chosen)
    capacity = measured(house, chosen.home, burst, screen)
    quiet_s = chosen.quiet_min * 60
    requests = burst.requests(chosen.seed, capacity, quiet_s, chosen.minutes * 60 - quiet_s)
    return requests, told_load(burst, capacity, quiet_s)


def with_loads(scenario: Scenario, chosen: argparse.Namespace) -> Scenario:
    """The scenario under the loads that were asked for, else its own."""
    given = {"calm": chosen.calm, "load": chosen.load}
    return replace(scenario, **{k: v for k, v in given.items() if v is not None})


def told_load(scenario: Scenario, capacity: float, quiet_s: float) -> str:
    """What is sent before and after the shift, in words."""
    how = " in crowds" if scenario.crowd_every_s else ""
    if scenario.answers > 1:
        how += f", answers up to {scenario.answers} times as long"
    return (
        f"{scenario.calm * capacity:.0f} requests/s, after {spoken(quiet_s)} "
        f"{scenario.load * capacity:.0f}{how} "
        f"({scenario.calm:.0%} and {scenario.load:.0%} of this machine's {capacity:.0f})"
    )


def spoken(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def open_house(house: House, screen: Screen, load: str, watch_for: str) -> None:
    """Starts everything and prints the one screen."""
    screen.step("starting control plane, engine, agent")
    kept = kept_from_before(house.home)
    house.start()
    kept += set_back(reset_knobs(house))
    set_up = ", ".join(f"{knob} {value}" for knob, value in house.knobs.items())
    screen.box("Trimtab", [
        f"Page      {house.web_url}/",
        *watched_from_elsewhere(house.ports.web, os.cpu_count() or 1),
        f"Sign in   {house.secrets['login']}  {house.secrets['password']}",
        "Times     UTC, on the pages as here",
        f"Load      {load}",
        *([f"Set up    {set_up}"] if set_up else []),
        "",
        f"Watch for: {watch_for}",
        "",
        f"Logs      {house.processes.log}",
        *kept,
        "End       Ctrl-C or make stop",
    ])  # fmt: skip


def watched_from_elsewhere(port: int, cpus: int) -> list[str]:
    """How to look at the pages without a browser on this machine, where it has few CPUs."""
    if cpus > CPUS_FEW:
        return []
    return [
        f"Browser   one here takes CPU that the engine needs, of {cpus} in all; better one on "
        f"another machine, after `ssh -N -L {port}:127.0.0.1:{port} HOST`"
    ]


def kept_from_before(home: Path) -> list[str]:
    """What a run inherits of the last one, and how to begin afresh; nothing in a new house."""
    if not (home / "db.sqlite3").exists():
        return []
    usual = home.resolve() == ROOT / "var"
    afresh = "`make clean` forgets them" if usual else "another --home begins afresh"
    return [
        f"Kept      incidents and budgets of the last run, and what is open goes on; {afresh}",
    ]


def play(house: House, scenario: Scenario, chosen: argparse.Namespace, screen: Screen) -> int:
    """One story to its end, and what happened in it; 0 only if no request was lost."""
    pace, quiet_s = PACES[chosen.pace], chosen.quiet_min * 60
    scenario = with_loads(scenario, chosen)
    story_s = scenario.windows * pace.window_s
    if chosen.minutes:
        story_s = chosen.minutes * 60 - quiet_s
        scenario = replace(scenario, windows=story_s / pace.window_s)
    capacity = measured(house, chosen.home, scenario, screen)
    requests = scenario.requests(chosen.seed, capacity, quiet_s, story_s)
    load = told_load(scenario, capacity, quiet_s)
    open_house(house, screen, load, scenario.watch_for)
    before = settings_of(house)
    played = Play(
        house, scenario, requests, quiet_s, pace, screen.event,
        watch=lambda now: screen.progress(now.replayer.now(), lately(now.replayer)),
    )  # fmt: skip
    story = Story(house, screen.event)
    try:
        summary = asyncio.run(_with_story(played, story))
    except BaseException:
        say_what_was_done(played.replayer, story, chosen, screen)
        raise
    screen.settle()
    screen.box(f"the story of {scenario.name}, in seconds since it began",
               closed(played, summary, before), hang=TEXT_AT)  # fmt: skip
    screen.say("To look at it again:", f"  TRIMTAB_HOME={house.home} trimtab up")
    return int(summary.counts[Status.LOST] > 0 or summary.duplicated > 0 or bool(played.undone))


def closed(played: Play, summary: Summary, before: Settings) -> list[str]:
    """The lines of a story that has come to its end; `before` are the engine's settings then."""
    began_at, since = played.began_at, played.started_at
    incidents, actions, deliveries = ledger(played.house)
    told = moments(began_at, since, incidents, actions, deliveries)
    done = [(at - began_at, "·", event.what) for at, event in played.done]
    done = done or [(0.0, "·", played.scenario.about)]
    done += [(time.time() - began_at, "not done", event.what) for event in played.undone]
    good_again_s = client.good_again_s(played.replayer.records, began_at - since)
    return lines(
        [*done, *back(played.supervisor.outages, began_at), *told],
        summary,
        [
            *in_short(told, incidents, actions, good_again_s),
            settled(before, settings_of(played.house)),
        ],
    )


async def _with_story(played: Play, story: Story) -> Summary:
    """The play, with every step told as it happens."""
    following = asyncio.create_task(story.follow())
    try:
        return await played.run()
    finally:
        following.cancel()


def say_what_was_done(
    replayer: Replayer, story: Story, chosen: argparse.Namespace, screen: Screen
) -> None:
    """The last words but one, which are kept for who ends the demo from elsewhere."""
    summary = summarise(replayer.records, replayer.unsolicited)
    line = counted(summary, story.incidents, story.actions, story.since)
    closing_line(chosen.home).write_text(f"{line}\n")
    screen.settle()
    screen.say(*hung("", line, width()))


def settings_of(house: House) -> Settings:
    """The values the engine runs now. Raises httpx.HTTPError."""
    answer = httpx.get(f"{house.engine_url}/v1/runtime_config", timeout=10).raise_for_status()
    values: Settings = answer.json()["values"]
    return values


def reset_knobs(house: House) -> Settings:
    """The engine keeps its configuration over restarts; a demo starts from the defaults, but for
    what the house is set up with. Returns the knobs that were set back, as the engine had reported
    them."""
    knobs = httpx.get(f"{house.engine_url}/v1/runtime_config", timeout=10).json()["knobs"]
    moved = {
        name: knob
        for name, knob in knobs.items()
        if name not in house.knobs and knob["value"] != knob["default"]
    }
    if moved:
        changed = {name: knob["default"] for name, knob in moved.items()}
        house.configure(changed, by="start of the demo")
    return moved


def set_back(moved: Settings) -> list[str]:
    """A line of the first screen: an open incident may still tell of another value as kept."""
    told = ", ".join(f"{name} {knob['value']} → {knob['default']}" for name, knob in moved.items())
    return (
        [f"Set back  to the engine's defaults, whatever the last run kept: {told}"] if told else []
    )


def demonstrate(house: House, chosen: argparse.Namespace, screen: Screen) -> None:
    requests, load = shifting_load(house, chosen, screen)
    open_house(house, screen, load, WATCH_FOR)
    replayer, story = Replayer(house.engine_url), Story(house, screen.event)
    try:
        asyncio.run(run(replayer, requests, story, screen, chosen))
    finally:
        say_what_was_done(replayer, story, chosen, screen)


async def run(
    replayer: Replayer, requests: list[Request], story: Story, screen: Screen,
    chosen: argparse.Namespace,
) -> None:  # fmt: skip
    load = asyncio.create_task(replayer.run(requests))
    following = asyncio.create_task(story.follow())
    burst, quiet_s = with_loads(SCENARIOS["burst"], chosen), chosen.quiet_min * 60
    to_say = [] if chosen.trace else [
        (quiet_s, lambda: f"The quiet is over: {burst.about}"),
        (quiet_s + MISSED_S, lambda: nothing_missed(story, burst.load)),
    ]  # fmt: skip
    while not load.done():
        await asyncio.sleep(LIVE_EVERY_S)
        story.house.processes.check()
        if to_say and replayer.now() > to_say[0][0] and (words := to_say.pop(0)[1]()):
            screen.event(words)
        screen.progress(replayer.now(), lately(replayer))
    following.cancel()
    await load


def nothing_missed(story: Story, load: float) -> str:
    """What to do where the load does not break any promise; "" where it did."""
    if opened_since(story.incidents, story.since):
        return ""
    more = min(MORE * load, LOAD_MAX)
    return (
        "No promise is missed yet: the engine serves more now than when it was measured, or the "
        f"load is small. For more of it: make run ARGS='--load {more:.2g}'"
    )


if __name__ == "__main__":
    sys.exit(main())
