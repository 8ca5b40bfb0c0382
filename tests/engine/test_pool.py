"""The pool takes memory as it is used, and says no where there is not enough for all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kv.pool import KVPool, zeros

MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_pool_takes_the_memory_of_what_was_written() -> None:
    before = resident_bytes()
    pool = KVPool(layers=2, kv_heads=2, head_dim=64, blocks=8192, block_size=16)  # 256 MiB
    assert resident_bytes() - before < 32 * MIB
    place = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    pool.store(1, *place, torch.ones(4, 2, 64), torch.ones(4, 2, 64))
    assert pool.keys[1][:, 0].sum() == 4 * 2 * 64
    assert resident_bytes() - before < 32 * MIB
    pool.touch()
    assert resident_bytes() - before > 192 * MIB
    assert pool.keys[1].abs().max() == 0


def test_a_pool_beyond_the_machine_is_refused() -> None:
    with pytest.raises(MemoryError, match="does not fit into"):
        KVPool(layers=2, kv_heads=64, head_dim=1024, blocks=2**22, block_size=128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_numbers_begin_at_zero_and_on_a_page(dtype: torch.dtype) -> None:
    tensor = zeros(33, 24, dtype)
    assert tensor.dtype == dtype
    assert tensor.shape == (33, 24)
    assert not tensor.any()
    assert tensor.data_ptr() % 4096 == 0
