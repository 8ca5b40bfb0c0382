"""Host memory for the KV of preempted sequences: copied back instead of computed again.

The swapping of PagedAttention (Kwon et al., SOSP'23, section 4.5), with a pool on the host.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable

import numpy as np
import torch

from engine.kv.allocator import PagedAllocator
from engine.kv.pool import KVPool
from engine.kv.prefetch import Prefetch

log = logging.getLogger("engine")

BLOCK_TOKENS = 16  # of the host's pool, whatever the other's blocks hold
FORGET = 0.1  # of what was measured, with each copy: some ten copies are what the speed is of


class HostTier:
    """Keeps sequences token by token, so that the pool they come from may be recut meanwhile.

    `pool` gives the pool that is computed in. At most `bytes_max` are taken, and those as they are
    first written. `hits`: sequences that were copied back; `misses`: those that found no room, and
    are computed again. `ahead`: what is copied back before it is asked for. Of the step thread
    only.
    """

    def __init__(
        self,
        pool: Callable[[], KVPool],
        bytes_max: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self.pool = pool
        self.hits = 0
        self.misses = 0
        self.token_bytes = layers * 2 * kv_heads * head_dim * dtype.itemsize
        self.allocator = PagedAllocator(0)
        self.ahead = Prefetch(self)
        self._blocks = bytes_max // (BLOCK_TOKENS * self.token_bytes)
        self._host: KVPool | None = None
        self._kept: dict[Hashable, tuple[list[int], int]] = {}
        self._copied = self._seconds = 0.0  # bytes, and what they took, of late
        self._make: Callable[[], KVPool] = lambda: KVPool(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            blocks=self._blocks,
            block_size=BLOCK_TOKENS,
            dtype=dtype,
        )

    @property
    def bytes_per_s(self) -> float:
        """How fast KV was copied lately, either way; 0.0 before anything was."""
        return self._copied / self._seconds if self._seconds else 0.0

    def tokens(self, who: Hashable) -> int:
        """How many of its first tokens are kept."""
        return self._kept[who][1] if who in self._kept else 0

    def put(self, who: Hashable, slots: np.ndarray) -> bool:
        """Copies a sequence's tokens, all of them in order, from the pool's slots (int64).

        False, and nothing is kept, when there is no room.
        """
        assert who not in self._kept, "it is kept already"
        blocks = self.allocator.allocate(-(-len(slots) // BLOCK_TOKENS)) if self._there() else None
        if blocks is None:
            self.misses += 1
            return False
        self._kept[who] = blocks, len(slots)
        began, there = time.monotonic(), torch.from_numpy(slots)
        assert self._host is not None
        with torch.inference_mode():
            self.pool().move(self._host, there, self._slots(who, 0, len(slots)))
        self.measured(len(slots), time.monotonic() - began)
        return True

    def take(self, who: Hashable, first: int, slots: np.ndarray) -> None:
        """Copies its tokens from `first` on into the pool's slots (int64), and keeps it no more."""
        if len(slots):
            began = time.monotonic()
            self.copy_back(who, first, slots)
            self.measured(len(slots), time.monotonic() - began)
        self.drop(who)
        self.hits += 1

    def drop(self, who: Hashable) -> None:
        """Keeps it no more, if it is kept."""
        if who == self.ahead.who:
            self.ahead.roll_back()
        blocks, _ = self._kept.pop(who, ([], 0))
        self.allocator.release(blocks)

    @torch.inference_mode()
    def copy_back(
        self,
        who: Hashable,
        first: int,
        slots: np.ndarray,
        stop: Callable[[], bool] = lambda: False,
    ) -> float:
        """Copies its tokens from `first` on into the pool's slots (int64), and keeps it.

        Returns what share of their bytes was copied: 1.0, unless `stop` said so between two layers.
        The one thing that may be done beside a step.
        """
        assert self._host is not None
        source, target = self._slots(who, first, first + len(slots)), torch.from_numpy(slots)
        pool = self.pool()
        return self._host.move(pool, source, target, stop) / len(pool.keys)

    def measured(self, tokens: float, seconds: float) -> None:
        """So many tokens were copied in that time."""
        self._copied += tokens * self.token_bytes - FORGET * self._copied
        self._seconds += seconds - FORGET * self._seconds

    def _there(self) -> bool:
        """Whether there is a host pool; made when it is first asked for."""
        if self._host is None and self._blocks:
            try:
                self._host = self._make()
                self.allocator = PagedAllocator(self._blocks)
            except MemoryError as error:
                log.warning("preempted sequences are computed again: %s", error)
                self._blocks = 0
        return self._host is not None

    def _slots(self, who: Hashable, first: int, end: int) -> torch.Tensor:
        """Where the host's pool has these of its tokens."""
        block, offset = np.divmod(np.arange(first, end), BLOCK_TOKENS)
        return torch.from_numpy(np.array(self._kept[who][0])[block] * BLOCK_TOKENS + offset)
