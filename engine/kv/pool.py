"""The KV tensors: one flat pair per layer, never one stacked tensor.

A stacked tensor mutated through views makes graph capture copy the whole pool at every layer.
Rows are head-major, row = (head · blocks + block) · block_size + offset, so that gathering whole
blocks by index gives a dense (sequence, head, token) context without a transposing copy.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

CANARY_TOKENS = 24  # of the sequence that proves a change of the pool or of the graph


class KVPool:
    """`keys[layer]`, `values[layer]`: (kv_heads · blocks · block_size, head_dim) of `dtype`.

    Of the blocks the first is scratch, the last few (`canary`) belong to no request.
    Takes its memory as it is first written. Raises MemoryError where the machine has not that much
    left for all of it.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.canary = list(range(blocks + 1, blocks + 1 + -(-CANARY_TOKENS // block_size)))
        self.blocks = 1 + blocks + len(self.canary)
        self.block_size = block_size
        rows = kv_heads * self.blocks * block_size
        self.bytes, free = layers * 2 * rows * head_dim * dtype.itemsize, memory_free_bytes()
        if free is not None and self.bytes > free:
            raise MemoryError(
                f"a KV pool of {self.bytes} bytes does not fit into {free} free bytes"
            )
        self.keys: Sequence[torch.Tensor] = [zeros(rows, head_dim, dtype) for _ in range(layers)]
        self.values: Sequence[torch.Tensor] = [zeros(rows, head_dim, dtype) for _ in range(layers)]

    @property
    def slots_per_head(self) -> int:
        return self.blocks * self.block_size

    def touch(self) -> None:
        """Takes all of its memory now, so that nothing waits for it later."""
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    def over(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> KVPool:
        """This pool's layout over other tensors: what graph capture traces."""
        other = copy.copy(self)
        other.keys, other.values = keys, values
        return other

    def store(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes (tokens · kv_heads, head_dim) keys and values at `rows`."""
        self.keys[layer].index_copy_(0, rows, key)
        self.values[layer].index_copy_(0, rows, value)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole blocks by index: (blocks, block_size · head_dim) of keys and of values."""
        width = self.block_size * self.head_dim
        return (
            self.keys[layer].view(-1, width).index_select(0, blocks),
            self.values[layer].view(-1, width).index_select(0, blocks),
        )

    def by_block(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of each layer as views (kv_heads, blocks, block_size, head_dim)."""
        shape = (self.kv_heads, self.blocks, self.block_size, self.head_dim)
        return [each.view(shape) for each in self.keys], [each.view(shape) for each in self.values]

    def move(self, to: KVPool, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies tokens (slots of the first head, int64) into another pool's slots."""
        here, there = self._rows(source), to._rows(target)
        for old, new in self.pairs(to):
            new.index_copy_(0, there, old.index_select(0, here))

    def same(self, other: KVPool, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether `move` left there what is here."""
        here, there = self._rows(source), other._rows(target)
        return all(
            torch.equal(old.index_select(0, here), new.index_select(0, there))
            for old, new in self.pairs(other)
        )

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(self.kv_heads)[:, None] * self.slots_per_head
        return (slots + heads).reshape(-1)

    def pairs(self, other: KVPool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each of the tensors with the other pool's."""
        yield from zip(self.keys, other.keys, strict=True)
        yield from zip(self.values, other.values, strict=True)


def zeros(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """torch.zeros, but of pages the system hands over when they are first written."""
    size = rows * width * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(rows, width)


def memory_free_bytes() -> int | None:
    """What this process may still take, by the machine and by its cgroup; None: it is not said."""
    limits = []
    try:
        machine = Path("/proc/meminfo").read_text()
        limits.append(int(machine.partition("MemAvailable:")[2].split()[0]) * 1024)
        cgroup = Path("/sys/fs/cgroup")
        limits.append(
            int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text())
        )
    except (OSError, ValueError, IndexError):
        pass  # no Linux, no cgroup v2, or no limit ("max")
    return min(limits, default=None)
