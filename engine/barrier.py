"""Barrier knobs: what they need is built beside the running steps and exchanged between two.

    prepare   off the step thread: capture graphs, allocate the pool; may refuse
    swap      on the step thread: move the running requests' KV, exchange, prove with a canary
    restore   the proof failed: everything stands as before, the old pool was only read

A request that runs meanwhile notices nothing but one longer gap between two tokens.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import EngineConfig
from engine.exec.build import Workshop
from engine.exec.capture import Captured, CaptureError, Graphs, capture
from engine.exec.compiled import Compiled
from engine.exec.reblock import Layout, blocks_needed, reblock
from engine.exec.runner import Runner
from engine.knobs import NotPossible, RuntimeConfig
from engine.kv.allocator import PagedAllocator
from engine.kv.pool import CANARY_TOKENS, KVPool
from engine.kv.prefix import PrefixCache
from engine.models.llama import Llama
from engine.reconfig import RuntimeStore
from engine.sched.request import Request
from engine.sched.scheduler import Chunk, Plan, Scheduler

log = logging.getLogger("engine")


class ProofFailed(RuntimeError):
    """After an exchange, a step did not compute what it should."""


def new_pool(config: EngineConfig, model: Llama, block_size: int) -> KVPool:
    """An empty pool of the configured size in blocks of `block_size`. Raises NotPossible."""
    shape, blocks = model.shape, config.kv_pool_tokens // block_size
    one = -(-config.model_len_max // block_size)
    if blocks < one:
        raise NotPossible(
            "does_not_fit",
            "kv_block_size",
            f"kv_block_size: a pool of {config.kv_pool_tokens} tokens has {blocks} blocks of "
            f"{block_size}, and one sequence of {config.model_len_max} tokens needs {one}",
        )
    try:
        return KVPool(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            blocks=blocks,
            block_size=block_size,
            dtype=model.dtype,
        )
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        raise NotPossible("does_not_fit", "kv_block_size", f"kv_block_size: {error}") from error


class Barrier:
    """Owns what barrier knobs exchange. `prepare` from any thread, one at a time."""

    def __init__(
        self, config: EngineConfig, runner: Runner, scheduler: Scheduler, runtime: RuntimeStore
    ) -> None:
        self.config = config
        self.runner = runner
        self.scheduler = scheduler
        self.runtime = runtime
        self.workshop = Workshop(config.cache, runner.model, config.threads)
        self.rollbacks = 0
        self.swap_s = 0.0  # how long the last swap held up the steps
        self.unsupported: dict[str, str] = {}  # knob → why this device cannot
        self.capture_lost = False
        self.canary = Canary(runner)

    def start(self, running: RuntimeConfig) -> None:
        """Captures, if that is asked for, before the first step. Without it the engine serves."""
        self.scheduler.prefixes.turn(running.prefix_cache == "on")
        if running.graph_capture == "on":
            try:
                self.runner.captured = self._best(running.kv_block_size)
            except CaptureError as error:
                log.warning("%s: graph capture is not supported: %s", self.config.name, error)
                self.unsupported["graph_capture"] = str(error)

    def prepare(self, before: RuntimeConfig, after: RuntimeConfig) -> Swap | None:
        """What to run between two steps; None when no barrier knob changes. Raises NotPossible."""
        turned = after.graph_capture != before.graph_capture
        recut = after.kv_block_size != before.kv_block_size
        if not turned and not recut and after.prefix_cache == before.prefix_cache:
            return None
        captured = self.runner.captured if after.graph_capture == "on" else None
        if (turned and after.graph_capture == "on") or (recut and captured is not None):
            captured = self._capture(after.kv_block_size)
        pool = None
        if recut:
            pool = new_pool(self.config, self.runner.model, after.kv_block_size)
            pool.touch()
            self._check_room(after.kv_block_size)
        return Swap(self, pool, captured, after.prefix_cache == "on")

    def upgrade(self, compiled: Compiled) -> None:
        """Takes the compiled step for the graphs, where graphs are in use."""
        with self.runtime.changing:
            if isinstance(self.runner.captured, Graphs):
                try:
                    caching = self.scheduler.prefixes.on
                    self.runtime.boundary.run(Swap(self, None, compiled, caching))
                except (NotPossible, TimeoutError) as error:
                    log.warning("%s: the compiled step is not used: %s", self.config.name, error)

    def lose_capture(self) -> None:
        """Between two steps: what was captured is gone, and cannot be had until `recapture`."""
        self.capture_lost = True
        self.runner.captured = None

    def recapture(self, running: RuntimeConfig) -> Captured | None:
        """Ends `lose_capture`: what to use from the next step on, where it is asked for."""
        self.capture_lost = False
        return self._capture(running.kv_block_size) if running.graph_capture == "on" else None

    def _capture(self, block_size: int) -> Captured:
        if self.capture_lost:
            raise NotPossible(
                "capture_failed",
                "graph_capture",
                "graph_capture: the device does not take a graph now; steps run op by op",
            )
        try:
            return self._best(block_size)
        except CaptureError as error:
            raise NotPossible(
                "capture_failed", "graph_capture", f"graph_capture: {error}"
            ) from error

    def _best(self, block_size: int) -> Captured:
        """The compiled step; while it is being made, traced graphs. Raises CaptureError."""
        if (compiled := self.workshop.find()) is not None:
            return compiled
        graphs = capture(self.runner.model, block_size)
        self.workshop.order(self.upgrade)
        return graphs

    def _check_room(self, block_size: int) -> None:
        """An early no, of the moment; `reblock` has the last word."""
        allocator = self._allocator_for(block_size)
        lone = -(-self.config.model_len_max // block_size)
        needed = max(lone, blocks_needed(self.runner.rows, block_size))
        if needed > allocator.blocks:
            raise self.too_small(block_size, needed, allocator.blocks)

    def _allocator_for(self, block_size: int) -> PagedAllocator:
        """Of a pool cut otherwise, and empty; what share is withheld now stays withheld."""
        now = self.scheduler.allocator
        total = self.config.kv_pool_tokens // block_size
        allocator = PagedAllocator(total)
        share = now.withheld_blocks / (now.blocks + now.withheld_blocks)
        allocator.withhold(round(total * share))
        allocator.evictions = now.evictions
        return allocator

    def prefixes_for(self, block_size: int) -> PrefixCache:
        """Of a pool cut otherwise, and empty; pins what is pinned now, once that is computed."""
        allocator = self._allocator_for(block_size)
        prefixes = PrefixCache(allocator, block_size, ttl_s=self.config.prefix_ttl_s)
        for tokens, salt in self.scheduler.prefixes.hot:
            prefixes.pin(tokens, salt)
        room = allocator.blocks - -(-self.config.model_len_max // block_size)
        if prefixes.hot_blocks > room:
            log.warning("%s: no room to pin prompts in blocks of %d", self.config.name, block_size)
            prefixes.unpin()
        return prefixes

    @staticmethod
    def too_small(block_size: int, needed: int, blocks: int) -> NotPossible:
        return NotPossible(
            "does_not_fit",
            "kv_block_size",
            f"kv_block_size: {needed} blocks of {block_size} tokens would be needed for what runs, "
            f"or for the longest request; the pool has {blocks}",
        )


@dataclass(frozen=True)
class Swap:
    """One exchange, prepared. Called on the step thread, between two steps.

    `pool` None: the blocks stay as they are. `caching`: whether prefixes are; turned on or off, or
    with other blocks, the cache is empty. Raises NotPossible, and all else is as before.
    """

    barrier: Barrier
    pool: KVPool | None
    captured: Captured | None
    caching: bool

    def __call__(self) -> None:
        began = time.monotonic()
        barrier, runner, scheduler = self.barrier, self.barrier.runner, self.barrier.scheduler
        prefixes = scheduler.prefixes
        before = Layout(runner.pool, prefixes, runner.rows.layout), runner.captured
        try:
            layout = before[0] if self.pool is None else self._moved(self.pool)
            self._use(layout, self.captured)
            barrier.canary.prove()
            # Last: what is cached is lost with it.
            scheduler.prefixes.turn(self.caching)
        except Exception as error:
            self._use(*before)
            barrier.rollbacks += 1
            if isinstance(error, NotPossible):
                raise
            log.exception("a change was taken back")
            message = f"the change was taken back, its proof failed: {error}"
            raise NotPossible("proof_failed", "", message) from error
        finally:
            barrier.swap_s = time.monotonic() - began

    def _moved(self, pool: KVPool) -> Layout:
        barrier, rows = self.barrier, self.barrier.runner.rows
        prefixes = barrier.prefixes_for(pool.block_size)
        layout = reblock(rows, barrier.runner.pool, pool, prefixes)
        if layout is None:
            needed = blocks_needed(rows, pool.block_size)
            raise barrier.too_small(pool.block_size, needed, prefixes.allocator.blocks)
        return layout

    def _use(self, layout: Layout, captured: Captured | None) -> None:
        runner, scheduler = self.barrier.runner, self.barrier.scheduler
        runner.pool = layout.pool
        runner.rows.use(layout.tables)
        scheduler.prefixes = layout.prefixes
        runner.captured = captured


class Canary:
    """A short sequence in blocks of its own, whose logits are known: proof that steps are right."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        vocabulary = runner.model.shape.vocabulary
        self.tokens = np.arange(CANARY_TOKENS) * 97 % vocabulary
        self.expected = runner.model.dense(torch.from_numpy(self.tokens))[-2:]

    def prove(self) -> None:
        """Prefill, then one decode, through the pool and what was captured. Raises ProofFailed."""
        runner, rows = self.runner, self.runner.rows
        request = Request(id="canary", tokens=self.tokens, max_tokens=1, arrived=0.0)
        last = len(self.tokens) - 1
        row = request.row = rows.open(
            self.tokens, request.limit, ignore_eos=True, has_stop=False, begun=False
        )
        steps, misses = dict(runner.steps), dict(runner.misses)
        try:
            rows.append_blocks(row, runner.pool.canary)
            chunk = Chunk(request, row, 0, last, last=True)
            _, first = runner.forward(Plan([], np.empty(0, np.int64), [chunk]))
            rows.computed[row] = last
            _, second = runner.forward(Plan([request], np.array([row]), []))
        finally:
            rows.close(row)
            runner.steps, runner.misses = steps, misses
        error = float((torch.cat([first, second]) - self.expected).abs().max())
        if not error <= float(runner.model.tolerance):
            raise ProofFailed(f"the canary's logits differ by {error:g}")
