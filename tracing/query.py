"""The one door out: `reader(tenant)` gives the Reader of types.py over the process's store.

The store filters, sorts and deduplicates; windows.py does the arithmetic. A 15 s question over the
last minutes is two small queries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from tracing import search as searching
from tracing import sql, wiring
from tracing.series import (
    EPOCH,
    LOOKBACK,
    NOTHING,
    Catalogue,
    SeriesAhead,
    StoreSeries,
    milliseconds_of,
)
from tracing.store.store import Parameter, Store
from tracing.types import (
    Grid,
    HeatCell,
    HistogramSeries,
    Labels,
    Place,
    Reader,
    Series,
    ShareSeries,
    Span,
    TraceSearch,
)
from tracing.windows import (
    Floats,
    Ints,
    Samples,
    add_up,
    split_buckets,
    steps,
    window_of,
)

LAST_SEEN = timedelta(hours=1)
TRACE_SPANS_MAX = 10_000
SPANS_MAX = 1_000


def reader(tenant_id: str) -> Reader:
    """The Reader of a tenant. Opens this process's store on first use; raises StoreLocked then
    when another process owns it."""
    return StoreReader(wiring.store(), tenant_id)


Key = tuple[str, ...]


class StoreReader:
    """See `tracing.types.Reader`: every promise is written there."""

    def __init__(self, store: Store, tenant_id: str, series: StoreSeries | None = None) -> None:
        self._store = store
        self._tenant = tenant_id
        self._series = series or StoreSeries(store, tenant_id)
        self._ahead: dict[tuple[Any, ...], StoreReader] = {}

    # --- metrics -------------------------------------------------------------------------------

    def increase(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[Series]:
        samples, window, grown, catalogue = self._growth((metric,), where or {}, grid)
        groups, row = _grouped(samples, window, catalogue, by)
        totals = add_up(grown, row, window, (len(groups), grid.count))
        return _as_series(groups, totals, by)

    def gauge(
        self,
        metric: str,
        grid: Grid,
        *,
        where: Labels | None = None,
        by: Sequence[str] = (),
        over: str = "avg",
    ) -> list[Series]:
        if over not in sql.GAUGES:
            raise ValueError(f"over={over!r}, allowed: {', '.join(sql.GAUGES)}")
        catalogue = self._series.catalogue((metric,), where or {})
        if not catalogue:
            return []
        samples = self._series.gauges((metric,), where or {}, grid, over)
        window = window_of(samples.time_ms, grid)
        groups, row = _grouped(samples, window, catalogue, by)
        totals = add_up(samples.value, row, window, (len(groups), grid.count))
        return _as_series(groups, totals, by)

    def histogram(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[HistogramSeries]:
        if "le" in {*by, *(where or {})}:
            raise ValueError(
                "a histogram cannot be asked for by 'le'; its bounds are in the answer"
            )
        metrics = (f"{metric}_bucket", f"{metric}_sum")
        samples, window, grown, catalogue = self._growth(metrics, where or {}, grid)
        # A bucket's cell is its group and `le`, the sum's is its group and "".
        cells, row = _grouped(samples, window, catalogue, (*by, "le"))
        totals = add_up(grown, row, window, (len(cells), grid.count))
        unmeasured = np.full(grid.count, math.nan)
        return [
            HistogramSeries(
                labels=dict(zip(by, key, strict=True)),
                bounds=[float(le) for le in edges[:-1]],
                counts=split_buckets(
                    np.array([totals[cells[(*key, le)]] for le in edges])
                ).tolist(),
                sums=(totals[cells[(*key, "")]] if (*key, "") in cells else unmeasured).tolist(),
            )
            for key, edges in _bucket_edges(samples, catalogue, cells, by)
        ]

    def ahead(
        self, grid: Grid, *, where: Labels, metrics: Sequence[str] | None = None
    ) -> StoreReader:
        # A histogram is asked for without suffix.
        names = metrics and [m + suffix for m in metrics for suffix in ("", "_bucket", "_sum")]
        key = (grid.start, grid.end, tuple(sorted(where.items())), names and tuple(names))
        if key not in self._ahead:
            of = (self._store, self._tenant, grid, where, names)
            series = SeriesAhead(*of, beyond=self._series)
            self._ahead[key] = StoreReader(self._store, self._tenant, series)
        return self._ahead[key]

    def last_seen(
        self, metrics: Sequence[str], *, where: Labels | None = None
    ) -> dict[str, dict[str, datetime]]:
        now = datetime.now(UTC)
        # A histogram is asked for without suffix; its count is there whenever it is.
        names = [name for metric in metrics for name in (metric, f"{metric}_count")]
        times = {"since_ms": milliseconds_of(now - LAST_SEEN), "now_ms": milliseconds_of(now)}
        rows = self._series.rows(sql.LAST_SEEN, where or {}, "labels", metrics=names, **times)
        found: dict[str, dict[str, datetime]] = {}
        for row in rows:
            name, at = row["metric"], _time(row["newest_ms"])
            seen = found.setdefault(name if name in metrics else name.removesuffix("_count"), {})
            seen[row["instance"]] = max(at, seen.get(row["instance"], at))
        return found

    # --- spans ---------------------------------------------------------------------------------

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
        if measure != "status" and threshold_s is None:
            raise ValueError(f"threshold_s=None, allowed only for measure 'status', not {measure}")
        text, parameters = sql.span_share(measure, by)
        parameters |= {
            "tenant": self._tenant,
            "service": service,
            "name": name,
            "start_ns": _nanoseconds(grid.start),
            "end_ns": _nanoseconds(grid.end),
            "step_ns": max(1, round(grid.step_s * 1e9)),
            "windows": grid.count,
            "threshold": math.inf if threshold_s is None else threshold_s,
        }
        return _shares(self._store.query(text, parameters).to_pylist(), grid.count, by)

    def span_last_seen(self, *, service: str, name: str) -> dict[str, datetime]:
        now = datetime.now(UTC)
        parameters = {"service": service, "name": name, **self._between(now - LAST_SEEN, now)}
        rows = self._store.query(sql.SPAN_LAST_SEEN, parameters).to_pylist()
        return {row["instance"]: _time(row["newest_ms"]) for row in rows}

    def trace(self, trace_id: str) -> list[Span]:
        if len(trace_id) != 32 or not set(trace_id.lower()) <= set("0123456789abcdef"):
            return []
        parameters: dict[str, Parameter] = {
            "tenant": self._tenant,
            "trace_id": trace_id.lower(),
            "limit": TRACE_SPANS_MAX,
        }
        return _spans(self._store.query(sql.TRACE, parameters))

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
        if not 1 <= limit <= SPANS_MAX:
            raise ValueError(f"limit={limit}, allowed: 1 to {SPANS_MAX}")
        filters = {"service": service, "instance": instance, "name": name}
        text, parameters = sql.spans(
            {column: value for column, value in filters.items() if value is not None},
            measure if slowest else None,
        )
        times = self._between(start, end)
        return _spans(self._store.query(text, {**parameters, **times, "limit": limit}))

    def traces(
        self,
        search: TraceSearch,
        *,
        slowest: bool = False,
        after: Place | None = None,
        limit: int = 50,
    ) -> list[Span]:
        if not 1 <= limit <= searching.TRACES_MAX:
            raise ValueError(f"limit={limit}, allowed: 1 to {searching.TRACES_MAX}")
        columns = sql.SPAN_COLUMNS
        text, parameters = searching.traces(columns, search, slowest=slowest, after=after)
        times = self._between(search.start, search.end)
        return _spans(self._store.query(text, {**parameters, **times, "limit": limit}))

    def latency_heat(
        self, search: TraceSearch, *, step_s: float, bounds_s: Sequence[float]
    ) -> list[HeatCell]:
        grid = Grid(search.start, search.end, step_s)
        text, parameters = searching.heat(search, [round(bound * 1e9) for bound in bounds_s])
        parameters |= {"step_ns": round(step_s * 1e9), "windows": grid.count}
        times = self._between(search.start, search.end)
        rows = self._store.query(text, {**parameters, **times}).to_pylist()
        return [HeatCell(row["w"], row["b"], row["count"], row["failed"]) for row in rows]

    # --- from the store ------------------------------------------------------------------------

    def _between(self, start: datetime, end: datetime) -> dict[str, Parameter]:
        return {
            "tenant": self._tenant,
            "start_ns": _nanoseconds(start),
            "end_ns": _nanoseconds(end),
        }

    def _growth(
        self, metrics: Sequence[str], where: Labels, grid: Grid
    ) -> tuple[Samples, Ints, Floats, Catalogue]:
        """Samples that tell the growth, the window of each, what each adds to its counter, and
        the series they belong to."""
        catalogue = self._series.catalogue(metrics, where)
        samples = self._series.counters(metrics, where, grid) if catalogue else NOTHING
        before: dict[int, float] = {}
        orphans = False
        for i in np.flatnonzero(samples.firsts()):
            series, time_ms = int(samples.series[i]), int(samples.time_ms[i])
            entry = catalogue.get(series)
            if entry is None:
                continue
            if entry.first_ms < time_ms:
                orphans = orphans or time_ms > milliseconds_of(grid.start)
            elif entry.known_ms < time_ms:
                before[series] = 0.0
        if orphans:
            # A gap longer than LOOKBACK: its far end is the last value before.
            before |= self._series.last_values(metrics, where, grid.start - LOOKBACK)
        window = window_of(samples.time_ms, grid)
        return samples, window, steps(samples, before), catalogue


# --- rows to answers --------------------------------------------------------------------------


def _time(milliseconds: int) -> datetime:
    return EPOCH + timedelta(milliseconds=milliseconds)


def _nanoseconds(time: datetime) -> int:
    # Whole microseconds: float seconds of today hold no nanoseconds.
    return (time - EPOCH) // timedelta(microseconds=1) * 1000


def _grouped(
    samples: Samples, window: Ints, catalogue: Catalogue, by: Sequence[str]
) -> tuple[dict[Key, int], Ints]:
    """Groups (label values → row) that have a sample inside the grid, and each sample's row."""
    ids, inverse = np.unique(samples.series, return_inverse=True)
    inside = np.zeros(len(ids), dtype=bool)
    inside[inverse[window >= 0]] = True
    groups: dict[Key, int] = {}
    rows = np.full(len(ids), -1, dtype=np.int64)
    for i in np.flatnonzero(inside):
        entry = catalogue.get(int(ids[i]))
        if entry is not None:
            key = tuple(entry.labels.get(label, "") for label in by)
            rows[i] = groups.setdefault(key, len(groups))
    row = rows[inverse]
    window[row < 0] = -1
    return groups, row


def _as_series(groups: Mapping[Key, int], totals: Any, by: Sequence[str]) -> list[Series]:
    return [
        Series(dict(zip(by, key, strict=True)), totals[row].tolist())
        for key, row in sorted(groups.items())
    ]


def _bucket_edges(
    samples: Samples,
    catalogue: Catalogue,
    cells: Mapping[Key, int],
    by: Sequence[str],
) -> list[tuple[Key, list[str]]]:
    """Per group its key and the `le` of the buckets all its histograms share, +Inf last: only at
    shared bounds is the sum of cumulative counts exact."""
    histograms: dict[Key, dict[Key, set[str]]] = {}
    for series in np.unique(samples.series):
        entry = catalogue.get(int(series))
        if entry is None or "le" not in entry.labels:
            continue
        key = tuple(entry.labels.get(label, "") for label in by)
        one = tuple(f"{k}={v}" for k, v in sorted(entry.labels.items()) if k != "le")
        histograms.setdefault(key, {}).setdefault(one, set()).add(entry.labels["le"])
    found = []
    for key, by_histogram in sorted(histograms.items()):
        shared = set.intersection(*by_histogram.values())
        edges = sorted((le for le in shared if (*key, le) in cells), key=float)
        if edges and edges[-1] == "+Inf":
            found.append((key, edges))
    return found


def _shares(rows: list[dict[str, Any]], windows: int, by: Sequence[str]) -> list[ShareSeries]:
    groups: dict[Key, tuple[list[float], list[float]]] = {}
    for row in rows:
        good, total = groups.setdefault(
            tuple(row["key"]), ([math.nan] * windows, [math.nan] * windows)
        )
        good[row["w"]] = float(row["good"])
        total[row["w"]] = float(row["total"])
    return [
        ShareSeries(dict(zip(by, key, strict=True)), good, total)
        for key, (good, total) in sorted(groups.items())
    ]


def _spans(table: Any) -> list[Span]:
    return [
        Span(
            **{
                **row,
                "attributes": dict(row["attributes"]),
                "resource": json.loads(row["resource"]),
            }
        )
        for row in table.to_pylist()
    ]
