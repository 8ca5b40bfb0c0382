"""Cuts the pool into blocks of another size: every sequence keeps its KV, in new blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.exec.rows import Rows, Tables
from engine.kv.allocator import PagedAllocator
from engine.kv.pool import KVPool


@dataclass(frozen=True)
class Layout:
    """The pool, who owns its blocks, and where each sequence stands in it: they go together."""

    pool: KVPool
    allocator: PagedAllocator
    tables: Tables


def blocks_needed(rows: Rows, block_size: int) -> int:
    """Blocks of that size for all KV computed so far."""
    computed = rows.computed[rows.owned > 0]
    return int((-(-computed // block_size)).sum())


@torch.inference_mode()
def reblock(rows: Rows, pool: KVPool, to: KVPool, allocator: PagedAllocator) -> Layout | None:
    """The same sequences in the empty pool `to`, blocks from `allocator`; changes nothing else.

    None when they do not fit: larger blocks waste more of their last one.
    """
    model_len_max = rows.tokens.shape[1]
    size = to.block_size
    tables = Tables.empty(rows=len(rows.owned), model_len_max=model_len_max, block_size=size)
    sources, targets = [], []
    for row in np.flatnonzero(rows.owned).tolist():
        position = np.arange(rows.computed[row])
        blocks = allocator.allocate(-(-len(position) // size))
        if blocks is None:
            return None
        tables.tables[row, : len(blocks)] = blocks
        tables.owned[row] = len(blocks)
        sources.append(slots(rows.layout, row, position))
        targets.append(slots(tables, row, position))
    if sources:
        source, target = np.concatenate(sources), np.concatenate(targets)
        pool.move(to, torch.from_numpy(source), torch.from_numpy(target))
        # One sequence stands for all: they went the same way.
        assert pool.same(to, torch.from_numpy(sources[-1]), torch.from_numpy(targets[-1]))
    return Layout(to, allocator, tables)


def slots(layout: Tables, row: int, position: np.ndarray) -> np.ndarray:
    """Where the pool holds these positions of a sequence, in its first head."""
    block, offset = np.divmod(position, layout.block_size)
    first: np.ndarray = layout.tables[row, block] * layout.block_size
    return first + offset
