"""Packed matrices compute what plain ones do, and a row of theirs knows of no other row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core import Core
from engine.exec.capture import Graphs, capture
from engine.exec.step import ROWS_MIN
from engine.knobs import RuntimeConfig
from engine.models.llama import SHAPES, Llama
from engine.models.packing import added, available, packed, product
from tests.engine.conftest import CONFIGS, as_dense, bench, request
from tests.engine.models.files import state, write_folder

pytestmark = pytest.mark.skipif(not available(), reason="this CPU has no packed product")


@pytest.fixture(scope="module")
def packed_model() -> Llama:
    torch.set_num_threads(1)
    model = Llama(SHAPES["1.3m"], seed=0, positions=512)
    model.pack()
    return model


@pytest.fixture(scope="module")
def packed_graphs(packed_model: Llama) -> Graphs:
    return capture(packed_model, 16)


@settings(max_examples=60, deadline=None)
@given(
    fan_in=st.integers(1, 300),
    fan_out=st.integers(1, 300),
    rows=st.integers(ROWS_MIN, 80),
    seed=st.integers(0, 100),
)
def test_a_row_of_a_packed_product_does_not_depend_on_the_others(
    fan_in: int, fan_out: int, rows: int, seed: int
) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, fan_in, generator=generator)
    matrix = torch.randn(fan_out, fan_in, generator=generator).t() / fan_in**0.5
    to = torch.randn(rows, fan_out, generator=generator)
    opaque = packed(matrix)
    assert torch.allclose(product(x, opaque), x @ matrix, atol=1e-5)
    assert torch.allclose(added(to, x, opaque), to + x @ matrix, atol=1e-5)
    for row in {0, rows // 2, rows - 1}:
        # As the engine has it: never fewer rows than ROWS_MIN, for which BLAS has other kernels.
        few = torch.tensor([row] * ROWS_MIN)
        assert torch.equal(product(x[few], opaque)[0], product(x, opaque)[row])
        assert torch.equal(added(to[few], x[few], opaque)[0], added(to, x, opaque)[row])


def test_a_packed_model_has_the_logits_of_the_plain_one(packed_model: Llama, model: Llama) -> None:
    tokens = torch.arange(100) * 7 % 262
    assert (packed_model.dense(tokens) - model.dense(tokens)).abs().max() <= 1e-5
    assert packed_model.parameters == model.parameters


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 14), config=CONFIGS, captured=st.booleans())
def test_any_batch_of_a_packed_model_gives_the_tokens_of_each_alone(
    packed_model: Llama,
    packed_graphs: Graphs,
    seed: int,
    count: int,
    config: RuntimeConfig,
    captured: bool,
) -> None:
    rng = np.random.default_rng(seed)
    asked = [
        request(str(i), rng.integers(0, 262, rng.integers(1, 200)), 1 + i % 12)
        for i in range(count)
    ]
    subject = bench(packed_model, graphs=packed_graphs if captured else None)
    tokens, logits = subject.generate(asked, config)
    for one in asked:
        as_dense(packed_model, one, tokens[one.id], logits[one.id])


def test_an_engine_packs_a_model_from_files_and_replays_its_graph(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", state())
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        model_len_max=128,
        kv_pool_blocks=64,
        cache=tmp_path / "steps",
    )
    core = Core(config, lambda outcome: None)
    assert core.runner.model.packed
    assert isinstance(core.runner.captured, Graphs)
    core.barrier.workshop.close()
    assert not (tmp_path / "steps").exists()
