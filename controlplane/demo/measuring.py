"""What an engine sustains on this machine, measured before the load is drawn."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from controlplane.demo.house import House, Ports
from controlplane.demo.processes import STORIES
from controlplane.demo.scenarios import Scenario
from controlplane.screen import Gone, Screen
from engine.replay import calibrate

LOOKS, LOOK_S = 3, 4.0
HOUSE_S = 8.0  # for a house to start and end again, and for what a look left to be answered
USUAL_S = LOOKS * LOOK_S + HOUSE_S
SHOWN_EVERY_S = 1.0


def measured(house: House, home: Path, scenario: Scenario, screen: Screen) -> float:
    """What `sustained` finds, with its progress on the screen."""
    screen.step(
        "measuring what an engine sustains here beside control plane and agent (about "
        f"{USUAL_S:.0f} s, longer where other work shares the machine)"
    )
    with shown("starting a house to measure in", screen) as tell:
        return sustained(house, home, scenario, tell)


def sustained(
    house: House, home: Path, scenario: Scenario, tell: Callable[[str], None] = lambda doing: None
) -> float:
    """Requests a second, as the scenario's are before its shift, that such a house sustains.

    Control plane and agent take their part of the machine, so that an engine alone sustains more.
    In a house of its own, for a measurement is no traffic. `tell` hears what is being done.
    """
    trial = replace(
        house,
        home=home / STORIES / "measuring",
        ports=Ports.free(),
        settings={**house.settings, "TRIMTAB_AUTOPILOT": "0"},
    )
    try:
        trial.start()
        best = best_look(trial, scenario, tell)
        tell(f"{best:.0f} requests/s; ending that house")
        return best
    finally:
        trial.stop()
        shutil.rmtree(trial.home, ignore_errors=True)


def best_look(house: House, scenario: Scenario, tell: Callable[[str], None]) -> float:
    """Requests a second: what disturbs one of the looks for seconds is not what it sustains."""
    best = 0.0
    for look in range(LOOKS):
        found = f", {best:.0f} requests/s so far" if best else ""
        tell(f"look {look + 1} of {LOOKS}{found}")
        supply = scenario.supply(LOOK_S)
        capacity = asyncio.run(calibrate(house.engine_url, seconds=LOOK_S, requests=supply))
        best = max(best, capacity.requests_per_s)
    return best


@contextmanager
def shown(first: str, screen: Screen) -> Iterator[Callable[[str], None]]:
    """Until the block ends, the live line has what was told last, and the seconds since it began.

    Gives what to tell it with; `first` stands there until then.
    """
    began, done, doing = time.monotonic(), threading.Event(), [first]

    def tell(text: str) -> None:
        doing[0] = text

    def show() -> None:
        try:
            while not done.wait(SHOWN_EVERY_S):
                screen.progress(time.monotonic() - began, doing[0])
        except Gone:
            return  # the next step ends the demo

    showing = threading.Thread(target=show, daemon=True)
    showing.start()
    try:
        yield tell
    finally:
        done.set()
        showing.join()
        screen.settle()
