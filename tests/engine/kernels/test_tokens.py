"""Tokens through Triton: the demo's model, scheduler and pool, every kernel, the served tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.exec.kernel_step import KernelStep
from engine.knobs import RuntimeConfig
from engine.models.llama import Llama
from engine.sched.request import Request
from tests.engine.conftest import bench, request

LENGTHS = (1, 16, 17, 45, 70)
CONFIG = RuntimeConfig(max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_tokens=32)


def asked() -> list[Request]:
    rng = np.random.default_rng(3)
    return [request(str(n), rng.integers(0, 262, n), 6) for n in LENGTHS]


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_greedy_tokens_through_the_kernels_are_those_served(
    model: Llama, name: str, block_size: int
) -> None:
    served, logits = bench(model).generate(asked(), CONFIG)
    subject = bench(model, block_size=block_size)
    subject.runner.eager = KernelStep(name)
    tokens, got = subject.generate(asked(), CONFIG)
    assert tokens == served
    assert subject.runner.near_ties == 0
    for one in served:
        torch.testing.assert_close(
            torch.stack(got[one]), torch.stack(logits[one]), atol=2e-5, rtol=0
        )


def test_a_preempted_sequence_gets_the_same_tokens_through_triton(model: Llama) -> None:
    def three() -> list[Request]:
        return [request(str(i), np.arange(i, i + 10), 16) for i in range(3)]

    served, _ = bench(model).generate(three(), RuntimeConfig())
    small = bench(model, blocks=8, block_size=8)
    small.runner.eager = KernelStep("triton")
    tokens, _ = small.generate(three(), RuntimeConfig())
    assert small.scheduler.preemptions > 0
    assert tokens == served
