"""The next token of each row: the largest logit, or one drawn at a temperature.

What the engine's runner does (exec/runner.py): a draw is inverse transform sampling with a number
the request's own generator gave, so that it depends on no batch; a greedy choice comes with how
many tokens rounding could not tell from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.kernels.lang import Kernel, check, interpreted, power

if TYPE_CHECKING:
    import triton.language as tl


@Kernel
def _sample(  # type: ignore[no-untyped-def]
    logits, temperatures, numbers, tokens, rivals, logits_row, vocabulary, margin,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * logits_row
    lane = tl.arange(0, TILE)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.zeros([], tl.int32)
    for first in range(0, vocabulary, TILE):
        real = first + lane < vocabulary
        part = tl.load(at + first + lane, mask=real, other=float("-inf")).to(tl.float32)
        most = tl.max(part, 0)
        where = first + tl.argmax(part, 0)
        token = tl.where(most > best, where, token)
        best = tl.maximum(best, most)

    temperature = tl.load(temperatures + row)
    cold = tl.where(temperature > 0, temperature, 1.0)
    near = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.float32)
    for first in range(0, vocabulary, TILE):
        real = first + lane < vocabulary
        part = tl.load(at + first + lane, mask=real, other=float("-inf")).to(tl.float32)
        near += tl.sum((part >= best - margin).to(tl.int32), 0)
        total += tl.sum(tl.exp((part - best) / cold), 0)
    tl.store(rivals + row, near.to(tl.int64))

    if temperature > 0:
        wanted = tl.load(numbers + row) * total
        passed = tl.zeros([], tl.float32)
        drawn = tl.zeros([], tl.int32)
        for first in range(0, vocabulary, TILE):
            real = first + lane < vocabulary
            part = tl.load(at + first + lane, mask=real, other=float("-inf")).to(tl.float32)
            weight = tl.exp((part - best) / cold)
            below = (passed + tl.cumsum(weight, 0) <= wanted) & real
            drawn += tl.sum(below.to(tl.int32), 0)
            passed += tl.sum(weight, 0)
        # Rounding can leave the last sum below `wanted`.
        token = tl.where(drawn < vocabulary, drawn, token)
    tl.store(tokens + row, token.to(tl.int64))


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, numbers: torch.Tensor, margin: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and rivals, both (rows,) int64, of logits (rows, vocabulary).

    temperatures, numbers: (rows,) float32. A temperature of 0 takes the largest logit, the first
    of equals; above, the token at which the softmax's running sum passes `number` in [0, 1).
    rivals: how many logits are within `margin` of the largest, itself included. Logits must not be
    NaN, nor all -inf. Raises ValueError for other shapes.
    """
    tokens, rivals = shapes(logits, temperatures, numbers)
    rows, vocabulary = logits.shape
    _sample.launch(
        (rows,),
        *(logits, temperatures, numbers, tokens, rivals, logits.stride(0), vocabulary, margin),
        TILE=power(vocabulary) if interpreted() else min(2048, power(vocabulary)),
    )
    return tokens, rivals


def sample_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, numbers: torch.Tensor, margin: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    tokens, rivals = shapes(logits, temperatures, numbers)
    best, greedy = logits.float().max(1, keepdim=True)
    rivals.copy_((logits.float() >= best - margin).sum(1))
    cold = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    sums = torch.exp((logits.float() - best) / cold).cumsum(1)
    drawn = (sums <= numbers[:, None] * sums[:, -1:]).sum(1)
    is_drawn = (temperatures > 0) & (drawn < logits.size(1))
    tokens.copy_(torch.where(is_drawn, drawn, greedy[:, 0]))
    return tokens, rivals


def shapes(
    logits: torch.Tensor, temperatures: torch.Tensor, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for tokens and rivals; raises ValueError where the arguments do not fit together."""
    check("logits", logits, ("rows", "vocabulary"))
    rows, vocabulary = logits.shape
    if vocabulary < 1:
        raise ValueError("logits: got no columns, allowed: 1 or more")
    for name, each in (("temperatures", temperatures), ("numbers", numbers)):
        check(name, each, (rows,), (torch.float32,))
    empty = torch.empty(rows, dtype=torch.int64, device=logits.device)
    return empty, torch.empty_like(empty)
