"""A tiny Llama in files, and what it computes by a reference of its own.

The reference follows Hugging Face's modeling_llama: heads are turned by halves, and nothing is
joined or folded in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.models.words import byte_alphabet

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or")]
VOCABULARY = [*SPECIAL, *sorted(byte_alphabet()), *(a + b for a, b in MERGES)]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,  # more than words: as files pad it
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
State = dict[str, torch.Tensor]


def state(config: dict[str, Any] = CONFIG, seed: int = 0) -> State:
    """float32 weights by Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, feed, dim = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    query, key = (config[f"num_{n}_heads"] * dim for n in ("attention", "key_value"))

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(hidden, generator=generator)

    found = {"model.embed_tokens.weight": torch.randn(300, hidden, generator=generator)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        found |= {
            at + "input_layernorm.weight": norm(),
            at + "self_attn.q_proj.weight": draw(query, hidden),
            at + "self_attn.k_proj.weight": draw(key, hidden),
            at + "self_attn.v_proj.weight": draw(key, hidden),
            at + "self_attn.o_proj.weight": draw(hidden, query),
            at + "post_attention_layernorm.weight": norm(),
            at + "mlp.gate_proj.weight": draw(feed, hidden),
            at + "mlp.up_proj.weight": draw(feed, hidden),
            at + "mlp.down_proj.weight": draw(hidden, feed),
        }
    found["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = draw(300, hidden)
    return found


def llama3_frequencies(frequency: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Case by case, as the paper's code has it."""
    scaled = []
    for each in frequency.tolist():
        wave = 2 * np.pi / each
        trained, low, high = (
            rope[n]
            for n in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        if wave < trained / high:
            scaled.append(each)
        elif wave > trained / low:
            scaled.append(each / rope["factor"])
        else:
            smooth = (trained / wave - low) / (high - low)
            scaled.append((1 - smooth) * each / rope["factor"] + smooth * each)
    return torch.tensor(scaled, dtype=torch.float64)


def reference(state: State, config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """(tokens, vocabulary) float32."""
    state = {name: tensor.float() for name, tensor in state.items()}
    dim, count = config["head_dim"], len(tokens)
    frequency = config["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
    if rope := config.get("rope_scaling"):
        frequency = llama3_frequencies(frequency, rope)
    angle = torch.outer(torch.arange(count).double(), frequency).repeat(1, 2)
    cosine, sine = angle.cos().float(), angle.sin().float()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return x * scale * state[name]

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ state[name].t()).view(count, -1, dim).transpose(0, 1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat([-second, first], -1) * sine

    x = state["model.embed_tokens.weight"][tokens]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        query = turned(heads(h, at + "self_attn.q_proj.weight"))
        key = turned(heads(h, at + "self_attn.k_proj.weight")).repeat_interleave(group, 0)
        value = heads(h, at + "self_attn.v_proj.weight").repeat_interleave(group, 0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined = mixed.transpose(0, 1).reshape(count, -1)
        x = x + joined @ state[at + "self_attn.o_proj.weight"].t()
        h = norm(x, at + "post_attention_layernorm.weight")
        gate = F.silu(h @ state[at + "mlp.gate_proj.weight"].t())
        x = x + (gate * (h @ state[at + "mlp.up_proj.weight"].t())) @ (
            state[at + "mlp.down_proj.weight"].t()
        )
    head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    return norm(x, "model.norm.weight") @ head.t()


def bpe() -> Tokenizer:
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(VOCABULARY)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    return backend


def write_folder(
    folder: Path,
    tensors: State,
    config: dict[str, Any] = CONFIG,
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Path:
    """What `save_pretrained` would leave; returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        names = sorted(tensors)
        placed = {n: f"model-{i % shards + 1}-of-{shards}.safetensors" for i, n in enumerate(names)}
        for file in set(placed.values()):
            save_file({n: tensors[n] for n in names if placed[n] == file}, folder / file)
        index = {"metadata": {}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    bpe().save(str(folder / "tokenizer.json"))
    options = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def gguf_name(name: str) -> str:
    for theirs, other in GGUF_NAMES.items():
        name = name.replace(theirs, other)
    return name


def by_neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter writes the rows of query and key."""
    rows, width = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, width)
    return halves.swapaxes(1, 2).reshape(rows, width)


def rounded(tensors: State, kind: gguf.GGMLQuantizationType) -> State:
    """The weights as they are after a way through that type; norms stay float32."""
    return {
        name: tensor
        if tensor.dim() == 1
        else torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind).copy())
        for name, tensor in tensors.items()
    }


def write_gguf(
    path: Path,
    tensors: State,
    config: dict[str, Any] = CONFIG,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **fields: Any,
) -> Path:
    """`fields`: metadata that is to be otherwise, with __ for a dot; None leaves it out."""
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    } | {name.replace("__", "."): value for name, value in fields.items()}
    for name, value in numbers.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_string(name, value)
    writer.add_token_list(VOCABULARY)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control] * len(SPECIAL) + [normal] * (len(VOCABULARY) - len(SPECIAL)))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    for name, tensor in tensors.items():
        for part, heads in (("q_proj", "attention"), ("k_proj", "key_value")):
            if part in name:
                tensor = by_neighbours(tensor, config[f"num_{heads}_heads"])
        if tensor.dim() == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), tensor.numpy())
        else:
            raw = quantize(tensor.numpy(), kind)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
