"""The largest logit, or one drawn by the request's own number; and what rounding could not tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.exec.decode import choose
from engine.exec.runner import draw
from engine.kernels.lang import FLOATS
from engine.kernels.sampler import sample, sample_reference
from engine.models.llama import LOGIT_TOLERANCE
from tests.engine.kernels.conftest import drawn


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (9, 262), (3, 5000)], ids=str)
def test_tokens_and_rivals_are_the_references(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    logits = drawn(*shape, dtype=dtype)
    temperatures = torch.tensor([0.0, 0.5, 2.0]).repeat(3)[: shape[0]]
    numbers = torch.rand(shape[0], generator=torch.Generator().manual_seed(1))
    for got, wanted in zip(
        sample(logits, temperatures, numbers, 0.2),
        sample_reference(logits, temperatures, numbers, 0.2),
        strict=True,
    ):
        assert torch.equal(got, wanted)


def test_a_greedy_choice_is_the_engines_with_its_count_of_rivals() -> None:
    logits = drawn(6, 262)
    logits[1, 40] = logits[1, 200] = logits[1].max() + 1
    logits[2, 7] = logits[2].max() + LOGIT_TOLERANCE
    cold = torch.zeros(6)
    tokens, rivals = sample(logits, cold, cold, 2 * LOGIT_TOLERANCE)
    _, wanted, close = choose(logits, torch.tensor(LOGIT_TOLERANCE))
    assert torch.equal(tokens, wanted)
    assert torch.equal(rivals, close)
    assert tokens[1] == 40


def test_a_draw_is_the_engines_for_the_same_number() -> None:
    logits = drawn(64, 262)
    numbers = np.array([np.random.default_rng(i).random() for i in range(64)])
    wanted = [draw(row, 0.8, np.random.default_rng(i)) for i, row in enumerate(logits)]
    warm = torch.full((64,), 0.8)
    tokens, _ = sample(logits, warm, torch.from_numpy(numbers).float())
    assert tokens.tolist() == wanted


def test_draws_have_the_softmaxs_shares_and_skip_what_is_masked() -> None:
    logits = torch.tensor([-torch.inf, 2.0, 1.0, -torch.inf, 0.0])
    numbers = (torch.arange(500) / 500).float()
    tokens, _ = sample(logits.repeat(500, 1), torch.full((500,), 0.5), numbers)
    shares = torch.bincount(tokens, minlength=5) / 500
    assert torch.allclose(shares, torch.softmax(logits / 0.5, 0), atol=0.003)
    assert shares[0] == shares[3] == 0


def test_what_does_not_fit_together_is_named() -> None:
    logits, row = drawn(2, 5), torch.zeros(2)
    with pytest.raises(ValueError, match=r"numbers: got float32 \(1,\), allowed: float32 of"):
        sample(logits, row, row[:1])
    with pytest.raises(ValueError, match="temperatures: got float64"):
        sample(logits, row.double(), row)
    with pytest.raises(ValueError, match="logits: got no columns, allowed: 1 or more"):
        sample(logits[:, :0], row, row)
