"""What follows from a model before any of its weights is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.models import loader
from engine.models.errors import ModelError
from engine.models.llama import Shape
from engine.models.loader import BuiltIn, Packaged, compute_dtype, find, length_max, pool_blocks
from tests.engine.models.files import state, write_folder

LARGE = Shape(layers=30, hidden=576, heads=9, kv_heads=3, feed_forward=1536, head_dim=64)


@pytest.mark.parametrize(
    ("shape", "dtype", "length", "blocks"),
    [
        (None, torch.float32, 2048, 4096),
        (LARGE, torch.float32, 2048, 1456),
        (LARGE, torch.bfloat16, 2048, 2912),
        (Shape(3000, 64, 4, 4, 96, 128), torch.float32, 8192, 512),
    ],
)
def test_a_pool_is_4096_blocks_or_a_gibibyte_and_holds_one_sequence(
    shape: Shape | None, dtype: torch.dtype, length: int, blocks: int
) -> None:
    source = BuiltIn("1.3m", 0)
    source.shape = shape or source.shape
    assert pool_blocks(source, dtype, length, 16) == blocks


def test_texts_are_as_long_as_the_model_goes_or_less(tmp_path: Path) -> None:
    source = find(str(write_folder(tmp_path, state())))
    assert length_max(source, None) == 256
    assert length_max(source, 100) == 100
    with pytest.raises(ModelError, match="model_len_max: got 257, allowed: 1 to 256"):
        length_max(source, 257)
    assert length_max(BuiltIn("8m", 0), 8192) == 8192


def test_what_was_asked_for_is_computed_in_and_built_in_models_stay_float32() -> None:
    assert compute_dtype("bfloat16", "1.3m")[0] == torch.bfloat16
    assert compute_dtype("float32", "x.gguf")[0] == torch.float32
    assert compute_dtype("auto", "8m")[0] == torch.float32
    flags = Path("/proc/cpuinfo").read_text()
    wanted = any(f" {flag}" in flags for flag in ("avx512_bf16", "amx_bf16"))
    dtype, why = compute_dtype("auto", "x.gguf")
    assert dtype == (torch.bfloat16 if wanted else torch.float32)
    assert "this CPU has" in why


def test_a_package_that_is_not_there_is_named_with_its_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = Packaged("no_such_module", "x.gguf", "pip install no-such-module")
    monkeypatch.setitem(loader.PACKAGED, "smollm2", missing)
    with pytest.raises(ModelError, match="'smollm2' is not installed: pip install no-such-module"):
        find("smollm2")
