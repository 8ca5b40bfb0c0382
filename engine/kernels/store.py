"""Writes the keys and values of a step's tokens to their slots in the paged cache.

Values may be kept as int8 codes, with one scale a token and head, taken here: a token comes alone,
so what shares a scale has to come with it. (Whole groups of tokens: quant.py.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.kernels.interface import PagedKV
from engine.kernels.lang import Kernel, check, interpreted, power
from engine.kernels.quant import codes_reference

if TYPE_CHECKING:
    import triton.language as tl


@Kernel
def _store(  # type: ignore[no-untyped-def]
    key, value, keys, values, scales, slots, tokens, kv_heads,
    from_key_token, from_key_head, from_value_token, from_value_head,
    key_head, key_block, key_token, value_head, value_block, value_token, scale_head, scale_block,
    ROWS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUANTISED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // kv_heads).to(tl.int64)
    head = row % kv_heads
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    kept = slot >= 0
    column = tl.arange(0, COLUMNS)
    cell = kept[:, None] & (column < DIM)[None, :]
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    from_key = token * from_key_token + head * from_key_head
    k = tl.load(key + from_key[:, None] + column[None, :], mask=cell, other=0.0)
    to_key = head * key_head + block * key_block + offset * key_token
    tl.store(keys + to_key[:, None] + column[None, :], k.to(keys.dtype.element_ty), mask=cell)
    from_value = token * from_value_token + head * from_value_head
    v = tl.load(value + from_value[:, None] + column[None, :], mask=cell, other=0.0)
    to_value = head * value_head + block * value_block + offset * value_token
    if QUANTISED:
        v = v.to(tl.float32)
        scale = tl.max(tl.abs(v), 1) / 127
        v = tl.floor(v / tl.where(scale > 0, scale, 1.0)[:, None] + 0.5)
        tl.store(scales + head * scale_head + block * scale_block + offset, scale, mask=kept)
    tl.store(values + to_value[:, None] + column[None, :], v.to(values.dtype.element_ty), mask=cell)


def store(kv: PagedKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes key and value (tokens, kv_heads, head_dim), a float dtype, at `slots`.

    slots: (tokens,) int64, block · block_size + offset; below 0: the token is left out. They must
    lie in the cache: a kernel does not look. Two tokens of one slot leave either's.
    """
    shapes(kv, slots, key, value)
    tokens = slots.size(0)
    rows = 1024 if interpreted() else 16
    scales = kv.keys if kv.scales is None else kv.scales
    _store.launch(
        (-(-tokens * kv.kv_heads // rows),),
        *(key, value, kv.keys, kv.values, scales, slots, tokens, kv.kv_heads),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *(*kv.keys.stride()[:3], *kv.values.stride()[:3], scales.stride(0), scales.stride(1)),
        ROWS=rows,
        DIM=kv.head_dim,
        COLUMNS=power(kv.head_dim),
        BLOCK_SIZE=kv.block_size,
        QUANTISED=kv.scales is not None,
    )


def store_reference(
    kv: PagedKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """The same in torch. Raises IndexError for slots beyond the cache."""
    shapes(kv, slots, key, value)
    kept = slots >= 0
    block = torch.div(slots[kept], kv.block_size, rounding_mode="floor")
    offset = slots[kept] % kv.block_size
    key, value = (each[kept].transpose(0, 1) for each in (key, value))
    kv.keys[:, block, offset] = key.to(kv.keys.dtype)
    if kv.scales is not None:
        scale = value.float().abs().amax(-1) / 127
        kv.scales[:, block, offset] = scale
        value = codes_reference(value.float(), scale.unsqueeze(-1))
    kv.values[:, block, offset] = value.to(kv.values.dtype)


def shapes(kv: PagedKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raises ValueError where tokens do not fit the cache."""
    check("slots", slots, ("tokens",), (torch.int64,))
    for name, each in (("key", key), ("value", value)):
        check(name, each, (slots.size(0), kv.kv_heads, kv.head_dim))
