"""An OTLP metrics request as tables of series and samples, with Prometheus's data model.

A series is a metric name with labels; its id is a hash of both and of the tenant. Histograms are
exploded as Prometheus does: `_bucket{le}` (cumulative), `_sum`, `_count`. Labels are the point's
attributes plus service, instance and node from the resource; a point attribute of one of those
names is kept as `exported_…` (Prometheus, honor_labels: false).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import pyarrow as pa

from tracing import wire, wire_json
from tracing.limits import Limits
from tracing.memo import Memo
from tracing.rejected import Rejected, quoted

_CUMULATIVE = 2
_NO_RECORDED_VALUE = 1  # DataPointFlags
_PLACE_BYTES = 1_500  # what Python takes for a remembered point besides its texts and ids
_IDENTITY = {
    "service": "service.name",
    "instance": "service.instance.id",
    "node": "host.name",
}
_UNSUPPORTED = ("exponential_histogram", "summary")
WORDS = {
    "unsupported_exponential_histogram": "exponential histograms are not supported, those with "
    "explicit bounds are",
    "unsupported_summary": "summaries are not supported, histograms are",
    "delta_temporality": "its temporality is not cumulative (2), the only one supported",
    "invalid_metric_name": "a metric needs a name, of at most {limits.name_chars_max} bytes",
    "too_many_samples": "a request may hold {limits.request_samples_max} samples",
    "invalid_time": "its time is before 1970 or more than {limits.ahead_s_max} s ahead",
    "value_too_large": "it is infinite, or further from 0 than {limits.value_abs_max:g}",
    "no_value": "it holds neither as_double nor as_int",
    "too_many_labels": "it has more than {limits.series_labels_max} labels, or a longer one than "
    "{limits.name_chars_max} characters, its value {limits.value_chars_max}",
    "too_many_buckets": "it has more than {limits.histogram_buckets_max} buckets",
    "invalid_buckets": "its bounds do not ascend, or are not one fewer than its buckets",
    "undecodable_attributes": "an attribute is malformed, or nested too deeply",
}


@dataclass
class DecodedMetrics:
    """As `spans.Decoded`; `series` are rows this process has not written yet."""

    rows: Any
    series: Any
    fresh: dict[int, int]
    rejected: Rejected = field(default_factory=Rejected)
    trimmed: Counter[str] = field(default_factory=Counter)


class SeriesCache:
    """Which series rows are in the store, with the oldest sample time written (ms).

    Forgets everything at the turn of the day (the `seen` date must be renewed) and when full;
    a row written twice merges into one. The event loop writes what the decoding thread asks: each
    is one operation on a dict, and an answer that is too old costs one more such row.
    """

    def __init__(self, series_cached_max: int) -> None:
        self._max = series_cached_max
        self._first_ms: dict[int, int] = {}
        self._day = datetime.now(UTC).date()

    def knows(self, series: int, time_ms: int) -> bool:
        first = self._first_ms.get(series)
        return first is not None and first <= time_ms

    def remember(self, first_ms: Mapping[int, int]) -> None:
        """Called once the rows are durable."""
        today = datetime.now(UTC).date()
        if today != self._day or len(self._first_ms) + len(first_ms) > self._max:
            self._first_ms.clear()
            self._day = today
        self._first_ms.update(first_ms)


def series_id(tenant: str, metric: str, labels: Mapping[str, str]) -> int:
    """64 bits of BLAKE2b over tenant, name and sorted labels (not forgeable like a fast hash)."""
    digest = blake2b(digest_size=8)
    for part in (tenant, metric, *(text for item in sorted(labels.items()) for text in item)):
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return int.from_bytes(digest.digest(), "little")


def bound_text(bound: float) -> str:
    """An `le` value as Prometheus 3 writes it: 0.5, 1.0, +Inf."""
    return "+Inf" if bound == math.inf else repr(bound)


@dataclass(frozen=True)
class _Point:
    """Where a point belongs: one id and metric name per exploded series; `bounds` of a histogram.

    The labels of each series are made when they are asked for: once in a series' life.
    """

    ids: tuple[int, ...]
    metrics: tuple[str, ...]
    labels: Mapping[str, str]
    bounds: tuple[float, ...] | None

    def series(self) -> Iterator[tuple[int, str, Mapping[str, str]]]:
        """(id, metric, labels) of every series."""
        return zip(self.ids, self.metrics, _labels_of(self.labels, self.bounds), strict=True)


class _Rows:
    """The samples of one request while they are read; those after `latest_ms` are not believed."""

    def __init__(self, latest_ms: int) -> None:
        self.latest_ms = latest_ms
        self.metric: list[str] = []
        self.series: list[int] = []
        self.time_ms: list[int] = []
        self.value: list[float] = []
        self.places: list[tuple[_Point, int]] = []

    def add(self, place: _Point, time_ms: int, values: list[float]) -> None:
        kept = 0
        for metric, series, value in zip(place.metrics, place.ids, values, strict=True):
            if math.isnan(value):
                continue  # Nothing measured, also Prometheus's staleness marker
            kept += 1
            self.metric.append(metric)
            self.series.append(series)
            self.time_ms.append(time_ms)
            self.value.append(value)
        if kept:
            self.places.append((place, time_ms))


_Read = Callable[[tuple[str, bytes], bytes, Any, _Rows], str | None]


class SampleDecoder:
    """Turns metrics requests into rows. Not thread-safe: one per thread."""

    def __init__(self, limits: Limits, cache: SeriesCache) -> None:
        self._limits = limits
        self._cache = cache
        self._places: Memo[tuple[Any, ...], _Point] = Memo(
            bytes_max=limits.memo_bytes_max, item_bytes_max=limits.memo_item_bytes_max
        )

    def decode(
        self, tenant: str, body: bytes, encoding: wire.Encoding = wire.Encoding.PROTOBUF
    ) -> DecodedMetrics:
        """Rows of `samples` and `series`. Raises Undecodable; then nothing of it is kept."""
        decoded = DecodedMetrics(None, None, {})
        if encoding is wire.Encoding.JSON:
            most = self._limits.request_samples_max
            request = wire_json.metrics_request(body, points_max=most, rejected=decoded.rejected)
        else:
            request = wire.parse(wire.MetricsRequest, body)
        rows = _Rows(time.time_ns() // 1_000_000 + self._limits.ahead_s_max * 1000)
        for resource_metrics in request.resource_metrics:
            origin = (tenant, resource_metrics.resource)
            wire.resource_attributes(resource_metrics.resource)  # all of it or nothing
            for scope in resource_metrics.scope_metrics:
                for metric in scope.metrics:
                    self._metric(origin, metric, rows, decoded.rejected)
        decoded.rows = pa.table(
            {
                "tenant": pa.repeat(pa.scalar(tenant, pa.string()), len(rows.series)),
                "metric": pa.array(rows.metric, pa.string()),
                "series": pa.array(rows.series, pa.uint64()),
                "time": pa.array(rows.time_ms, pa.int64()).cast(pa.timestamp("ms", "UTC")),
                "value": pa.array(rows.value, pa.float64()),
            }
        )
        self._series(tenant, rows, decoded)
        return decoded

    def _metric(
        self, origin: tuple[str, bytes], metric: Any, rows: _Rows, rejected: Rejected
    ) -> None:
        kind = metric.WhichOneof("value")
        if kind is None:
            return
        points = getattr(metric, kind).data_points
        reason = None
        if kind in _UNSUPPORTED:
            reason = f"unsupported_{kind}"
        elif kind != "gauge" and getattr(metric, kind).temporality != _CUMULATIVE:
            reason = "delta_temporality"
        elif not metric.name or len(metric.name) > self._limits.name_chars_max:
            reason = "invalid_metric_name"
        if reason:
            if points:
                rejected.add(reason, partial(self._words, reason, metric), len(points))
            return
        read = self._histogram if kind == "histogram" else self._number
        for place, point in enumerate(points):
            if reason := self._point(read, origin, metric.name, point, rows):
                rejected.add(reason, partial(self._words, reason, metric, place))

    def _words(self, reason: str, metric: Any, place: int = 0) -> str:
        """What is wrong with that point of a metric, in a line."""
        problem = WORDS[reason].format(limits=self._limits)
        return f"point {place} of metric {quoted(metric.name)}: {problem}"

    def _point(
        self, read: _Read, origin: tuple[str, bytes], name: bytes, point: Any, rows: _Rows
    ) -> str | None:
        """Adds the point to `rows`, or returns why it cannot be kept (of WORDS)."""
        if point.flags & _NO_RECORDED_VALUE:
            return None
        if len(rows.series) >= self._limits.request_samples_max:
            return "too_many_samples"
        if not 0 < point.time // 1_000_000 <= rows.latest_ms:
            return "invalid_time"
        try:
            return read(origin, name, point, rows)
        except wire.Undecodable:
            return "undecodable_attributes"

    def _number(
        self, origin: tuple[str, bytes], name: bytes, point: Any, rows: _Rows
    ) -> str | None:
        kind = point.WhichOneof("value")
        if kind is None:
            return "no_value"
        value = float(getattr(point, kind))
        if abs(value) > self._limits.value_abs_max:
            return "value_too_large"
        place = self._place(origin, name, tuple(point.attributes), None)
        if place is None:
            return "too_many_labels"
        rows.add(place, point.time // 1_000_000, [value])
        return None

    def _histogram(
        self, origin: tuple[str, bytes], name: bytes, point: Any, rows: _Rows
    ) -> str | None:
        if len(point.bucket_counts) > self._limits.histogram_buckets_max:
            return "too_many_buckets"
        bounds, counts = tuple(point.explicit_bounds), list(point.bucket_counts)
        if len(counts) != (len(bounds) + 1 if counts else 0):
            return "invalid_buckets"
        if not all(map(math.isfinite, bounds)) or list(bounds) != sorted(set(bounds)):
            return "invalid_buckets"
        if not counts:
            bounds, counts = (), [point.count]
        place = self._place(origin, name, tuple(point.attributes), bounds)
        if place is None:
            return "too_many_labels"
        # One infinite observation spoils the sum for good, but not the buckets.
        summed = point.HasField("sum") and abs(point.sum) <= self._limits.value_abs_max
        total = point.sum if summed else math.nan
        values = [*map(float, accumulate(counts)), total, float(point.count)]
        rows.add(place, point.time // 1_000_000, values)
        return None

    def _place(
        self,
        origin: tuple[str, bytes],
        name: bytes,
        attributes: tuple[bytes, ...],
        bounds: tuple[float, ...] | None,
    ) -> _Point | None:
        key = (origin, name, attributes, bounds)
        place = self._places.get(key)
        if place is None:
            labels = self._labels(origin[1], attributes)
            if labels is None:
                return None
            place = _explode(origin[0], name.decode("utf-8", "replace"), labels, bounds)
            text_bytes = len(origin[1]) + 4 * sum(map(len, attributes))
            self._places.keep(key, place, _PLACE_BYTES + text_bytes + 64 * len(place.ids))
        return place

    def _labels(self, resource: bytes, attributes: tuple[bytes, ...]) -> dict[str, str] | None:
        """The labels of a point, None when there are too many or one is too long."""
        limits = self._limits
        labels: dict[str, str] = {}
        for key, value in map(wire.key_value, attributes):
            labels[f"exported_{key}" if key in _IDENTITY else key] = value
        found = wire.resource_attributes(resource)
        for label, attribute in _IDENTITY.items():
            if found.get(attribute):
                labels[label] = found[attribute]
        too_long = any(
            len(key) > limits.name_chars_max or len(value) > limits.value_chars_max
            for key, value in labels.items()
        )
        return None if too_long or len(labels) > limits.series_labels_max else labels

    def _series(self, tenant: str, rows: _Rows, decoded: DecodedMetrics) -> None:
        """Fill `decoded.series` with the series that the store does not know yet."""
        first: dict[int, int] = {}
        labels: dict[int, tuple[str, Mapping[str, str]]] = {}
        for place, time_ms in rows.places:
            if self._cache.knows(place.ids[0], time_ms):
                continue
            for series, metric, found in place.series():
                first[series] = min(time_ms, first.get(series, time_ms))
                labels[series] = (metric, found)
        decoded.fresh = first
        decoded.series = pa.table(
            {
                "tenant": pa.repeat(pa.scalar(tenant, pa.string()), len(first)),
                "metric": pa.array([labels[series][0] for series in first], pa.string()),
                "series": pa.array(list(first), pa.uint64()),
                "labels": pa.array(
                    [list(labels[series][1].items()) for series in first],
                    pa.map_(pa.string(), pa.string()),
                ),
                "first": pa.array(list(first.values()), pa.int64()).cast(pa.timestamp("ms", "UTC")),
            }
        )


def _labels_of(
    labels: Mapping[str, str], bounds: tuple[float, ...] | None
) -> Iterator[Mapping[str, str]]:
    """The labels of the series a point feeds, in the order of `_explode`."""
    if bounds is not None:
        for bound in (*bounds, math.inf):
            yield {**labels, "le": bound_text(bound)}
        yield labels
    yield labels


def _explode(
    tenant: str, name: str, labels: Mapping[str, str], bounds: tuple[float, ...] | None
) -> _Point:
    """The series a point feeds: itself, or the buckets, sum and count of a histogram."""
    metrics: tuple[str, ...] = (name,)
    if bounds is not None:
        metrics = (f"{name}_bucket",) * (len(bounds) + 1) + (f"{name}_sum", f"{name}_count")
    found = zip(metrics, _labels_of(labels, bounds), strict=True)
    ids = tuple(series_id(tenant, metric, one) for metric, one in found)
    return _Point(ids, metrics, labels, bounds)
