"""A model as Hugging Face keeps it: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as Backend

from engine.models.chat import ChatTemplate
from engine.models.errors import ModelError
from engine.models.llama import Shape, Weights
from engine.models.tokenizer import Tokenizer
from engine.models.weights import Names, Said, assemble, check_shape, positive
from engine.models.words import FileTokenizer

NAMES = Names(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm="model.layers.{}.input_layernorm.weight",
    query="model.layers.{}.self_attn.q_proj.weight",
    key="model.layers.{}.self_attn.k_proj.weight",
    value="model.layers.{}.self_attn.v_proj.weight",
    out="model.layers.{}.self_attn.o_proj.weight",
    feed_norm="model.layers.{}.post_attention_layernorm.weight",
    gate="model.layers.{}.mlp.gate_proj.weight",
    up="model.layers.{}.mlp.up_proj.weight",
    down="model.layers.{}.mlp.down_proj.weight",
    halves=True,
    unread=("rotary_emb.inv_freq",),  # older files have it; it follows from rope_theta
)

# What a Llama of another making may have in its config.json; anything else is another computation.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
    "num_local_experts": (None, 0, 1),
    "sliding_window": (None,),
}
MODEL_TYPES = ("llama",)
ROPE_TYPES = ("default", "linear", "llama3")


class HFFolder:
    """A folder, or one .safetensors file of it. Raises ModelError for what it does not support."""

    def __init__(self, path: Path) -> None:
        self.folder = path if path.is_dir() else path.parent
        self.only = None if path.is_dir() else path
        self.name = self.folder.resolve().name
        self.config_file = self.folder / "config.json"
        self.config = _object(self.config_file)
        kind = self.config.get("model_type")
        if kind not in MODEL_TYPES:
            raise ModelError.of(self.config_file, "model_type", kind, MODEL_TYPES)
        for field, allowed in ALLOWED.items():
            value = self.config.get(field, allowed[0])
            if value not in allowed:
                raise ModelError.of(self.config_file, field, value, allowed)
        # transformers 5 keeps all of it in rope_parameters, those before it in two fields.
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        self.rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if self.rope_type not in ROPE_TYPES:
            raise ModelError.of(self.config_file, "rope_type", self.rope_type, ROPE_TYPES)
        self.rope = rope
        heads = self._number("num_attention_heads")
        hidden = self._number("hidden_size")
        self.shape = Shape(
            layers=self._number("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._number("num_key_value_heads", heads),
            feed_forward=self._number("intermediate_size"),
            head_dim=self._number("head_dim", hidden // max(heads, 1)),
            vocabulary=self._number("vocab_size"),
            rope_theta=self._positive(
                "rope_theta", rope.get("rope_theta", self.config.get("rope_theta")), 10_000.0
            ),
            norm_eps=self._positive("rms_norm_eps", self.config.get("rms_norm_eps"), 1e-6),
        )
        self.positions = self._number("max_position_embeddings", 2048)
        check_shape(self.shape, self.config_file)

    def weights(self, dtype: torch.dtype, said: Said) -> Weights:
        tensors = _Safetensors(self._files())
        if NAMES.head not in tensors.names() and not self.config.get("tie_word_embeddings"):
            raise ModelError(
                f"{tensors.file}: {NAMES.head}: no such tensor, and {self.config_file} does not "
                "say tie_word_embeddings"
            )
        weights = assemble(self.shape, tensors, NAMES, dtype, said)
        return weights._replace(rope_factors=self._rope_factors())

    def tokenizer(self) -> Tokenizer:
        file = self.folder / "tokenizer.json"
        described = _object(file)
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # of Rust: a bare Exception
            raise ModelError(f"{file}: no tokenizer that works: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        options_file = self.folder / "tokenizer_config.json"
        options = _object(options_file) if options_file.exists() else {}
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (value := options.get(name)) is not None
        }
        eos = set(self._eos())
        if (end := backend.token_to_id(special.get("eos_token", ""))) is not None:
            eos.add(end)
        return FileTokenizer(
            backend,
            where=str(file),
            decoder=described.get("decoder"),
            vocabulary=self.shape.vocabulary,
            eos=eos,
            chat=self._chat(options, special, options_file),
        )

    def _chat(
        self, options: dict[str, Any], special: dict[str, str], file: Path
    ) -> ChatTemplate | None:
        template = options.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {each["name"]: each["template"] for each in template}.get("default")
        own = self.folder / "chat_template.jinja"
        if own.exists():
            template, file = own.read_text(), own
        return ChatTemplate(template, special, str(file)) if template else None

    def _eos(self) -> list[int]:
        generation = self.folder / "generation_config.json"
        said = _object(generation) if generation.exists() else {}
        ids = said.get("eos_token_id", self.config.get("eos_token_id"))
        return [ids] if isinstance(ids, int) else list(ids or [])

    def _files(self) -> dict[str, Path] | Path:
        """One file, or which file has which tensor."""
        if self.only is not None:
            return self.only
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            placed = _object(index).get("weight_map") or {}
            for file in placed.values():
                if Path(file).name != file:  # not what lies elsewhere
                    raise ModelError.of(index, "weight_map", file, "names of files beside it")
            return {name: self.folder / file for name, file in placed.items()}
        files = sorted(self.folder.glob("*.safetensors"))
        if len(files) != 1:
            raise ModelError.of(
                self.folder,
                "*.safetensors",
                [file.name for file in files],
                "one file, or several with model.safetensors.index.json",
            )
        return files[0]

    def _rope_factors(self) -> torch.Tensor | None:
        """What divides the frequencies (transformers' modeling_rope_utils has the formulas)."""
        if self.rope_type == "default":
            return None
        pairs = self.shape.head_dim // 2
        factor = self._rope("factor")
        if self.rope_type == "linear":
            return torch.full((pairs,), factor)
        low, high = self._rope("low_freq_factor"), self._rope("high_freq_factor")
        trained = self._rope("original_max_position_embeddings")
        frequency = self.shape.rope_theta ** (-torch.arange(pairs).double() / pairs)
        turns = trained * frequency / (2 * math.pi)  # within what it was trained for first
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).float()

    def _rope(self, field: str) -> float:
        return self._positive(f"rope {field}", self.rope.get(field))

    def _positive(self, field: str, value: Any, default: float | None = None) -> float:
        value = default if value is None else value
        return positive(self.config_file, field, value)

    def _number(self, field: str, default: int | None = None) -> int:
        value = self.config.get(field)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ModelError.of(self.config_file, field, value, "integers from 1 on")
        return value


class _Safetensors:
    """The tensors of one file, or of several by an index; all are mapped, none is copied."""

    def __init__(self, files: Path | dict[str, Path]) -> None:
        paths = set(files.values()) if isinstance(files, dict) else {files}
        self.file = str(files if isinstance(files, Path) else min(paths, default=Path()).parent)
        self.place: dict[str, Any] = {}
        for path in sorted(paths):
            try:
                opened = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{path}: no safetensors file that can be read: {error}"
                ) from error
            there = opened.keys()  # type: ignore[no-untyped-call]
            if isinstance(files, dict):
                # What the index places elsewhere, or nowhere, is not what this file says it is.
                asked = {name for name, place in files.items() if place == path}
                if missing := sorted(asked.difference(there)):
                    raise ModelError(f"{path}: {missing[0]}: no such tensor, the index says so")
                there = asked
            self.place |= dict.fromkeys(there, opened)

    def names(self) -> Collection[str]:
        return self.place.keys()

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.place[name].get_tensor(name)
        return tensor


def _object(file: Path) -> dict[str, Any]:
    """A file with a JSON object; raises ModelError."""
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file, and the model needs it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: no JSON that can be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file}: want a JSON object")
    return found
