from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.allocator import SCRATCH_BLOCK, PagedAllocator


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=60))
def test_allocated_and_free_are_always_the_total_and_no_block_has_two_owners(
    moves: list[tuple[bool, int]],
) -> None:
    allocator = PagedAllocator(40)
    owners: list[list[int]] = []
    for take, count in moves:
        if take:
            blocks = allocator.allocate(count)
            if blocks is None:
                assert count > allocator.free_blocks
            else:
                assert len(blocks) == count
                owners.append(blocks)
        elif owners:
            allocator.release(owners.pop(count % len(owners)))
        owned = [block for blocks in owners for block in blocks]
        assert len(set(owned)) == len(owned) == allocator.allocated_blocks
        assert allocator.allocated_blocks + allocator.free_blocks == 40
        assert SCRATCH_BLOCK not in owned


def test_giving_back_what_one_does_not_own_is_caught() -> None:
    allocator = PagedAllocator(4)
    blocks = allocator.allocate(2)
    assert blocks is not None
    allocator.release(blocks)
    with pytest.raises(AssertionError, match="did not own"):
        allocator.release(blocks)
