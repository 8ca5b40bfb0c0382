"""Host memory for the KV of preempted sequences: copied back instead of computed again.

The swapping of PagedAttention (Kwon et al., SOSP'23, section 4.5), with a pool on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import numpy as np
import torch

from engine.kv.allocator import PagedAllocator
from engine.kv.pool import KVPool

log = logging.getLogger("engine")

BLOCK_TOKENS = 16  # of the host's pool, whatever the other's blocks hold


class HostTier:
    """Keeps sequences token by token, so that the pool they come from may be recut meanwhile.

    `pool` gives the pool that is computed in. At most `bytes_max` are taken, and those as they are
    first written. `hits`: sequences that were copied back; `misses`: those that found no room, and
    are computed again. Of the step thread only.
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
        block_bytes = layers * 2 * kv_heads * BLOCK_TOKENS * head_dim * dtype.itemsize
        self.allocator = PagedAllocator(0)
        self._blocks = bytes_max // block_bytes
        self._host: KVPool | None = None
        self._kept: dict[Hashable, tuple[list[int], int]] = {}
        self._make: Callable[[], KVPool] = lambda: KVPool(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            blocks=self._blocks,
            block_size=BLOCK_TOKENS,
            dtype=dtype,
        )

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
        self._move(who, 0, slots, out=True)
        return True

    def take(self, who: Hashable, first: int, slots: np.ndarray) -> None:
        """Copies its tokens from `first` on into the pool's slots (int64), and keeps it no more."""
        self._move(who, first, slots, out=False)
        self.drop(who)
        self.hits += 1

    def drop(self, who: Hashable) -> None:
        """Keeps it no more, if it is kept."""
        blocks, _ = self._kept.pop(who, ([], 0))
        self.allocator.release(blocks)

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

    @torch.inference_mode()
    def _move(self, who: Hashable, first: int, slots: np.ndarray, *, out: bool) -> None:
        assert self._host is not None
        blocks, tokens = self._kept[who]
        block, offset = np.divmod(np.arange(first, tokens), BLOCK_TOKENS)
        kept = torch.from_numpy(np.array(blocks)[block] * BLOCK_TOKENS + offset)
        there = torch.from_numpy(slots)
        if out:
            self.pool().move(self._host, there, kept)
        else:
            self._host.move(self.pool(), kept, there)
