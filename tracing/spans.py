"""An OTLP trace request as a table of spans, fast.

Each span is read as one shallow message; its attributes stay bytes until those of the whole
request are decoded together. What repeats (names, statuses, resources) is decoded once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tracing import wire
from tracing.attributes import AttributeDecoder
from tracing.limits import Limits

_NO_TRACE = bytes(16)
_NO_SPAN = bytes(8)
_NS_MAX = 2**63 - 1  # DateTime64(9) counts in signed 64 bits
_KIND_MAX = 5
_STATUS_MAX = 2


@dataclass
class Decoded:
    """What a request came to: rows to store, and what was left out and why (reason → count).

    `rejected` are whole spans or points, told to the sender; `trimmed` are parts of kept ones.
    """

    rows: Any
    rejected: Counter[str] = field(default_factory=Counter)
    trimmed: Counter[str] = field(default_factory=Counter)


class _Columns:
    """The rows of one request while they are read, a list per column."""

    def __init__(self) -> None:
        self.trace_id: list[bytes] = []
        self.span_id: list[bytes] = []
        self.parent: list[bytes] = []
        self.name: list[bytes] = []
        self.kind: list[int] = []
        self.start: list[int] = []
        self.end: list[int] = []
        self.status: list[bytes] = []
        self.attributes: list[bytes] = []
        self.offsets: list[int] = [0]
        self.resources: list[tuple[dict[str, str], int]] = []


def _times(start: int, end: int, trimmed: Counter[str]) -> int:
    """The end to store: never before the start (trace.proto expects it, senders differ)."""
    if end >= start:
        return end
    trimmed["end_before_start"] += 1
    return start


class SpanDecoder:
    """Turns TraceRequest bytes into rows of the table `spans`. Not thread-safe: one per thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._attributes = AttributeDecoder(limits)
        self._resources: dict[bytes, dict[str, str]] = {}

    def decode(self, tenant: str, body: bytes) -> Decoded:
        """Rows of `spans` for `tenant`. Raises Undecodable; then nothing of it is kept."""
        request = wire.parse(wire.TraceRequest, body)
        columns = _Columns()
        decoded = Decoded(None)
        for resource_spans in request.resource_spans:
            before = len(columns.trace_id)
            for scope in resource_spans.scope_spans:
                self._read(scope.spans, columns, decoded)
            resource = self._resource(resource_spans.resource)
            columns.resources.append((resource, len(columns.trace_id) - before))
        decoded.rows = self._table(tenant, columns, decoded.trimmed)
        return decoded

    def _read(self, spans: Any, columns: _Columns, decoded: Decoded) -> None:
        rejected, trimmed = decoded.rejected, decoded.trimmed
        attributes_max = self._limits.span_attributes_max
        room = self._limits.request_spans_max - len(columns.trace_id)
        attributes, offsets = columns.attributes, columns.offsets
        for span in spans:
            trace_id, span_id, parent = span.trace_id, span.span_id, span.parent_span_id
            start, end = span.start, span.end
            reason = None
            if len(trace_id) != 16 or trace_id == _NO_TRACE:
                reason = "invalid_trace_id"
            elif len(span_id) != 8 or span_id == _NO_SPAN:
                reason = "invalid_span_id"
            elif parent and len(parent) != 8:
                reason = "invalid_parent_span_id"
            elif end > _NS_MAX or start > _NS_MAX:
                reason = "invalid_time"
            elif room <= 0:
                reason = "too_many_spans"
            if reason:
                rejected[reason] += 1
                continue
            room -= 1
            columns.trace_id.append(trace_id)
            columns.span_id.append(span_id)
            columns.parent.append(parent or _NO_SPAN)
            columns.name.append(span.name)
            columns.kind.append(span.kind)
            columns.start.append(start)
            columns.end.append(end if end >= start else _times(start, end, trimmed))
            columns.status.append(span.status)
            attributes.extend(span.attributes)
            if len(attributes) - offsets[-1] > attributes_max:
                trimmed["too_many_attributes"] += len(attributes) - offsets[-1] - attributes_max
                del attributes[offsets[-1] + attributes_max :]
            offsets.append(len(attributes))
            # Not stored yet; said in the counters rather than lost silently.
            if span.events:
                trimmed["event"] += len(span.events)
            if span.links:
                trimmed["link"] += len(span.links)

    def _resource(self, raw: bytes) -> dict[str, str]:
        known = self._resources.get(raw)
        if known is None:
            limit = self._limits
            known = {
                key[: limit.name_chars_max]: value[: limit.value_chars_max]
                for key, value in wire.resource_attributes(raw).items()
            }
            known = dict(list(known.items())[: limit.span_attributes_max])
            if len(self._resources) > 1_000:
                self._resources.clear()
            self._resources[raw] = known
        return known

    def _names(self, raws: list[bytes]) -> Any:
        chars_max = self._limits.name_chars_max
        distinct, index = _distinct(raws)
        names = [raw.decode("utf-8", "replace")[:chars_max] for raw in distinct]
        return pa.array(names, pa.string()).take(index)

    def _statuses(self, raws: list[bytes]) -> tuple[Any, Any]:
        """Codes and messages."""
        chars_max = self._limits.value_chars_max
        distinct, index = _distinct(raws)
        statuses = [wire.parse(wire.SpanStatus, raw) for raw in distinct]
        codes = [s.code if 0 <= s.code <= _STATUS_MAX else 0 for s in statuses]
        messages = [s.message.decode("utf-8", "replace")[:chars_max] for s in statuses]
        return (
            pa.array(codes, pa.uint8()).take(index),
            pa.array(messages, pa.string()).take(index),
        )

    def _table(self, tenant: str, columns: _Columns, trimmed: Counter[str]) -> Any:
        count = len(columns.trace_id)
        keys, values = self._attributes.decode(columns.attributes, trimmed)
        codes, messages = self._statuses(columns.status)
        start = np.array(columns.start, dtype=np.int64)
        end = np.array(columns.end, dtype=np.int64)
        kind = np.array(columns.kind, dtype=np.int64)
        kind[(kind < 0) | (kind > _KIND_MAX)] = 0
        text = pa.string()
        return pa.table(
            {
                "tenant": pa.repeat(pa.scalar(tenant, text), count),
                "service": _per_resource(columns, "service.name"),
                "end": _timestamps(end),
                "trace_id": _fixed(columns.trace_id, 16),
                "span_id": _fixed(columns.span_id, 8),
                "parent_span_id": _fixed(columns.parent, 8),
                "name": self._names(columns.name),
                "kind": kind.astype(np.uint8),
                "instance": _per_resource(columns, "service.instance.id"),
                "node": _per_resource(columns, "host.name"),
                "start": _timestamps(start),
                "duration_ns": (end - start).astype(np.uint64),
                "status_code": codes,
                "status_message": messages,
                "attributes": pa.MapArray.from_arrays(
                    pa.array(columns.offsets, pa.int32()), keys, values
                ),
                "resource": _resource_maps(columns),
            }
        )


def _timestamps(nanoseconds: Any) -> Any:
    return pa.array(nanoseconds, pa.int64()).cast(pa.timestamp("ns", "UTC"))


def _fixed(values: list[bytes], size: int) -> Any:
    buffers = [None, pa.py_buffer(b"".join(values))]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), len(values), buffers)


def _distinct(raws: list[bytes]) -> tuple[list[bytes], Any]:
    """The distinct values, and for each of `raws` where it stands among them."""
    distinct = list(dict.fromkeys(raws))
    place = {raw: i for i, raw in enumerate(distinct)}
    return distinct, pa.array(map(place.__getitem__, raws), pa.int32(), size=len(raws))


def _resource_of(columns: _Columns) -> Any:
    """The index of each span's resource."""
    sizes = [spans for _, spans in columns.resources]
    return pa.array(np.repeat(np.arange(len(sizes)), sizes))


def _per_resource(columns: _Columns, key: str) -> Any:
    values = [resource.get(key, "") for resource, _ in columns.resources]
    return pa.array(values, pa.string()).take(_resource_of(columns))


def _resource_maps(columns: _Columns) -> Any:
    maps = [list(resource.items()) for resource, _ in columns.resources]
    return pa.array(maps, pa.map_(pa.string(), pa.string())).take(_resource_of(columns))
