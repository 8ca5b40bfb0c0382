"""A request gets the same answer alone or in any batch, in any chunks, preempted or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.exec.capture import Graphs
from engine.exec.step import splits
from engine.knobs import RuntimeConfig
from engine.models.llama import SHAPES, Llama
from tests.engine.conftest import CONFIGS, as_dense, bench, request


def prompts(seed: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 262, rng.integers(1, 200)) for _ in range(count)]


def alone(model: Llama, prompt: np.ndarray, max_tokens: int) -> list[int]:
    tokens, _ = bench(model).generate([request("a", prompt, max_tokens)], RuntimeConfig())
    return tokens["a"]


@settings(max_examples=16, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 14),
    config=CONFIGS,
    blocks=st.sampled_from([32, 64, 512]),
    captured=st.booleans(),
)
def test_any_batch_and_chunking_gives_the_tokens_and_logits_of_the_dense_reference(
    model: Llama,
    graphs: Graphs,
    seed: int,
    count: int,
    config: RuntimeConfig,
    blocks: int,
    captured: bool,
) -> None:
    asked = [request(str(i), p, 1 + i % 12) for i, p in enumerate(prompts(seed, count))]
    subject = bench(model, blocks=blocks, graphs=graphs if captured else None)
    tokens, logits = subject.generate(asked, config)
    for one in asked:
        as_dense(model, one, tokens[one.id], logits[one.id])


@pytest.mark.parametrize("captured", [False, True])
def test_tokens_are_equal_alone_and_in_a_crowd(
    model: Llama, graphs: Graphs, captured: bool
) -> None:
    asked = [request(str(i), p, 24) for i, p in enumerate(prompts(7, 24))]
    config = RuntimeConfig(max_num_seqs=24, max_num_batched_tokens=300, prefill_chunk_tokens=50)
    subject = bench(model, graphs=graphs if captured else None)
    crowd, _ = subject.generate(asked, config)
    assert (subject.runner.steps["graph"] > 20) is captured
    for one in asked[::4]:
        assert crowd[one.id] == alone(model, one.tokens[: one.prompt_tokens], 24)


def test_a_small_pool_preempts_and_changes_no_token(model: Llama) -> None:
    asked = [request(str(i), p[:100], 60) for i, p in enumerate(prompts(3, 6))]
    small = bench(model, blocks=32)
    tokens, _ = small.generate(asked, RuntimeConfig())
    assert small.scheduler.preemptions > 0
    for one in asked:
        prompt = prompts(3, 6)[int(one.id)][:100]
        assert tokens[one.id] == alone(model, prompt, 60)


def test_choices_that_rounding_could_flip_do_not_depend_on_the_batch() -> None:
    """Two heads that differ by less than the rounding error: a plain argmax would waver."""
    torch.set_num_threads(1)
    model = Llama(SHAPES["1.3m"], seed=1, positions=512)
    noise = 1 + 1e-7 * torch.randn(128, generator=torch.Generator().manual_seed(0))
    model.head[:, 128:256] = model.head[:, :128] * noise
    model.head[:, 256:] = 0
    asked = [request(str(i), p, 10) for i, p in enumerate(prompts(5, 8))]
    crowded = bench(model)
    config = RuntimeConfig(max_num_batched_tokens=150, prefill_chunk_tokens=33)
    tokens, _ = crowded.generate(asked, config)
    assert crowded.runner.near_ties > 60
    for one in asked:
        assert tokens[one.id] == alone(model, one.tokens[: one.prompt_tokens], 10)


def test_sampling_with_a_seed_does_not_depend_on_the_batch(model: Llama) -> None:
    def sampled(count: int) -> list[int]:
        asked = [request(str(i), p, 16) for i, p in enumerate(prompts(11, count))]
        for i, one in enumerate(asked):
            one.temperature, one.generator = 0.8, np.random.default_rng(i)
        tokens, _ = bench(model).generate(asked, RuntimeConfig())
        return tokens["0"]

    assert sampled(1) == sampled(9)
    greedy = alone(model, prompts(11, 1)[0], 16)
    assert sampled(1) != greedy


@pytest.mark.parametrize("size", sorted(SHAPES))
def test_a_model_has_about_the_parameters_its_name_says(size: str) -> None:
    parameters = Llama(SHAPES[size], seed=0, positions=16).parameters
    assert parameters == pytest.approx(float(size.removesuffix("m")) * 1e6, rel=0.1)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    heads = [Llama(SHAPES["1.3m"], seed=seed, positions=16).head for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


@given(st.lists(st.integers(1, 128), min_size=1, max_size=200))
def test_attention_groups_cover_every_decode_once_in_order(lengths: list[int]) -> None:
    blocks = np.array(sorted(lengths, reverse=True))
    parts = splits(blocks, 384)
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(len(blocks)))
    for begin, end in parts:
        assert end - begin == 1 or blocks[begin] * (end - begin) <= 384
