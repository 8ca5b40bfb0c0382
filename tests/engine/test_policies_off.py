"""With every policy off, the order of work is what it was before there were any."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from engine.knobs import RuntimeConfig
from engine.sched.request import PRIORITIES, Request
from engine.sched.scheduler import Plan
from tests.engine.test_scheduler import scheduler, step

# Digests of every plan of `run`, taken of the scheduler before it had policies (commit 00f7549).
BEFORE = {
    (512, False): "6037f0d42fdc22590d766099f70a3b56d6f88c9c4fb9e78170dc35080d6b8c4a",
    (48, False): "785331ecde2e6a74c91765b8d8267caeaa3abb24b1be5ad9aa6deb0420724df5",
    (48, True): "61714a0b0e11766b287223936f44762887b6258d863e8dfd16898d6a28923984",
}


def told(plan: Plan) -> str:
    decodes = [one.id for one in plan.decodes]
    return f"{decodes} {[(c.request.id, c.start, c.count, c.last) for c in plan.chunks]}"


def run(blocks: int, caching: bool) -> tuple[str, int]:
    """A seeded crowd of all priorities, that comes while others run; also its preemptions."""
    rng = np.random.default_rng(7)
    subject = scheduler(blocks, caching)
    config = RuntimeConfig(max_num_seqs=12, max_num_batched_tokens=256, prefill_chunk_tokens=96)
    asked: list[Request] = []
    digest = hashlib.sha256()
    for turn in range(4000):
        for _ in range(int(rng.poisson(0.3)) if turn < 600 else 0):
            length = int(rng.integers(1, 300))
            one = Request(
                id=str(len(asked)),
                tokens=np.concatenate([np.arange(length) % 7, rng.integers(0, 9, 3)]),
                max_tokens=int(rng.integers(1, 90)),
                arrived=float(turn),
                ignore_eos=True,
                priority=int(rng.integers(len(PRIORITIES))),
            )
            asked.append(one)
            subject.add(one)
        done = step(subject, config, now=float(turn))
        if done is not None:
            digest.update(told(done[0]).encode())
        elif turn >= 600:
            break
    assert len(asked) > 100
    assert all(one.finish is not None for one in asked)
    return digest.hexdigest(), subject.preemptions


@pytest.mark.parametrize(("blocks", "caching"), list(BEFORE))
def test_defaults_plan_every_step_as_before(blocks: int, caching: bool) -> None:
    digest, preemptions = run(blocks, caching)
    assert digest == BEFORE[blocks, caching]
    assert (preemptions > 0) == (blocks < 512)
