"""The decode step compiled ahead of time: the same tokens, ordered while serving, kept on disk."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import BLOCK_SIZES, EngineConfig
from engine.exec import build
from engine.exec.build import Workshop, home, library
from engine.exec.capture import CaptureError, Graphs
from engine.exec.compiled import PROMPT_READS_MAX, Compiled
from engine.exec.decode import Chosen
from engine.exec.step import Step
from engine.knobs import RuntimeConfig
from engine.models.llama import SHAPES, Llama, Shape
from tests.engine.conftest import ROOT, bench, request
from tests.engine.test_barrier import Served

TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=64, head_dim=16)
WORKER_S_MAX = 120  # of a process that has nothing to compile, on a machine busy with other tests

needs_compiler = pytest.mark.skipif(
    shutil.which(build.COMPILER) is None, reason=f"no C++ compiler ({build.COMPILER})"
)


def config(cache: Path | None) -> EngineConfig:
    return EngineConfig(model_len_max=512, kv_pool_blocks=256, cache=cache)


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[Llama]:
    """Every engine of this module has this model."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "1.3m", TINY)
        yield Llama(TINY, seed=0, positions=512)


@pytest.fixture(scope="module")
def stored() -> Path:
    """The library of the tiny model, compiled for the first run of this code and kept."""
    command = [sys.executable, "-m", "engine.exec.build", "--shape", json.dumps(asdict(TINY))]
    subprocess.run(command, cwd=ROOT, check=True)
    return library(home(), TINY, 1)


@pytest.fixture
def folder(stored: Path, tmp_path: Path) -> Path:
    """A cache of the test's own, with the library in it."""
    shutil.copy(stored, tmp_path)
    return tmp_path


@pytest.fixture
def compiled(stored: Path, tiny: Llama) -> Compiled:
    return Compiled(stored, tiny)


@needs_compiler
def test_an_engine_serves_before_its_step_is_there_and_takes_it_between_two_steps(
    folder: Path, stored: Path, tiny: Llama
) -> None:
    (folder / stored.name).unlink()
    with (folder / "lock").open("w") as lock:  # what it orders waits, as for another's compiler
        fcntl.flock(lock, fcntl.LOCK_EX)
        subject = Served(config(folder))
        assert isinstance(subject.core.runner.captured, Graphs)
        subject.submit([request(str(i), [70 + i] * 30, 400) for i in range(4)])
        subject.wait(tokens=40)
        shutil.copy(stored, folder)
    try:
        until = time.monotonic() + WORKER_S_MAX
        count = 4
        while not subject.core.runner.steps["compiled"]:
            assert time.monotonic() < until, "the compiled step was not taken"
            subject.wait(ended=count)
            subject.submit([request(str(count), [70 + count % 4] * 30, 400)])
            count += 1
        subject.wait(ended=count)
    finally:
        subject.core.stop()
    assert subject.core.runner.steps["graph"] >= 9
    asked = [request(str(i), [70 + i] * 30, 400) for i in range(4)]
    expected, _ = bench(tiny).generate(asked, RuntimeConfig())
    for name, tokens in subject.tokens.items():
        assert tokens == expected[str(int(name) % 4)]


@needs_compiler
@pytest.mark.parametrize("lengths", [[5], [16, 15], [30, 31, 200], [7] * 9, [400, 300, *[3] * 40]])
def test_any_batch_gives_the_tokens_and_logits_of_the_plain_step(
    tiny: Llama, compiled: Compiled, lengths: list[int]
) -> None:
    answers, logits = [], []
    for captured in (None, compiled):
        rng = np.random.default_rng(0)
        asked = [request(str(i), rng.integers(0, 262, n), 40) for i, n in enumerate(lengths)]
        subject = bench(tiny, blocks=2000)
        subject.runner.captured = captured
        tokens, seen = subject.generate(asked, RuntimeConfig(max_num_seqs=64))
        answers.append(tokens)
        logits.append(torch.cat([torch.stack(seen[one.id]) for one in asked]))
    assert answers[0] == answers[1]
    assert float((logits[0] - logits[1]).abs().max()) <= 1e-5
    assert subject.runner.steps["compiled"] >= 39
    long = sum(n * (n + 1) // 2 for n in lengths) > PROMPT_READS_MAX
    assert subject.runner.steps["eager"] == subject.runner.misses["prompt"] == int(long)
    assert subject.runner.misses["shape"] == 0


@needs_compiler
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_blocks_of_all_sizes_and_layouts_are_read(
    tiny: Llama, compiled: Compiled, block_size: int, interleaved: bool
) -> None:
    prompt = np.random.default_rng(1).integers(0, 262, 100)
    plain, _ = bench(tiny).generate([request("a", prompt, 40)], RuntimeConfig())
    subject = bench(tiny, blocks=80, block_size=block_size, interleaved=interleaved)
    subject.runner.captured = compiled
    tokens, _ = subject.generate([request("a", prompt, 40)], RuntimeConfig())
    assert tokens == plain
    assert subject.runner.steps["compiled"] == 40


@needs_compiler
def test_tokens_are_equal_alone_and_in_a_crowd(tiny: Llama, compiled: Compiled) -> None:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 262, rng.integers(1, 200)) for _ in range(24)]
    crowd = bench(tiny)
    crowd.runner.captured = compiled
    together, _ = crowd.generate(
        [request(str(i), p, 24) for i, p in enumerate(prompts)],
        RuntimeConfig(max_num_seqs=24, max_num_batched_tokens=300, prefill_chunk_tokens=50),
    )
    for i in range(0, 24, 4):
        alone = bench(tiny)
        alone.runner.captured = compiled
        tokens, _ = alone.generate([request("a", prompts[i], 24)], RuntimeConfig())
        assert tokens["a"] == together[str(i)]


@needs_compiler
def test_a_later_engine_finds_it_loses_it_and_gets_it_back(folder: Path) -> None:
    subject = Served(config(folder))
    try:
        runner, faults = subject.core.runner, subject.core.faults
        assert isinstance(runner.captured, Compiled)
        assert subject.core.reading().captured is runner.captured
        faults.inject({"fault": "capture_lost"})
        subject.submit([request("a", [70] * 30, 20)])
        subject.wait(ended=1)
        assert runner.steps["compiled"] == runner.steps["graph"] == 0
        faults.inject({"fault": "none"})
        subject.submit([request("b", [70] * 30, 20)])
        subject.wait(ended=2)
        assert runner.steps["compiled"] == 20
        assert subject.tokens["a"] == subject.tokens["b"]
    finally:
        subject.core.stop()


@needs_compiler
def test_over_kv_kept_otherwise_graphs_are_replayed_until_it_is_as_computed(folder: Path) -> None:
    subject = Served(config(folder))
    try:
        runner = subject.core.runner
        taken = runner.captured
        assert isinstance(taken, Compiled)
        subject.change(kv_layout="interleaved")
        assert runner.captured is taken
        subject.change(kv_dtype="float16_int8")
        assert isinstance(runner.captured, Graphs)
        subject.core.barrier.upgrade(taken)  # as when one is made just now
        assert isinstance(runner.captured, Graphs)
        subject.submit([request("a", [70] * 30, 20)])
        subject.wait(ended=1)
        assert (runner.steps["compiled"], runner.steps["graph"]) == (0, 19)
        subject.change(kv_dtype="float32")
        assert runner.captured is taken
        assert subject.core.barrier.rollbacks == 0
    finally:
        subject.core.stop()


@needs_compiler
def test_a_step_that_computes_something_else_is_not_taken(stored: Path, tiny: Llama) -> None:
    class Off(Compiled):
        def forward(self, step: Step) -> Chosen:
            logits, tokens, rivals = super().forward(step)
            return logits + 1e-4, tokens, rivals

    with pytest.raises(CaptureError, match=r"logits or KV differ by 0\.0001"):
        Off(stored, tiny)


def test_what_cannot_be_loaded_is_told_and_a_graph_is_replayed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library(tmp_path, TINY, 1).write_bytes(b"no library")
    subject = Served(config(tmp_path))
    subject.core.stop()
    assert isinstance(subject.core.runner.captured, Graphs)
    assert "a compiled step is not used" in caplog.text


@needs_compiler
def test_what_cannot_be_compiled_is_told_and_not_tried_again(
    tmp_path: Path, tiny: Llama, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    workshop = Workshop(tmp_path / "file" / "steps", tiny, 1)
    for _ in range(2):
        workshop.order(lambda _: pytest.fail("there is nothing to hand over"))
    until = time.monotonic() + WORKER_S_MAX
    while "the decode step was not compiled: Cannot keep compiled" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.05)
    workshop.close()


@needs_compiler
def test_a_cache_that_cannot_be_written_to_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "engine.exec.build", "--shape", json.dumps(asdict(TINY))],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path / "file"), "XDG_CACHE_HOME": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Cannot keep compiled decode steps in {tmp_path}/file/.cache/trimtab: Not a directory. "
        "Set XDG_CACHE_HOME to a folder that may be written to.\n"
    )


def test_without_a_compiler_a_graph_is_replayed_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    subject = Served(config(tmp_path))
    subject.core.stop()
    assert isinstance(subject.core.runner.captured, Graphs)
    assert subject.core.barrier.workshop.worker is None
    assert "no no-such-compiler: decode steps replay a TorchScript graph" in caplog.text


@needs_compiler
def test_an_engine_that_ends_ends_what_it_ordered(tmp_path: Path) -> None:
    subject = Served(config(tmp_path))
    subject.core.stop()
    worker = subject.core.barrier.workshop.worker
    assert worker is not None
    assert worker.returncode == -signal.SIGKILL


def test_a_library_is_named_by_what_it_depends_on(tmp_path: Path) -> None:
    names = {
        library(tmp_path, TINY, 1),
        library(tmp_path, TINY, 2),
        library(tmp_path, replace(TINY, layers=3), 1),
    }
    assert len(names) == 3
    assert library(tmp_path, TINY, 1) in names


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "engine")
