"""What the benches share: a house to drive, its load, what it costs, and the last lines."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import httpx
import psutil

from controlplane.demo.client import in_time
from controlplane.demo.house import House, Ports
from controlplane.demo.pace import Pace
from engine.load import Request, arrivals
from engine.replay import Record, Replayer, Status

CPU_SHARE_MAX = 0.10  # of the machine, for control plane and agent while serving


def share_inside(records: Sequence[Record]) -> float:
    return sum(map(in_time, records)) / len(records) if records else 1.0


class CpuMeter:
    """What process trees cost between two moments: CPU as a share of the machine, and memory."""

    def __init__(self, house: House) -> None:
        self.trees = {n: psutil.Process(c.pid) for n, c in house.processes.children.items()}
        self.before = self.total(cpu_s)
        self.at = time.monotonic()

    def total(self, of: Callable[[psutil.Process], float]) -> dict[str, float]:
        return {
            name: sum(map(of, [tree, *tree.children(recursive=True)]))
            for name, tree in self.trees.items()
        }

    def shares(self) -> dict[str, float]:
        span = (time.monotonic() - self.at) * (os.cpu_count() or 1)
        return {name: (s - self.before[name]) / span for name, s in self.total(cpu_s).items()}

    def memory_mib(self) -> dict[str, float]:
        return self.total(resident_mib)


def cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def resident_mib(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss / 2**20)
    except psutil.NoSuchProcess:
        return 0.0


@contextmanager
def house(*, acting: bool, pace: Pace) -> Iterator[House]:
    """A fresh house on free ports, ended and removed afterwards."""
    home = Path(tempfile.mkdtemp(prefix="trimtab-bench-"))
    built = House(
        home,
        Ports.free(),
        settings={**pace.settings, "TRIMTAB_AUTOPILOT": "1" if acting else "0"},
        scrape_s=pace.scrape_s,
    )
    try:
        built.start()
        yield built
    finally:
        built.stop()
        shutil.rmtree(home, ignore_errors=True)


def say(text: str) -> None:
    print(text, flush=True)


def drive(built: House, requests: list[Request]) -> tuple[list[Record], Replayer, float]:
    replayer = Replayer(built.engine_url)
    started = time.time()
    records = asyncio.run(replayer.run(requests))
    return records, replayer, started


def warm_up(built: House) -> None:
    """A second of light load: the first forward passes of a process are slow in every arm."""
    drive(built, arrivals(99, [(2.0, 5.0)], name="warm"))


class Load(threading.Thread):
    """The open-loop load, in a thread with a loop of its own, until `finish`."""

    def __init__(self, url: str, requests: list[Request]) -> None:
        super().__init__(name="load", daemon=True)
        self.replayer = Replayer(url)
        self.requests = requests
        self.ending = threading.Event()

    def run(self) -> None:
        until_told = takewhile(lambda _: not self.ending.is_set(), self.requests)
        asyncio.run(self.replayer.run(until_told))

    def finish(self) -> list[Record]:
        self.ending.set()
        self.join()
        return self.replayer.records

    def count(self) -> str:
        counts = Counter(record.status for record in list(self.replayer.records))
        words = (Status.OK, Status.INTERRUPTED, Status.REJECTED, Status.FAILED)
        return ", ".join(f"{counts[word]:,} {word}" for word in words if counts[word])


def capacity_here() -> float:
    """Requests a second an engine with the defaults sustains here."""
    with tempfile.TemporaryDirectory() as scratch:
        return House(Path(scratch), Ports.free()).capacity().requests_per_s


def verdict(metric: str, value: float, target: str, passed: bool) -> bool:
    """Prints `<bench> <metric> <value> target <t> PASS|FAIL`."""
    name, word = Path(sys.argv[0]).stem, "PASS" if passed else "FAIL"
    shown = f"{value:.3f}" if isinstance(value, float) else value
    say(f"{name} {metric} {shown} target {target} {word}")
    return passed


@dataclass(frozen=True)
class Version:
    """A configuration of an engine, as the engine tells it; `at` in unix seconds."""

    number: int
    by: str
    at: float
    values: dict[str, Any]


class ConfigWatch(threading.Thread):
    """The configurations an engine has run, read every `every_s` until `finish`, oldest first."""

    def __init__(self, url: str, every_s: float = 1.0) -> None:
        super().__init__(name="config-watch", daemon=True)
        self.url = url
        self.every_s = every_s
        self.seen: list[Version] = []
        self.ending = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=5) as client:
            while not self.ending.wait(self.every_s):
                try:
                    self.look(client.get("/v1/runtime_config").raise_for_status().json())
                except httpx.HTTPError:
                    continue

    def look(self, body: dict[str, Any]) -> None:
        if not self.seen or self.seen[-1].number != body["config_version"]:
            at = datetime.fromisoformat(body["changed_at"]).timestamp()
            number, by = body["config_version"], body["changed_by"]
            self.seen.append(Version(number, by, at, body["values"]))

    def finish(self) -> list[Version]:
        self.ending.set()
        self.join()
        return self.seen


def turned_back(versions: Sequence[Version]) -> list[str]:
    """Each time a knob was set to a value that it had left before."""
    found, left = [], set()
    for before, after in pairwise(versions):
        for knob, value in after.values.items():
            if before.values.get(knob) == value:
                continue
            left.add((knob, before.values.get(knob)))
            if (knob, value) in left:
                found.append(f"{knob} back to {value} by {after.by}")
    return found
