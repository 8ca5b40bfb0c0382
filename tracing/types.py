"""Spans, series and how they are read: pure types, imported by everyone.

Times are timezone-aware UTC datetimes; seconds in metrics (OpenTelemetry, Prometheus), so a
threshold in milliseconds is divided by 1,000 before it meets a series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol


class Signal(StrEnum):
    """The state of a measured series (NORMS, Words). Only OK may trigger anything."""

    OK = "ok"
    NO_TRAFFIC = "no_traffic"
    MISSING = "missing"
    STALE = "stale"


@dataclass(frozen=True)
class Grid:
    """Windows (start, start + step], (start + step, start + 2 step], … as Prometheus 3 has them.

    Raises ValueError when the windows do not fit or are more than `windows_max`.
    """

    start: datetime
    end: datetime
    step_s: float
    windows_max: int = 11_000

    def __post_init__(self) -> None:
        if self.start.tzinfo is None or self.end.tzinfo is None:
            raise ValueError(f"Grid needs times with a zone, got {self.start!r}, {self.end!r}")
        if self.step_s <= 0 or self.end <= self.start:
            raise ValueError(f"Grid is empty: {self.start} to {self.end} by {self.step_s} s")
        if self.count > self.windows_max:
            raise ValueError(f"Grid has {self.count} windows, allowed: {self.windows_max}")

    @property
    def count(self) -> int:
        return max(1, round((self.end - self.start).total_seconds() / self.step_s))

    def ends(self) -> list[datetime]:
        """The right edge of every window, oldest first; length `count`."""
        return [self.start + timedelta(seconds=self.step_s * (i + 1)) for i in range(self.count)]


Labels = Mapping[str, str]


@dataclass(frozen=True)
class Series:
    """One value per window of a grid; NaN where nothing was measured."""

    labels: Labels
    values: Sequence[float]

    def last(self) -> float | None:
        """The newest measured value, or None."""
        return next((v for v in reversed(self.values) if not math.isnan(v)), None)


@dataclass(frozen=True)
class HistogramSeries:
    """Increase of an explicit-bucket histogram per window.

    counts[w][i] is the number of events in window w with bounds[i-1] < value ≤ bounds[i]; the last
    is above bounds[-1]. NaN marks a window that was not measured.
    """

    labels: Labels
    bounds: Sequence[float]
    counts: Sequence[Sequence[float]]
    sums: Sequence[float]


@dataclass(frozen=True)
class ShareSeries:
    """Good and total events per window; NaN where nothing was measured."""

    labels: Labels
    good: Sequence[float]
    total: Sequence[float]


@dataclass(frozen=True)
class Span:
    """A stored span. `attributes` are strings: numbers in shortest form, booleans true/false."""

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    kind: int
    service: str
    instance: str
    start_ns: int
    duration_ns: int
    status_code: int
    status_message: str = ""
    attributes: Labels = field(default_factory=dict)
    resource: Labels = field(default_factory=dict)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class TraceSearch:
    """Requests that ended in (start, end] and fit everything given; durations are seconds.

    `longer_s` < duration ≤ `until_s`. `text` is looked for in the request id, whatever its case,
    and at the start of the trace id. `failed` None means both.
    """

    start: datetime
    end: datetime
    service: str | None = None
    longer_s: float = 0.0
    until_s: float | None = None
    failed: bool | None = None
    text: str = ""


@dataclass(frozen=True)
class Place:
    """Where the page before ended: its last row's rank (end or duration, in ns) and trace id."""

    rank_ns: int
    trace_id: str


@dataclass(frozen=True)
class HeatCell:
    """Requests that ended in window `column` of the grid and took bounds[row - 1] < s ≤
    bounds[row]; the row after the last bound has the longer ones."""

    column: int
    row: int
    count: int
    failed: int


class StoreError(RuntimeError):
    """The store refused or failed; what it said is in the message. Every read may raise it."""


class StoreLocked(StoreError):
    """Another process owns the data directory."""


class Reader(Protocol):
    """The way out of telemetry, bound to one tenant. Pure code takes it as an argument.

    `where` matches labels exactly; metric labels are the point's attributes plus `service`
    (service.name), `instance` (service.instance.id, the engine's name) and `node` (host.name).
    `by` keeps those labels and aggregates the rest.
    """

    def increase(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[Series]:
        """Growth of a cumulative counter per window, resets handled, summed over series.

        The step from the last sample before a window to the last sample in it: nothing is
        extrapolated, so the sum over windows is the counter's own growth. A gap is booked at its
        end. A series that first appears after its family was known counts from 0.
        """
        ...

    def gauge(
        self,
        metric: str,
        grid: Grid,
        *,
        where: Labels | None = None,
        by: Sequence[str] = (),
        over: str = "avg",
    ) -> list[Series]:
        """`over` ∈ avg, max, min, last within each window; summed over the series aggregated."""
        ...

    def histogram(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[HistogramSeries]:
        """Bucket increases per window of a histogram named without `_bucket`."""
        ...

    def span_share(
        self,
        grid: Grid,
        *,
        service: str,
        name: str,
        measure: str,
        threshold_s: float | None,
        by: Sequence[str] = (),
    ) -> list[ShareSeries]:
        """Spans that ended in each window: total, and good ones.

        `measure` is "duration", "status" (good: status is not ERROR, threshold unused) or an
        attribute holding seconds; a span lacking that attribute is no event. Good is ≤ threshold.
        """
        ...

    def ahead(self, grid: Grid, *, where: Labels, metrics: Sequence[str] | None = None) -> Reader:
        """A reader of the same answers that has read the metrics (None: all) of exactly that
        `where` up to the grid's end: for who will ask several questions of it inside the grid, and
        inside those that the reader it is made from has read ahead.

        Asked for the same again, it is the same one: readers are made for a pass or a page.
        """
        ...

    def last_seen(
        self, metrics: Sequence[str], *, where: Labels | None = None
    ) -> dict[str, dict[str, datetime]]:
        """By metric and `instance` the time of its newest sample within an hour."""
        ...

    def span_last_seen(self, *, service: str, name: str) -> dict[str, datetime]:
        """By `instance` when the newest such span within an hour ended."""
        ...

    def trace(self, trace_id: str) -> list[Span]:
        """All spans of a trace by start time; empty when unknown. At most 10,000."""
        ...

    def spans(
        self,
        start: datetime,
        end: datetime,
        *,
        service: str | None = None,
        instance: str | None = None,
        name: str | None = None,
        measure: str = "duration",
        slowest: bool = False,
        limit: int = 50,
    ) -> list[Span]:
        """Spans that ended in (start, end]: newest first, or slowest by `measure` first."""
        ...

    def traces(
        self,
        search: TraceSearch,
        *,
        slowest: bool = False,
        after: Place | None = None,
        limit: int = 50,
    ) -> list[Span]:
        """The entry spans of the requests, newest (slowest) first, beyond `after`; at most 200."""
        ...

    def latency_heat(
        self, search: TraceSearch, *, step_s: float, bounds_s: Sequence[float]
    ) -> list[HeatCell]:
        """How many of the requests ended in which window and took how long; no empty cells."""
        ...
