"""OTLP/JSON, read into the same messages as protobuf (opentelemetry-proto 1.11, OTLP/HTTP, JSON).

It is not protobuf's own JSON: ids are hexadecimal, enums are integers, unknown names are ignored.
64-bit integers may be strings or numbers; enum names, which senders must not use, are understood.
Spans and points are read one by one: one that cannot be is rejected alone, in partial_success.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from tracing import wire
from tracing.rejected import Rejected, quoted

T = TypeVar("T")

# By value, for senders of the names.
_KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
_STATUS_CODES = ("UNSET", "OK", "ERROR")
_TEMPORALITIES = ("UNSPECIFIED", "DELTA", "CUMULATIVE")
# A span's events and links are not read yet: whether there were any is all that is noted.
_SOME = b"\0"
# ValueError: ids that are not hexadecimal, numbers that do not fit their field
_UNREADABLE = (DecodeError, RecursionError, ValueError)


class _AnyValue(Struct, rename="camel", gc=False):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: int | None = None
    double_value: float | None = None
    array_value: _ArrayValue | None = None
    kvlist_value: _KeyValueList | None = None
    bytes_value: bytes | None = None


class _ArrayValue(Struct, rename="camel", gc=False):
    values: list[_AnyValue] | None = None


class _KeyValue(Struct, rename="camel", gc=False):
    key: str | None = None
    value: _AnyValue | None = None


class _KeyValueList(Struct, rename="camel", gc=False):
    values: list[_KeyValue] | None = None


class _Resource(Struct, rename="camel"):
    attributes: list[_KeyValue] | None = None


class _Status(Struct, rename="camel"):
    code: int | str | None = None
    message: str | None = None


class _Span(Struct, rename="camel"):
    trace_id: str | None = None
    span_id: str | None = None
    parent_span_id: str | None = None
    name: str | None = None
    kind: int | str | None = None
    start_time_unix_nano: int | None = None
    end_time_unix_nano: int | None = None
    attributes: list[_KeyValue] | None = None
    events: list[Raw] | None = None
    links: list[Raw] | None = None
    status: _Status | None = None


class _ScopeSpans(Struct, rename="camel"):
    spans: list[Raw] | None = None


class _ResourceSpans(Struct, rename="camel"):
    resource: _Resource | None = None
    scope_spans: list[_ScopeSpans] | None = None


class _TraceRequest(Struct, rename="camel"):
    resource_spans: list[_ResourceSpans] | None = None


class _NumberPoint(Struct, rename="camel"):
    time_unix_nano: int | None = None
    as_double: float | None = None
    as_int: int | None = None
    attributes: list[_KeyValue] | None = None
    flags: int | None = None


class _HistogramPoint(Struct, rename="camel"):
    time_unix_nano: int | None = None
    count: int | None = None
    sum: float | None = None
    bucket_counts: list[int] | None = None
    explicit_bounds: list[float] | None = None
    attributes: list[_KeyValue] | None = None
    flags: int | None = None


class _Points(Struct, rename="camel"):
    data_points: list[Raw] | None = None
    aggregation_temporality: int | str | None = None
    is_monotonic: bool | None = None


class _Metric(Struct, rename="camel"):
    name: str | None = None
    gauge: _Points | None = None
    sum: _Points | None = None
    histogram: _Points | None = None
    exponential_histogram: _Points | None = None
    summary: _Points | None = None


class _ScopeMetrics(Struct, rename="camel"):
    metrics: list[_Metric] | None = None


class _ResourceMetrics(Struct, rename="camel"):
    resource: _Resource | None = None
    scope_metrics: list[_ScopeMetrics] | None = None


class _MetricsRequest(Struct, rename="camel"):
    resource_metrics: list[_ResourceMetrics] | None = None


# Not strict: numbers may stand in strings.
_trace_request = Decoder(_TraceRequest, strict=False)
_span = Decoder(_Span, strict=False)
_metrics_request = Decoder(_MetricsRequest, strict=False)
_number_point = Decoder(_NumberPoint, strict=False)
_histogram_point = Decoder(_HistogramPoint, strict=False)


def trace_request(body: bytes, *, spans_max: int, rejected: Rejected) -> Any:
    """`body` as a wire.TraceRequest, without the spans noted in `rejected`. Raises Undecodable."""
    request = wire.TraceRequest()
    left = spans_max
    for sent in _read(_trace_request, body).resource_spans or ():
        resource_spans = request.resource_spans.add(resource=_resource(sent.resource))
        into = resource_spans.scope_spans.add().spans
        raws = [raw for scope in sent.scope_spans or () for raw in scope.spans or ()]
        for place, raw in enumerate(raws[:left]):
            try:
                into.append(_wire_span(_span.decode(raw)))
            except _UNREADABLE as error:
                rejected.add("unreadable_span", partial(_words, f"span {place}", error))
        _too_many(rejected, "span", len(raws) - left, spans_max)
        left -= min(left, len(raws))
    return request


def metrics_request(body: bytes, *, points_max: int, rejected: Rejected) -> Any:
    """As `trace_request`, a wire.MetricsRequest without the points noted in `rejected`."""
    request = wire.MetricsRequest()
    left = points_max
    for sent in _read(_metrics_request, body).resource_metrics or ():
        resource_metrics = request.resource_metrics.add(resource=_resource(sent.resource))
        into = resource_metrics.scope_metrics.add().metrics
        for metric in (each for scope in sent.scope_metrics or () for each in scope.metrics or ()):
            kind = next((kind for kind in _POINTS if getattr(metric, kind) is not None), None)
            if kind is None:
                continue
            added = into.add(name=(metric.name or "").encode())
            raws = getattr(metric, kind).data_points or []
            _put_points(added, kind, getattr(metric, kind), raws[:left], rejected)
            _too_many(rejected, "sample", len(raws) - left, points_max)
            left -= min(left, len(raws))
    return request


def _read(decoder: Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (DecodeError, RecursionError) as error:
        raise wire.Undecodable(f"{len(body)} bytes are no OTLP/JSON request: {error}") from error


def _words(item: str, error: Exception) -> str:
    return f"{item} cannot be read: {error}"


def _too_many(rejected: Rejected, noun: str, count: int, most: int) -> None:
    if count > 0:
        rejected.add(f"too_many_{noun}s", lambda: f"a request may hold {most} {noun}s", count)


def _number(value: int | str | None, prefix: str, names: tuple[str, ...]) -> int:
    """An enum's value. Raises ValueError when it is a name and not one of `names`."""
    if not isinstance(value, str):
        return value or 0
    name = value.removeprefix(prefix)
    if name not in names:
        raise ValueError(f"{value[:40]!r} is none of {prefix}{{{','.join(names)}}}")
    return names.index(name)


def _id(name: str, text: str | None) -> bytes:
    try:
        return unhexlify(text or "")
    except ValueError:
        raise ValueError(f"{name} {(text or '')[:40]!r} is not hexadecimal") from None


def _wire_span(sent: _Span) -> Any:
    span = wire.Span(
        trace_id=_id("traceId", sent.trace_id),
        span_id=_id("spanId", sent.span_id),
        parent_span_id=_id("parentSpanId", sent.parent_span_id),
        name=(sent.name or "").encode(),
        kind=_number(sent.kind, "SPAN_KIND_", _KINDS),
        start=sent.start_time_unix_nano,
        end=sent.end_time_unix_nano,
        attributes=_attributes(sent.attributes),
        events=_SOME if sent.events else b"",
        links=_SOME if sent.links else b"",
    )
    if sent.status is not None:
        code = _number(sent.status.code, "STATUS_CODE_", _STATUS_CODES)
        status = wire.SpanStatus(code=code, message=(sent.status.message or "").encode())
        span.status = status.SerializeToString()
    return span


def _number_of(sent: _NumberPoint) -> Any:
    point = wire.NumberPoint(
        time=sent.time_unix_nano, attributes=_attributes(sent.attributes), flags=sent.flags
    )
    if sent.as_int is not None:
        point.as_int = sent.as_int
    elif sent.as_double is not None:
        point.as_double = sent.as_double
    return point


def _histogram_of(sent: _HistogramPoint) -> Any:
    return wire.HistogramPoint(
        time=sent.time_unix_nano,
        count=sent.count,
        sum=sent.sum,
        bucket_counts=sent.bucket_counts,
        explicit_bounds=sent.explicit_bounds,
        attributes=_attributes(sent.attributes),
        flags=sent.flags,
    )


def _unsupported(_: Raw) -> Any:
    """A point of a kind that is rejected unread; the decoder counts it."""
    return wire.NumberPoint()


_POINTS: dict[str, Callable[[Raw], Any]] = {
    "gauge": lambda raw: _number_of(_number_point.decode(raw)),
    "sum": lambda raw: _number_of(_number_point.decode(raw)),
    "histogram": lambda raw: _histogram_of(_histogram_point.decode(raw)),
    "exponential_histogram": _unsupported,
    "summary": _unsupported,
}


def _put_points(metric: Any, kind: str, sent: _Points, raws: list[Raw], rejected: Rejected) -> None:
    name = f"metric {quoted(metric.name)}"
    into = getattr(metric, kind)
    into.SetInParent()  # also without points it is a metric of this kind
    try:
        if kind in ("sum", "histogram"):
            into.temporality = _number(
                sent.aggregation_temporality, "AGGREGATION_TEMPORALITY_", _TEMPORALITIES
            )
    except ValueError as error:
        rejected.add("unreadable_metric", partial(_words, name, error), len(raws))
        return
    for place, raw in enumerate(raws):
        try:
            into.data_points.append(_POINTS[kind](raw))
        except _UNREADABLE as error:
            item = f"point {place} of {name}"
            rejected.add("unreadable_point", partial(_words, item, error))


def _resource(sent: _Resource | None) -> bytes:
    try:
        resource = wire.Resource(attributes=_attributes(sent.attributes if sent else None))
        raw: bytes = resource.SerializeToString()
    except _UNREADABLE as error:
        raise wire.Undecodable(f"A resource cannot be read: {error}") from error
    return raw


def _attributes(sent: list[_KeyValue] | None) -> list[bytes]:
    return [_attribute(pair) for pair in sent or ()]


def _attribute(sent: _KeyValue) -> bytes:
    """A serialized wire.KeyValue."""
    pair = wire.KeyValue(key=(sent.key or "").encode())
    if sent.value is not None:
        _fill(pair.value, sent.value)
    raw: bytes = pair.SerializeToString()
    return raw


def _fill(into: Any, sent: _AnyValue) -> None:
    if sent.string_value is not None:
        into.string_value = sent.string_value.encode()
    elif sent.bool_value is not None:
        into.bool_value = sent.bool_value
    elif sent.int_value is not None:
        into.int_value = sent.int_value
    elif sent.double_value is not None:
        into.double_value = sent.double_value
    elif sent.bytes_value is not None:
        into.bytes_value = sent.bytes_value
    elif sent.array_value is not None:
        into.array_value.SetInParent()
        for value in sent.array_value.values or ():
            _fill(into.array_value.values.add(), value)
    elif sent.kvlist_value is not None:
        into.kvlist_value.SetInParent()
        for pair in sent.kvlist_value.values or ():
            added = into.kvlist_value.values.add(key=(pair.key or "").encode())
            if pair.value is not None:
                _fill(added.value, pair.value)
