"""Barrier knobs: what they need is built beside the running steps and exchanged between two.

    prepare   off the step thread: capture graphs, allocate the pool; may refuse
    swap      on the step thread: move the running requests' KV, exchange, prove with a canary
    restore   the proof failed: everything stands as before, the old pool was only read

A request that runs meanwhile notices nothing but one longer gap between two tokens.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from engine.config import EngineConfig
from engine.exec.build import Workshop
from engine.exec.capture import Captured, CaptureError, Contexts, Graphs
from engine.exec.compiled import Compiled
from engine.exec.reblock import Layout, blocks_needed, reblock
from engine.exec.runner import Runner
from engine.knobs import NotPossible, RuntimeConfig
from engine.kv.allocator import Allocator
from engine.kv.contiguous import ALLOCATORS
from engine.kv.formats import Format
from engine.kv.pool import CANARY_TOKENS, KVPool
from engine.kv.prefix import PrefixCache
from engine.models.llama import Llama
from engine.reconfig import RuntimeStore
from engine.sched.request import Request
from engine.sched.scheduler import Chunk, Plan, Scheduler

log = logging.getLogger("engine")

# A change of these takes another pool; of all but the allocator also another capture.
POOL_KNOBS = ("kv_block_size", "kv_dtype", "kv_layout", "kv_allocator")
FLIPS = 0.25  # of what rounding changes: what the few numbers may that fall to the other side


class ProofFailed(RuntimeError):
    """After an exchange, a step did not compute what it should."""


def new_pool(
    config: EngineConfig, model: Llama, running: RuntimeConfig, knob: str = "kv_block_size"
) -> KVPool:
    """An empty pool of the configured size as the knobs say.

    Raises NotPossible; where memory is short it names `knob`.
    """
    shape, block_size = model.shape, running.kv_block_size
    blocks = config.kv_pool_tokens // block_size
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
            kept=Format.of(running.kv_dtype, model.dtype),
            interleaved=running.kv_layout == "interleaved",
        )
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        raise NotPossible("does_not_fit", knob, f"{knob}: {error}") from error


class Barrier:
    """Owns what barrier knobs exchange. `prepare` from any thread, one at a time."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        scheduler: Scheduler,
        runtime: RuntimeStore[RuntimeConfig],
    ) -> None:
        self.config = config
        self.runner = runner
        self.scheduler = scheduler
        self.runtime = runtime
        self.workshop = Workshop(config.cache, runner.model, config.threads)
        self.contexts = Contexts(runner.model)
        self.rollbacks = 0
        self.swap_s = 0.0  # how long the last swap held up the steps
        self.unsupported: dict[str, str] = {}  # knob → why this device cannot
        self.capture_lost = False
        self.canary = Canary(runner)
        self.canary.learn(runner.pool.kept)

    def start(self, running: RuntimeConfig) -> None:
        """Captures, if that is asked for, before the first step. Without it the engine serves.

        Raises NotPossible for knobs that exclude each other, as a file of state may have them.
        """
        self._check_pair(running, "kv_allocator")
        self.scheduler.prefixes.turn(running.prefix_cache == "on")
        if running.graph_capture == "on":
            try:
                self.runner.captured = self._best(running)
            except CaptureError as error:
                log.warning("%s: graph capture is not supported: %s", self.config.name, error)
                self.unsupported["graph_capture"] = str(error)

    def prepare(self, before: RuntimeConfig, after: RuntimeConfig) -> Swap | None:
        """What to run between two steps; None when no barrier knob changes. Raises NotPossible."""
        turned = after.graph_capture != before.graph_capture
        changed = [name for name in POOL_KNOBS if getattr(after, name) != getattr(before, name)]
        if not turned and not changed and after.prefix_cache == before.prefix_cache:
            return None
        knob = "kv_allocator" if "kv_allocator" in changed else "kv_block_size"
        self._check_pair(after, knob if knob in changed else "prefix_cache")
        captured = self.runner.captured if after.graph_capture == "on" else None
        if (turned and after.graph_capture == "on") or (
            captured is not None and set(changed) - {"kv_allocator"}
        ):
            captured = self._capture(after)
        pool = None
        if changed:
            pool = new_pool(self.config, self.runner.model, after, changed[0])
            pool.touch()
            self.canary.learn(pool.kept)
            self._check_room(after, knob)
        return Swap(self, pool, captured, after.prefix_cache == "on", after.kv_allocator)

    def upgrade(self, compiled: Compiled) -> None:
        """Takes the compiled step for the graphs, where graphs are in use."""
        with self.runtime.changing:
            if isinstance(self.runner.captured, Graphs) and self.runner.pool.native:
                try:
                    caching = self.scheduler.prefixes.on
                    kind = self.runtime.running.config.kv_allocator
                    self.runtime.boundary.run(Swap(self, None, compiled, caching, kind))
                except (NotPossible, TimeoutError) as error:
                    log.warning("%s: the compiled step is not used: %s", self.config.name, error)

    def lose_capture(self) -> None:
        """Between two steps: what was captured is gone, and cannot be had until `recapture`."""
        self.capture_lost = True
        self.contexts.forget()
        self.runner.captured = None

    def recapture(self, running: RuntimeConfig) -> Captured | None:
        """Ends `lose_capture`: what to use from the next step on, where it is asked for."""
        self.capture_lost = False
        return self._capture(running) if running.graph_capture == "on" else None

    def _capture(self, running: RuntimeConfig) -> Captured:
        if self.capture_lost:
            raise NotPossible(
                "capture_failed",
                "graph_capture",
                "graph_capture: the device does not take a graph now; steps run op by op",
            )
        try:
            return self._best(running)
        except CaptureError as error:
            raise NotPossible(
                "capture_failed", "graph_capture", f"graph_capture: {error}"
            ) from error

    def _best(self, running: RuntimeConfig) -> Captured:
        """The compiled step; while it is being made, traced graphs. Raises CaptureError.

        It reads KV as it is computed: over KV that is kept otherwise there are graphs.
        """
        model = self.runner.model
        kept = Format.of(running.kv_dtype, model.dtype)
        native = kept == Format(model.dtype)
        if native and (compiled := self.workshop.find()) is not None:
            return compiled
        graphs = self.contexts.get(running.kv_block_size, kept)
        if native:
            self.workshop.order(self.upgrade)
        return graphs

    @staticmethod
    def _check_pair(config: RuntimeConfig, knob: str) -> None:
        if config.kv_allocator == "contiguous" and config.prefix_cache == "on":
            raise NotPossible(
                "excluded",
                knob,
                f"{knob}: sequences in runs of their own share no blocks, so kv_allocator "
                "contiguous and prefix_cache on exclude each other",
            )

    def _check_room(self, after: RuntimeConfig, knob: str) -> None:
        """An early no, of the moment; `reblock` has the last word."""
        size = after.kv_block_size
        allocator = self._allocator_for(size, after.kv_allocator)
        lone = -(-self.config.model_len_max // size)
        needed = blocks_needed(self.runner.rows, size, contiguous=allocator.contiguous)
        if max(lone, needed) > allocator.blocks:
            raise self.too_small(knob, size, max(lone, needed), allocator.blocks)

    def _allocator_for(self, block_size: int, kind: str) -> Allocator:
        """Of a pool cut otherwise, and empty; what share is withheld now stays withheld.

        `kind`: a value of the knob kv_allocator.
        """
        now = self.scheduler.allocator
        total = self.config.kv_pool_tokens // block_size
        allocator = ALLOCATORS[kind](total)
        allocator.withhold(round(total * now.withheld_blocks / now.total))
        allocator.evictions = now.evictions
        return allocator

    def prefixes_for(self, block_size: int, kind: str) -> PrefixCache:
        """Of a pool cut otherwise, and empty; pins what is pinned now, once that is computed."""
        allocator = self._allocator_for(block_size, kind)
        prefixes = PrefixCache(allocator, block_size, ttl_s=self.config.prefix_ttl_s)
        for tokens, salt in self.scheduler.prefixes.hot:
            prefixes.pin(tokens, salt)
        room = allocator.blocks - -(-self.config.model_len_max // block_size)
        if prefixes.hot_blocks > room:
            log.warning("%s: no room to pin prompts in blocks of %d", self.config.name, block_size)
            prefixes.unpin()
        return prefixes

    @staticmethod
    def too_small(knob: str, block_size: int, needed: int, blocks: int) -> NotPossible:
        return NotPossible(
            "does_not_fit",
            knob,
            f"{knob}: {needed} blocks of {block_size} tokens would be needed for what runs, "
            f"or for the longest request; the pool has {blocks}",
        )


@dataclass(frozen=True)
class Swap:
    """One exchange, prepared. Called on the step thread, between two steps.

    `pool` None: the blocks stay as they are. `caching`: whether prefixes are; turned on or off, or
    with other blocks, the cache is empty. `kind`: of allocator. Raises NotPossible, and all else is
    as before. `left` is what stood before: who asked gives its memory back, not the step thread.
    """

    barrier: Barrier
    pool: KVPool | None
    captured: Captured | None
    caching: bool
    kind: str
    left: list[Layout] = field(default_factory=list)

    def __call__(self) -> None:
        began = time.monotonic()
        barrier, runner, scheduler = self.barrier, self.barrier.runner, self.barrier.scheduler
        if scheduler.tier is not None:
            scheduler.tier.ahead.roll_back()
        prefixes = scheduler.prefixes
        before = Layout(runner.pool, prefixes, runner.rows.layout), runner.captured
        try:
            layout = before[0] if self.pool is None else self._moved(self.pool)
            self._use(layout, self.captured)
            self.left.append(before[0])
            barrier.canary.prove()
            # Last: what is cached is lost with it.
            scheduler.prefixes.turn(self.caching)
        except Exception as error:
            self._use(*before)
            barrier.contexts.drop(self.captured)  # it may be to blame
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
        prefixes = barrier.prefixes_for(pool.block_size, self.kind)
        allocator = prefixes.allocator
        layout = reblock(rows, barrier.runner.pool, pool, prefixes)
        if layout is None:
            needed = blocks_needed(rows, pool.block_size, contiguous=allocator.contiguous)
            resized = pool.block_size != barrier.runner.pool.block_size
            knob = "kv_block_size" if resized else "kv_allocator"
            raise barrier.too_small(knob, pool.block_size, needed, allocator.blocks)
        return layout

    def _use(self, layout: Layout, captured: Captured | None) -> None:
        runner, scheduler = self.barrier.runner, self.barrier.scheduler
        runner.pool = layout.pool
        runner.rows.use(layout.tables)
        scheduler.prefixes = layout.prefixes
        runner.captured = captured


class Known(NamedTuple):
    """What the canary's logits are over KV of one format, and by how much they may differ."""

    logits: torch.Tensor
    tolerance: float


class Canary:
    """A short sequence in blocks of its own, whose logits are known: proof that steps are right.

    They are those of the plain reference, with its keys and values rounded as the pool rounds them.
    There another order of sums may take a number to the other side of a rounding step: then logits
    may also differ by FLIPS of what rounding all of them does to these.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        vocabulary = runner.model.shape.vocabulary
        self.tokens = np.arange(CANARY_TOKENS) * 97 % vocabulary
        self.known: dict[Format, Known] = {}

    def learn(self, kept: Format) -> None:
        """From any thread, before a pool of that format is proved."""
        if kept in self.known:
            return
        model, tokens = self.runner.model, torch.from_numpy(self.tokens)
        exact = logits = model.dense(tokens)[-2:]
        if not kept.exact(model.dtype):
            logits = model.dense(
                tokens, lambda key, value: kept.decode(kept.encode(key, value), model.dtype)
            )[-2:]
        rounding = float((logits - exact).abs().max())
        self.known[kept] = Known(logits, float(model.tolerance) + FLIPS * rounding)

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
        logits, tolerance = self.known[runner.pool.kept]
        error = float((torch.cat([first, second]) - logits).abs().max())
        if not error <= tolerance:
            raise ProofFailed(f"the canary's logits differ by {error:g}, allowed: {tolerance:g}")
