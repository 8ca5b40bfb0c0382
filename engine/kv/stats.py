"""What of a KV pool is free but cannot be used, and what is in use but holds nothing.

External fragmentation exists in a contiguous pool only: any free block of a paged one serves any
sequence, so nothing of it is ever stranded, and the entropy of its free blocks says nothing.
`stranded` is the unusable free space index of Gorman & Whitcroft ("The what, the why and the where
to of anti-fragmentation", OLS'06), in blocks; unlike the entropy it knows how much is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


def entropy_bits(lengths: np.ndarray) -> float | None:
    """−Σ p·log2 p over free runs (int64, blocks), p = length ÷ all that is free; None: nothing is.

    0 for one run, log2 N for N equal ones.
    """
    total = int(lengths.sum())
    if not total:
        return None
    share = lengths / total
    return float(-(share * np.log2(share)).sum()) + 0.0


def stranded(lengths: np.ndarray, size: int) -> int:
    """Blocks of free runs (int64) that can serve no request of `size` blocks: Σ length mod size."""
    return int((lengths % size).sum())


@dataclass(frozen=True)
class Memory:
    """The pool of one moment. Lengths and sizes in blocks.

    `runs` (int64): lengths of the runs of consecutive blocks that can be had, cached ones among
    them. `asked`: what each request that runs or waits may come to hold, in no order; `stalled`:
    what the one that is held up may, in one run, 0 where nobody is.
    `waste_tokens`: room in allocated blocks for tokens their sequence does not have: the end of its
    last block, and in a contiguous pool all that is reserved for tokens yet to come.
    """

    contiguous: bool
    block_size: int
    total: int
    runs: np.ndarray
    asked: tuple[int, ...]
    stalled: int
    waste_tokens: int

    @property
    def longest(self) -> int:
        return int(self.runs.max(initial=0))

    @property
    def entropy_bits(self) -> float | None:
        """None where it says nothing: in a paged pool, and when nothing is free."""
        return entropy_bits(self.runs) if self.contiguous else None

    def stranded_tokens(self) -> dict[str, int]:
        """By whose size they are asked: the median of those that run or wait, and the largest.

        Empty when nobody does. 0 in a paged pool.
        """
        if not self.asked:
            return {}
        sizes = sorted(self.asked)
        asked = {"median": sizes[len(sizes) // 2], "largest": sizes[-1]}
        if not self.contiguous:
            return dict.fromkeys(asked, 0)
        return {who: stranded(self.runs, size) * self.block_size for who, size in asked.items()}

    def run_counts(self) -> list[tuple[str, int]]:
        """How many runs are of at most 1, 2, 4 … blocks, up to the pool's size, and of any."""
        bounds = 2 ** np.arange(1 + math.ceil(math.log2(self.total)))
        counts = (self.runs[:, None] <= bounds).sum(axis=0)
        named = zip(map(str, bounds.tolist()), counts.tolist(), strict=True)
        return [*named, ("+Inf", len(self.runs))]
