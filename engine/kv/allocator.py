"""Who owns which block of the pool. Block 0 is scratch: padding reads and writes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import ClassVar

import numpy as np

SCRATCH_BLOCK = 0


def nobody(block: int) -> None:
    """Hears of evictions where nothing is cached."""


class Allocator(ABC):
    """Hands out blocks 1 … total; allocated + free + cached + withheld = `total`, always asserted.

    allocated: a sequence refers to it, or several do. cached: none does, but what it holds was
    kept; taken when nothing is free, the least recently used first, unless pinned, and before
    these, the last one first, what was lent. withheld: out of the pool for the time being. free:
    none of these. `evicted` is told of each kept block that is taken for something else; `pinned`
    is changed by `pin` and `unpin`.

    Which of the free blocks a sequence is given is what a subclass decides. `contiguous`: it is
    given all it may ever need at once, as one run.
    """

    contiguous: ClassVar[bool]

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self.evicted: Callable[[int], None] = nobody
        self.evictions = 0
        self._references = [0] * (blocks + 1)
        self._allocated = 0
        self._kept: set[int] = set()
        self.pinned: set[int] = set()
        # Those kept that no sequence refers to, least recently used first; and those also pinned.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_pinned: dict[int, None] = {}
        self._lent: dict[int, Callable[[int], None]] = {}
        self._withheld: list[int] = []

    @property
    @abstractmethod
    def free_blocks(self) -> int: ...

    @abstractmethod
    def fits(self, count: int) -> bool:
        """Whether `allocate` has so many to give now."""

    @abstractmethod
    def free_runs(self) -> np.ndarray:
        """(runs, 2) int64: start and length of each run of available blocks, by start.

        From any thread: as of one moment.
        """

    @abstractmethod
    def _take(self, count: int) -> list[int]:
        """So many of the free blocks, or of the cached; they `fits`."""

    @abstractmethod
    def _give(self, block: int) -> None:
        """This block is free from now on."""

    @property
    def blocks(self) -> int:
        return self.total - len(self._withheld)

    @property
    def allocated_blocks(self) -> int:
        return self._allocated

    @property
    def cached_blocks(self) -> int:
        return len(self._idle) + len(self._idle_pinned) + len(self._lent)

    @property
    def available_blocks(self) -> int:
        """Free, or cached and not pinned."""
        return self.free_blocks + len(self._idle) + len(self._lent)

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
        """`count` distinct blocks, or None when they do not fit; never some of them."""
        assert count >= 0
        if not self.fits(count):
            return None
        taken = self._take(count)
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
            self._give(block)
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
        self._withheld += self._take(count)
        self._check()
        return True

    def give_back(self) -> None:
        """Ends what `withhold` did."""
        withheld, self._withheld = self._withheld, []
        for block in withheld:
            self._give(block)
        self._check()

    def states(self) -> np.ndarray:
        """(1 + total,) text, by block: "scratch", "free", "cached", "allocated", "withheld"."""
        states = np.full(1 + self.total, "free", "<U9")
        states[np.array(self._references) > 0] = "allocated"
        states[[*self._idle, *self._idle_pinned, *self._lent]] = "cached"
        states[self._withheld] = "withheld"
        states[SCRATCH_BLOCK] = "scratch"
        return states

    def _rest(self, block: int) -> None:
        if block not in self._kept:
            self._give(block)
        elif block in self.pinned:
            self._idle_pinned[block] = None
        else:
            self._idle[block] = None

    def _evict(self, count: int) -> None:
        for _ in range(count):
            if self._lent:
                block, recalled = self._lent.popitem()
                self._give(block)
                recalled(block)
                continue
            block, _nothing = self._idle.popitem(last=False)
            self._kept.remove(block)
            self._give(block)
            self.evictions += 1
            self.evicted(block)

    def _check(self) -> None:
        assert self._allocated + self.free_blocks + self.cached_blocks == self.blocks


class PagedAllocator(Allocator):
    """Any free block serves any sequence (Kwon et al., SOSP'23): the one freed last goes first."""

    contiguous = False

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self._free = list(range(blocks, 0, -1))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def fits(self, count: int) -> bool:
        return count <= self.available_blocks

    def free_runs(self) -> np.ndarray:
        blocks = np.unique(np.array([*self._free, *self._idle, *self._lent], np.int64))
        starts = np.flatnonzero(np.diff(blocks, prepend=-1) != 1)
        lengths = np.diff(starts, append=len(blocks))
        return np.stack([blocks[starts], lengths], axis=1)

    def lend(self, count: int, recalled: Callable[[int], None]) -> list[int]:
        """`count` free blocks to somebody who may have to do without: `recalled` is told of each.

        To all others they are as good as free.
        """
        assert count <= len(self._free), "only what is free is lent"
        blocks = self._take(count)
        self._lent.update(dict.fromkeys(blocks, recalled))
        self._check()
        return blocks

    def end_loan(self, blocks: Iterable[int], *, own: bool) -> None:
        """They are a sequence's from now on (`own`), or free again."""
        for block in blocks:
            del self._lent[block]
            if own:
                self._references[block] = 1
                self._allocated += 1
            else:
                self._give(block)
        self._check()

    def _take(self, count: int) -> list[int]:
        self._evict(count - len(self._free))
        return [self._free.pop() for _ in range(count)]

    def _give(self, block: int) -> None:
        self._free.append(block)
