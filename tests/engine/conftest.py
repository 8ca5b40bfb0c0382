"""Engines for the tests: the scheduler with its runner in this process, or a whole process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

with warnings.catch_warnings():
    # torch warns about a package that is installed beside it; that is not ours to fail on.
    warnings.simplefilter("ignore")
    import torch

from engine.exec.capture import Graphs, capture
from engine.exec.rows import Rows
from engine.exec.runner import Runner
from engine.knobs import RuntimeConfig
from engine.kv.contiguous import ALLOCATORS
from engine.kv.formats import Format
from engine.kv.pool import KVPool
from engine.kv.prefix import PrefixCache
from engine.kv.tier import HostTier
from engine.models.llama import SHAPES, Llama
from engine.models.tokenizer import Tokenizer
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler

CONFIGS = st.builds(
    RuntimeConfig,
    max_num_seqs=st.integers(1, 16),
    max_num_batched_tokens=st.integers(64, 1024),
    prefill_chunk_tokens=st.integers(32, 256),
)
ROOT = Path(__file__).parents[2]
START_S_MAX = 60


@pytest.fixture(scope="session")
def model() -> Llama:
    torch.set_num_threads(1)
    return Llama(SHAPES["1.3m"], seed=0, positions=512)


@pytest.fixture(scope="session")
def graphs(model: Llama) -> Graphs:
    return capture(model, 16)


@dataclass
class Bench:
    """A scheduler and a runner, stepped by hand."""

    scheduler: Scheduler
    runner: Runner

    def generate(
        self,
        requests: list[Request],
        config: RuntimeConfig,
        between: Callable[[], object] = lambda: None,
    ) -> tuple[dict[str, list[int]], dict[str, list[torch.Tensor]]]:
        """Runs all requests to their end: tokens and logits of each. `between` any two steps."""
        for request in requests:
            self.scheduler.add(request)
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        logits: dict[str, list[torch.Tensor]] = {request.id: [] for request in requests}
        while (plan := self.scheduler.plan(config, 1.0)) is not None:
            conserved(self.scheduler)
            sampled, rows = self.runner.forward(plan)
            outcome = self.scheduler.commit(plan, sampled, 1.0, 2.0)
            for request, token, row in zip(outcome.requests, outcome.tokens, rows, strict=True):
                tokens[request.id].append(token)
                logits[request.id].append(row.clone())
            between()
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.scheduler.allocator.allocated_blocks == 0
        return tokens, logits


def conserved(scheduler: Scheduler) -> None:
    """Every block is in one of four states, and is referred to as often as the tables say."""
    allocator, rows = scheduler.allocator, scheduler.rows
    taken, free = allocator.allocated_blocks, allocator.free_blocks
    rest = allocator.cached_blocks + allocator.withheld_blocks
    assert taken + free + rest == allocator.total
    owned = [
        block for row in range(len(rows.owned)) for block in rows.tables[row, : rows.owned[row]]
    ]
    counts = Counter(map(int, owned))
    assert len(counts) == taken
    assert all(allocator.references(block) == count for block, count in counts.items())


def bench(
    model: Llama,
    *,
    blocks: int = 512,
    block_size: int = 16,
    graphs: Graphs | None = None,
    words: Tokenizer | None = None,
    caching: bool = False,
    allocator: str = "paged",
    tier_bytes: int = 0,
    kept: Format | None = None,
    interleaved: bool = False,
) -> Bench:
    shape = model.shape
    rows = Rows(rows=64, model_len_max=512, block_size=block_size)
    pool = KVPool(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        blocks=blocks,
        block_size=block_size,
        dtype=model.dtype,
        kept=kept,
        interleaved=interleaved,
    )
    runner = Runner(model, pool, rows)
    runner.captured = graphs
    prefixes = PrefixCache(ALLOCATORS[allocator](blocks), block_size, on=caching)
    subject = Bench(Scheduler(rows, prefixes, words), runner)
    subject.scheduler.tier = HostTier(
        lambda: runner.pool,
        tier_bytes,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=model.dtype,
    )
    return subject


def request(name: str, tokens: np.ndarray | list[int], max_tokens: int) -> Request:
    return Request(
        id=name,
        tokens=np.array(tokens, np.int64),
        max_tokens=max_tokens,
        arrived=0.5,
        ignore_eos=True,
    )


def as_dense(model: Llama, one: Request, tokens: list[int], logits: list[torch.Tensor]) -> None:
    """What was served of a request that ended is what the dense reference says."""
    prompt = one.tokens[: one.prompt_tokens]
    assert len(tokens) == one.max_tokens
    dense = model.dense(torch.from_numpy(np.concatenate([prompt, tokens])))
    expected = dense[one.prompt_tokens - 1 : -1]
    assert (torch.stack(logits) - expected).abs().max().item() <= 1e-5
    assert tokens == expected.argmax(dim=1).tolist()


class EngineProcess:
    """`python -m engine` on a free port; its steps are not compiled."""

    command: tuple[str, ...] = ("-m", "engine", "--cache", "")

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *self.command, "--port", "0", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        if " on http://" not in self.ready:
            _, errors = self.process.communicate(timeout=START_S_MAX)
            raise AssertionError(f"it did not start: {self.ready}{errors}")
        self.url = self.ready.split(" on ")[1].split(",")[0]

    def stop(self, sig: int = signal.SIGTERM) -> int:
        self.process.send_signal(sig)
        _, self.errors = self.process.communicate(timeout=30)
        return self.process.returncode


class RouterProcess(EngineProcess):
    """`python -m engine.router` on a free port."""

    command = ("-m", "engine.router")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One default engine for the tests of a module."""
    process = EngineProcess("--state", str(tmp_path_factory.mktemp("engine")))
    yield process
    process.stop()
