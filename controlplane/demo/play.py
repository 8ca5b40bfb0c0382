"""Plays a scenario on a running house: sends its load, does its events, ends with its story."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import httpx

from controlplane.demo.house import House
from controlplane.demo.pace import Pace
from controlplane.demo.scenarios import Event, Scenario
from controlplane.demo.supervisor import Supervisor, answers
from engine.load import Request
from engine.replay import Replayer, Summary, summarise

LOOK_EVERY_S = 0.5
LINGER_WINDOWS = 8.0  # so long after the last event nothing may be open for the story to be over
ON_TRIAL = frozenset({"applied", "verifying"})


@dataclass
class Play:
    """`run` returns when the story is over, `over` says so, or its windows have passed.

    `done` are the events with their time (unix seconds); `shifted_at` is when the load shifted.
    """

    house: House
    scenario: Scenario
    requests: Sequence[Request]
    quiet_s: float
    pace: Pace
    say: Callable[[str], None]
    over: Callable[[Play], bool] | None = None
    watch: Callable[[Play], None] | None = None
    done: list[tuple[float, Event]] = field(default_factory=list)
    shifted_at: float = 0.0
    started_at: float = 0.0
    ended: bool = False

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.house)
        self.replayer = Replayer(self.house.engine_url)

    @property
    def began_at(self) -> float:
        """When what the story is about began: its first event, else the shift."""
        return self.done[0][0] if self.done else self.shifted_at

    @property
    def undone(self) -> Sequence[Event]:
        """Events whose time did not come: nothing was on trial, or the story ended before."""
        return self.scenario.events[len(self.done) :]

    async def run(self) -> Summary:
        self.started_at = time.time()
        load = asyncio.create_task(
            self.replayer.run(takewhile(lambda _: not self.ended, self.requests))
        )
        while not self.ended:
            await asyncio.sleep(LOOK_EVERY_S)
            self.house.processes.check()
            if self.watch:
                self.watch(self)
            if load.done() or (self.shifted() and await asyncio.to_thread(self.step)):
                self.ended = True
        return summarise(await load, self.replayer.unsolicited)

    def shifted(self) -> bool:
        if not self.shifted_at and self.replayer.now() >= self.quiet_s:
            self.shifted_at = time.time()
            self.say(f"The quiet is over: {self.scenario.about}")
        return bool(self.shifted_at)

    def step(self) -> bool:
        """Does what is due; True when the story is over."""
        windows = (time.time() - self.shifted_at) / self.pace.window_s
        events = self.undone
        if events and windows >= events[0].after_windows:
            if not events[0].on_trial or self.anything("actions", ON_TRIAL):
                self.happen(events[0])
            events = events[1:]
        if windows >= self.scenario.windows or (self.over is not None and self.over(self)):
            return True
        last = self.done[-1][0] if self.done else self.shifted_at
        lingered = time.time() - last >= LINGER_WINDOWS * self.pace.window_s
        return lingered and not events and self.all_quiet()

    def happen(self, event: Event) -> None:
        self.done.append((time.time(), event))
        self.say(event.what)
        event.do(self.supervisor)

    def anything(self, noun: str, states: frozenset[str]) -> bool:
        """Whether one of the newest is in such a state; False while nobody answers."""
        return any(row["state"] in states for row in self.rows(noun))

    def rows(self, noun: str) -> list[dict[str, Any]]:
        """Newest first, those of this play; empty while the control plane does not answer."""
        if not answers(self.house.health_url("control-plane")):
            return []
        try:
            found: list[dict[str, Any]] = self.house.api(f"{noun}/?limit=100")[noun]
        except httpx.HTTPError:
            return []
        return found

    def all_quiet(self) -> bool:
        """Nothing open, nothing under way, everybody there."""
        if not all(outage.over for outage in self.supervisor.outages):
            return False
        if not answers(self.house.health_url("control-plane")):
            return False
        under_way = any(not action["ended_at"] for action in self.rows("actions"))
        return not under_way and not self.anything("incidents", frozenset({"open"}))
