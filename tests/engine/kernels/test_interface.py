"""A cache or a batch that cannot be is refused where it is made; Triton waits to be asked."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine.kernels.backends import TorchBackend, TritonBackend, backend
from engine.kernels.interface import Batch, PagedKV
from engine.kernels.swiglu import swiglu
from tests.engine.conftest import ROOT
from tests.engine.kernels.conftest import close, drawn, paged


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_batch_says_where_each_new_token_goes() -> None:
    batch = Batch.of([2, 0, 1], [9, 5, 1], np.array([[3, 7], [1, 0], [2, 0]]), 8)
    assert batch.starts.tolist() == [0, 2, 2, 3]
    assert batch.slots.tolist() == [3 * 8 + 7, 7 * 8, 2 * 8]
    assert (batch.queries_max, batch.context_max, batch.sequences) == (2, 9, 3)


@pytest.mark.parametrize(("queries", "contexts"), [([3], [2]), ([-1], [2]), ([1], [17])])
def test_a_sequence_that_cannot_be_is_named(queries: list[int], contexts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"sequence 0: got .* in a table for 16, allowed: 0 <= "):
        Batch.of(queries, contexts, np.zeros((1, 2), int), 8)


def test_every_sequence_needs_its_row_of_the_tables() -> None:
    with pytest.raises(ValueError, match=r"tables: got shape \(1, 2\) for 2 queries and 2 "):
        Batch.of([1, 1], [1, 1], np.zeros((1, 2), int), 8)


def test_a_cache_whose_parts_do_not_fit_together_is_refused() -> None:
    keys = drawn(2, 3, 8, 4)
    with pytest.raises(ValueError, match=r"values: got float32 \(2, 3, 8, 5\), allowed: "):
        PagedKV(keys, drawn(2, 3, 8, 5))
    with pytest.raises(ValueError, match=r"values: got float32 .* allowed: int8 of shape"):
        PagedKV(keys, keys, drawn(2, 3, 8))
    with pytest.raises(ValueError, match="values: got int8"):
        PagedKV(keys, keys.to(torch.int8))
    with pytest.raises(ValueError, match="block_size: got 12, allowed: 8, 16, 32, 64, 128, 256"):
        PagedKV(drawn(2, 3, 12, 4), drawn(2, 3, 12, 4))
    with pytest.raises(ValueError, match="head_dim: got 300, allowed: 1 to 256"):
        PagedKV(drawn(1, 1, 8, 300), drawn(1, 1, 8, 300))


def test_both_backends_store_and_answer_alike() -> None:
    answers = []
    for name in ("torch", "triton"):
        query, kv, batch = paged([1, 5], [20, 9])
        one = backend(name)
        assert one.name == name
        one.store(kv, batch, drawn(6, 2, 32, seed=8), drawn(6, 2, 32, seed=9))
        answers.append(one.prefill(query, kv, batch, 0.2))
        query, kv, batch = paged([1, 1], [20, 9])
        answers.append(one.decode(query, kv, batch, 0.2))
    close(answers[2], answers[0])
    close(answers[3], answers[1])
    assert isinstance(backend("torch"), TorchBackend)
    assert isinstance(backend("triton"), TritonBackend)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="attention backend: got 'cuda', allowed: torch, triton"):
        backend("cuda")


def test_neither_serving_nor_the_torch_backend_imports_triton() -> None:
    code = (
        "import sys, engine.server, engine.exec.kernel_step as k; k.KernelStep('torch'); "
        "sys.exit('triton' in sys.modules)"
    )
    assert python(code).returncode == 0


def test_without_triton_the_triton_backend_says_what_to_install() -> None:
    code = "import sys; sys.modules['triton'] = None; import engine.kernels.backends as b; "
    said = python(code + "b.backend('triton')").stderr
    assert "Triton kernels need triton==3.7.1: pip install '.[kernels]'" in said


def test_without_a_gpu_and_the_interpreter_a_launch_says_how_to_have_one() -> None:
    code = "import torch; from engine.kernels.swiglu import swiglu; swiglu(torch.zeros(2, 4))"
    said = python(code, TRITON_INTERPRET="0").stderr
    assert "got tensors on cpu, allowed: a CUDA device, or any with TRITON_INTERPRET=1" in said


def test_interpreting_cannot_begin_after_triton_was_imported() -> None:
    code = (
        "import os, triton; os.environ['TRITON_INTERPRET'] = '1'; import torch; "
        "from engine.kernels.swiglu import swiglu; swiglu(torch.zeros(2, 4))"
    )
    said = python(code, TRITON_INTERPRET="0").stderr
    assert "TRITON_INTERPRET changed after Triton was imported: set it before" in said


def test_tensors_on_two_devices_are_refused() -> None:
    _, kv, batch = paged([1], [3])
    with pytest.raises(ValueError, match="store: got tensors on cpu, meta, allowed: one device"):
        TritonBackend().store(kv, batch, *(torch.empty(1, 2, 32, device="meta"),) * 2)
    assert swiglu(drawn(0, 4)).shape == (0, 2)
