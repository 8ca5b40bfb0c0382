"""Groups of rows as codes and scales, and back."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.lang import FLOATS
from engine.kernels.quant import (
    LARGEST,
    dequantise,
    dequantise_reference,
    quantise,
    quantise_reference,
)
from tests.engine.kernels.conftest import close, drawn


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize(
    ("rows", "dim", "group_rows"), [(300, 64, 256), (1, 2, 256), (33, 80, 16), (7, 6, 1)]
)
def test_codes_scales_and_what_they_stand_for_are_the_references(
    dtype: torch.dtype, bits: int, per_column: bool, rows: int, dim: int, group_rows: int
) -> None:
    x = drawn(rows, dim, dtype=dtype)
    got = quantise(x, bits=bits, group_rows=group_rows, per_column=per_column)
    wanted = quantise_reference(x, bits=bits, group_rows=group_rows, per_column=per_column)
    assert torch.equal(got.codes, wanted.codes)
    assert torch.equal(got.scales, wanted.scales)
    close(dequantise(got, dtype), dequantise_reference(wanted, dtype))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("per_column", [False, True])
def test_nothing_is_off_by_more_than_half_a_step(bits: int, per_column: bool) -> None:
    x = drawn(300, 32)
    what = quantise(x, bits=bits, per_column=per_column)
    steps = what.scales.repeat_interleave(256, 0)[:300]
    assert bool(((dequantise(what) - x).abs() <= 0.5001 * steps).all())
    assert float(what.scales.max()) == pytest.approx(float(x.abs().max()) / LARGEST[bits])


def test_zeros_stay_zeros_and_no_rows_stay_none() -> None:
    for bits in (8, 4):
        assert not dequantise(quantise(torch.zeros(5, 8), bits=bits)).any()
        assert dequantise(quantise(torch.zeros(0, 8), bits=bits)).shape == (0, 8)


def test_what_cannot_be_is_named() -> None:
    x = drawn(4, 8)
    with pytest.raises(ValueError, match="bits: got 3, allowed: 8 or 4"):
        quantise(x, bits=3)
    with pytest.raises(ValueError, match="dim: got 7, allowed: even, 2 to 256"):
        quantise(x[:, :7])
    with pytest.raises(ValueError, match="group_rows: got 0, allowed: 1 or more"):
        quantise(x, group_rows=0)
    with pytest.raises(ValueError, match=r"dtype: got torch\.int8, allowed: torch\.float32, "):
        dequantise(quantise(x), torch.int8)
