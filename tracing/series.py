"""Series and their samples as they leave the store; query.py makes answers of them.

The store filters, sorts and deduplicates. Of wide windows it hands out only what the answer depends
on: a day of charts is millions of samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from tracing import sql
from tracing.store.store import Parameter, Store
from tracing.types import Grid, Labels
from tracing.windows import Samples, milliseconds, reduced

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A predecessor is looked for this far back at once, further back only where one must exist.
LOOKBACK = timedelta(minutes=5)
THINNED_FROM_S = 60  # narrower windows hold so few samples that choosing costs more than reading
AHEAD_SERIES_MAX = 10_000
AHEAD_SAMPLES_MAX = 1_000_000  # 24 MB
NOTHING = Samples(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True)
class Entry:
    """A series of the catalogue: `first_ms` its oldest sample, `known_ms` the oldest of any
    series of the same metric and source (service, instance, node)."""

    labels: Mapping[str, str]
    first_ms: int
    known_ms: int


Catalogue = dict[int, Entry]


class StoreSeries:
    """A tenant's series in the store, asked for by metrics and by labels that fit `where`."""

    def __init__(self, store: Store, tenant_id: str) -> None:
        self._store = store
        self._tenant = tenant_id

    def catalogue(self, metrics: Sequence[str], where: Labels) -> Catalogue:
        """The series by id."""
        rows = self.rows(sql.CATALOGUE, where, "labels", metrics=metrics)
        return {row["series"]: _entry(row) for row in rows}

    def counters(self, metrics: Sequence[str], where: Labels, grid: Grid) -> Samples:
        """What tells the growth in the grid's windows: samples from LOOKBACK before it on."""
        text = sql.COUNTERS if grid.step_s >= THINNED_FROM_S else sql.SAMPLES
        times = _times(grid.start - LOOKBACK, grid)
        return _samples(self._table(text, where, "series", metrics=metrics, **times))

    def gauges(self, metrics: Sequence[str], where: Labels, grid: Grid, over: str) -> Samples:
        """One sample per series and window of the grid: their avg, max, min or last."""
        times = _times(grid.start, grid)
        return _samples(self._table(sql.GAUGES[over], where, "series", metrics=metrics, **times))

    def last_values(
        self, metrics: Sequence[str], where: Labels, until: datetime
    ) -> dict[int, float]:
        """By series its last value up to then, however long ago."""
        until_ms = milliseconds_of(until)
        rows = self.rows(sql.PREDECESSORS, where, "series", metrics=metrics, until_ms=until_ms)
        return {row["series"]: row["last_value"] for row in rows}

    def rows(
        self, text: str, where: Labels, column: str, **values: Parameter
    ) -> list[dict[str, Any]]:
        """Of all metrics unless `values` say of which."""
        found: list[dict[str, Any]] = self._table(text, where, column, **values).to_pylist()
        return found

    def _table(self, text: str, where: Labels, column: str, **values: Parameter) -> Any:
        text, parameters = sql.labelled(text, where, column)
        if "metrics" not in values:
            text = sql.of_all_metrics(text)
        return self._store.query(text, {**parameters, "tenant": self._tenant, **values})


class SeriesAhead(StoreSeries):
    """The same answers, from one look at the metrics (None: all) of `where` up to the grid's end.

    A question costs the store milliseconds however small it is, and whoever explains an engine asks
    a hundred. What lies beyond the look is asked of `beyond`, an earlier look or the store, and all
    of it where it would be more than AHEAD_SERIES_MAX or AHEAD_SAMPLES_MAX.
    """

    def __init__(
        self,
        store: Store,
        tenant_id: str,
        grid: Grid,
        where: Labels,
        metrics: Sequence[str] | None = None,
        *,
        beyond: StoreSeries,
    ) -> None:
        super().__init__(store, tenant_id)
        self._beyond = beyond
        self._where = dict(where)
        self._metrics = metrics
        of: dict[str, Parameter] = {} if metrics is None else {"metrics": metrics}
        self._after, self._until = grid.start - LOOKBACK, grid.end
        self._known: dict[str, Catalogue] = defaultdict(dict)
        for row in self.rows(sql.CATALOGUE, where, "labels", **of):
            self._known[row["metric"]][row["series"]] = _entry(row)
        self._held = self._look(grid, of)
        borders = [*np.flatnonzero(self._held.firsts()).tolist(), len(self._held.series)]
        runs = map(slice, borders, borders[1:])
        self._runs = {int(self._held.series[run.start]): run for run in runs}

    def _look(self, grid: Grid, of: dict[str, Parameter]) -> Samples:
        """All samples that fit, or none where they are too many to hold."""
        if sum(map(len, self._known.values())) <= AHEAD_SERIES_MAX:
            of |= _times(self._after, grid) | {"most": AHEAD_SAMPLES_MAX + 1}
            found = _samples(self._table(sql.SAMPLES_AHEAD, self._where, "series", **of))
            if len(found.series) <= AHEAD_SAMPLES_MAX:
                return found
        self._until = self._after
        return NOTHING

    def catalogue(self, metrics: Sequence[str], where: Labels) -> Catalogue:
        if not self._covers(metrics, where):
            return self._beyond.catalogue(metrics, where)
        return {key: entry for m in metrics for key, entry in self._known.get(m, {}).items()}

    def counters(self, metrics: Sequence[str], where: Labels, grid: Grid) -> Samples:
        after = grid.start - LOOKBACK
        if not self._holds(metrics, where, after, grid.end):
            return self._beyond.counters(metrics, where, grid)
        return self._between(metrics, after, grid.end)

    def gauges(self, metrics: Sequence[str], where: Labels, grid: Grid, over: str) -> Samples:
        if not self._holds(metrics, where, grid.start, grid.end):
            return self._beyond.gauges(metrics, where, grid, over)
        return reduced(self._between(metrics, grid.start, grid.end), grid, over)

    def _covers(self, metrics: Sequence[str], where: Labels) -> bool:
        known = self._metrics is None or set(metrics) <= set(self._metrics)
        return known and where == self._where

    def _holds(
        self, metrics: Sequence[str], where: Labels, after: datetime, until: datetime
    ) -> bool:
        inside = self._after <= after and until <= self._until
        return inside and self._covers(metrics, where)

    def _between(self, metrics: Sequence[str], after: datetime, until: datetime) -> Samples:
        known = self.catalogue(metrics, self._where)
        runs = [self._runs[series] for series in sorted(known) if series in self._runs]
        found = self._held.take([slice(0), *runs])  # of no run too
        after_ms, until_ms = milliseconds_of(after), milliseconds_of(until)
        return found.take([(found.time_ms > after_ms) & (found.time_ms <= until_ms)])


def milliseconds_of(time: datetime) -> int:
    return (time - EPOCH) // timedelta(milliseconds=1)


def _entry(row: Mapping[str, Any]) -> Entry:
    return Entry(dict(row["labels"]), row["first_ms"], row["known_ms"])


def _times(after: datetime, grid: Grid) -> dict[str, Parameter]:
    return {
        "after_ms": milliseconds_of(after),
        "start_ms": milliseconds_of(grid.start),
        "until_ms": milliseconds_of(grid.end),
        "step_ms": max(1, milliseconds(grid.step_s)),
    }


def _samples(table: Any) -> Samples:
    return Samples(*(table.column(i).to_numpy() for i in range(3)))
