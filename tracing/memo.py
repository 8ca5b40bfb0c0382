"""What decoders remember between requests, limited in bytes: senders choose what it holds."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """Answers by their question; forgets all of them when they grow past `bytes_max`.

    Nothing larger than `item_bytes_max` is kept: long texts seldom repeat. Not thread-safe.
    """

    def __init__(self, *, bytes_max: int, item_bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._item_bytes_max = item_bytes_max
        self._known: dict[K, V] = {}
        self.bytes = 0

    def get(self, key: K) -> V | None:
        return self._known.get(key)

    def keep(self, key: K, value: V, size_bytes: int) -> None:
        """Remember `value`; `size_bytes` is about what it and its key take."""
        if size_bytes > self._item_bytes_max:
            return
        if self.bytes + size_bytes > self._bytes_max:
            self._known.clear()
            self.bytes = 0
        self._known[key] = value
        self.bytes += size_bytes
