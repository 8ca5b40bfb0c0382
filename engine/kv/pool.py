"""The KV tensors of each layer, flat: nothing is stacked.

A stacked tensor mutated through views makes graph capture copy the whole pool at every layer.
Where a token's KV lies is told by strides alone: keys and values of a layer are views (kv_heads,
blocks, block_size, …), whatever the block size, dtype and layout, and all who read or write them
index them alike. Heads come first, so that gathering whole blocks by index gives a dense (sequence,
head, token) context without a transposing copy.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from engine.kv.formats import Format, Part

MOVED_TOKENS = 8192  # at a time
CANARY_TOKENS = 24  # of the sequence that proves a change of the pool or of the graph


class KVPool:
    """`keys[layer]`, `values[layer]`: (kv_heads, blocks, block_size, head_dim) as `kept` has them.

    Of int4 codes two share an int8; with codes there are `scales[layer]` (groups, blocks,
    block_size, 1). `dtype`: what goes in and comes out; `kept` None: kept in it as well.
    `interleaved`: a block's values follow its keys in one tensor; else each has its own.
    Of the blocks the first is scratch, the last few (`canary`) belong to no request.
    Takes its memory as it is first written. Raises MemoryError where the machine has not that much
    left for all of it, ValueError for a head_dim that does not go with int4.
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
        kept: Format | None = None,
        interleaved: bool = False,
    ) -> None:
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.canary = list(range(blocks + 1, blocks + 1 + -(-CANARY_TOKENS // block_size)))
        self.blocks = 1 + blocks + len(self.canary)
        self.block_size = block_size
        self.dtype = dtype
        self.kept = kept or Format(dtype)
        self.interleaved = interleaved
        self.parts = self.kept.parts(kv_heads, head_dim)
        tensors = [[part] for part in self.parts]
        if interleaved:
            tensors[:2] = [self.parts[:2]]
        # A block more than is used where two share a tensor: see `dense`.
        sizes = [
            (
                parts[0].heads * self.blocks + len(parts) - 1,
                block_size * sum(p.bytes for p in parts),
            )
            for parts in tensors
        ]
        self.bytes = layers * sum(rows * block_bytes for rows, block_bytes in sizes)
        free = memory_free_bytes()
        if free is not None and self.bytes > free:
            raise MemoryError(
                f"a KV pool of {self.bytes} bytes does not fit into {free} free bytes"
            )
        self._tensors = [[zeros(*size, torch.uint8) for size in sizes] for _ in range(layers)]
        by_layer = [
            [
                view
                for each, parts in zip(made, tensors, strict=True)
                for view in self._views(each, parts)
            ]
            for made in self._tensors
        ]
        self.keys: Sequence[torch.Tensor]
        self.values: Sequence[torch.Tensor]
        self.keys, self.values, *scales = zip(*by_layer, strict=True)
        self.scales: Sequence[torch.Tensor] = scales[0] if scales else ()

    def _views(self, tensor: torch.Tensor, parts: list[Part]) -> Iterator[torch.Tensor]:
        """(heads, blocks, block_size, width) of each part of a tensor of a block a row (bytes)."""
        begin = 0
        for heads, width, dtype in parts:
            step = tensor.size(1) // dtype.itemsize
            shape = (heads, self.blocks, self.block_size, width)
            strides = (self.blocks * step, step, width, 1)
            numbers = tensor.view(-1).view(dtype)
            yield numbers.as_strided(shape, strides, begin // dtype.itemsize)
            begin += self.block_size * width * dtype.itemsize

    @property
    def exact(self) -> bool:
        """Whether what is read is what was computed."""
        return self.kept.exact(self.dtype)

    @property
    def native(self) -> bool:
        """Whether it is kept as it was computed."""
        return self.kept == Format(self.dtype)

    @property
    def tensors(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Keys, values, and scales where there are any, each by layer."""
        return tuple(tuple(each) for each in (self.keys, self.values, self.scales) if each)

    def touch(self) -> None:
        """Takes all of its memory now, so that nothing waits for it later."""
        for made in self._tensors:
            for tensor in made:
                tensor.zero_()

    def over(self, tensors: Sequence[Sequence[torch.Tensor]]) -> KVPool:
        """This pool's layout over other tensors: what graph capture traces."""
        other = copy.copy(self)
        other.keys, other.values, *scales = tensors
        other.scales = scales[0] if scales else ()
        return other

    def store(
        self,
        layer: int,
        block: torch.Tensor,
        offset: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Writes (tokens, kv_heads, head_dim) keys and values where each token's go: (tokens,)."""
        parts = self.kept.encode(key.transpose(0, 1), value.transpose(0, 1))
        self.write(layer, block, offset, parts)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole blocks, (sequences, kv_heads, blocks) by index: head · `blocks` + block.

        Keys and values (sequences, kv_heads, tokens, head_dim).
        """
        index = blocks.flatten()
        found = []
        for part, tensor in zip(self.parts, self._of(layer), strict=True):
            if part.heads < self.kv_heads:
                # Scales: those of group g stand where those of head g would.
                index = blocks[:, : part.heads].flatten()
            rows = tensor.view(-1, self.block_size * part.width).index_select(0, index)
            found.append(rows.view(blocks.size(0), part.heads, -1, part.width))
        return self.kept.decode(found, self.dtype)

    def dense(self) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of each layer as contiguous (kv_heads, places, block_size, head_dim).

        First, how many places a block takes: its keys or values are in the first of them. For
        what wants no strides. Only where it is `native`.
        """
        places = 1 + self.interleaved
        shape = (self.kv_heads, places * self.blocks, self.block_size, self.head_dim)
        step = self.block_size * self.head_dim
        strides = (shape[1] * step, step, self.head_dim, 1)
        # Values begin one place later than keys, and so end: hence a block more.
        keys, values = (
            [each.as_strided(shape, strides) for each in some] for some in (self.keys, self.values)
        )
        return places, keys, values

    def read(self, layer: int, slots: torch.Tensor) -> list[torch.Tensor]:
        """The parts of tokens, as they are kept, by slot: block · block_size + offset (int64)."""
        found = []
        for part, tensor in zip(self.parts, self._of(layer), strict=True):
            lines, where = self._lines(tensor, slots)
            found.append(lines.index_select(0, where).view(part.heads, -1, part.width))
        return found

    def write(
        self, layer: int, block: torch.Tensor, offset: torch.Tensor, parts: list[torch.Tensor]
    ) -> None:
        """Puts parts of tokens, as they are kept, where each token's go."""
        for each, part in zip(self._of(layer), parts, strict=True):
            # Not by item assignment: a graph would keep the sizes it was recorded with.
            each.movedim(0, 2).index_put_((block, offset), part.transpose(0, 1))

    def move(
        self,
        to: KVPool,
        source: torch.Tensor,
        target: torch.Tensor,
        stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """Copies tokens by slot into another pool; converts what is kept otherwise there.

        In their order, some at a time: what they pass through stays in the cache of the CPU. So a
        pool may be its own target where no token goes up. Returns how many layers were copied: all,
        unless `stop` said so before one of them.
        """
        pieces = (torch.split(slots, MOVED_TOKENS) for slots in (source, target))
        some = list(zip(*pieces, strict=True))
        for layer in range(len(self.keys)):
            if stop():
                return layer
            for here, there in some:
                parts = self._as_in(to, layer, here)
                for part, tensor in zip(parts, to._of(layer), strict=True):
                    lines, where = to._lines(tensor, there)
                    lines.index_copy_(0, where, part.reshape(-1, part.size(-1)))
        return len(self.keys)

    def same(self, other: KVPool, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether `move` left there what is here."""
        return all(
            torch.equal(here, there)
            for layer in range(len(self.keys))
            for here, there in zip(
                self._as_in(other, layer, source), other.read(layer, target), strict=True
            )
        )

    def _as_in(self, to: KVPool, layer: int, slots: torch.Tensor) -> list[torch.Tensor]:
        parts = self.read(layer, slots)
        return (
            parts if to.kept == self.kept else to.kept.encode(*self.kept.decode(parts, self.dtype))
        )

    def _of(self, layer: int) -> list[torch.Tensor]:
        return [each[layer] for each in self.tensors]

    def _lines(
        self, tensor: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A part as a matrix, a token's numbers a row, and where in it these slots are, by head.

        A row is copied at once; indexed by block and offset, the same takes each number by itself.
        """
        heads, blocks, size, width = tensor.shape
        places = tensor.stride(1) // width  # of a block: beside its own, those of what lies between
        assert places * width == tensor.stride(1)
        # Not beyond its last block, where another part may end.
        lines = tensor.as_strided((heads * blocks * places - places + size, width), (width, 1))
        first = torch.arange(heads)[:, None] * (blocks * places)
        return lines, (first + slots // size * places + slots % size).flatten()


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
