"""An OTLP trace request as a table of spans, fast.

Each span is read as one shallow message; its attributes stay bytes until those of the whole
request are decoded together. What repeats (names, statuses, resources) is decoded once.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tracing import wire, wire_json
from tracing.attributes import AttributeDecoder
from tracing.limits import Limits
from tracing.memo import Memo
from tracing.rejected import Rejected, quoted

K = TypeVar("K", str, bytes)
Ints = npt.NDArray[np.int64]

_NO_TRACE = bytes(16)
_NO_SPAN = bytes(8)
_KIND_MAX = 5
_STATUS_MAX = 2
WORDS = {
    "invalid_trace_id": "its trace_id is {ids[0]!r} in hexadecimal, not 16 bytes with one not zero",
    "invalid_span_id": "its span_id is {ids[1]!r} in hexadecimal, not 8 bytes with one not zero",
    "invalid_parent_span_id": "its parent_span_id is {ids[2]!r} in hexadecimal, neither empty "
    "nor 8 bytes",
    "invalid_time": "it starts at {span.start} and ends at {span.end} ns, and what is more than "
    "{limits.ahead_s_max} s ahead is not believed",
    "too_many_spans": "a request may hold {limits.request_spans_max} spans",
    "undecodable_span": "its status or an attribute is malformed, or nested too deeply",
}


@dataclass
class Decoded:
    """What a request came to: rows to store, and what was left out and why.

    `rejected` are whole spans, told to the sender; `trimmed` counts parts of kept ones by reason.
    """

    rows: Any
    rejected: Rejected
    trimmed: Counter[str] = field(default_factory=Counter)


class SpanDecoder:
    """Turns trace requests into rows of the table `spans`. Not thread-safe: one per thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._attributes = AttributeDecoder(limits)
        self._resources: Memo[bytes, dict[str, str]] = Memo(
            bytes_max=limits.memo_bytes_max, item_bytes_max=limits.memo_item_bytes_max
        )

    def decode(
        self, tenant: str, body: bytes, encoding: wire.Encoding = wire.Encoding.PROTOBUF
    ) -> Decoded:
        """Rows of `spans` for `tenant`. Raises Undecodable; then nothing of it is kept."""
        rejected = Rejected()
        if encoding is wire.Encoding.JSON:
            most = self._limits.request_spans_max
            request = wire_json.trace_request(body, spans_max=most, rejected=rejected)
        else:
            request = wire.parse(wire.TraceRequest, body)
        try:
            return self._decode(tenant, request, rejected.copy(), inside=False)
        except wire.Undecodable:
            # Some attribute or status is no message. Whose it is, shows span by span.
            return self._decode(tenant, request, rejected, inside=True)

    def _decode(self, tenant: str, request: Any, rejected: Rejected, *, inside: bool) -> Decoded:
        """`inside`: whether each span is looked into before it is taken."""
        decoded = Decoded(None, rejected)
        latest = time.time_ns() + self._limits.ahead_s_max * 10**9
        spans: list[Any] = []
        resources: list[dict[str, str]] = []
        sizes: list[int] = []
        for resource_spans in request.resource_spans:
            kept = list(chain.from_iterable(s.spans for s in resource_spans.scope_spans))
            room = self._limits.request_spans_max - len(spans)
            if inside or len(kept) > room or not _all_usable(kept, latest):
                check = partial(self._problem_inside if inside else _problem, latest=latest)
                kept = self._kept(kept, room, check, rejected)
            spans += kept
            resources.append(self._resource(resource_spans.resource))
            sizes.append(len(kept))
        decoded.rows = self._table(tenant, spans, _Resources(resources, sizes), decoded.trimmed)
        return decoded

    def _kept(
        self, spans: list[Any], room: int, check: Callable[[Any], str | None], rejected: Rejected
    ) -> list[Any]:
        """The spans that can be stored, at most `room`: one bad span costs itself alone."""
        kept: list[Any] = []
        for place, span in enumerate(spans):
            reason = check(span) or ("too_many_spans" if len(kept) >= room else None)
            if reason is None:
                kept.append(span)
            else:
                rejected.add(reason, partial(self._words, reason, place, span))
        return kept

    def _words(self, reason: str, place: int, span: Any) -> str:
        """What is wrong with the span at that place of its resource, in a line."""
        ids = [id_[:32].hex() for id_ in (span.trace_id, span.span_id, span.parent_span_id)]
        problem = WORDS[reason].format(span=span, ids=ids, limits=self._limits)
        return f"span {place} ({quoted(span.name)}): {problem}"

    def _problem_inside(self, span: Any, latest: int) -> str | None:
        """As `_problem`, and its status and attributes are read too."""
        try:
            wire.parse(wire.SpanStatus, span.status)
            for raw in span.attributes[: self._limits.span_attributes_max]:
                wire.key_value(raw)
        except wire.Undecodable:
            return "undecodable_span"
        return _problem(span, latest)

    def _resource(self, raw: bytes) -> dict[str, str]:
        known = self._resources.get(raw)
        if known is None:
            limit = self._limits
            known = {
                key[: limit.name_chars_max]: value[: limit.value_chars_max]
                for key, value in wire.resource_attributes(raw).items()
            }
            known = dict(list(known.items())[: limit.span_attributes_max])
            self._resources.keep(raw, known, 1_000 + 4 * len(raw))
        return known

    def _names(self, raws: list[bytes]) -> Any:
        chars_max = self._limits.name_chars_max
        distinct, index = _distinct(raws)
        names = [raw.decode("utf-8", "replace")[:chars_max] for raw in distinct]
        return _references(names, index)

    def _statuses(self, raws: list[bytes]) -> tuple[Any, Any]:
        """Codes and messages."""
        chars_max = self._limits.value_chars_max
        distinct, index = _distinct(raws)
        statuses = [wire.parse(wire.SpanStatus, raw) for raw in distinct]
        codes = [s.code if 0 <= s.code <= _STATUS_MAX else 0 for s in statuses]
        messages = [s.message.decode("utf-8", "replace")[:chars_max] for s in statuses]
        return np.array(codes, dtype=np.uint8)[index], _references(messages, index)

    def _table(
        self, tenant: str, spans: list[Any], resources: _Resources, trimmed: Counter[str]
    ) -> Any:
        start = np.array([span.start for span in spans], dtype=np.int64)
        end = np.array([span.end for span in spans], dtype=np.int64)
        # trace.proto expects end ≥ start, senders differ: such a span lasts 0.
        trimmed["end_before_start"] += int((end < start).sum())
        end = np.maximum(start, end)
        kind = np.array([span.kind for span in spans], dtype=np.int64)
        kind[(kind < 0) | (kind > _KIND_MAX)] = 0
        codes, messages = self._statuses([span.status for span in spans])
        # Not stored yet; said in the counters rather than lost silently.
        trimmed["span_events"] += sum(map(bool, [span.events for span in spans]))
        trimmed["span_links"] += sum(map(bool, [span.links for span in spans]))
        return pa.table(
            {
                "tenant": _references([tenant], np.zeros(len(spans), dtype=np.int64)),
                "service": resources.text("service.name"),
                "end": _timestamps(end),
                "trace_id": _fixed([span.trace_id for span in spans], 16),
                "span_id": _fixed([span.span_id for span in spans], 8),
                "parent_span_id": _fixed([span.parent_span_id or _NO_SPAN for span in spans], 8),
                "name": self._names([span.name for span in spans]),
                "kind": kind.astype(np.uint8),
                "instance": resources.text("service.instance.id"),
                "node": resources.text("host.name"),
                "start": _timestamps(start),
                "duration_ns": (end - start).astype(np.uint64),
                "status_code": codes,
                "status_message": messages,
                "attributes": self._attribute_maps(spans, trimmed),
                "resource": resources.json(),
            }
        )

    def _attribute_maps(self, spans: list[Any], trimmed: Counter[str]) -> Any:
        most = self._limits.span_attributes_max
        per_span = [span.attributes for span in spans]
        sizes = np.array(list(map(len, per_span)), dtype=np.int64)
        if len(spans) and sizes.max() > most:
            trimmed["too_many_attributes"] += int((sizes - np.minimum(sizes, most)).sum())
            per_span = [attributes[:most] for attributes in per_span]
            sizes = np.minimum(sizes, most)
        keys, values = self._attributes.decode(list(chain.from_iterable(per_span)), trimmed)
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        return pa.MapArray.from_arrays(pa.array(offsets), keys, values)


def _all_usable(spans: list[Any], latest: int) -> bool:
    """Whether `_problem` finds none in any of them, at a tenth of the time."""
    if not spans:
        return True
    trace_ids = [span.trace_id for span in spans]
    span_ids = [span.span_id for span in spans]
    return (
        set(map(len, trace_ids)) == {16}
        and set(map(len, span_ids)) == {8}
        and {len(span.parent_span_id) for span in spans} <= {0, 8}
        and _NO_TRACE not in trace_ids
        and _NO_SPAN not in span_ids
        and max([span.start for span in spans]) <= latest
        and max([span.end for span in spans]) <= latest
    )


def _problem(span: Any, latest: int) -> str | None:
    """Why a span cannot be stored (trace.proto: which ids are invalid), or None.

    `latest` is the last time believed, in ns: a clock far ahead would make a source look alive.
    """
    if len(span.trace_id) != 16 or span.trace_id == _NO_TRACE:
        return "invalid_trace_id"
    if len(span.span_id) != 8 or span.span_id == _NO_SPAN:
        return "invalid_span_id"
    if len(span.parent_span_id) not in (0, 8):
        return "invalid_parent_span_id"
    return "invalid_time" if max(span.start, span.end) > latest else None


class _Resources:
    """The resources of a request, and which span has which: `sizes[i]` spans have the i-th."""

    def __init__(self, resources: list[dict[str, str]], sizes: list[int]) -> None:
        self._resources = resources
        self._sizes = sizes

    def text(self, key: str) -> Any:
        """One resource attribute per span, "" where it is missing."""
        return self._spread([resource.get(key, "") for resource in self._resources])

    def json(self) -> Any:
        """All attributes of the resource of each span, as a JSON object."""
        return self._spread([json.dumps(resource) for resource in self._resources])

    def _spread(self, values: list[str]) -> Any:
        return _references(values, np.repeat(np.arange(len(values)), self._sizes))


def _timestamps(nanoseconds: Any) -> Any:
    return pa.array(nanoseconds, pa.int64()).cast(pa.timestamp("ns", "UTC"))


def _fixed(values: list[bytes], size: int) -> Any:
    buffers = [None, pa.py_buffer(b"".join(values))]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), len(values), buffers)


def _distinct(values: list[K]) -> tuple[list[K], Ints]:
    """The distinct values, and for each of `values` where it stands among them."""
    place = {value: i for i, value in enumerate(dict.fromkeys(values))}
    index = np.fromiter(map(place.__getitem__, values), dtype=np.int64, count=len(values))
    return list(place), index


def _references(texts: list[str], index: Ints) -> Any:
    """The column `texts[index]`, each text in it once."""
    distinct, place = _distinct(texts)
    return pa.DictionaryArray.from_arrays(pa.array(place[index]), pa.array(distinct, pa.string()))
