"""The KV pool as seen from outside: what a scrape asks for, and the map of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.kv.pool import KVPool
from engine.kv.stats import Memory
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler

STATES = ("free", "cached", "allocated", "withheld", "scratch", "canary")
MAP_RUNS_MAX = 2048  # of one answer
REQUEST_ID_CHARS_MAX = 128  # clients choose them


def memory(scheduler: Scheduler) -> Memory:
    """From any thread, while steps run."""
    allocator, rows = scheduler.allocator, scheduler.rows
    layout = rows.layout
    size = layout.block_size
    there = [*scheduler.running, *scheduler.waiting]
    stalled = scheduler.stalls.stalled
    empty = layout.owned * size - rows.known
    return Memory(
        contiguous=allocator.contiguous,
        block_size=size,
        total=allocator.total,
        runs=allocator.free_runs()[:, 1],
        asked=tuple(_asked(request, size) for request in there),
        stalled=_asked(stalled, size) if stalled else 0,
        waste_tokens=int(empty[(layout.owned > 0) & (empty > 0)].sum()),
    )


def _asked(request: Request, block_size: int) -> int:
    return -(-(request.limit - 1) // block_size)


@dataclass(frozen=True)
class Blocks:
    """Every block of a pool, scratch and canary among them, as of one moment between two steps.

    states (blocks,) text; owners (blocks,) int64: the first of `requests` (ids) that holds it, or
    -1; references (blocks,) int64: how many do; tokens (blocks,) int64: that have their KV in it.
    """

    block_size: int
    states: np.ndarray
    owners: np.ndarray
    references: np.ndarray
    tokens: np.ndarray
    requests: Sequence[str]


def blocks(scheduler: Scheduler, pool: KVPool) -> Blocks:
    """Of the step thread only."""
    rows, size = scheduler.rows, pool.block_size
    states = np.append(scheduler.allocator.states(), ["canary"] * len(pool.canary))
    owners = np.full(len(states), -1)
    references, tokens = np.zeros((2, len(states)), np.int64)
    tokens[states == "cached"] = size
    # The last first, so that the first has the last word.
    for number, request in reversed([*enumerate(scheduler.running)]):
        held = rows.tables[request.row, : rows.owned[request.row]]
        filled = rows.computed[request.row] - np.arange(len(held)) * size
        owners[held] = number
        references[held] += 1
        tokens[held] = np.maximum(tokens[held], filled.clip(0, size))
    names = [request.id[:REQUEST_ID_CHARS_MAX] for request in scheduler.running]
    return Blocks(size, states, owners, references, tokens, names)


def described(pool: Blocks, start: int) -> dict[str, Any]:
    """The body of GET /v1/kv/map but for its head: runs of blocks from `start` on.

    `next` is where to go on from; None at the end.
    """
    keys = (pool.states, pool.owners, pool.references)
    changed = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    begins = np.append(0, 1 + np.flatnonzero(changed))
    begins = np.append(start, begins[begins > start])[: MAP_RUNS_MAX + 1]
    more = len(begins) > MAP_RUNS_MAX
    ends = np.append(begins[1:], [] if more else len(pool.states)).astype(np.int64)
    runs = [
        {
            "start": begin,
            "blocks": end - begin,
            "state": str(pool.states[begin]),
            "tokens": int(pool.tokens[begin:end].sum()),
            "request": pool.requests[owner] if (owner := int(pool.owners[begin])) >= 0 else None,
            "references": int(pool.references[begin]),
        }
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=False)
    ]
    return {
        "block_size": pool.block_size,
        "blocks": len(pool.states),
        "counts": {state: int((pool.states == state).sum()) for state in STATES},
        "runs": runs,
        "next": int(begins[-1]) if more else None,
    }
