"""Decode and prefill in Triton give what gathering each context and attending to it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import attention
from engine.kernels.attention import attend_reference, decode, prefill, splits_of
from engine.kernels.interface import BLOCK_SIZES, Batch, PagedKV
from engine.kernels.lang import FLOATS
from tests.engine.kernels.conftest import close, drawn, paged

SCALE = 0.3


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_decode_reads_contexts_that_end_at_and_beside_the_edges_of_blocks(block_size: int) -> None:
    contexts = [1, block_size - 1, block_size, block_size + 1, 0]
    asked = paged([1, 1, 1, 1, 0], contexts, block_size=block_size)
    close(decode(*asked, SCALE), attend_reference(*asked, SCALE))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prefill_reads_prompts_that_end_at_and_beside_the_edges_of_blocks(block_size: int) -> None:
    ends = [block_size - 1, block_size, block_size + 1]
    asked = paged([*ends, 3, 1], [*ends, block_size + 2, 2 * block_size], block_size=block_size)
    close(prefill(*asked, SCALE), attend_reference(*asked, SCALE))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("quantised", [False, True])
def test_every_dtype_is_read_also_beside_int8_values(dtype: torch.dtype, quantised: bool) -> None:
    asked = paged([1, 1, 1], [5, 40, 1], dtype=dtype, quantised=quantised)
    for splits in (1, 3):
        close(decode(*asked, SCALE, splits=splits), attend_reference(*asked, SCALE))
    asked = paged([1, 20, 0, 7], [33, 20, 4, 50], dtype=dtype, quantised=quantised)
    close(prefill(*asked, SCALE), attend_reference(*asked, SCALE))


@pytest.mark.parametrize(
    "heads",
    [
        {"kv_heads": 1, "group": 1, "dim": 16},
        {"kv_heads": 3, "group": 3, "dim": 64},
        {"kv_heads": 5, "group": 2, "dim": 80},
        {"kv_heads": 1, "group": 8, "dim": 128},
        {"kv_heads": 2, "group": 1, "dim": 7},
        {"kv_heads": 1, "group": 2, "dim": 256},
    ],
    ids=str,
)
def test_heads_need_not_be_powers_of_two_nor_many(heads: dict[str, Any]) -> None:
    asked = paged([1, 1], [17, 3], **heads)
    close(decode(*asked, SCALE, splits=2), attend_reference(*asked, SCALE))
    asked = paged([9, 1], [17, 3], **heads)
    close(prefill(*asked, SCALE), attend_reference(*asked, SCALE))


@pytest.mark.parametrize("splits", [2, 5, 64])
def test_a_long_context_in_splits_is_the_context(splits: int) -> None:
    asked = paged([1, 1, 1, 0], [700, 40, 0 + 1, 9])
    close(decode(*asked, SCALE, splits=splits), attend_reference(*asked, SCALE))


def test_tiles_of_the_context_and_of_the_queries_join() -> None:
    asked = paged([150, 1, 70], [600, 300, 70], kv_heads=1, group=2, dim=16, block_size=8)
    close(prefill(*asked, SCALE), attend_reference(*asked, SCALE))


@settings(max_examples=12, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=5),
    block_size=st.sampled_from(BLOCK_SIZES),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
)
def test_any_mix_of_prompts_chunks_and_decodes_is_answered_as_one_by_one(
    sequences: list[tuple[int, int]], block_size: int, kv_heads: int, group: int
) -> None:
    queries = [new for new, _ in sequences]
    contexts = [new + before for new, before in sequences]
    asked = paged(queries, contexts, block_size=block_size, kv_heads=kv_heads, group=group, dim=16)
    close(prefill(*asked, SCALE), attend_reference(*asked, SCALE))


def test_a_decode_step_is_the_prefill_of_one_token_each() -> None:
    asked = paged([1, 1, 1], [60, 16, 1])
    close(decode(*asked, SCALE), prefill(*asked, SCALE))


def test_neighbours_in_a_batch_change_nothing() -> None:
    query, kv, batch = paged([9, 5, 1], [30, 5, 47])
    together = prefill(query, kv, batch, SCALE)
    at = 0
    for index, (new, known) in enumerate(zip([9, 5, 1], [30, 5, 47], strict=True)):
        alone = Batch.of([new], [known], batch.tables[index : index + 1].numpy(), 16)
        assert torch.equal(prefill(query[at : at + new], kv, alone, SCALE), together[at : at + new])
        at += new


def test_tokens_of_no_sequence_and_an_empty_step_are_answered_with_zeros() -> None:
    query, kv, batch = paged([1, 1], [3, 4])
    longer = torch.cat([query, query])
    assert torch.equal(decode(longer, kv, batch, SCALE)[2:], torch.zeros_like(query))
    assert torch.equal(decode(longer, kv, batch, SCALE, splits=2)[2:], torch.zeros_like(query))
    nothing = Batch.of([], [], batch.tables.numpy()[:0], 16)
    assert not prefill(query, kv, nothing, SCALE).any()
    assert not decode(query, kv, nothing, SCALE).any()


def test_keys_and_values_may_stand_block_by_block_in_one_tensor() -> None:
    query, kv, batch = paged([1, 4], [20, 9])
    both = torch.stack([kv.keys, kv.values]).permute(2, 0, 1, 3, 4).contiguous()
    mixed = PagedKV(*both.permute(1, 2, 0, 3, 4))
    assert mixed.keys.stride() != kv.keys.stride()
    assert torch.equal(prefill(query, mixed, batch, SCALE), prefill(query, kv, batch, SCALE))


def test_a_query_may_be_a_view_of_the_fused_product() -> None:
    query, kv, batch = paged([1, 6], [20, 9])
    fused = drawn(7, 10, 32)
    fused[:, :6] = query
    assert torch.equal(prefill(fused[:, :6], kv, batch, SCALE), prefill(query, kv, batch, SCALE))


def test_a_gpu_gets_more_splits_the_fewer_sequences_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def splits(sequences: int, context: int) -> int:
        _, kv, batch = paged([1] * sequences, [context] * sequences, dim=1, group=1)
        return splits_of(batch, kv)

    assert splits(1, 4096) == 1  # in the interpreter
    monkeypatch.setattr(attention, "interpreted", lambda: False)
    assert [splits(1, 4096), splits(16, 4096), splits(256, 4096), splits(1, 100)] == [16, 9, 1, 1]


def test_what_does_not_fit_together_is_named() -> None:
    query, kv, batch = paged([1, 4], [20, 9])
    with pytest.raises(ValueError, match="queries_max: got 4, allowed in a decode step: 1"):
        decode(query, kv, batch, SCALE)
    with pytest.raises(ValueError, match=r"query: got float64 \(5, 6, 32\), allowed: float32, "):
        prefill(query.double(), kv, batch, SCALE)
    with pytest.raises(ValueError, match=r"allowed: .* of shape \(tokens, heads, 32\)"):
        prefill(query[..., :16], kv, batch, SCALE)
    with pytest.raises(ValueError, match="query: got 5 heads, allowed: a multiple of 2 KV heads"):
        prefill(query[:, :5], kv, batch, SCALE)
    with pytest.raises(ValueError, match="query: got a last stride of 32, allowed: 1"):
        prefill(drawn(5, 32, 32).transpose(1, 2)[:, :6], kv, batch, SCALE)
    with pytest.raises(ValueError, match="splits: got 65, allowed: 1 to 64"):
        decode(*paged([1], [9]), SCALE, splits=65)
