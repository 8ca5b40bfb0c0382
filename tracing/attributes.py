"""Many OTLP attributes at once: KeyValue messages to two columns of text.

The usual attribute is a short key with a short string, a double, an integer or a boolean. Where
key and value stand in its bytes follows from three length bytes, so whole requests are read with
array arithmetic: about ten times faster than one message object per attribute. What has another
form (long strings, lists, maps, fields in another order) is decoded by `wire.key_value`, and
remembered, because such bytes tend to repeat.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tracing import wire
from tracing.limits import Limits
from tracing.memo import Memo

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

# Tags (field number << 3 | wire type) of KeyValue and AnyValue.
_KEY, _VALUE = 0x0A, 0x12
_STRING, _BOOL, _INT, _DOUBLE = 0x0A, 0x10, 0x18, 0x21
_ONE_BYTE = 0x80  # lengths below this take one byte
_VARINT_BYTES_MAX = 10
_ITEM_BYTES = 300  # what Python adds to a remembered attribute: three objects and a tuple
# Reading a few bytes past the last attribute must stay inside the buffer.
_PADDING = bytes(16)


class AttributeDecoder:
    """Decodes and trims attributes; keeps a bounded memory of the unusual ones."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._unusual: Memo[bytes, tuple[str, str]] = Memo(
            bytes_max=limits.memo_bytes_max, item_bytes_max=limits.memo_item_bytes_max
        )

    def decode(self, raws: list[bytes], trimmed: Counter[str]) -> tuple[Any, Any]:
        """Keys (a dictionary) and values (strings) in Arrow; what was cut is counted in `trimmed`.

        Raises Undecodable when one of them is no KeyValue.
        """
        if not raws:
            return pa.array([], pa.string()).dictionary_encode(), pa.array([], pa.string())
        limits = self._limits
        plain_bytes_max = min(127, limits.value_chars_max, limits.name_chars_max)
        layout = _Layout(raws, plain_bytes_max)
        try:
            return self._assemble(layout, raws, trimmed)
        except pa.ArrowInvalid:
            # Somewhere a string is not UTF-8: rare enough to read them all one by one.
            pairs = [self._one(raw, trimmed) for raw in raws]
            keys, values = zip(*pairs, strict=True)
            return pa.array(keys, pa.string()).dictionary_encode(), pa.array(values, pa.string())

    def _assemble(
        self, layout: _Layout, raws: list[bytes], trimmed: Counter[str]
    ) -> tuple[Any, Any]:
        """One array per form end to end, and from it every key and value by its index."""
        segments = layout.segments()
        key_at, value_at = layout.key_segments(), layout.value_segments()
        odd = np.flatnonzero(~layout.plain)
        pairs = [self._one(raws[i], trimmed) for i in odd]
        keys = [segments, pa.array([key.encode() for key, _ in pairs], pa.binary())]
        values = [segments, pa.array([value.encode() for _, value in pairs], pa.binary())]
        key_at[odd] = value_at[odd] = len(segments) + np.arange(len(odd))
        end = len(segments) + len(odd)
        for rows, texts in layout.numbers():
            value_at[rows] = end + np.arange(len(rows))
            values.append(texts.cast(pa.binary()))
            end += len(rows)
        return _references(keys, key_at), _gather(values, value_at)

    def _one(self, raw: bytes, trimmed: Counter[str]) -> tuple[str, str]:
        pair = self._unusual.get(raw)
        if pair is None:
            pair = wire.key_value(raw)
            self._unusual.keep(raw, pair, _ITEM_BYTES + 2 * len(raw))
        key, value = pair
        if len(value) > self._limits.value_chars_max or len(key) > self._limits.name_chars_max:
            trimmed["value_too_long"] += 1
            return key[: self._limits.name_chars_max], value[: self._limits.value_chars_max]
        return pair


def _gather(parts: list[Any], index: Ints) -> Any:
    """Raises ArrowInvalid when one of the parts taken is not UTF-8."""
    return pa.concat_arrays(parts).take(pa.array(index)).cast(pa.string())


def _references(parts: list[Any], index: Ints) -> Any:
    """As `_gather`, each text once: keys are few. Raises ArrowInvalid too."""
    found = pa.concat_arrays(parts).take(pa.array(index)).dictionary_encode()
    return pa.DictionaryArray.from_arrays(found.indices, found.dictionary.cast(pa.string()))


class _Layout:
    """Where keys and values stand in the joined bytes of all attributes.

    `plain` marks attributes of the usual forms; positions of the others mean nothing.
    """

    def __init__(self, raws: list[bytes], plain_bytes_max: int) -> None:
        self._joined = b"".join(chain(raws, (_PADDING,)))
        self._bytes: Bytes = np.frombuffer(self._joined, dtype=np.uint8)
        sizes: Ints = np.fromiter(map(len, raws), dtype=np.int64, count=len(raws))
        self._end: Ints = np.cumsum(sizes)
        self._start: Ints = self._end - sizes
        self._find(plain_bytes_max)

    def _find(self, plain_bytes_max: int) -> None:
        assert plain_bytes_max < _ONE_BYTE
        read, start, end = self._bytes, self._start, self._end
        key_size = read[start + 1].astype(np.int64)
        plain = (end - start > 6) & (read[start] == _KEY) & (key_size <= plain_bytes_max)
        self._key = np.where(plain, start + 2, start)
        self._key_end = np.where(plain, start + 2 + key_size, start)
        plain &= self._key_end + 4 <= end
        # The positions of what is not plain are moved to its start, so reads stay inside.
        value = np.where(plain, self._key_end, start)
        value_size = read[value + 1].astype(np.int64)
        plain &= (read[value] == _VALUE) & (value_size <= plain_bytes_max)
        plain &= value + 2 + value_size == end
        self._value = np.where(plain, value + 3, start)
        size = end - self._value
        tag = read[value + 2]
        first = read[self._value]
        self._text = plain & (tag == _STRING) & (size >= 1) & (first == size - 1)
        self._double = plain & (tag == _DOUBLE) & (size == 8)
        self._integer = plain & (tag == _INT) & (size >= 1) & (size <= _VARINT_BYTES_MAX)
        self._integer[self._integer] = self._is_varint(np.flatnonzero(self._integer))
        self._boolean = plain & (tag == _BOOL) & (size == 1) & (first <= 1)
        self.plain = self._text | self._double | self._integer | self._boolean

    def _is_varint(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """True where the value is one varint: its last byte alone has no high bit."""
        at, end = self._value[rows], self._end[rows]
        ok = np.ones(len(rows), dtype=bool)
        for i in range((end - at).max(initial=0)):
            more = self._bytes[at + i] >= _ONE_BYTE
            ok &= (at + i >= end) | (more == (at + i < end - 1))
        return ok

    def segments(self) -> Any:
        """The joined bytes cut at every border: per attribute its head, key, tags and text."""
        key = np.where(self.plain, self._key, self._start)
        key_end = np.where(self.plain, self._key_end, self._start)
        text = np.where(self.plain, self._value + self._text, self._start)
        borders = np.stack([self._start, key, key_end, text], axis=1).ravel()
        offsets = np.append(borders, self._end[-1]).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._joined)]
        return pa.Array.from_buffers(pa.binary(), len(borders), buffers)

    def key_segments(self) -> Ints:
        return np.arange(len(self._start)) * 4 + 1

    def value_segments(self) -> Ints:
        return np.arange(len(self._start)) * 4 + 3

    def numbers(self) -> list[tuple[Ints, Any]]:
        """(rows, texts) of the doubles, the integers and the booleans."""
        doubles, integers, booleans = map(
            np.flatnonzero, (self._double, self._integer, self._boolean)
        )
        raw = self._bytes[self._value[doubles][:, None] + np.arange(8)]
        floats = np.ascontiguousarray(raw).view("<f8").ravel()
        words = pa.array(["false", "true"])
        return [
            (doubles, pa.array(floats).cast(pa.string())),
            (integers, pa.array(self._varints(integers)).cast(pa.string())),
            (booleans, words.take(pa.array(self._bytes[self._value[booleans]]))),
        ]

    def _varints(self, rows: Ints) -> Ints:
        at, end = self._value[rows], self._end[rows]
        total = np.zeros(len(rows), dtype=np.uint64)
        for i in range((end - at).max(initial=0)):
            low = (self._bytes[at + i] & 0x7F).astype(np.uint64) << np.uint64(7 * i)
            total |= np.where(at + i < end, low, np.uint64(0))
        return total.view(np.int64)
