"""Attention over the paged cache: decode and varlen prefill are one kernel.

A program answers a tile of rows: query heads that share a KV head, times queries. Keys and values
pass in tiles of TILE tokens gathered through the block table, whatever the block size, and the
softmax is kept running (flash attention, Dao et al. 2022, arXiv:2205.14135; the cache in pages:
Kwon et al. 2023, arXiv:2309.06180). A decode's context may be cut into splits for programs of their
own, which `_combine` joins by their log-sum-exp (flash decoding, Dao et al. 2023).

A GPU takes one KV head a program. The interpreter pays by the operation, not by the element, so it
takes all: the product of all rows with all heads' keys, where a row sees its own head's alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.kernels.interface import Batch, PagedKV, attention_shapes
from engine.kernels.lang import Kernel, interpreted, power

if TYPE_CHECKING:
    import triton.language as tl

PROGRAMS_MIN = 264  # two for each multiprocessor of the larger GPUs: fewer leave some idle
SPLIT_TOKENS_MIN = 256  # of context that are worth a program
SPLITS_MAX = 64


@Kernel
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, scales, out, sums, tables, starts, contexts,
    query_token, query_head, key_head, key_block, key_token, value_head, value_block, value_token,
    scale_head, scale_block, table_row, kv_heads, factor, split_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, QUERIES: tl.constexpr,
    TILE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, QUANTISED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    first_head = tl.program_id(1) * HEADS
    part = tl.program_id(2)  # of the context with SPLIT, else of the queries
    start = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - start
    context = tl.load(contexts + sequence)
    tile = 0
    begin = 0
    end = context
    if SPLIT:
        begin = part * split_tokens
        end = tl.minimum(context, begin + split_tokens)
    else:
        tile = part * QUERIES
        end = tl.minimum(context, context - queries + tile + QUERIES)
    if tile >= queries:
        return

    row = tl.arange(0, HEADS * MEMBERS * QUERIES)
    row_head = row // (MEMBERS * QUERIES)
    member = row // QUERIES % MEMBERS
    index = tile + row % QUERIES
    head = (first_head + row_head) * GROUP + member
    real = (member < GROUP) & (first_head + row_head < kv_heads) & (index < queries)
    position = context - queries + index
    token = (start + index).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    cell = real[:, None] & (column < DIM)[None, :]
    at = token * query_token + head * query_head
    q = tl.load(query + at[:, None] + column[None, :], mask=cell, other=0.0)
    if WIDE:
        q = q.to(tl.float32)

    key = tl.arange(0, HEADS * TILE)
    key_row_head = key // TILE
    kv_head = first_head + key_row_head
    top = tl.full([HEADS * MEMBERS * QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([HEADS * MEMBERS * QUERIES], tl.float32)
    mixed = tl.zeros([HEADS * MEMBERS * QUERIES, COLUMNS], tl.float32)
    for first in range(begin, end, TILE):
        seen = first + key % TILE
        known = seen < end
        there = known & (kv_head < kv_heads)
        block = tl.load(tables + sequence * table_row + seen // BLOCK_SIZE, mask=there, other=0)
        block = block.to(tl.int64)
        offset = seen % BLOCK_SIZE
        from_key = kv_head * key_head + block * key_block + offset * key_token
        kept = there[:, None] & (column < DIM)[None, :]
        k = tl.load(keys + from_key[:, None] + column[None, :], mask=kept, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * factor
        visible = known[None, :] & (seen[None, :] <= position[:, None])
        if HEADS > 1:
            visible = visible & (row_head[:, None] == key_row_head[None, :])
        scores = tl.where(visible, scores, float("-inf"))
        risen = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - risen)
        weights = tl.exp2(scores - risen[:, None])
        total = total * shrink + tl.sum(weights, 1)
        from_value = kv_head * value_head + block * value_block + offset * value_token
        v = tl.load(values + from_value[:, None] + column[None, :], mask=kept, other=0)
        if QUANTISED:
            from_scale = kv_head * scale_head + block * scale_block + offset
            weights = weights * tl.load(scales + from_scale, mask=there, other=0.0)[None, :]
        product = tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        mixed = mixed * shrink[:, None] + product
        top = risen

    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    row_out = token * kv_heads * GROUP + head
    if SPLIT:
        row_out = row_out * tl.num_programs(2) + part
        tl.store(sums + row_out, top + tl.log2(tl.maximum(total, 1e-30)), mask=real)
    tl.store(out + (row_out * DIM)[:, None] + column[None, :], mixed, mask=cell)


@Kernel
def _combine(  # type: ignore[no-untyped-def]
    parts, sums, out, rows, splits,
    ROWS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    cell = (row < rows)[:, None] & (column < DIM)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for split in range(splits):
        at = row * splits + split
        new = tl.load(sums + at, mask=row < rows, other=float("-inf"))
        some = cell & (new > float("-inf"))[:, None]
        part = tl.load(parts + (at * DIM)[:, None] + column[None, :], mask=some, other=0.0)
        risen = tl.maximum(top, new)
        level = tl.where(risen > float("-inf"), risen, 0.0)
        shrink, share = tl.exp2(top - level), tl.exp2(new - level)
        total = total * shrink + share
        mixed = mixed * shrink[:, None] + part * share[:, None]
        top = risen
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + (row * DIM)[:, None] + column[None, :], mixed, mask=cell)


def decode(
    query: torch.Tensor, kv: PagedKV, batch: Batch, scale: float, *, splits: int | None = None
) -> torch.Tensor:
    """AttentionBackend.decode in Triton; `splits` of the context, None: as many as fill a GPU."""
    attention_shapes(query, kv, batch)
    if batch.queries_max > 1:
        raise ValueError(f"queries_max: got {batch.queries_max}, allowed in a decode step: 1")
    if splits is None:
        splits = splits_of(batch, kv)
    if not 1 <= splits <= SPLITS_MAX:
        raise ValueError(f"splits: got {splits}, allowed: 1 to {SPLITS_MAX}")
    return _launch(query, kv, batch, scale, queries=1, splits=splits)


def prefill(query: torch.Tensor, kv: PagedKV, batch: Batch, scale: float) -> torch.Tensor:
    """AttentionBackend.prefill in Triton."""
    attention_shapes(query, kv, batch)
    members = power(query.size(1) // kv.kv_heads)
    rows, _ = tiles(query.dtype, kv)
    return _launch(query, kv, batch, scale, queries=max(1, rows // members), splits=1)


def tiles(dtype: torch.dtype, kv: PagedKV) -> tuple[int, int]:
    """Rows of a prefill program and tokens it reads at once: what fits a GPU's registers."""
    if interpreted():
        return 64, 256
    columns = power(kv.head_dim)
    if dtype == torch.float32:
        return min(64, max(16, 4096 // columns)), 32 if columns <= 128 else 16
    return 128 if columns <= 128 else 32, 64 if columns <= 128 and kv.scales is None else 32


def splits_of(batch: Batch, kv: PagedKV) -> int:
    """How many programs should share a context, for a GPU to be full; one in the interpreter."""
    if interpreted():
        return 1
    wanted = -(-PROGRAMS_MIN // max(1, batch.sequences * kv.kv_heads))
    worth = -(-batch.context_max // SPLIT_TOKENS_MIN)
    return max(1, min(wanted, worth, SPLITS_MAX))


def _launch(
    query: torch.Tensor, kv: PagedKV, batch: Batch, scale: float, *, queries: int, splits: int
) -> torch.Tensor:
    """`queries`: rows of a program's tile for each query head."""
    tokens, heads = query.shape[:2]
    dim, group = kv.head_dim, heads // kv.kv_heads
    heads_each = power(kv.kv_heads) if interpreted() else 1
    columns = max(16, power(dim))
    out = query.new_zeros(tokens, heads, dim)
    parts, sums = out, out
    if splits > 1:
        parts = query.new_empty(tokens, heads, splits, dim, dtype=torch.float32)
        sums = query.new_full((tokens, heads, splits), -math.inf, dtype=torch.float32)
    scales = kv.keys if kv.scales is None else kv.scales
    _attend.launch(
        (
            batch.sequences,
            -(-kv.kv_heads // heads_each),
            splits if splits > 1 else -(-batch.queries_max // queries),
        ),
        *(query, kv.keys, kv.values, scales, parts, sums),
        *(batch.tables, batch.starts, batch.contexts),
        *(query.stride(0), query.stride(1), *kv.keys.stride()[:3], *kv.values.stride()[:3]),
        *(scales.stride(0), scales.stride(1), batch.tables.stride(0), kv.kv_heads),
        *(scale * math.log2(math.e), -(-batch.context_max // splits)),
        HEADS=heads_each,
        GROUP=group,
        # A GPU's matrix unit takes 16 rows or more.
        MEMBERS=max(power(group), 16 // (queries * heads_each)),
        QUERIES=queries,
        TILE=tiles(query.dtype, kv)[1],
        DIM=dim,
        COLUMNS=columns,
        BLOCK_SIZE=kv.block_size,
        SPLIT=splits > 1,
        QUANTISED=kv.scales is not None,
        # The interpreter's product of bfloat16 matrices is silently wrong (Triton 3.7.1).
        WIDE=interpreted() and query.dtype == torch.bfloat16,
        # Three products of TF32 parts: float32's accuracy from the matrix unit.
        PRECISION="tf32x3" if query.dtype == torch.float32 else "ieee",
        warps=4 if queries == 1 and columns * query.element_size() <= 512 else 8,
    )
    if splits > 1:
        rows = 256 if interpreted() else 4
        _combine.launch(
            (-(-tokens * heads // rows),),
            *(parts, sums, out, tokens * heads, splits),
            ROWS=rows,
            DIM=dim,
            COLUMNS=columns,
        )
    return out


def attend_reference(query: torch.Tensor, kv: PagedKV, batch: Batch, scale: float) -> torch.Tensor:
    """Both in torch: each sequence's context gathered, then dense attention in float32."""
    tokens, heads = attention_shapes(query, kv, batch)
    out = query.new_zeros(tokens, heads, kv.head_dim)
    starts = batch.starts.tolist()
    for index, context in enumerate(batch.contexts.tolist()):
        span = slice(starts[index], starts[index + 1])
        new = span.stop - span.start
        if new == 0 or context == 0:
            continue
        blocks = batch.tables[index, : -(-context // kv.block_size)].long()
        keys, values = kv.keys[:, blocks].float(), kv.values[:, blocks].float()
        if kv.scales is not None:
            values = values * kv.scales[:, blocks].unsqueeze(-1)
        k, v = (each.flatten(1, 2)[:, :context] for each in (keys, values))
        position = torch.arange(context - new, context, device=query.device)
        mask = torch.arange(context, device=query.device) <= position[:, None]
        answer = F.scaled_dot_product_attention(
            query[span].transpose(0, 1)[None].float(),
            k[None],
            v[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[span] = answer[0].transpose(0, 1).to(query.dtype)
    return out
