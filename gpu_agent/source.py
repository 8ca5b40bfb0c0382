"""The contract of a telemetry source; its implementations live in sources/, one file each.

A source is asked once per tick, on a thread of its own, and answers with a `Reading`: families of
samples that carry the time they were read. It never repeats old values: what could not be read
now is absent, and the reason is in `SourceError`.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Labels = Mapping[str, str]


class SourceError(Exception):
    """Nothing could be read this time; the message says why. The next tick tries again."""


class Kind(StrEnum):
    GAUGE = "gauge"
    SUM = "sum"  # cumulative and monotonic
    HISTOGRAM = "histogram"  # cumulative, explicit bounds


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Labels
    value: float


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """counts[i] events with bounds[i-1] < value ≤ bounds[i]; the last are above bounds[-1]."""

    labels: Labels
    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float
    count: int

    def __post_init__(self) -> None:
        assert len(self.counts) == len(self.bounds) + 1


@dataclass(slots=True)
class Family:
    """Samples of one metric; histograms hold `HistogramSample`, the other kinds `Sample`."""

    name: str
    kind: Kind
    help: str = ""
    unit: str = ""
    samples: list[Sample] = field(default_factory=list)
    histograms: list[HistogramSample] = field(default_factory=list)

    def add(self, value: float, **labels: str) -> None:
        self.samples.append(Sample(labels, value))


@dataclass(frozen=True, slots=True)
class Reading:
    """What one source said at `read_at_ns` (wall clock, Unix nanoseconds).

    `start_ns` is when the counters began, where the source knows; 0 where it does not.
    `notes` are counts about the reading itself (lines refused, series) for the agent's own metrics.
    `error` says why a reading is only part of what it should be; it is sent all the same.
    """

    resource: Labels
    read_at_ns: int
    families: Sequence[Family]
    start_ns: int = 0
    notes: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the agent runs: what a source needs to know to build itself.

    `engines`: name, service and URL of each engine on the node.
    """

    node: str
    engines: Sequence[tuple[str, str, str]]
    timeout_s: float
    gpu: bool


class Source(ABC):
    """One thing to read. `slug` names the kind, `name` this one of it.

    A source that knows GPUs keeps `gpus` and `gpu_status`; one with a process of its own names it
    in `worker_pid`, so that its cost is counted.
    """

    slug: str
    label: str
    name: str
    gpus: list[dict[str, Any]] = []
    gpu_status: str = ""
    worker_pid: int | None = None

    @classmethod
    @abstractmethod
    def build(cls, place: Place) -> list[Source]:
        """The sources of this kind that make sense here; none is an answer."""

    @abstractmethod
    def collect(self) -> Reading:
        """One reading, within the source's own time limit. Raises SourceError."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of processes and connections. Called once, at the end."""


def source_classes() -> dict[str, type[Source]]:
    """The sources found in sources/, by slug."""
    from gpu_agent import sources

    for module in pkgutil.iter_modules(sources.__path__):
        importlib.import_module(f"{sources.__name__}.{module.name}")
    here = f"{sources.__name__}."
    return {
        found.slug: found for found in Source.__subclasses__() if found.__module__.startswith(here)
    }
