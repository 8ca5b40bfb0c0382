"""Who owns which block of the paged pool. Block 0 is scratch: padding reads and writes it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

SCRATCH_BLOCK = 0


def nobody(block: int) -> None:
    """Hears of evictions where nothing is cached."""


class PagedAllocator:
    """Hands out block numbers 1 … blocks; allocated + free + cached = `blocks`, always asserted.

    allocated: a sequence refers to it, or several do. cached: none does, but what it holds was
    kept; taken when nothing is free, the least recently used first, unless pinned. free: neither.
    Blocks withheld are out of the pool for the time being, and none of the three. `evicted` is told
    of each cached block that is taken for something else; `pinned` is changed by `pin` and `unpin`.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.evicted: Callable[[int], None] = nobody
        self.evictions = 0
        self._free = list(range(blocks, 0, -1))
        self._references = [0] * (blocks + 1)
        self._allocated = 0
        self._kept: set[int] = set()
        self.pinned: set[int] = set()
        # Those kept that no sequence refers to, least recently used first; and those also pinned.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_pinned: dict[int, None] = {}
        self._withheld: list[int] = []

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def allocated_blocks(self) -> int:
        return self._allocated

    @property
    def cached_blocks(self) -> int:
        return len(self._idle) + len(self._idle_pinned)

    @property
    def available_blocks(self) -> int:
        """What `allocate` can give: free, or cached and not pinned."""
        return len(self._free) + len(self._idle)

    @property
    def withheld_blocks(self) -> int:
        return len(self._withheld)

    def references(self, block: int) -> int:
        """How many sequences refer to it."""
        return self._references[block]

    def available(self, block: int) -> bool:
        """Whether it is one of `available_blocks`."""
        return not self._references[block] and block not in self.pinned

    def allocate(self, count: int) -> list[int] | None:
        """`count` distinct blocks, or None when that many are not available; never some of them."""
        assert count >= 0
        if count > self.available_blocks:
            return None
        self._evict(count - len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            assert not self._references[block], f"block {block} was free and owned at once"
            self._references[block] = 1
        self._allocated += count
        self._check()
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence refers to these blocks, each allocated or cached."""
        for block in blocks:
            if not self._references[block]:
                assert block in self._kept, f"block {block} is neither allocated nor cached"
                self._idle.pop(block, None)
                self._idle_pinned.pop(block, None)
                self._allocated += 1
            self._references[block] += 1
        self._check()

    def release(self, blocks: Iterable[int]) -> None:
        """A sequence refers to them no longer; of those kept, the first are evicted first."""
        for block in blocks:
            assert self._references[block], (
                f"block {block} was given back by one who did not own it"
            )
            self._references[block] -= 1
            if not self._references[block]:
                self._allocated -= 1
                self._rest(block)
        self._check()

    def keep(self, block: int) -> None:
        """What this allocated block holds is worth keeping when nobody refers to it any more."""
        assert self._references[block], f"block {block} holds nothing"
        self._kept.add(block)

    def drop(self, block: int) -> None:
        """Ends `keep` and `pin`."""
        self._kept.remove(block)
        self.pinned.discard(block)
        if not self._references[block]:
            self._idle.pop(block, None)
            self._idle_pinned.pop(block, None)
            self._free.append(block)
        self._check()

    def pin(self, block: int) -> None:
        """This kept block is not evicted."""
        assert block in self._kept, f"block {block} is not kept"
        self.pinned.add(block)
        if block in self._idle:
            del self._idle[block]
            self._idle_pinned[block] = None

    def unpin(self) -> None:
        """All pinned blocks may be evicted again, in the order in which they came to rest."""
        self._idle.update(self._idle_pinned)
        self._idle_pinned.clear()
        self.pinned.clear()

    def withhold(self, count: int) -> bool:
        """Takes `count` available blocks out of the pool; False when there are not that many."""
        if count > self.available_blocks:
            return False
        self._evict(count - len(self._free))
        self._withheld += [self._free.pop() for _ in range(count)]
        self.blocks -= count
        self._check()
        return True

    def give_back(self) -> None:
        """Ends what `withhold` did."""
        self.blocks += len(self._withheld)
        self._free += self._withheld
        self._withheld = []
        self._check()

    def _rest(self, block: int) -> None:
        if block not in self._kept:
            self._free.append(block)
        elif block in self.pinned:
            self._idle_pinned[block] = None
        else:
            self._idle[block] = None

    def _evict(self, count: int) -> None:
        for _ in range(count):
            block, _nothing = self._idle.popitem(last=False)
            self._kept.remove(block)
            self._free.append(block)
            self.evictions += 1
            self.evicted(block)

    def _check(self) -> None:
        assert self._allocated + len(self._free) + self.cached_blocks == self.blocks
