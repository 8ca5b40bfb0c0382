"""tracing's Reader over samples in lists, so that pure code is tested without a store."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from tracing.types import Grid, HistogramSeries, Labels, Series, ShareSeries, Span

Value = float | tuple[float, ...]


class MemoryReader:
    """Read as tracing.types promises; one series per metric and label set.

    `bounds` are those of the histograms by metric."""

    def __init__(self, bounds: Mapping[str, Sequence[float]] | None = None) -> None:
        self.bounds = bounds or {}
        self.samples: dict[str, dict[tuple[tuple[str, str], ...], list[tuple[datetime, Value]]]] = (
            defaultdict(dict)
        )
        self.stored_spans: list[Span] = []

    def add(self, metric: str, at: datetime, value: Value, labels: Labels) -> None:
        key = tuple(sorted(labels.items()))
        self.samples[metric].setdefault(key, []).append((at, value))

    def _matching(self, metric: str, where: Labels | None) -> list[tuple[Labels, Any]]:
        return [
            (dict(key), samples)
            for key, samples in self.samples[metric].items()
            if (where or {}).items() <= dict(key).items()
        ]

    def increase(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[Series]:
        groups: dict[tuple[str, ...], list[float]] = {}
        known = min((s[0][0] for s in self.samples[metric].values()), default=None)
        for labels, samples in self._matching(metric, where):
            # A series that first appears after its family was known counts from 0.
            zero = [] if samples[0][0] == known else [(known, 0.0)]
            values = [_growth(zero + samples, end, grid.step_s) for end in grid.ends()]
            key = tuple(labels.get(name, "") for name in by)
            groups[key] = _sum(groups.get(key), values)
        return [Series(dict(zip(by, k, strict=True)), v) for k, v in groups.items()]

    def gauge(
        self,
        metric: str,
        grid: Grid,
        *,
        where: Labels | None = None,
        by: Sequence[str] = (),
        over: str = "avg",
    ) -> list[Series]:
        fold = {
            "avg": lambda v: sum(v) / len(v),
            "max": max,
            "min": min,
            "last": lambda v: v[-1],
        }[over]
        groups: dict[tuple[str, ...], list[float]] = {}
        for labels, samples in self._matching(metric, where):
            windows = [_inside(samples, end, grid.step_s) for end in grid.ends()]
            values = [fold(w) if w else math.nan for w in windows]
            key = tuple(labels.get(name, "") for name in by)
            groups[key] = _sum(groups.get(key), values)
        return [Series(dict(zip(by, k, strict=True)), v) for k, v in groups.items()]

    def histogram(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[HistogramSeries]:
        found = []
        for labels, samples in self._matching(metric, where):
            width = len(samples[0][1])
            columns = [[(at, row[i]) for at, row in samples] for i in range(width)]
            rows = [[_growth(c, end, grid.step_s) for c in columns] for end in grid.ends()]
            shown = {name: labels.get(name, "") for name in by}
            counts, sums = [row[:-1] for row in rows], [row[-1] for row in rows]
            found.append(HistogramSeries(shown, self.bounds[metric], counts, sums))
        return found

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
        return []

    def last_seen(self, metric: str, *, where: Labels | None = None) -> datetime | None:
        times = [samples[-1][0] for _, samples in self._matching(metric, where)]
        return max(times, default=None)

    def span_last_seen(
        self, *, service: str, name: str, instance: str | None = None
    ) -> datetime | None:
        ends = [s.end_ns for s in self.stored_spans if instance in (None, s.instance)]
        return datetime.fromtimestamp(max(ends) / 1e9, UTC) if ends else None

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.stored_spans if span.trace_id == trace_id]

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
        wanted = [
            span
            for span in self.stored_spans
            if start.timestamp() < span.end_ns / 1e9 <= end.timestamp()
            and instance in (None, span.instance)
        ]
        return sorted(wanted, key=lambda s: -s.duration_ns)[:limit]


def _sum(a: list[float] | None, b: list[float]) -> list[float]:
    if a is None:
        return b
    return [
        y if math.isnan(x) else x if math.isnan(y) else x + y for x, y in zip(a, b, strict=True)
    ]


def _edges(
    samples: Sequence[tuple[datetime, Any]], end: datetime, step_s: float
) -> tuple[int, int]:
    start = end - timedelta(seconds=step_s)
    return (
        bisect_right(samples, start, key=lambda s: s[0]),
        bisect_right(samples, end, key=lambda s: s[0]),
    )


def _inside(samples: Sequence[tuple[datetime, Any]], end: datetime, step_s: float) -> list[Any]:
    low, high = _edges(samples, end, step_s)
    return [value for _, value in samples[low:high]]


def _growth(samples: Sequence[tuple[datetime, Any]], end: datetime, step_s: float) -> float:
    low, high = _edges(samples, end, step_s)
    if low == high:
        return math.nan
    before = samples[low - 1][1] if low else samples[0][1]
    return float(samples[high - 1][1] - before)
