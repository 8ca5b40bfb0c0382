"""OTLP on the wire, read shallowly: a private protobuf schema that is built at import.

A length-delimited sub-message may be declared as `bytes` without changing the wire format
(protobuf encoding guide, "Length-Delimited Records"). Attributes, resources and statuses are
declared so: identical bytes are decoded once and remembered by the decoders. Strings are declared
as `bytes` too, so one invalid UTF-8 character costs a replacement character, not the request.
Field numbers: opentelemetry-proto 1.11 trace.proto, metrics.proto, common.proto; google.rpc.Status.
"""

from __future__ import annotations

import json
from base64 import b64encode
from enum import StrEnum
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_F = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "trimtab.wire"
_SCALARS = {
    "bytes": _F.TYPE_BYTES,
    "bool": _F.TYPE_BOOL,
    "int32": _F.TYPE_INT32,
    "uint32": _F.TYPE_UINT32,
    "int64": _F.TYPE_INT64,
    "fixed64": _F.TYPE_FIXED64,
    "sfixed64": _F.TYPE_SFIXED64,
    "double": _F.TYPE_DOUBLE,
}

# message -> field -> (number, type); `*` repeated, `?` presence kept, `|` member of the oneof
# "value". A type that is no scalar names a message of this table.
_SCHEMA: dict[str, dict[str, tuple[int, str]]] = {
    "TraceRequest": {"resource_spans": (1, "*ResourceSpans")},
    "ResourceSpans": {"resource": (1, "bytes"), "scope_spans": (2, "*ScopeSpans")},
    "ScopeSpans": {"spans": (2, "*Span")},
    "Span": {
        "trace_id": (1, "bytes"),
        "span_id": (2, "bytes"),
        "parent_span_id": (4, "bytes"),
        "name": (5, "bytes"),
        "kind": (6, "int32"),
        "start": (7, "fixed64"),
        "end": (8, "fixed64"),
        "attributes": (9, "*bytes"),
        "events": (11, "bytes"),  # the last one: enough to know whether there were any
        "links": (13, "bytes"),
        "status": (15, "bytes"),
    },
    "SpanStatus": {"message": (2, "bytes"), "code": (3, "int32")},
    "MetricsRequest": {"resource_metrics": (1, "*ResourceMetrics")},
    "ResourceMetrics": {"resource": (1, "bytes"), "scope_metrics": (2, "*ScopeMetrics")},
    "ScopeMetrics": {"metrics": (2, "*Metric")},
    "Metric": {
        "name": (1, "bytes"),
        "gauge": (5, "|Gauge"),
        "sum": (7, "|Sum"),
        "histogram": (9, "|Histogram"),
        "exponential_histogram": (10, "|Gauge"),  # only its points are counted, then rejected
        "summary": (11, "|Gauge"),
    },
    "Gauge": {"data_points": (1, "*NumberPoint")},
    "Sum": {
        "data_points": (1, "*NumberPoint"),
        "temporality": (2, "int32"),
        "is_monotonic": (3, "bool"),
    },
    "Histogram": {"data_points": (1, "*HistogramPoint"), "temporality": (2, "int32")},
    "NumberPoint": {
        "time": (3, "fixed64"),
        "as_double": (4, "|double"),
        "as_int": (6, "|sfixed64"),
        "attributes": (7, "*bytes"),
        "flags": (8, "uint32"),
    },
    "HistogramPoint": {
        "time": (3, "fixed64"),
        "count": (4, "fixed64"),
        "sum": (5, "?double"),
        "bucket_counts": (6, "*fixed64"),
        "explicit_bounds": (7, "*double"),
        "attributes": (9, "*bytes"),
        "flags": (10, "uint32"),
    },
    "Resource": {"attributes": (1, "*bytes")},
    "KeyValue": {"key": (1, "bytes"), "value": (2, "AnyValue")},
    "AnyValue": {
        "string_value": (1, "|bytes"),
        "bool_value": (2, "|bool"),
        "int_value": (3, "|int64"),
        "double_value": (4, "|double"),
        "array_value": (5, "|ArrayValue"),
        "kvlist_value": (6, "|KeyValueList"),
        "bytes_value": (7, "|bytes"),
    },
    "ArrayValue": {"values": (1, "*AnyValue")},
    "KeyValueList": {"values": (1, "*KeyValue")},
    "ExportResponse": {"partial_success": (1, "PartialSuccess")},
    "PartialSuccess": {"rejected": (1, "int64"), "error_message": (2, "bytes")},
    "Status": {"code": (1, "int32"), "message": (2, "bytes"), "details": (3, "*Any")},
    "Any": {"type_url": (1, "bytes"), "value": (2, "bytes")},
    "BadRequest": {"field_violations": (1, "*FieldViolation")},
    "FieldViolation": {"field": (1, "bytes"), "description": (2, "bytes")},
    "RetryInfo": {"retry_delay": (1, "Duration")},
    "Duration": {"seconds": (1, "int64"), "nanos": (2, "int32")},
}


def _field(message: Any, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_F.LABEL_OPTIONAL)
    if kind[0] == "*":
        field.label = _F.LABEL_REPEATED
    elif kind[0] == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="value")
        field.oneof_index = 0
    elif kind[0] == "?":
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    kind = kind.lstrip("*|?")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _F.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


def _build() -> dict[str, Any]:
    """Message classes by name, from a pool of our own (the global one stays untouched)."""
    file = descriptor_pb2.FileDescriptorProto(
        name="trimtab/wire.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _SCHEMA
    }


_messages = _build()
TraceRequest = _messages["TraceRequest"]
MetricsRequest = _messages["MetricsRequest"]
Resource = _messages["Resource"]
KeyValue = _messages["KeyValue"]
Span = _messages["Span"]
SpanStatus = _messages["SpanStatus"]
NumberPoint = _messages["NumberPoint"]
HistogramPoint = _messages["HistogramPoint"]
ExportResponse = _messages["ExportResponse"]
Status = _messages["Status"]
BadRequest = _messages["BadRequest"]
RetryInfo = _messages["RetryInfo"]


class Encoding(StrEnum):
    """How a request is written, by its media type; gRPC carries protobuf."""

    PROTOBUF = "application/x-protobuf"
    JSON = "application/json"


class Undecodable(ValueError):
    """The bytes are not the message they claim to be; sending them again will not help."""


def parse(message: Any, body: bytes) -> Any:
    """`body` as a `message`; raises Undecodable."""
    try:
        return message.FromString(body)
    except DecodeError as error:
        name = message.DESCRIPTOR.name
        raise Undecodable(f"{len(body)} bytes are no protobuf {name}: {error}") from error


def number_text(value: float) -> str:
    """The shortest decimal that reads back as `value`: 1, 0.25, 1e-7, 1e+22.

    Written by Arrow, as `attributes` writes whole columns of them: one number has one text.
    """
    text: str = pa.scalar(value, pa.float64()).cast(pa.string()).as_py()
    return text


def _plain(value: Any) -> Any:
    """An AnyValue as what JSON would hold (OTLP/JSON: bytes are base64)."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    inner = getattr(value, kind)
    if kind == "string_value":
        return inner.decode("utf-8", "replace")
    if kind == "bytes_value":
        return b64encode(inner).decode()
    if kind == "array_value":
        return [_plain(item) for item in inner.values]
    if kind == "kvlist_value":
        return {kv.key.decode("utf-8", "replace"): _plain(kv.value) for kv in inner.values}
    return inner


def key_value(raw: bytes) -> tuple[str, str]:
    """One attribute as text: numbers in shortest form, true/false, lists and maps as JSON."""
    kv = parse(KeyValue, raw)
    value = _plain(kv.value)
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, float):
        text = number_text(value)
    elif isinstance(value, list | dict):
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    else:
        text = "" if value is None else str(value)
    return kv.key.decode("utf-8", "replace"), text


def resource_attributes(raw: bytes) -> dict[str, str]:
    """The attributes of a Resource as text; raises Undecodable."""
    return dict(key_value(kv) for kv in parse(Resource, raw).attributes)
