"""Rotary positions: adjacent pairs of a head turned by an angle (Su et al., arXiv:2104.09864)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.kernels.lang import Kernel, check, interpreted, power

if TYPE_CHECKING:
    import triton.language as tl


@Kernel
def _rope(  # type: ignore[no-untyped-def]
    qkv, rotation, rows, heads, qkv_token, qkv_head,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // heads).to(tl.int64)
    head = row % heads
    pair = tl.arange(0, COLUMNS)
    half = tl.arange(0, 2)
    cell = (row < rows)[:, None] & (pair < PAIRS)[None, :]
    within = 2 * pair[:, None] + half[None, :]
    both = cell[:, :, None] & (half < 2)[None, None, :]
    at = qkv + (token * qkv_token + head * qkv_head)[:, None, None] + within[None, :, :]
    a, b = tl.split(tl.load(at, mask=both, other=0.0).to(tl.float32))
    turn = rotation + (token * 2 * PAIRS)[:, None, None] + within[None, :, :]
    cosine, sine = tl.split(tl.load(turn, mask=both, other=0.0))
    turned = tl.join(a * cosine - b * sine, a * sine + b * cosine)
    tl.store(at, turned.to(qkv.dtype.element_ty), mask=both)


def rope(qkv: torch.Tensor, heads: int, rotation: torch.Tensor) -> torch.Tensor:
    """Turns the first `heads` heads of qkv (tokens, all heads, head_dim) in place; returns it.

    rotation: (tokens, head_dim / 2, 2) float32, each a cosine and a sine. Raises ValueError.
    """
    shapes(qkv, heads, rotation)
    tokens, _, dim = qkv.shape
    tile = 256 if interpreted() else 8
    _rope.launch(
        (-(-tokens * heads // tile),),
        *(qkv, rotation, tokens * heads, heads, qkv.stride(0), qkv.stride(1)),
        ROWS=tile,
        PAIRS=dim // 2,
        COLUMNS=power(dim // 2),
    )
    return qkv


def rope_reference(qkv: torch.Tensor, heads: int, rotation: torch.Tensor) -> torch.Tensor:
    """The same in torch, into a new tensor."""
    shapes(qkv, heads, rotation)
    a, b = qkv[:, :heads].float().reshape(len(qkv), heads, -1, 2).unbind(-1)
    cosine, sine = rotation[:, None].unbind(-1)
    turned = torch.stack([a * cosine - b * sine, a * sine + b * cosine], -1).flatten(-2)
    return torch.cat([turned.to(qkv.dtype), qkv[:, heads:]], 1)


def shapes(qkv: torch.Tensor, heads: int, rotation: torch.Tensor) -> None:
    """Raises ValueError where they do not fit together."""
    check("qkv", qkv, ("tokens", "heads", "head_dim"))
    tokens, all_heads, dim = qkv.shape
    if not 1 <= heads <= all_heads:
        raise ValueError(f"heads: got {heads}, allowed: 1 to {all_heads}")
    if dim < 2 or dim % 2:
        raise ValueError(f"head_dim: got {dim}, allowed: even, 2 or more")
    check("rotation", rotation, (tokens, dim // 2, 2), (torch.float32,))
    if not rotation.is_contiguous():
        raise ValueError("rotation: got strides with gaps, allowed: contiguous")
