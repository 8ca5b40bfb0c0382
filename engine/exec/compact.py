"""Compaction of a contiguous pool: what is free becomes one run, behind all sequences."""

from __future__ import annotations

import numpy as np
import torch

from engine.exec.reblock import slots
from engine.exec.rows import Rows
from engine.kv.contiguous import ContiguousAllocator
from engine.kv.pool import KVPool


@torch.inference_mode()
def compact(rows: Rows, pool: KVPool, allocator: ContiguousAllocator) -> int:
    """Moves every sequence down to where the one before it ends; returns how many tokens moved.

    Between two steps. One at a time and in the order they stand in, so that nobody is written over
    who has not moved yet, and no more memory is taken than the longest of them holds.
    """
    taken = np.flatnonzero(rows.owned)
    to, moved = 1, 0
    for row in taken[np.argsort(rows.tables[taken, 0])].tolist():
        start, count = int(rows.tables[row, 0]), int(rows.owned[row])
        if start > to:
            position = np.arange(rows.computed[row])
            source = torch.from_numpy(slots(rows.layout, row, position))
            allocator.move(start, to, count)
            rows.tables[row, :count] -= start - to
            target = torch.from_numpy(slots(rows.layout, row, position))
            pool.move(pool, source, target)
            moved += len(position)
        to += count
    return moved
