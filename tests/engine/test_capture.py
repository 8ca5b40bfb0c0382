"""The captured decode step: the same to the bit, counted, and gone when it is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.exec.capture import (
    CONTEXTS_MAX,
    GROUPS_MAX,
    CaptureError,
    Contexts,
    DecodeStep,
    Graph,
    Graphs,
    capture,
    prove,
)
from engine.exec.decode import Chosen
from engine.knobs import NotPossible, RuntimeConfig
from engine.kv.formats import Format
from engine.models.llama import SHAPES, Llama
from tests.engine.conftest import bench, request
from tests.engine.test_barrier import Served


def both_ways(
    model: Llama, graphs: Graphs, lengths: list[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, int], dict[str, int]]:
    """Logits op by op and replayed, and how the replaying runner counted."""
    logits = []
    for use in (None, graphs):
        rng = np.random.default_rng(0)
        asked = [request(str(i), rng.integers(0, 262, n), 9) for i, n in enumerate(lengths)]
        subject = bench(model, blocks=2000, graphs=use)
        _, seen = subject.generate(asked, RuntimeConfig(max_num_seqs=64))
        logits.append([torch.stack(seen[one.id]) for one in asked])
    return logits[0], logits[1], subject.runner.steps, subject.runner.misses


@pytest.mark.parametrize("lengths", [[5], [30, 31, 200], [7] * 9, [400, 300, 20, *[3] * 40]])
def test_a_replayed_step_has_the_logits_of_the_plain_one_to_the_bit(
    model: Llama, graphs: Graphs, lengths: list[int]
) -> None:
    plain, replayed, steps, misses = both_ways(model, graphs, lengths)
    for one, other in zip(plain, replayed, strict=True):
        assert torch.equal(one, other)
    assert steps["graph"] >= 7
    assert misses["prompt"] == steps["eager"]
    assert misses["shape"] == 0


def test_a_shape_nobody_captured_runs_op_by_op_and_is_counted(model: Llama, graphs: Graphs) -> None:
    few = Graphs({}, 0.0)
    plain, fallen_back, steps, misses = both_ways(model, few, [5, 6])
    assert torch.equal(torch.stack(plain), torch.stack(fallen_back))
    assert steps["graph"] == 0
    assert misses["shape"] == steps["eager"] - misses["prompt"] > 0
    assert set(graphs.by_groups) == set(range(1, GROUPS_MAX + 1))


@pytest.mark.parametrize("block_size", [8, 128])
def test_each_block_size_has_its_own_graphs(model: Llama, block_size: int) -> None:
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 262, 100)
    plain, _ = bench(model).generate([request("a", prompt, 20)], RuntimeConfig())
    subject = bench(model, blocks=80, block_size=block_size, graphs=capture(model, block_size))
    tokens, _ = subject.generate([request("a", prompt, 20)], RuntimeConfig())
    assert tokens == plain
    assert subject.runner.steps["graph"] == 19


def test_the_larger_model_is_captured_too() -> None:
    model = Llama(SHAPES["8m"], seed=0, positions=64)
    assert capture(model, 16).seconds > 0


def test_a_graph_that_computes_something_else_is_not_taken(model: Llama) -> None:
    class Off(Graph):
        def __call__(self, *arguments: Any) -> Chosen:
            logits, tokens, rivals = super().__call__(*arguments)
            return logits + 1e-4, tokens, rivals

    pool = bench(model).runner.pool
    step = DecodeStep(model, pool)
    prove(step, Graph(step, 2), 2)
    with pytest.raises(CaptureError, match=r"logits differ by 0\.0001"):
        prove(step, Off(step, 2), 2)


def test_what_was_captured_for_a_configuration_is_there_when_it_comes_back() -> None:
    subject = Served(EngineConfig(model_len_max=64, kv_pool_blocks=32))
    core, contexts = subject.core, subject.core.barrier.contexts
    try:
        first = core.runner.captured
        for value in ("off", "on"):
            subject.change(graph_capture=value)
        assert core.runner.captured is first
        for seqs in (4, 256):
            subject.change(max_num_seqs=seqs)
        assert core.runner.captured is first
        for size in (32, 16):
            subject.change(kv_block_size=size)
        assert core.runner.captured is first
        assert core.reading().contexts == {"built": 2, "reused": 2}
        known = dict(core.barrier.canary.known)
        subject.expect_otherwise()
        for _ in range(2):
            with pytest.raises(NotPossible, match="taken back"):
                subject.change(kv_block_size=32)
        assert core.runner.captured is first
        # The second try takes no graph that was there when the first failed its proof.
        assert core.reading().contexts == {"built": 3, "reused": 3}
        core.barrier.canary.known = known
        core.faults.inject({"fault": "capture_lost"})
        assert len(contexts) == 0
        core.faults.inject({"fault": "none"})
        assert core.runner.captured is not first
        assert core.reading().contexts == {"built": 4, "reused": 3}
    finally:
        core.stop()


def test_the_contexts_kept_are_the_last_used(model: Llama) -> None:
    contexts, kept = Contexts(model), Format(torch.float32)
    sizes = (8, 16, 32, 64, 128)
    first, *_ = (contexts.get(size, kept) for size in sizes[:CONTEXTS_MAX])
    assert contexts.get(8, kept) is first
    contexts.get(sizes[CONTEXTS_MAX], kept)
    assert len(contexts) == CONTEXTS_MAX
    assert contexts.get(8, kept) is first
    assert (contexts.built, contexts.reused) == (5, 2)
    contexts.get(16, kept)
    assert (contexts.built, contexts.reused) == (6, 2)
