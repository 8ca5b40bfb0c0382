"""Who owns which block of the paged pool. Block 0 is scratch: padding reads and writes it."""

from __future__ import annotations

SCRATCH_BLOCK = 0


class PagedAllocator:
    """Hands out block numbers 1 … blocks; allocated + free = `blocks`, asserted at every call.

    Blocks withheld are out of the pool for the time being: neither free nor allocated.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks, 0, -1))
        self._owned = bytearray(blocks + 1)
        self._allocated = 0
        self._withheld: list[int] = []

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def allocated_blocks(self) -> int:
        return self._allocated

    @property
    def withheld_blocks(self) -> int:
        return len(self._withheld)

    def allocate(self, count: int) -> list[int] | None:
        """`count` distinct blocks, or None when that many are not free; never some of them."""
        assert count >= 0
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            assert not self._owned[block], f"block {block} was free and owned at once"
            self._owned[block] = 1
        self._allocated += count
        assert self._allocated + len(self._free) == self.blocks
        return taken

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self._owned[block], f"block {block} was given back by one who did not own it"
            self._owned[block] = 0
        self._free.extend(blocks)
        self._allocated -= len(blocks)
        assert self._allocated + len(self._free) == self.blocks

    def withhold(self, count: int) -> bool:
        """Takes `count` free blocks out of the pool; False when that many are not free."""
        if count > len(self._free):
            return False
        self._withheld += [self._free.pop() for _ in range(count)]
        self.blocks -= count
        return True

    def give_back(self) -> None:
        """Ends what `withhold` did."""
        self.blocks += len(self._withheld)
        self._free += self._withheld
        self._withheld = []
