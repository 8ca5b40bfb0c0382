"""Kernels run in Triton's interpreter here: tests/conftest.py asks for it before anything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.kernels.interface import Batch, PagedKV

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _triton() -> None:
    torch.set_num_threads(1)
    pytest.importorskip("triton", reason="Triton has no wheel for this system")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paged(
    queries: Sequence[int],
    contexts: Sequence[int],
    *,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    quantised: bool = False,
) -> tuple[torch.Tensor, PagedKV, Batch]:
    """A query, and a cache whose sequences have blocks anywhere; block 0 is nobody's."""
    width = max(1, *(-(-context // block_size) for context in contexts))
    blocks = 1 + len(contexts) * width
    order = np.random.default_rng(0).permutation(np.arange(1, blocks))
    batch = Batch.of(queries, contexts, order.reshape(len(contexts), width), block_size)
    shape = (kv_heads, blocks, block_size, dim)
    keys, values = (drawn(*shape, seed=seed, dtype=dtype) for seed in (1, 2))
    # What no sequence may see would spoil every sum it got into.
    keys[:, 0] = values[:, 0] = 1e4
    kv = PagedKV(keys, values)
    if quantised:
        codes = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(3))
        kv = PagedKV(keys, codes.to(torch.int8), drawn(*shape[:3], seed=4).abs() / 64)
    return drawn(sum(queries), kv_heads * group, dim, seed=5, dtype=dtype), kv, batch


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(
        got, wanted, atol=TOLERANCE[wanted.dtype], rtol=TOLERANCE[wanted.dtype]
    )
