"""One run of consecutive blocks for a sequence: the memory of engines before PagedAttention.

What is free lies in runs between the sequences. A request is turned away when no run is long
enough for all it may become, however much is free in total: external fragmentation, which a paged
pool has not. (Kwon et al., SOSP'23, section 3.1, and Wilson et al., "Dynamic storage allocation",
IWMM'95, on which run to take.)
"""

from __future__ import annotations

import numpy as np

from engine.kv.allocator import Allocator, PagedAllocator


class ContiguousAllocator(Allocator):
    """Takes the shortest run that is long enough, the first of several: best fit.

    It leaves long runs whole, and a long request is who waits for one. Nothing can be shared: a
    shared block would have to stand in two runs.
    """

    contiguous = True

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self._lengths = {1: blocks}  # of the free runs, by their first block
        self._starts = {1 + blocks: 1}  # of the same, by the block after their last
        self._settled = self._lengths  # as the last operation left it, for other threads

    @property
    def free_blocks(self) -> int:
        return sum(self._lengths.values())

    @property
    def longest_run(self) -> int:
        return max(self._lengths.values(), default=0)

    def fits(self, count: int) -> bool:
        return count <= self.longest_run

    def free_runs(self) -> np.ndarray:
        return np.array(sorted(self._settled.items()), np.int64).reshape(-1, 2)

    def move(self, start: int, to: int, count: int) -> None:
        """A sequence's run goes down to `to`, the first block of the free run just before it."""
        assert self._lengths.get(to) == start - to, f"block {to} does not begin the run before"
        for block in range(start, start + count):
            self._references[block] = 0
            self._give(block)
        self._cut(to, to, count)
        for block in range(to, to + count):
            self._references[block] = 1
        self._check()

    def withhold(self, count: int) -> bool:
        """The last blocks of the pool, so that the others can still be one run.

        False while a sequence stands in them.
        """
        first = 1 + self.blocks - count
        start = self._starts.get(1 + self.blocks, 1 + self.blocks)
        if start > first:
            return False
        if count:
            self._withheld += self._cut(start, first, count)
        self._check()
        return True

    def _take(self, count: int) -> list[int]:
        if not count:
            return []
        runs = self._lengths.items()
        _, start = min((length, start) for start, length in runs if length >= count)
        return self._cut(start, start, count)

    def _check(self) -> None:
        super()._check()
        self._settled = dict(self._lengths)

    def _cut(self, start: int, first: int, count: int) -> list[int]:
        """Takes `count` blocks from `first` on out of the free run that begins at `start`."""
        end = start + self._lengths.pop(start)
        del self._starts[end]
        for begin, after in ((start, first), (first + count, end)):
            if begin < after:
                self._lengths[begin] = after - begin
                self._starts[after] = begin
        return list(range(first, first + count))

    def _give(self, block: int) -> None:
        start, length = block, 1
        if block in self._starts:
            start = self._starts.pop(block)
            length += self._lengths.pop(start)
        if block + 1 in self._lengths:
            length += self._lengths.pop(block + 1)
        self._lengths[start] = length
        self._starts[start + length] = start


ALLOCATORS: dict[str, type[Allocator]] = {
    "paged": PagedAllocator,
    "contiguous": ContiguousAllocator,
}
