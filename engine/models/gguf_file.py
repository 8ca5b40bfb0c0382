"""A model as llama.cpp keeps it: one GGUF file with numbers, words and (quantised) weights.

The header is read here, not with the `gguf` package's GGUFReader: that makes some arrays for every
word and every merge, which took 5.5 s and 195 MB for SmolLM2's 49,152 words. What is hard, the
quantised formats, is the package's. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from engine.models.chat import ChatTemplate
from engine.models.errors import ModelError
from engine.models.llama import Shape, Weights
from engine.models.tokenizer import Tokenizer
from engine.models.weights import Names, Said, assemble, check_shape, positive
from engine.models.words import FileTokenizer

NAMES = Names(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    attention_norm="blk.{}.attn_norm.weight",
    query="blk.{}.attn_q.weight",
    key="blk.{}.attn_k.weight",
    value="blk.{}.attn_v.weight",
    out="blk.{}.attn_output.weight",
    feed_norm="blk.{}.ffn_norm.weight",
    gate="blk.{}.ffn_gate.weight",
    up="blk.{}.ffn_up.weight",
    down="blk.{}.ffn_down.weight",
    halves=False,
    factors="rope_freqs.weight",
)

MAGIC, VERSIONS = b"GGUF", (2, 3)
DIMENSIONS_MAX = 4
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

ALLOWED: dict[str, tuple[Any, ...]] = {
    "llama.expert_count": (0,),
    "llama.rope.scaling.type": ("none",),
    "tokenizer.ggml.model": ("gpt2",),
}

# How a text is cut before merging, by `tokenizer.ggml.pre`: (pattern, None for GPT-2's; digits one
# by one; whole words before merges; a beginning, unless the file says otherwise).
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "gpt-2": (None, False, False, False),
    "smollm": (None, True, False, False),
    "llama-bpe": (LLAMA3, False, True, True),
}
CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


class Place(NamedTuple):
    """Where a tensor lies: `shape` as (out, in), `at` in bytes from the beginning of the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    at: int


class GGUFFile:
    """One file of a Llama. Raises ModelError for what it does not support."""

    def __init__(self, path: Path) -> None:
        self.open(path)
        self.shape, self.positions = self._described()

    def open(self, path: Path) -> None:
        """Maps the file, and reads its header."""
        self.path, self.file, self.name = path, str(path), path.stem
        try:
            with path.open("rb") as file:
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self.fields, self.places = _Header(self.bytes).read()
        except (OSError, ValueError, struct.error, RecursionError) as error:
            raise ModelError(f"{path}: no GGUF file that can be read: {error}") from error

    def _described(self) -> tuple[Shape, int]:
        path = self.path
        kind = self._field("general.architecture", None)
        if kind != "llama":
            raise ModelError.of(path, "general.architecture", kind, ["llama"])
        for field, allowed in ALLOWED.items():
            if (value := self.fields.get(field, allowed[0])) not in allowed:
                raise ModelError.of(path, field, value, allowed)
        heads = self._number("llama.attention.head_count")
        hidden = self._number("llama.embedding_length")
        head_dim = self._number("llama.attention.key_length", hidden // heads)
        for field in ("llama.rope.dimension_count", "llama.attention.value_length"):
            if (value := self._number(field, head_dim)) != head_dim:
                raise ModelError.of(path, field, value, [head_dim])
        if NAMES.embedding not in self.places:
            raise ModelError(f"{path}: {NAMES.embedding}: no such tensor")
        shape = Shape(
            layers=self._number("llama.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._number("llama.attention.head_count_kv", heads),
            feed_forward=self._number("llama.feed_forward_length"),
            head_dim=head_dim,
            vocabulary=self.places[NAMES.embedding].shape[0],
            rope_theta=self._positive("llama.rope.freq_base", 10_000.0),
            norm_eps=self._positive("llama.attention.layer_norm_rms_epsilon", 1e-5),
        )
        check_shape(shape, path)
        return shape, self._number("llama.context_length")

    def weights(self, dtype: torch.dtype, said: Said) -> Weights:
        return assemble(self.shape, self, NAMES, dtype, said)

    def names(self) -> Collection[str]:
        return self.places.keys()

    def read(self, name: str) -> torch.Tensor:
        kind, shape, at = self.places[name]
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        size = prod(shape) // per_block * block_bytes
        if shape[-1] % per_block or at + size > len(self.bytes):
            raise ModelError(f"{self.path}: {name}: the file ends before its end, or cuts a block")
        if (plain := PLAIN.get(kind.name)) is not None:
            raw = torch.frombuffer(self.bytes, dtype=plain, count=prod(shape), offset=at)
            return raw.view(shape)
        if kind.name not in QUANTISED:
            raise ModelError.of(self.path, f"{name}: type", kind.name, [*PLAIN, *QUANTISED])
        blocks = np.frombuffer(self.bytes, np.uint8, size, at).reshape(*shape[:-1], -1)
        return torch.from_numpy(dequantize(blocks, kind))

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE from the words and merges in the file."""
        words: list[str] = self._field("tokenizer.ggml.tokens", [])
        cut = self._field("tokenizer.ggml.pre", "gpt-2")
        if cut not in CUTS:
            raise ModelError.of(self.path, "tokenizer.ggml.pre", cut, CUTS)
        pattern, digits, whole_words, begins = CUTS[cut]
        merges = [tuple(each.split(" ", 1)) for each in self._field("tokenizer.ggml.merges", [])]
        vocabulary = {word: i for i, word in enumerate(words)}
        try:
            backend = Backend(models.BPE(vocabulary, merges, ignore_merges=whole_words))
        except Exception as error:  # of Rust: a bare Exception
            raise ModelError(f"{self.path}: tokenizer.ggml.merges: {error}") from error
        steps: list[pre_tokenizers.PreTokenizer] = []
        if digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if pattern:
            steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.decoder = decoders.ByteLevel()
        kinds = self._field("tokenizer.ggml.token_type", [])
        backend.add_tokens(
            [
                AddedToken(word, special=kind == CONTROL, normalized=False)
                for word, kind in zip(words, kinds, strict=False)
                if kind in (CONTROL, USER_DEFINED)
            ]
        )
        steering = {
            f"{name}_token": words[token]
            for name in ("bos", "eos")
            if 0 <= (token := self._field(f"tokenizer.ggml.{name}_token_id", -1)) < len(words)
        }
        if "bos_token" in steering and self._field("tokenizer.ggml.add_bos_token", begins):
            begin = steering["bos_token"]
            backend.post_processor = processors.TemplateProcessing(
                single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
            )
        template = self.fields.get("tokenizer.chat_template")
        ends = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        return FileTokenizer(
            backend,
            where=self.file,
            decoder={"type": "ByteLevel"},
            vocabulary=self.shape.vocabulary,
            eos=[self.fields[field] for field in ends if field in self.fields],
            chat=ChatTemplate(template, steering, self.file) if template else None,
        )

    def _field(self, name: str, default: Any) -> Any:
        return self.fields.get(name, default)

    def _positive(self, field: str, default: float) -> float:
        return positive(self.path, field, self.fields.get(field, default))

    def _number(self, field: str, default: int | None = None) -> int:
        value = self.fields.get(field, default)
        if not isinstance(value, int) or value < 1:
            raise ModelError.of(self.path, field, value, "integers from 1 on")
        return value


class _Header:
    """Reads a file's beginning, front to back. Raises ValueError or struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, Place]]:
        """What the file says of the model, and where its tensors lie."""
        if (magic := self.data[:4]) != MAGIC:
            raise ValueError(f"it begins with {magic!r}, not with {MAGIC!r}")
        self.at = 4
        if (version := self.scalar("I")) not in VERSIONS:
            raise ValueError(f"version: got {version}, allowed: {VERSIONS}")
        tensors, fields = self.scalar("Q"), self.scalar("Q")
        said = {}
        for _ in range(fields):
            name = self.string()
            said[name] = self.value(self.scalar("I"))
        raw = [self.tensor() for _ in range(tensors)]
        alignment = said.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment: got {alignment!r}, allowed: integers from 1 on")
        begin = -(-self.at // alignment) * alignment
        return said, {name: place._replace(at=begin + place.at) for name, place in raw}

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        text = self.data[self.at : self.at + size]
        if len(text) != size:
            raise ValueError("it ends within a text")
        self.at += size
        return text.decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            kind, size = self.scalar("I"), self.scalar("Q")
            if kind not in SCALARS:
                return [self.value(kind) for _ in range(size)]
            width = struct.calcsize("<" + SCALARS[kind])
            if self.at + width * size > len(self.data):
                raise ValueError("it ends within a list")
            values = struct.unpack_from(f"<{size}{SCALARS[kind]}", self.data, self.at)
            self.at += width * size
            return list(values)
        if kind not in SCALARS:
            raise ValueError(f"type of a field: got {kind}, allowed: 0 to 12")
        return self.scalar(SCALARS[kind])

    def tensor(self) -> tuple[str, Place]:
        name, count = self.string(), self.scalar("I")
        if not 1 <= count <= DIMENSIONS_MAX:
            raise ValueError(f"{name}: dimensions: got {count}, allowed: 1 to {DIMENSIONS_MAX}")
        innermost_first = [self.scalar("Q") for _ in range(count)]
        if 0 in innermost_first:
            raise ValueError(f"{name}: it has no numbers")
        kind = GGMLQuantizationType(self.scalar("I"))
        return name, Place(kind, tuple(reversed(innermost_first)), self.scalar("Q"))
