"""Cuts the pool into blocks of another size: every sequence keeps its KV, in new blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.exec.rows import Rows, Tables
from engine.kv.pool import KVPool
from engine.kv.prefix import PrefixCache


@dataclass(frozen=True)
class Layout:
    """The pool, who owns its blocks, and where each sequence stands in it: they go together."""

    pool: KVPool
    prefixes: PrefixCache
    tables: Tables


def blocks_needed(rows: Rows, block_size: int, *, contiguous: bool = False) -> int:
    """Blocks of that size for all KV computed so far; contiguous, for all there may ever be."""
    taken = np.flatnonzero(rows.owned)
    if contiguous:
        return sum(whole(rows, row, block_size) for row in taken.tolist())
    full = [full_blocks(rows, row, block_size) for row in taken.tolist()]
    begun = np.count_nonzero(rows.computed[taken] % block_size)
    return len(np.unique(np.concatenate(full))) + int(begun) if full else 0


def whole(rows: Rows, row: int, block_size: int) -> int:
    """Blocks of that size for all KV a sequence may ever have; nobody reads its last token's."""
    return -(-(int(rows.limit[row]) - 1) // block_size)


def full_blocks(rows: Rows, row: int, block_size: int) -> np.ndarray:
    """A number (int64) for each full block of that size: equal where sequences can share it.

    They can where its last token stands in one block now: a shared block is full, and is shared
    for what it and all before it hold.
    """
    which = np.arange(int(rows.computed[row]) // block_size)
    last = ((which + 1) * block_size - 1) // rows.block_size
    numbers: np.ndarray = rows.tables[row, last] * rows.tokens.shape[1] + which
    return numbers


@torch.inference_mode()
def reblock(rows: Rows, pool: KVPool, to: KVPool, prefixes: PrefixCache) -> Layout | None:
    """The same sequences in the empty pool `to`, blocks from `prefixes`; changes nothing else.

    What they share they share there too, unless `prefixes` allocates contiguous runs. None when
    they do not fit: larger blocks waste more of their last one, and share less.
    """
    model_len_max = rows.tokens.shape[1]
    size, contiguous = to.block_size, prefixes.allocator.contiguous
    tables = Tables.empty(rows=len(rows.owned), model_len_max=model_len_max, block_size=size)
    sources, targets = [], []
    moved: dict[int, int] = {}
    for row in np.flatnonzero(rows.owned).tolist():
        position = np.arange(rows.computed[row])
        numbers = full_blocks(rows, row, size).tolist()
        shared = [number in moved and not contiguous for number in numbers]
        count = whole(rows, row, size) if contiguous else -(-len(position) // size)
        fresh = prefixes.allocator.allocate(count - sum(shared))
        if fresh is None:
            return None
        ahead = iter(fresh)
        for number, known in zip(numbers, shared, strict=True):
            if known:
                prefixes.allocator.share([moved[number]])
            else:
                moved[number] = next(ahead)
        tables.tables[row, :count] = [*(moved[number] for number in numbers), *ahead]
        tables.owned[row] = count
        position = position[~np.repeat([*shared, False], size)[: len(position)]]
        sources.append(slots(rows.layout, row, position))
        targets.append(slots(tables, row, position))
    if sources:
        source, target = np.concatenate(sources), np.concatenate(targets)
        pool.move(to, torch.from_numpy(source), torch.from_numpy(target))
        # One sequence stands for all: they went the same way.
        assert pool.same(to, torch.from_numpy(sources[-1]), torch.from_numpy(targets[-1]))
    return Layout(to, prefixes, tables)


def slots(layout: Tables, row: int, position: np.ndarray) -> np.ndarray:
    """Where the pool holds these positions of a sequence, in its first head."""
    block, offset = np.divmod(position, layout.block_size)
    first: np.ndarray = layout.tables[row, block] * layout.block_size
    return first + offset
