"""Houses for these tests, and what is asked of them: traffic, orders, patience."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import httpx

from controlplane.demo.house import House, Ports
from engine.load import arrivals
from engine.replay import Record, Replayer

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
SCRAPE_S = 1
WINDOW_S = 3
LOAD_S_MAX = 300.0


def new_house(home: Path, **settings: str) -> House:
    """A house on free ports whose windows are short, not started yet."""
    short = {"TRIMTAB_CONTROL_WINDOW_S": f"{WINDOW_S}", "TRIMTAB_ACTION_TTL_S": "20"}
    return House(home, Ports.free(), settings={**short, **settings}, scrape_s=SCRAPE_S)


def until(look: Callable[[], T], within_s: float, what: str) -> T:
    """The first truthy thing `look` returns. A process that does not answer is asked again."""
    deadline = time.monotonic() + within_s
    seen: object = None
    while time.monotonic() < deadline:
        try:
            seen = found = look()
        except httpx.TransportError as error:
            seen, found = error, None
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"within {within_s:g} s not seen: {what}; last seen: {seen!r}")


class Traffic:
    """Steady open-loop load in a thread: `with Traffic(house, rate) as traffic: …`."""

    def __init__(self, house: House, requests_per_s: float, seed: int = 1) -> None:
        self.replayer = Replayer(house.engine_url)
        self.requests = arrivals(seed, [(LOAD_S_MAX, requests_per_s)])
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        until_told = takewhile(lambda _: not self.ending.is_set(), self.requests)
        asyncio.run(self.replayer.run(until_told))

    def __enter__(self) -> Traffic:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.thread.join()

    @property
    def records(self) -> list[Record]:
        return self.replayer.records


def runs(house: House) -> dict[str, Any]:
    """The values the engine runs now."""
    answer = httpx.get(f"{house.engine_url}/v1/runtime_config", timeout=10)
    values: dict[str, Any] = answer.raise_for_status().json()["values"]
    return values


def inside(house: House, *arguments: str) -> Any:
    """Asks the fleet's own services, in a process that holds the house's database."""
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "chaos_inside.py", *arguments],
        env={**os.environ, **house.env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def order(house: House, **asked: Any) -> str:
    """A command for the engine's agent; returns its id."""
    made: str = inside(house, "order", json.dumps(asked))["id"]
    return made


def state_of(house: House, command_id: str) -> str:
    """The agent's last word on a command, as the control plane has it."""
    commands = inside(house, "report")["commands"]
    state: str = next(c["state"] for c in commands if c["id"] == command_id)
    return state


def trimtab(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "controlplane.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,  # for a machine that is busy otherwise
    )
