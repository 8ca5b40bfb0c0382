"""Groups of rows as int8 or int4 codes and scales, and back: what cold KV is kept as.

Symmetric: code = round(x / scale), scale = the group's largest |x| / 127 (int8) or / 7 (int4). A
group is 256 rows (tokens of one head) by default; it has one scale, or one for each column, which
int4 needs (values have columns of their own size: Liu et al. 2024, KIVI, arXiv:2402.02750). Two
int4 codes of neighbouring columns share a byte, the first in its low half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.kernels.lang import FLOATS, Kernel, check, interpreted, power

if TYPE_CHECKING:
    import triton.language as tl

GROUP_ROWS = 256
LARGEST = {8: 127, 4: 7}
DIM_MAX = 256


@dataclass(frozen=True)
class Quantised:
    """codes: (rows, dim) int8, or (rows, dim / 2) uint8 for int4; scales: (groups, 1 or dim)."""

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int
    group_rows: int

    @property
    def dim(self) -> int:
        return self.codes.size(1) * (8 // self.bits)


@Kernel
def _quantise(  # type: ignore[no-untyped-def]
    x, codes, scales, rows, x_row, group_rows,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, LARGEST: tl.constexpr,
    PER_COLUMN: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    begin = group * group_rows
    end = tl.minimum(begin + group_rows, rows)
    column = tl.arange(0, COLUMNS)
    largest = tl.zeros([COLUMNS], tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        cell = (row < end)[:, None] & (column < DIM)[None, :]
        part = tl.load(x + (row * x_row)[:, None] + column[None, :], mask=cell, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(part.to(tl.float32)), 0))
    if PER_COLUMN:
        tl.store(scales + group * DIM + column, largest / LARGEST, mask=column < DIM)
    else:
        largest = tl.zeros([COLUMNS], tl.float32) + tl.max(largest, 0)
        tl.store(scales + group + column, largest / LARGEST, mask=column < 1)
    scale = largest / LARGEST
    scale = tl.where(scale > 0, scale, 1.0)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        cell = (row < end)[:, None] & (column < DIM)[None, :]
        part = tl.load(x + (row * x_row)[:, None] + column[None, :], mask=cell, other=0.0)
        code = tl.floor(part.to(tl.float32) / scale[None, :] + 0.5).to(tl.int32)
        if BITS == 8:
            tl.store(codes + (row * DIM)[:, None] + column[None, :], code.to(tl.int8), mask=cell)
        else:
            low, high = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
            pair = tl.arange(0, COLUMNS // 2)
            both = ((low & 15) | ((high & 15) << 4)).to(tl.uint8)
            at = codes + (row * (DIM // 2))[:, None] + pair[None, :]
            tl.store(at, both, mask=(row < end)[:, None] & (pair < DIM // 2)[None, :])


@Kernel
def _dequantise(  # type: ignore[no-untyped-def]
    codes, scales, out, rows, group_rows,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PER_COLUMN: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = row // group_rows
    column = tl.arange(0, COLUMNS)
    cell = (row < rows)[:, None] & (column < DIM)[None, :]
    if BITS == 8:
        code = tl.load(codes + (row * DIM)[:, None] + column[None, :], mask=cell, other=0)
        code = code.to(tl.int32)
    else:
        pair = tl.arange(0, COLUMNS // 2)
        kept = (row < rows)[:, None] & (pair < DIM // 2)[None, :]
        both = tl.load(codes + (row * (DIM // 2))[:, None] + pair[None, :], mask=kept, other=0)
        both = both.to(tl.int32)
        # Four bits with their sign: 8 to 15 stand for -8 to -1.
        low = ((both & 15) ^ 8) - 8
        high = ((both >> 4) ^ 8) - 8
        code = tl.reshape(tl.join(low, high), (ROWS, COLUMNS))
    if PER_COLUMN:
        scale = tl.load(scales + (group * DIM)[:, None] + column[None, :], mask=cell, other=0.0)
    else:
        scale = tl.load(scales + group, mask=row < rows, other=0.0)[:, None]
    value = code.to(tl.float32) * scale
    at = out + (row * DIM)[:, None] + column[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=cell)


def quantise(
    x: torch.Tensor, *, bits: int = 8, group_rows: int = GROUP_ROWS, per_column: bool = False
) -> Quantised:
    """(rows, dim) of a float dtype as codes; the last group may be smaller. Raises ValueError."""
    result = _empty(x, bits, group_rows, per_column)
    _quantise.launch(
        (result.scales.size(0),),
        *(x, result.codes, result.scales, x.size(0), x.stride(0), group_rows),
        DIM=x.size(1),
        COLUMNS=power(x.size(1)),
        ROWS=power(group_rows) if interpreted() else 16,
        LARGEST=LARGEST[bits],
        PER_COLUMN=per_column,
        BITS=bits,
    )
    return result


def dequantise(what: Quantised, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(rows, dim) of a float dtype: code · scale. Raises ValueError."""
    if dtype not in FLOATS:
        raise ValueError(f"dtype: got {dtype}, allowed: {', '.join(map(str, FLOATS))}")
    rows, dim = what.codes.size(0), what.dim
    out = torch.empty(rows, dim, dtype=dtype, device=what.codes.device)
    tile = 1024 if interpreted() else 16
    _dequantise.launch(
        (-(-rows // tile),),
        *(what.codes, what.scales, out, rows, what.group_rows),
        DIM=dim,
        COLUMNS=power(dim),
        ROWS=tile,
        PER_COLUMN=what.scales.size(1) > 1,
        BITS=what.bits,
    )
    return out


def quantise_reference(
    x: torch.Tensor, *, bits: int = 8, group_rows: int = GROUP_ROWS, per_column: bool = False
) -> Quantised:
    """The same in torch."""
    result = _empty(x, bits, group_rows, per_column)
    for group, scale in enumerate(result.scales):
        span = slice(group * group_rows, (group + 1) * group_rows)
        part = x[span].float()
        scale.copy_((part.abs().amax(0) if per_column else part.abs().amax()) / LARGEST[bits])
        codes = codes_reference(part, scale)
        result.codes[span] = packed(codes).view(torch.uint8) if bits == 4 else codes.to(torch.int8)
    return result


def dequantise_reference(what: Quantised, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same in torch."""
    codes = unpacked(what.codes.view(torch.int8)) if what.bits == 4 else what.codes
    scales = what.scales.repeat_interleave(what.group_rows, 0)[: len(codes)]
    return (codes * scales).to(dtype)


def codes_reference(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """round(x / scale), halves upwards; zeros where the scale is 0."""
    return torch.floor(x / torch.where(scale > 0, scale, 1.0) + 0.5)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes of four bits (…, dim) by twos, as int8 (…, dim / 2)."""
    codes = codes.to(torch.int8) & 15
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """What `packed` was given, as int8."""
    # Shifted right, the sign comes along.
    return torch.stack([(codes << 4) >> 4, codes >> 4], -1).flatten(-2)


def _empty(x: torch.Tensor, bits: int, group_rows: int, per_column: bool) -> Quantised:
    check("x", x, ("rows", "dim"))
    rows, dim = x.shape
    if bits not in LARGEST:
        raise ValueError(f"bits: got {bits}, allowed: 8 or 4")
    if not 2 <= dim <= DIM_MAX or dim % 2:
        raise ValueError(f"dim: got {dim}, allowed: even, 2 to {DIM_MAX}")
    if group_rows < 1:
        raise ValueError(f"group_rows: got {group_rows}, allowed: 1 or more")
    groups = -(-rows // group_rows)
    codes = torch.empty(rows, dim, dtype=torch.int8, device=x.device)
    if bits == 4:
        codes = torch.empty(rows, dim // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(groups, dim if per_column else 1, device=x.device)
    return Quantised(codes, scales, bits, group_rows)
