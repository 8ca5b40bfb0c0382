"""Whose KV is copied back from the host while a step runs: the next in line that was swapped."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from engine.kv.allocator import PagedAllocator
from engine.kv.prefix import PrefixCache
from engine.kv.tier import HostTier
from engine.sched.request import Request

LOOKED_AT_REQUESTS_MAX = 32  # of those that wait, at each step


def copy_ahead(
    tier: HostTier, prefixes: PrefixCache, waiting: Iterable[Request], running: int, depth: int
) -> None:
    """A step of `running` requests begins: up to `depth` tokens of one that waits are copied.

    Each that runs may need a block of its own before the next step: so many are left free.
    """
    allocator, ahead = prefixes.allocator, tier.ahead
    if not depth or not isinstance(allocator, PagedAllocator):
        ahead.roll_back()
        return
    swapped = (one for one in islice(waiting, LOOKED_AT_REQUESTS_MAX) if tier.tokens(one))
    # Who has begun to come goes on: two who change places in the queue would undo each other's.
    request = ahead.who if ahead.blocks else next(swapped, None)
    if not isinstance(request, Request):
        return
    if prefixes.outlived(request.chain):
        ahead.roll_back()
        return
    first = len(prefixes.find(request.chain)) * prefixes.block_size
    spare = allocator.free_blocks - running
    ahead.begin(request, first, allocator, depth=depth, spare=spare)
