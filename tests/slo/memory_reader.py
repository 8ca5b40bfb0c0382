"""A Reader over samples kept in lists, with the promises of tracing.types and nothing else."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from tracing.types import Grid, HistogramSeries, Labels, Series, ShareSeries, Span

Key = tuple[tuple[str, str], ...]


def _key(labels: Labels) -> Key:
    return tuple(sorted(labels.items()))


class MemoryReader:
    def __init__(self) -> None:
        self.counters: dict[str, dict[Key, list[tuple[datetime, float]]]] = defaultdict(dict)
        self.buckets: dict[str, dict[Key, list[tuple[datetime, list[float]]]]] = defaultdict(dict)
        self.bounds: dict[str, list[float]] = {}
        self.stored_spans: list[Span] = []

    def counter(self, metric: str, at: datetime, value: float, **labels: str) -> None:
        samples = self.counters[metric].setdefault(_key(labels), [])
        samples.append((at, value))
        samples.sort()

    def bucket(self, metric: str, at: datetime, counts: list[float], **labels: str) -> None:
        """Cumulative in time, not over buckets: counts[i] fell in bucket i since the start."""
        samples = self.buckets[metric].setdefault(_key(labels), [])
        samples.append((at, counts))
        samples.sort()

    def increase(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[Series]:
        family = self.counters[metric]
        born = min((s[0][0] for s in family.values()), default=None)
        columns: dict[Key, list[float]] = {}
        for key, samples in family.items():
            if not (where or {}).items() <= dict(key).items():
                continue
            values = [
                _growth(samples, end - timedelta(seconds=grid.step_s), end, born)
                for end in grid.ends()
            ]
            group = _key({name: dict(key).get(name, "") for name in by})
            so_far = columns.get(group, [math.nan] * grid.count)
            columns[group] = [_add(a, b) for a, b in zip(so_far, values, strict=True)]
        return [Series(dict(k), v) for k, v in columns.items() if not all(map(math.isnan, v))]

    def histogram(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[HistogramSeries]:
        found = []
        for key, samples in self.buckets[metric].items():
            labels = dict(key)
            if not (where or {}).items() <= labels.items():
                continue
            edges = range(len(self.bounds[metric]) + 1)
            columns = [[(at, counts[i]) for at, counts in samples] for i in edges]
            rows = [
                [_growth(c, end - timedelta(seconds=grid.step_s), end, None) for c in columns]
                for end in grid.ends()
            ]
            shown = {name: labels.get(name, "") for name in by}
            found.append(HistogramSeries(shown, self.bounds[metric], rows, [0.0] * grid.count))
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
        shares: dict[str, tuple[list[float], list[float]]] = {}
        for span in self.stored_spans:
            offset = span.end_ns / 1e9 - grid.start.timestamp()
            index = math.ceil(offset / grid.step_s) - 1
            if (span.service, span.name) != (service, name) or not 0 <= index < grid.count:
                continue
            nothing = [math.nan] * grid.count
            good, total = shares.setdefault(span.instance, (list(nothing), list(nothing)))
            if measure == "status":
                is_good = span.status_code != 2
            else:
                seconds = span.duration_ns / 1e9
                is_good = threshold_s is not None and seconds <= threshold_s
            good[index] = _add(good[index], float(is_good))
            total[index] = _add(total[index], 1.0)
        return [ShareSeries({"instance": i}, g, t) for i, (g, t) in shares.items()]

    def last_seen(self, metric: str, *, where: Labels | None = None) -> datetime | None:
        times = [
            samples[-1][0]
            for family in (self.counters[metric], self.buckets[metric])
            for key, samples in family.items()
            if (where or {}).items() <= dict(key).items()
        ]
        return max(times, default=None)

    def span_last_seen(
        self, *, service: str, name: str, instance: str | None = None
    ) -> datetime | None:
        ends = [
            s.end_ns
            for s in self.stored_spans
            if (s.service, s.name) == (service, name) and instance in (None, s.instance)
        ]
        return datetime.fromtimestamp(max(ends) / 1e9, UTC) if ends else None

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
            s
            for s in self.stored_spans
            if start.timestamp() < s.end_ns / 1e9 <= end.timestamp()
            and service in (None, s.service)
            and instance in (None, s.instance)
            and name in (None, s.name)
        ]
        return sorted(wanted, key=lambda s: -s.end_ns)[:limit]

    def gauge(
        self,
        metric: str,
        grid: Grid,
        *,
        where: Labels | None = None,
        by: Sequence[str] = (),
        over: str = "avg",
    ) -> list[Series]:
        raise NotImplementedError

    def trace(self, trace_id: str) -> list[Span]:
        raise NotImplementedError


def _add(a: float, b: float) -> float:
    if math.isnan(a):
        return b
    return a if math.isnan(b) else a + b


def _growth(
    samples: Sequence[tuple[datetime, float]],
    start: datetime,
    end: datetime,
    born: datetime | None,
) -> float:
    times = [at for at, _ in samples]
    before, upto = bisect_right(times, start), bisect_right(times, end)
    if before == upto:
        return math.nan
    first_ever = before == 0
    if not first_ever:
        last = samples[before - 1][1]
    else:
        last = 0.0 if born is not None and born < times[0] else samples[0][1]
    growth = 0.0
    for _, value in samples[before:upto]:
        growth += value - last if value >= last else value
        last = value
    return growth
