"""Kills a house's processes and starts them again at once, as a supervisor would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from controlplane.demo.house import House

BACK_S_MAX = 60.0


@dataclass
class Outage:
    """From the kill until the process answered again; `time.monotonic`."""

    victim: str
    began: float
    ended: float = float("inf")

    @property
    def over(self) -> bool:
        return self.ended < float("inf")


@dataclass
class Supervisor:
    house: House
    outages: list[Outage] = field(default_factory=list)

    def kill(self, victim: str, found: Callable[[], None] | None = None) -> Outage:
        """SIGKILL; `found` may look at what the dead left before it is started again."""
        outage = Outage(victim, time.monotonic())
        self.house.processes.kill(victim)
        if found is not None:
            found()
        self.house.start_one(victim)
        self.outages.append(outage)
        threading.Thread(target=self._await_back, args=(outage,), daemon=True).start()
        return outage

    def _await_back(self, outage: Outage) -> None:
        deadline = time.monotonic() + BACK_S_MAX
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if answers(self.house.health_url(outage.victim)):
                outage.ended = time.monotonic()
                return


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False
