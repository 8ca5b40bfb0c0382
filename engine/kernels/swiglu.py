"""The gated activation of the feed-forward (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.kernels.lang import Kernel, check, interpreted, power

if TYPE_CHECKING:
    import triton.language as tl


@Kernel
def _swiglu(  # type: ignore[no-untyped-def]
    gate_up, out, rows, width, gate_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    cell = (row < rows)[:, None] & (column < width)[None, :]
    at = gate_up + (row * gate_row)[:, None] + column[None, :]
    gate = tl.load(at, mask=cell, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=cell, other=0.0).to(tl.float32)
    fall = tl.exp(-tl.abs(gate))  # of the absolute value: it cannot overflow
    share = tl.where(gate >= 0, 1.0, fall) / (1.0 + fall)
    to = out + (row * width)[:, None] + column[None, :]
    tl.store(to, (gate * share * up).to(out.dtype.element_ty), mask=cell)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up: (rows, 2 · width), gate first → (rows, width); float32 inside.

    Raises ValueError for an odd number of columns.
    """
    rows, width = shapes(gate_up)
    out = gate_up.new_empty(rows, width)
    tile, columns = (64, power(width)) if interpreted() else (1, min(1024, power(width)))
    _swiglu.launch(
        (-(-rows // tile), -(-width // columns)),
        *(gate_up, out, rows, width, gate_up.stride(0)),
        ROWS=tile,
        COLUMNS=columns,
    )
    return out


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    shapes(gate_up)
    gate, up = gate_up.float().chunk(2, dim=1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def shapes(gate_up: torch.Tensor) -> tuple[int, int]:
    """(rows, width); raises ValueError."""
    check("gate_up", gate_up, ("rows", "2 · width"))
    rows, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up: got {both} columns, allowed: an even number")
    return rows, both // 2
