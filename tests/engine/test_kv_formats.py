"""KV of any dtype in any layout: what is rounded, by how much, and switches while requests run."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.barrier import FLIPS
from engine.config import BLOCK_SIZES, KV_DTYPES, EngineConfig
from engine.exec.capture import capture
from engine.knobs import KNOBS, NotPossible, RuntimeConfig
from engine.kv.formats import GROUP_VALUES, Format
from engine.kv.pool import KVPool
from engine.models.llama import Llama
from engine.sched.request import Finish
from tests.engine.conftest import bench, conserved, request
from tests.engine.test_barrier import Served, prompts

FORMATS = [Format.of(name, torch.float32) for name in KV_DTYPES if name != "auto"]
ROUNDED = [kept for kept in FORMATS if not kept.exact(torch.float32)]
CONFIG = RuntimeConfig(max_num_seqs=16, max_num_batched_tokens=300, prefill_chunk_tokens=50)

formats = st.sampled_from(FORMATS)
sizes = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 6),
        "head_dim": st.integers(1, 48).map(lambda half: 2 * half),
        "block_size": st.sampled_from(BLOCK_SIZES),
        "interleaved": st.booleans(),
    }
)


def drawn(
    seed: int, tokens: int, kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (tokens, kv_heads, head_dim), each token of a size of its own, some zero."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.uniform(-3, 2, (2, tokens, 1, 1)) * (rng.random((2, tokens, 1, 1)) > 0.1)
    numbers = rng.standard_normal((2, tokens, kv_heads, head_dim)) * size
    key, value = torch.from_numpy(numbers.astype(np.float32))
    return key, value


def pool(kept: Format, *, blocks: int = 6, layers: int = 2, **shape: int) -> KVPool:
    return KVPool(layers=layers, blocks=blocks, kept=kept, **shape)  # type: ignore[arg-type]


def through(kept: Format, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values (tokens, kv_heads, head_dim) as they come back."""
    parts = kept.encode(key.transpose(0, 1), value.transpose(0, 1))
    return tuple(each.transpose(0, 1) for each in kept.decode(parts, torch.float32))


def test_the_knob_names_a_format_and_a_format_names_itself() -> None:
    assert [kept.name for kept in FORMATS] == list(KV_DTYPES[1:])
    assert Format.of("auto", torch.bfloat16) == Format(torch.bfloat16)
    assert [kept.name for kept in FORMATS if kept.exact(torch.float32)] == ["float32"]
    exact = [kept.name for kept in FORMATS if kept.exact(torch.bfloat16)]
    assert exact == ["bfloat16", "float32"]


def test_a_token_takes_the_bytes_of_its_numbers_and_its_scales() -> None:
    """SmolLM2's 30 layers of 3 heads of 64: 192 values share a scale of two bytes."""
    sizes = {kept.name: kept.token_bytes(30, 3, 64) for kept in FORMATS}
    assert sizes == {
        "bfloat16": 30 * 768,
        "float16": 30 * 768,
        "float16_int4": 30 * (384 + 96 + 2),
        "float16_int8": 30 * (384 + 192 + 2),
        "float32": 30 * 1536,
    }


@given(st.integers(1, 64), st.integers(1, 256))
def test_heads_share_a_scale_as_far_as_a_group_goes(kv_heads: int, head_dim: int) -> None:
    groups = Format(torch.float16, 8).groups(kv_heads, head_dim)
    together = kv_heads // groups
    assert groups * together == kv_heads
    assert together * head_dim <= GROUP_VALUES or together == 1
    larger = [n for n in range(together + 1, kv_heads + 1) if kv_heads % n == 0]
    assert all(n * head_dim > GROUP_VALUES for n in larger)


@settings(deadline=None)
@given(formats, st.integers(0, 10_000), st.integers(0, 20), sizes)
def test_what_comes_back_is_off_by_half_a_step_at_most(
    kept: Format, seed: int, tokens: int, shape: dict[str, int]
) -> None:
    kv_heads, head_dim = shape["kv_heads"], shape["head_dim"]
    key, value = drawn(seed, tokens, kv_heads, head_dim)
    key_back, value_back = through(kept, key, value)
    eps = torch.finfo(kept.dtype).eps if kept.dtype != torch.float32 else 0.0
    tiny = torch.finfo(kept.dtype).smallest_normal * eps
    assert bool(((key_back - key).abs() <= key.abs() * eps / 2 + tiny).all())
    if not kept.bits:
        assert bool(((value_back - value).abs() <= value.abs() * eps / 2 + tiny).all())
        return
    scales = kept.encode(key.transpose(0, 1), value.transpose(0, 1))[2]  # (groups, tokens, 1)
    steps = scales.float().repeat_interleave(kv_heads // len(scales), 0).transpose(0, 1)
    assert bool(((value_back - value).abs() <= steps * (0.5 + 1e-5)).all())
    # Its scale is the group's largest / 127 (/ 7) as far as bfloat16 has it.
    largest = value.abs().amax((1, 2)) / {8: 127, 4: 7}[kept.bits]
    assert bool((steps.amax((1, 2)) <= largest * (1 + 2**-8)).all())


@settings(deadline=None, max_examples=60)
@given(formats, st.integers(0, 10_000), sizes)
def test_a_pool_gives_back_what_was_stored_and_keeps_the_rest(
    kept: Format, seed: int, shape: dict[str, int]
) -> None:
    subject, size = pool(kept, **shape), shape["block_size"]
    rng = np.random.default_rng(seed)
    slots = torch.from_numpy(rng.permutation(7 * size)[: int(rng.integers(1, 3 * size))])
    key, value = drawn(seed, len(slots), shape["kv_heads"], shape["head_dim"])
    subject.store(1, slots // size, slots % size, key, value)
    expected = through(kept, key, value)

    blocks = torch.from_numpy(rng.permutation(7)[:4].reshape(2, 1, 2))
    heads = torch.arange(shape["kv_heads"])[None, :, None] * subject.blocks
    stored = [
        torch.zeros(shape["kv_heads"], subject.blocks * size, shape["head_dim"]) for _ in range(2)
    ]
    for tensor, numbers in zip(stored, expected, strict=True):
        tensor[:, slots] = numbers.transpose(0, 1)
    asked = (blocks * size + torch.arange(size)[:, None]).transpose(1, 2).reshape(2, -1)
    for got, tensor in zip(subject.gather(1, blocks + heads), stored, strict=True):
        assert torch.equal(got, tensor[:, asked].transpose(0, 1))
    assert not any(each.any() for each in subject.gather(0, blocks + heads))


@settings(deadline=None, max_examples=60)
@given(formats, formats, st.integers(0, 10_000), sizes, sizes)
def test_tokens_move_into_a_pool_kept_and_cut_otherwise(
    kept: Format, other: Format, seed: int, shape: dict[str, int], target: dict[str, int]
) -> None:
    old = pool(kept, **shape)
    target = {**shape, "block_size": target["block_size"], "interleaved": target["interleaved"]}
    new = pool(other, blocks=48, **target)
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, 3 * shape["block_size"]))
    source = torch.from_numpy(rng.permutation(7 * shape["block_size"])[:tokens])
    there = torch.from_numpy(rng.permutation(49 * target["block_size"])[:tokens])
    key, value = drawn(seed, tokens, shape["kv_heads"], shape["head_dim"])
    for layer in range(2):
        size = shape["block_size"]
        old.store(layer, source // size, source % size, key * (layer + 1), value * (layer + 1))
    old.move(new, source, there)
    assert old.same(new, source, there)
    for layer in range(2):
        expected = through(kept, key * (layer + 1), value * (layer + 1))
        expected = expected if kept == other else through(other, *expected)
        got = other.decode(new.read(layer, there), torch.float32)
        for one, numbers in zip(got, expected, strict=True):
            assert torch.equal(one, numbers.transpose(0, 1))
    new.values[1][..., 0] += 1
    assert not old.same(new, source, there)


@pytest.mark.parametrize("kept", FORMATS, ids=lambda kept: kept.name)
def test_interleaved_keys_and_values_share_one_tensor_and_no_byte(kept: Format) -> None:
    apart, together = (
        pool(kept, layers=1, kv_heads=2, head_dim=8, block_size=16, interleaved=way)
        for way in (False, True)
    )
    storages = [each.untyped_storage().data_ptr() for each in (*together.keys, *together.values)]
    assert storages[0] == storages[1]
    assert (
        apart.keys[0].untyped_storage().data_ptr() != apart.values[0].untyped_storage().data_ptr()
    )
    # One block of one head more, for those who read it as one dense tensor.
    row = sum(part.bytes for part in together.parts[:2])
    assert together.bytes == apart.bytes + 16 * row
    begin = together.values[0].data_ptr() - together.keys[0].data_ptr()
    assert begin == 16 * together.parts[0].bytes
    together.keys[0].fill_(1)
    assert not together.values[0].any()
    together.values[0].fill_(2)
    assert bool((together.keys[0] == 1).all())


def test_int4_takes_two_columns_at_a_time() -> None:
    with pytest.raises(ValueError, match=r"head_dim: got 7, allowed with int4 values: even"):
        pool(Format(torch.float16, 4), kv_heads=1, head_dim=7, block_size=16)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_kept_exactly_every_token_and_logit_is_the_same_in_both_layouts(
    model: Llama, block_size: int, captured: bool
) -> None:
    """Greedy, in chunks, in one batch."""
    answers = []
    for interleaved in (False, True):
        asked = [request(str(i), p, 12) for i, p in enumerate(prompts(10))]
        graphs = capture(model, block_size) if captured else None
        subject = bench(
            model,
            blocks=4000 // block_size,
            block_size=block_size,
            graphs=graphs,
            interleaved=interleaved,
        )
        answers.append(subject.generate(asked, CONFIG))
        assert (subject.runner.steps["graph"] > 0) is captured
    assert answers[0][0] == answers[1][0]
    for name, logits in answers[0][1].items():
        assert torch.equal(torch.stack(logits), torch.stack(answers[1][1][name]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kept", ROUNDED, ids=lambda kept: kept.name)
def test_rounded_kv_gives_the_logits_of_the_reference_over_rounded_kv(
    model: Llama, kept: Format, interleaved: bool
) -> None:
    """In chunks or whole, op by op or replayed; and not those over KV as it was computed."""

    def rounded(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kept.decode(kept.encode(key, value), model.dtype)

    graphs = capture(model, 16, kept)
    seen = []
    for use, config in ((None, CONFIG), (None, RuntimeConfig()), (graphs, CONFIG)):
        asked = [request(str(i), p, 8) for i, p in enumerate(prompts(6))]
        subject = bench(model, graphs=use, kept=kept, interleaved=interleaved)
        tokens, logits = subject.generate(asked, config)
        assert (subject.runner.steps["graph"] > 0) is (use is not None)
        assert subject.runner.near_ties == 0
        seen.append((tokens, logits))
        for one in asked:
            sequence = torch.from_numpy(
                np.concatenate([one.tokens[: one.prompt_tokens], tokens[one.id]])
            )
            span = slice(one.prompt_tokens - 1, -1)
            exact, expected = model.dense(sequence)[span], model.dense(sequence, rounded)[span]
            got = torch.stack(logits[one.id])
            rounding = float((expected - exact).abs().max())
            error = float((got - expected).abs().max())
            assert error <= float(model.tolerance) + FLIPS * rounding
            assert float((got - exact).abs().max()) > error
    assert seen[0][0] == seen[2][0]
    for name, rows in seen[0][1].items():
        assert torch.equal(torch.stack(rows), torch.stack(seen[2][1][name]))


@pytest.fixture
def served() -> Iterator[Served]:
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=1024, prefix_cache="on"))
    yield subject
    subject.core.stop()


def test_thirty_switches_under_running_requests_lose_none(model: Llama, served: Served) -> None:
    """Each of any dtype, layout and block size; afterwards the pool is empty, and answers right."""
    rng = random.Random(5)
    core = served.core
    asked = [request(str(i), p, 300) for i, p in enumerate(prompts(16))]
    served.submit(asked)
    for i in range(30):
        served.wait(tokens=100 * i)
        chosen = rng.sample(("kv_block_size", "kv_dtype", "kv_layout"), rng.randint(1, 3))
        values = {name: rng.choice(KNOBS[name].ladder) for name in chosen}
        served.change(**values, graph_capture=rng.choice(("off", "on")))
        core.runtime.boundary.run(lambda: conserved(core.scheduler))
        running = core.runtime.running.config
        kept = Format.of(running.kv_dtype, torch.float32)
        assert core.runner.pool.kept == kept
        assert core.runner.pool.interleaved is (running.kv_layout == "interleaved")
        assert core.runner.pool.block_size == core.rows.block_size == running.kv_block_size
        assert core.reading().kv_dtype == kept.name
        assert core.reading().kv_token_bytes == kept.token_bytes(3, 2, 32)
    served.wait(ended=16)
    assert {name: len(tokens) for name, tokens in served.tokens.items()} == {
        one.id: 300 for one in asked
    }
    assert set(served.ended.values()) == {Finish.LENGTH}
    assert core.allocator.allocated_blocks == 0
    assert core.barrier.rollbacks == 0
    served.change(kv_dtype="auto", kv_block_size=32)
    served.submit([request("after", prompts(1)[0], 40)])
    served.wait(ended=17)
    expected, _ = bench(model).generate([request("after", prompts(1)[0], 40)], RuntimeConfig())
    assert served.tokens["after"] == expected["after"]


def test_a_model_in_bfloat16_takes_every_dtype() -> None:
    subject = Served(EngineConfig(model_len_max=256, kv_pool_blocks=64, dtype="bfloat16"))
    try:
        subject.submit([request("a", [70] * 30, 200)])
        for i, name in enumerate(KV_DTYPES):
            subject.wait(tokens=20 * i + 1)
            subject.change(kv_dtype=name, kv_layout="interleaved" if i % 2 else "separate")
            assert subject.core.runner.pool.native is (name in ("auto", "bfloat16"))
        subject.wait(ended=1)
        assert len(subject.tokens["a"]) == 200
        assert subject.core.barrier.rollbacks == 0
    finally:
        subject.core.stop()


def test_the_prefix_cache_is_emptied_by_another_dtype(model: Llama, served: Served) -> None:
    prompt = [70] * 100
    expected, _ = bench(model).generate([request("a", prompt, 20)], RuntimeConfig())
    for i, kept in enumerate(("float16_int4", "auto")):
        served.submit([request(str(2 * i), prompt, 20)])
        served.wait(ended=2 * i + 1)
        assert served.core.allocator.cached_blocks > 0
        served.change(kv_dtype=kept)
        assert served.core.allocator.cached_blocks == 0
        served.submit([request(str(2 * i + 1), prompt, 20)])
        served.wait(ended=2 * i + 2)
    assert served.core.scheduler.prefix_hits == 96  # of the third, what the second had rounded not
    assert served.tokens["0"] == served.tokens["3"] == expected["a"]


@pytest.mark.parametrize("name", ["float16", "float16_int8", "float16_int4"])
def test_a_pool_that_keeps_something_else_is_not_taken(
    model: Llama, served: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of each value, or of its scale, is lost on the way."""
    expected, _ = bench(model).generate([request("a", [70] * 30, 120)], RuntimeConfig())
    served.submit([request("a", [70] * 30, 120)])
    served.wait(tokens=10)
    before = served.core.runner.pool
    write = KVPool.write

    def wrong(
        self: KVPool,
        layer: int,
        block: torch.Tensor,
        offset: torch.Tensor,
        parts: list[torch.Tensor],
    ) -> None:
        if self.kept.name == name:
            parts = [*parts[:-1], parts[-1] * 0.9]
        write(self, layer, block, offset, parts)

    with monkeypatch.context() as patch:
        patch.setattr(KVPool, "write", wrong)
        patch.setattr(KVPool, "same", lambda *_: True)
        with pytest.raises(NotPossible, match=r"the canary's logits differ by .*, allowed: "):
            served.change(kv_dtype=name)
    assert served.core.runner.pool is before
    assert served.core.barrier.rollbacks == 1
    assert served.core.runtime.running.config == RuntimeConfig(prefix_cache="on")
    served.wait(ended=1)
    assert served.tokens == expected
    assert served.change(kv_dtype=name) == 2
