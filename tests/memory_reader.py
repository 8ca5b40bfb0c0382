"""tracing's Reader over samples in lists, so that pure code is tested without a store."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np

from tracing.types import Grid, HistogramSeries, Labels, Series, ShareSeries, Span

Sample = tuple[datetime, float | Sequence[float]]
FOLDS: dict[str, Callable[[list[float]], float]] = {
    "avg": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


class MemoryReader:
    """Read as tracing.types promises; one series per metric and label set.

    `bounds` are those of the histograms by metric."""

    def __init__(self, bounds: dict[str, Sequence[float]] | None = None) -> None:
        self.bounds = {} if bounds is None else bounds
        self.samples: dict[str, dict[tuple[tuple[str, str], ...], list[Sample]]] = defaultdict(dict)
        self.stored_spans: list[Span] = []

    def add(
        self, metric: str, at: datetime, value: float | Sequence[float], labels: Labels
    ) -> None:
        """In any order. A histogram's value: how many fell in each bucket ever, then their sum."""
        samples = self.samples[metric].setdefault(tuple(sorted(labels.items())), [])
        insort(samples, (at, value), key=_time)

    def increase(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[Series]:
        known = min((s[0][0] for s in self.samples[metric].values()), default=None)
        # A series that first appears after its family was known counts from 0.
        groups = self._grouped(
            metric, where, by, lambda s: _growth(s, grid, from_zero=s[0][0] != known)
        )
        # What has no sample in any window is not in the answer.
        return [
            Series(labels, values.tolist())
            for labels, values in groups
            if not np.isnan(values).all()
        ]

    def gauge(
        self,
        metric: str,
        grid: Grid,
        *,
        where: Labels | None = None,
        by: Sequence[str] = (),
        over: str = "avg",
    ) -> list[Series]:
        def folded(samples: list[Sample]) -> np.ndarray:
            windows = [[v for _, v in samples[low:high]] for low, high in _windows(samples, grid)]
            return np.array([FOLDS[over](window) if window else math.nan for window in windows])

        groups = self._grouped(metric, where, by, folded)
        return [Series(labels, values.tolist()) for labels, values in groups]

    def histogram(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[HistogramSeries]:
        groups = self._grouped(metric, where, by, lambda s: _growth(s, grid, from_zero=False))
        return [
            HistogramSeries(
                labels, self.bounds[metric], rows[:, :-1].tolist(), rows[:, -1].tolist()
            )
            for labels, rows in groups
        ]

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
        shares: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for span in self.stored_spans:
            index = math.ceil((span.end_ns / 1e9 - grid.start.timestamp()) / grid.step_s) - 1
            if (span.service, span.name) != (service, name) or not 0 <= index < grid.count:
                continue
            if measure == "status":
                is_good = span.status_code != 2
            elif not math.isnan(seconds := _measured(span, measure)):
                is_good = threshold_s is not None and seconds <= threshold_s
            else:
                continue
            nothing = np.full(grid.count, math.nan)
            good, total = shares.setdefault(span.instance, (nothing, nothing.copy()))
            good[index] = np.nansum([good[index], is_good])
            total[index] = np.nansum([total[index], 1])
        return [
            ShareSeries({"instance": instance}, good.tolist(), total.tolist())
            for instance, (good, total) in shares.items()
        ]

    def ahead(
        self, grid: Grid, *, where: Labels, metrics: Sequence[str] | None = None
    ) -> MemoryReader:
        return self

    def last_seen(
        self, metrics: Sequence[str], *, where: Labels | None = None
    ) -> dict[str, dict[str, datetime]]:
        found: dict[str, dict[str, datetime]] = defaultdict(dict)
        for metric in metrics:
            for labels, samples in self._matching(metric, where):
                instance, at = labels.get("instance", ""), samples[-1][0]
                found[metric][instance] = max(found[metric].get(instance, at), at)
        return found

    def span_last_seen(self, *, service: str, name: str) -> dict[str, datetime]:
        oldest_first = sorted(self._spans(service, None, name), key=lambda span: span.end_ns)
        return {s.instance: datetime.fromtimestamp(s.end_ns / 1e9, UTC) for s in oldest_first}

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
        found = [
            span
            for span in self._spans(service, instance, name)
            if start.timestamp() < span.end_ns / 1e9 <= end.timestamp()
        ]
        newest_last = sorted(found, key=lambda s: _measured(s, measure) if slowest else s.end_ns)
        return newest_last[::-1][:limit]

    def _spans(self, service: str | None, instance: str | None, name: str | None) -> list[Span]:
        return [
            span
            for span in self.stored_spans
            if service in (None, span.service)
            and instance in (None, span.instance)
            and name in (None, span.name)
        ]

    def _matching(self, metric: str, where: Labels | None) -> list[tuple[Labels, list[Sample]]]:
        return [
            (dict(key), samples)
            for key, samples in self.samples[metric].items()
            if (where or {}).items() <= dict(key).items()
        ]

    def _grouped(
        self,
        metric: str,
        where: Labels | None,
        by: Sequence[str],
        values: Callable[[list[Sample]], np.ndarray],
    ) -> list[tuple[Labels, np.ndarray]]:
        """The values of every series, summed by the labels kept; NaN where none was measured."""
        groups: dict[tuple[str, ...], np.ndarray] = {}
        for labels, samples in self._matching(metric, where):
            key, found = tuple(labels.get(name, "") for name in by), values(samples)
            if (so_far := groups.get(key)) is not None:
                both = np.nan_to_num(so_far) + np.nan_to_num(found)
                found = np.where(np.isnan(so_far) & np.isnan(found), math.nan, both)
            groups[key] = found
        return [(dict(zip(by, key, strict=True)), values) for key, values in groups.items()]


def _time(sample: Sample) -> datetime:
    return sample[0]


def _measured(span: Span, measure: str) -> float:
    """Seconds, NaN where the span lacks the attribute."""
    if measure == "duration":
        return span.duration_ns / 1e9
    return float(span.attributes.get(measure, math.nan))


def _windows(samples: Sequence[Sample], grid: Grid) -> list[tuple[int, int]]:
    """From and to which index the samples of each window stand."""
    edges = (grid.start, *grid.ends())
    return list(pairwise(bisect_right(samples, edge, key=_time) for edge in edges))


def _growth(samples: Sequence[Sample], grid: Grid, *, from_zero: bool) -> np.ndarray:
    """By window, and by column where a sample is a row; what is lower than before was reset."""
    windows = _windows(samples, grid)
    begin = max(0, windows[0][0] - 1)
    shape = np.shape(samples[0][1])
    seen = np.array([value for _, value in samples[begin : windows[-1][1]]], float)
    seen = seen.reshape(-1, *shape)
    before = np.zeros_like(seen[:1]) if windows[0][0] == 0 and from_zero else seen[:1]
    steps = np.diff(seen, axis=0, prepend=before)
    steps = np.where(steps < 0, seen, steps)
    nothing = np.full(shape, math.nan)
    inside = [steps[low - begin : high - begin] for low, high in windows]
    return np.array([rows.sum(axis=0) if len(rows) else nothing for rows in inside])
