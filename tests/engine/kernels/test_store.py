"""What is stored is found again, in the slots it was meant for and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.attention import attend_reference, prefill
from engine.kernels.interface import BLOCK_SIZES, PagedKV
from engine.kernels.lang import FLOATS
from engine.kernels.store import store, store_reference
from engine.kv.pool import KVPool
from tests.engine.kernels.conftest import close, drawn, paged


def copied(kv: PagedKV) -> PagedKV:
    scales = None if kv.scales is None else kv.scales.clone()
    return PagedKV(kv.keys.clone(), kv.values.clone(), scales)


def same(one: PagedKV, other: PagedKV) -> bool:
    pairs = ((one.keys, other.keys), (one.values, other.values), (one.scales, other.scales))
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_tokens_go_where_the_reference_puts_them(
    dtype: torch.dtype, quantised: bool, block_size: int
) -> None:
    _, kv, batch = paged(
        [1, 11, 0, 5], [8, 11, 2, 70], kv_heads=3, dim=24, block_size=block_size,
        dtype=dtype, quantised=quantised,
    )  # fmt: skip
    # Stored narrower than given, but for bfloat16: the interpreter cuts where others round.
    given = dtype if dtype == torch.bfloat16 else torch.float32
    fused = drawn(17, 9, 24, dtype=given)
    key, value = fused[:, 3:6], fused[:, 6:]
    value[3] = 0  # a scale of 0
    expected = copied(kv)
    store(kv, batch.slots, key, value)
    store_reference(expected, batch.slots, key, value)
    assert same(kv, expected)


def test_a_token_without_a_slot_is_left_out() -> None:
    _, kv, _ = paged([1], [3])
    before = copied(kv)
    key = drawn(3, 2, 32)
    store(kv, torch.tensor([-1, -1, 17]), key, key)
    assert torch.equal(kv.keys[:, 1, 1], key[2])
    kv.keys[:, 1, 1], kv.values[:, 1, 1] = before.keys[:, 1, 1], before.values[:, 1, 1]
    assert same(kv, before)
    store(kv, torch.empty(0, dtype=torch.int64), key[:0], key[:0])
    assert same(kv, before)


def test_the_engines_pool_is_written_as_it_writes_itself() -> None:
    def pool() -> KVPool:
        return KVPool(layers=1, kv_heads=2, head_dim=32, blocks=5, block_size=16)

    slots, key, value = torch.tensor([17, 90, 35]), drawn(3, 2, 32), drawn(3, 2, 32, seed=1)
    ours, its = pool(), pool()
    store(PagedKV(ours.keys[0], ours.values[0]), slots, key, value)
    its.store(0, slots // 16, slots % 16, key, value)
    assert torch.equal(ours.keys[0], its.keys[0])
    assert torch.equal(ours.values[0], its.values[0])


def test_attention_over_int8_values_is_near_that_over_the_values_themselves() -> None:
    query, plain, batch = paged([40], [40])
    key, value = drawn(40, 2, 32, seed=8), drawn(40, 2, 32, seed=9)
    codes = replace(
        plain,
        values=torch.zeros_like(plain.values, dtype=torch.int8),
        scales=torch.zeros(plain.keys.shape[:3]),
    )
    for kv in (plain, codes):
        store(kv, batch.slots, key, value)
    got = prefill(query, codes, batch, 0.2)
    close(got, attend_reference(query, codes, batch, 0.2))
    # Half a step of the coarsest scale, at most.
    worst = float(value.abs().max()) / 127 / 2
    assert float((got - attend_reference(query, plain, batch, 0.2)).abs().max()) <= worst


def test_what_does_not_fit_the_cache_is_named() -> None:
    _, kv, batch = paged([2], [3])
    key = drawn(2, 2, 32)
    with pytest.raises(ValueError, match=r"key: got float32 \(1, 2, 32\), allowed: .*\(2, 2, 32\)"):
        store(kv, batch.slots, key[:1], key)
    with pytest.raises(ValueError, match=r"value: got int64"):
        store(kv, batch.slots, key, key.long())
    with pytest.raises(ValueError, match=r"slots: got int32 \(2,\), allowed: int64"):
        store(kv, batch.slots.int(), key, key)
    with pytest.raises(IndexError):
        store_reference(kv, torch.tensor([0, 10_000]), key, key)
