"""RMSNorm, rotary positions and SwiGLU against torch's."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.lang import FLOATS
from engine.kernels.rms_norm import rms_norm, rms_norm_reference
from engine.kernels.rope import rope, rope_reference
from engine.kernels.swiglu import swiglu, swiglu_reference
from engine.models.llama import SHAPES, rotation, turned
from tests.engine.kernels.conftest import close, drawn


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 192), (70, 65), (0, 8)], ids=str)
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = drawn(*shape, dtype=dtype), drawn(shape[1], seed=1, dtype=dtype)
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def test_rms_norm_of_rows_with_gaps_between_them_and_of_zeros() -> None:
    x, weight = drawn(6, 40)[::2, :24], drawn(24)
    x[1] = 0
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 2), (5, 7, 80), (40, 8, 32)])
def test_rope_turns_the_first_heads_and_leaves_the_others(
    dtype: torch.dtype, tokens: int, heads: int, dim: int
) -> None:
    qkv, turns = drawn(tokens, heads + 2, dim, dtype=dtype), drawn(tokens, dim // 2, 2, seed=1)
    wanted = rope_reference(qkv, heads, turns)
    got = rope(qkv, heads, turns)
    assert got is qkv
    close(got, wanted)
    assert torch.equal(got[:, heads:], wanted[:, heads:])


def test_rope_is_the_models_own_turn() -> None:
    shape = SHAPES["1.3m"]
    turns = rotation(shape, 64)[torch.tensor([0, 63, 5])]
    qkv = drawn(3, 10, shape.head_dim)
    wanted = turned(qkv.clone(), 8, turns.unsqueeze(1))
    close(rope(qkv, 8, torch.view_as_real(turns)), wanted)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 1024), (70, 66), (0, 8)], ids=str)
def test_swiglu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = drawn(*shape, dtype=dtype)
    close(swiglu(gate_up), swiglu_reference(gate_up))


def test_swiglu_of_gates_far_from_zero_overflows_nowhere() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    close(swiglu(gate_up), torch.tensor([[0.0, 0.0, 90.0, 1e4]]))


def test_what_does_not_fit_together_is_named() -> None:
    with pytest.raises(ValueError, match=r"weight: got float32 \(7,\), allowed: .* \(8\)"):
        rms_norm(drawn(2, 8), drawn(7), 1e-5)
    with pytest.raises(ValueError, match="hidden: got 16385, allowed: 1 to 16384"):
        rms_norm(drawn(1, 16_385), drawn(16_385), 1e-5)
    with pytest.raises(ValueError, match="heads: got 4, allowed: 1 to 3"):
        rope(drawn(2, 3, 8), 4, drawn(2, 4, 2))
    with pytest.raises(ValueError, match="head_dim: got 7, allowed: even, 2 or more"):
        rope(drawn(2, 3, 7), 2, drawn(2, 3, 2))
    with pytest.raises(ValueError, match=r"rotation: got float32 \(1, 4, 2\), allowed: float32 of"):
        rope(drawn(2, 3, 8), 2, drawn(1, 4, 2))
    with pytest.raises(ValueError, match="gate_up: got 7 columns, allowed: an even number"):
        swiglu(drawn(2, 7))
