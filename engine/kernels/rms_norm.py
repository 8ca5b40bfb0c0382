"""Root mean square norm (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.kernels.lang import Kernel, check, interpreted, power

if TYPE_CHECKING:
    import triton.language as tl

HIDDEN_MAX = 16_384  # a program holds a row


@Kernel
def _rms_norm(  # type: ignore[no-untyped-def]
    x, weight, out, rows, x_row, eps,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    cell = (row < rows)[:, None] & (column < HIDDEN)[None, :]
    value = tl.load(x + (row * x_row)[:, None] + column[None, :], mask=cell, other=0.0)
    value = value.to(tl.float32)
    level = 1 / tl.sqrt(tl.sum(value * value, 1) / HIDDEN + eps)
    by = tl.load(weight + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    value = value * level[:, None] * by[None, :]
    at = out + (row * HIDDEN)[:, None] + column[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=cell)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight: (rows, hidden) → the same; float32 inside.

    weight: (hidden,). Raises ValueError for other shapes, or a row of more than HIDDEN_MAX.
    """
    check("x", x, ("rows", "hidden"))
    rows, hidden = x.shape
    check("weight", weight, (hidden,))
    if not 1 <= hidden <= HIDDEN_MAX:
        raise ValueError(f"hidden: got {hidden}, allowed: 1 to {HIDDEN_MAX}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tile = 64 if interpreted() else 1
    _rms_norm.launch(
        (-(-rows // tile),),
        *(x, weight, out, rows, x.stride(0), eps),
        ROWS=tile,
        HIDDEN=hidden,
        COLUMNS=power(hidden),
        warps=4 if hidden <= 4096 else 8,
    )
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in torch."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
