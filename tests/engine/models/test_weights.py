"""A model from files computes what a plain reference does with the same tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from engine.exec.capture import capture
from engine.knobs import RuntimeConfig
from engine.models.errors import ModelError
from engine.models.gguf_file import PLAIN, QUANTISED, GGUFFile
from engine.models.llama import Llama
from engine.models.loader import find, load
from tests.engine.conftest import bench, request
from tests.engine.models.files import (
    CONFIG,
    LLAMA3,
    by_neighbours,
    reference,
    rounded,
    state,
    write_folder,
    write_gguf,
)

TOKENS = torch.arange(90) * 7 % 266
TOLERANCE = 1e-5
Kind = gguf.GGMLQuantizationType


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Llama:
    torch.set_num_threads(1)
    model, _ = load(find(str(path)), dtype, 256, "")
    return model


def error(model: Llama, expected: torch.Tensor) -> float:
    """In units of the logits' size: rounding grows with it."""
    off = (model.dense(TOKENS) - expected).abs().max()
    return float(off / max(1.0, float(expected.std())))


@pytest.mark.parametrize(
    ("change", "dtype", "shards"),
    [
        ({}, torch.float32, 1),
        ({}, torch.float16, 3),
        ({"tie_word_embeddings": True}, torch.bfloat16, 1),
        ({"head_dim": 32, "num_key_value_heads": 4}, torch.float32, 2),
        ({"num_key_value_heads": 1, "rope_scaling": LLAMA3}, torch.float32, 1),
    ],
)
def test_a_folder_has_the_logits_of_the_reference(
    tmp_path: Path, change: dict[str, Any], dtype: torch.dtype, shards: int
) -> None:
    config = CONFIG | change
    tensors = {name: tensor.to(dtype) for name, tensor in state(config).items()}
    folder = write_folder(tmp_path, tensors, config, dtype=dtype, shards=shards)
    assert error(loaded(folder), reference(tensors, config, TOKENS)) <= TOLERANCE


def test_linear_scaling_slows_every_turn_down(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0}
    scaled = write_folder(tmp_path / "scaled", state(), CONFIG | {"rope_scaling": rope})
    plain = write_folder(tmp_path / "plain", state())
    turns = loaded(plain).rotation
    assert torch.allclose(loaded(scaled).rotation[4::4], turns[1:64], atol=1e-6)


def test_one_safetensors_file_is_a_model_with_what_lies_beside_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, state())
    model = loaded(folder / "model.safetensors")
    assert error(model, reference(state(), CONFIG, TOKENS)) <= TOLERANCE


def test_what_a_file_has_as_it_is_used_is_not_copied(tmp_path: Path) -> None:
    """A mapped page lies in no memory of ours: its address is within the file's mapping."""
    folder = write_folder(tmp_path, state())
    model = loaded(folder)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mine = [line.split()[0].split("-") for line in maps if str(folder) in line]
    for tensor in (model.embedding, model.head, model.layers[1].out, model.layers[0].down):
        assert any(int(a, 16) <= tensor.data_ptr() < int(b, 16) for a, b in mine)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_gguf_has_the_logits_of_the_reference_with_the_rounded_weights(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    tensors = state(config)
    path = write_gguf(tmp_path / "tiny.gguf", tensors, config, kind=Kind[kind])
    expected = reference(rounded(tensors, Kind[kind]), config, TOKENS)
    assert error(loaded(path), expected) <= TOLERANCE
    assert kind in (*PLAIN, *QUANTISED)


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_blocks_are_read_row_by_row(tmp_path: Path, kind: str) -> None:
    """Those that only llama.cpp itself can write, too: blocks of any bytes."""
    per_block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 60, (6, 512 // per_block * size), np.uint8)  # no infinite scales
    writer = gguf.GGUFWriter(tmp_path / "raw.gguf", "llama")
    writer.add_tensor("before", np.ones(3, np.float32))
    writer.add_tensor("raw", raw, raw_dtype=Kind[kind])
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    file = GGUFFile.__new__(GGUFFile)
    file.open(tmp_path / "raw.gguf")
    tensor = file.read("raw")
    assert tensor.shape == (6, 512)
    for row in range(6):
        expected = torch.from_numpy(dequantize(raw[row], Kind[kind]))
        assert torch.equal(tensor[row], expected)


def test_factors_in_a_gguf_divide_the_frequencies(tmp_path: Path) -> None:
    tensors = state() | {"rope_freqs.weight": torch.tensor([1.0, 1, 2, 2, 4, 4, 8, 8])}
    plain = loaded(write_gguf(tmp_path / "plain.gguf", state())).rotation.angle()
    model = loaded(write_gguf(tmp_path / "factors.gguf", tensors))
    slow = model.rotation.angle()
    assert torch.equal(slow[:, :2], plain[:, :2])
    assert torch.allclose(slow[1, 2:], plain[1, 2:] / torch.tensor([2.0, 2, 4, 4, 8, 8]))


def test_converted_rows_are_those_of_a_folder(tmp_path: Path) -> None:
    """The two formats order a head's rows differently; here they must be one."""
    folder = loaded(write_folder(tmp_path / "hf", state()))
    file = loaded(write_gguf(tmp_path / "tiny.gguf", state()))
    assert not torch.equal(by_neighbours(torch.eye(8), 1), torch.eye(8))
    for one, other in zip(folder.layers, file.layers, strict=True):
        assert torch.equal(one.qkv, other.qkv)


def test_a_batch_has_the_logits_of_each_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, state())
    model, words = loaded(folder), find(str(folder)).tokenizer()
    rng = np.random.default_rng(0)
    asked = [
        request(str(i), rng.integers(0, 266, rng.integers(1, 90)), 1 + i % 5) for i in range(9)
    ]
    config = RuntimeConfig(max_num_batched_tokens=128, prefill_chunk_tokens=40)
    tokens, logits = bench(model, words=words).generate(asked, config)
    for one in asked:
        prompt = one.tokens[: one.prompt_tokens]
        dense = model.dense(torch.from_numpy(np.concatenate([prompt, tokens[one.id]])))
        expected = dense[one.prompt_tokens - 1 : -1]
        assert (torch.stack(logits[one.id]) - expected).abs().max() <= TOLERANCE
        assert tokens[one.id] == expected.argmax(1).tolist()


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_bfloat16_stays_near_the_reference(tmp_path: Path, form: str) -> None:
    if form == "folder":
        path = write_folder(tmp_path / "hf", state(), dtype=torch.bfloat16)
    else:
        path = write_gguf(tmp_path / "tiny.gguf", state(), kind=Kind.BF16)
    model = loaded(path, torch.bfloat16)
    assert {tensor.dtype for layer in model.layers for tensor in layer} == {torch.bfloat16}
    logits = model.dense(TOKENS)
    assert logits.dtype == torch.float32
    expected = reference(rounded(state(), Kind.BF16), CONFIG, TOKENS)
    # 2^-8 of relative error in each of some ten roundings of numbers around 1.
    assert (logits - expected).abs().mean() < 0.02
    assert (logits - expected).abs().max() < 0.2


@pytest.mark.parametrize("captured", [False, True])
def test_bfloat16_is_served_near_its_own_dense_logits(tmp_path: Path, captured: bool) -> None:
    folder = write_folder(tmp_path, state(), dtype=torch.bfloat16)
    model, words = load(find(str(folder)), torch.bfloat16, 256, "")
    subject = bench(model, words=words, graphs=capture(model, 16) if captured else None)
    asked = [request(str(i), np.arange(20 + i) * 11 % 266, 6) for i in range(5)]
    tokens, logits = subject.generate(asked, RuntimeConfig(prefill_chunk_tokens=32))
    assert {tensor.dtype for tensor in subject.runner.pool.keys} == {torch.bfloat16}
    assert subject.runner.steps["graph"] == (5 if captured else 0)
    assert subject.runner.near_ties == 0
    for one in asked:
        prompt = one.tokens[: one.prompt_tokens]
        dense = model.dense(torch.from_numpy(np.concatenate([prompt, tokens[one.id]])))
        off = torch.stack(logits[one.id]) - dense[one.prompt_tokens - 1 : -1]
        assert off.abs().max() < 0.2


CASES: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "qwen2"}, "model_type: got 'qwen2', allowed: llama"),
    ({"attention_bias": True}, "attention_bias: got True, allowed: False"),
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', allowed: silu"),
    ({"num_local_experts": 8}, "num_local_experts: got 8, allowed: None, 0, 1"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type: got 'yarn', allowed: default, linear"),
    ({"rope_scaling": {"type": "linear"}}, "rope factor: got None, allowed: finite numbers"),
    ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "rope factor: got nan, allowed: fi"),
    ({"rope_theta": math.nan}, "rope_theta: got nan, allowed: finite numbers above 0"),
    ({"rope_theta": math.inf}, "rope_theta: got inf, allowed: finite numbers above 0"),
    ({"rope_theta": 0}, "rope_theta: got 0, allowed: finite numbers above 0"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps: got -1e-06, allowed: finite numbers above 0"),
    ({"num_hidden_layers": True}, "num_hidden_layers: got True, allowed: integers from 1 on"),
    ({"num_key_value_heads": 3}, "key-value heads: got 3, allowed: divisors of its 4 attention"),
    ({"head_dim": 15}, "head_dim: got 15, allowed: even numbers"),
    ({"vocab_size": "many"}, "vocab_size: got 'many', allowed: integers from 1 on"),
    ({"hidden_size": 32}, "model.embed_tokens.weight: shape: got (300, 64), allowed: (300, 32)"),
    ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight: no such tensor"),
    ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight: a Llama has no such tensor"),
]


@pytest.mark.parametrize(("change", "words"), CASES)
def test_a_folder_that_is_no_llama_of_ours_is_refused_by_field_and_value(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = write_folder(tmp_path, state(), CONFIG)
    write_config(folder, CONFIG | change)
    with pytest.raises(ModelError) as raised:
        loaded(folder)
    assert words in str(raised.value)
    assert str(folder) in str(raised.value)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"llama__expert_count": 4}, "llama.expert_count: got 4, allowed: 0"),
        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.type: got 'yarn', allowed: none"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count: got 8, allowed: 16"),
        ({"tokenizer__ggml__model": "llama"}, "ggml.model: got 'llama', allowed: gpt2"),
        ({"tokenizer__ggml__pre": "viking"}, "pre: got 'viking', allowed: gpt-2, smollm"),
        ({"llama__rope__freq_base": math.nan}, "freq_base: got nan, allowed: finite numbers above"),
        ({"llama__rope__freq_base": math.inf}, "freq_base: got inf, allowed: finite numbers above"),
        ({"llama__block_count": None}, "llama.block_count: got None, allowed: integers"),
    ],
)
def test_a_gguf_that_is_no_llama_of_ours_is_refused_by_field_and_value(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", state(), **fields)
    with pytest.raises(ModelError, match=r"tiny\.gguf") as raised:
        loaded(path)
    assert words in str(raised.value)


def test_a_tensor_is_taken_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, state(), shards=2)
    expected = loaded(folder).dense(torch.arange(20))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    # Each file also has what the other is asked for, and something else in it.
    for file in sorted(set(index.values())):
        there = load_file(folder / file)
        others = {name: torch.ones(2) for name in set(index) - set(there)}
        save_file({**there, **others, "nobody.asked": torch.ones(2)}, folder / file)
    assert torch.equal(loaded(folder).dense(torch.arange(20)), expected)
    moved = {name: sorted(set(index.values()))[0] for name in index}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ModelError, match=r"shape: got \(2,\)"):
        loaded(folder)
    moved["lm_head.bias"] = sorted(set(index.values()))[1]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ModelError, match=r"2-of-2\.safetensors: lm_head\.bias: no such tensor"):
        loaded(folder)


def test_a_cut_or_foreign_file_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", state()).read_bytes()
    for size in (0, 3, 30, 400, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            loaded(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"PK\x03\x04" + whole)
    with pytest.raises(ModelError, match="it begins with b'PK"):
        loaded(tmp_path / "cut.gguf")
    folder = write_folder(tmp_path / "hf", state())
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="no safetensors file that can be read"):
        loaded(folder)


def test_a_bias_in_a_file_is_not_ignored(tmp_path: Path) -> None:
    tensors = state() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    with pytest.raises(ModelError, match="a Llama has no such tensor"):
        loaded(write_folder(tmp_path, tensors))


def test_a_model_nobody_has_is_named_with_what_there_is() -> None:
    with pytest.raises(ModelError, match=r"got 'gpt-9', allowed: 1.3m, 8m, smollm2, or the path"):
        find("gpt-9")


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("config.json", CONFIG | {"rope_scaling": [1]}),
    ("config.json", CONFIG | {"rms_norm_eps": "x"}),
    ("config.json", CONFIG | {"intermediate_size": 2**60}),
    ("config.json", CONFIG | {"eos_token_id": [[1]]}),
    ("tokenizer_config.json", {"chat_template": [1]}),
    ("tokenizer_config.json", {"chat_template": 7}),
    ("tokenizer_config.json", {"eos_token": {}}),
    ("model.safetensors.index.json", {"weight_map": [1]}),
    ("model.safetensors.index.json", {"weight_map": {"x": "../hf/model.safetensors"}}),
]


@pytest.mark.parametrize(("file", "content"), WRONG)
def test_json_of_another_shape_is_refused_with_the_model_named(
    tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
    folder = write_folder(tmp_path / "hf", state())
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ModelError, match="hf"):
        load(find(str(folder)), torch.float32, 256, "")


@pytest.mark.parametrize(
    "fields",
    [
        {"general__alignment": 0},
        {"llama__rope__freq_base": "x"},
        {"tokenizer__ggml__bos_token_id": "x"},
        {"tokenizer__chat_template": 7},
    ],
)
def test_a_gguf_with_fields_of_other_types_is_refused(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", state(), **fields)
    with pytest.raises(ModelError, match="tiny"):
        load(find(str(path)), torch.float32, 256, "")
