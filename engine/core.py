"""The step thread: takes requests in, runs steps, hands tokens out.

Other threads reach it only through `submit`, `cancel`, `pause` and the RuntimeStore. It reads the
running configuration once per step, and wakes the event loop once per step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from engine.barrier import Barrier, Swap, new_pool
from engine.config import KV_DTYPES, MODELS, SEQS_MAX, EngineConfig
from engine.exec.compact import compact
from engine.exec.rows import Rows
from engine.exec.runner import Runner
from engine.faults import Faults
from engine.knobs import NotPossible, RuntimeConfig
from engine.kv.allocator import Allocator
from engine.kv.contiguous import ALLOCATORS, ContiguousAllocator
from engine.kv.formats import Format
from engine.kv.prefix import PrefixCache
from engine.kv.tier import HostTier
from engine.memory import Blocks, blocks, memory
from engine.models.loader import compute_dtype, find, load
from engine.observe import Metrics, Reading
from engine.pause import ABORTED, Pause
from engine.policies import PolicyMetrics
from engine.reconfig import RuntimeStore, Versioned
from engine.sched import quotas
from engine.sched.backpressure import QUEUE_REQUESTS_MAX, Backpressure, IdleClock
from engine.sched.request import NORMAL, PRIORITIES, Finish, Request
from engine.sched.scheduler import Outcome, Plan, Scheduler
from engine.spans import Tracing
from engine.steps import PHASES, Steps, StepTimes

log = logging.getLogger("engine")

IDLE_S_MAX = 1.0  # an idle engine looks around at least this often
RETRY_AFTER_S_MAX = 30
STOPPED = "the engine was stopped before the request was finished"
NO_TENANTS = "no tenants are listed; start the engine with --tenants FILE"

Deliver = Callable[[Outcome], None]


class Rejected(Exception):
    """Not admitted: `reason` is one of observe.REJECTIONS, `status` what HTTP calls it; come back
    after `retry_after_s` (None: waiting would not help)."""

    def __init__(
        self, reason: str, message: str, retry_after_s: int | None, status: int = 429
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.status = status


class Core:
    """One model, one scheduler, one step thread. `deliver` is called from that thread."""

    def __init__(self, config: EngineConfig, deliver: Deliver) -> None:
        self.config = config
        self.deliver = deliver
        torch.set_num_threads(config.threads)
        self.wake = threading.Event()
        initial = RuntimeConfig(kv_block_size=config.block_size, prefix_cache=config.prefix_cache)
        self.runtime = RuntimeStore(config.state, self.wake.set, initial)
        running = self.runtime.running.config
        self.quotas = quotas.read(config.tenants) if config.tenants else quotas.Quotas({})
        self._check_tenants(running)
        dtype, why = compute_dtype(config.dtype, config.model)
        source, how = find(config.model, config.seed), f"{dtype}, {why}"
        model, self.tokenizer = load(source, dtype, config.model_len_max, how, pack=True)
        pool = new_pool(config, model, running)
        if config.model not in MODELS:
            tokens, gib = config.kv_pool_tokens, pool.bytes / 2**30
            log.info("KV pool: %d tokens, %.2f GiB when all of it is used", tokens, gib)
        self.rows = Rows(
            rows=SEQS_MAX + 1,  # and the canary's
            model_len_max=config.model_len_max,
            block_size=pool.block_size,
        )
        self.runner = Runner(model, pool, self.rows)
        allocator = ALLOCATORS[running.kv_allocator](config.kv_pool_tokens // pool.block_size)
        prefixes = PrefixCache(allocator, pool.block_size, ttl_s=config.prefix_ttl_s)
        self.scheduler = Scheduler(self.rows, prefixes, self.tokenizer)
        self.scheduler.tier = self.tier = HostTier(
            lambda: self.runner.pool,
            config.host_tier_bytes,
            layers=model.shape.layers,
            kv_heads=model.shape.kv_heads,
            head_dim=model.shape.head_dim,
            dtype=model.dtype,
        )
        self.barrier = Barrier(config, self.runner, self.scheduler, self.runtime)
        if not self.quotas.listed:
            self.barrier.unsupported["tenant_quotas"] = NO_TENANTS
        self.runtime.prepare = self._prepare
        self.metrics = Metrics(config, self.reading)
        self.metrics.registry.register(PolicyMetrics(self.metrics, self.scheduler, self.quotas))
        self.runtime.listeners.append(self._count_change)
        self.tracing = Tracing(config) if config.otlp_endpoint else None
        self.barrier.start(running)
        self.steps = Steps()
        self.task_counts: Callable[[], dict[str, int]] = dict  # by state, where there are tasks
        self.inbox: deque[Callable[[], None]] = deque()  # for the step thread, in order of arrival
        self.submitted_requests = 0
        self.submitted_tokens = 0
        self.compactions = 0
        self.compaction_s = 0.0
        self.finish_gap_s = 0.0  # mean time between two finished requests, lately
        self.finished_at = 0.0
        self.draining = False
        self.paused = Pause.NOT
        self.stopping = False
        self.idle = IdleClock()
        self.backpressure = Backpressure(self.idle, time.monotonic())
        self.thread = threading.Thread(target=self._run, name="step", daemon=True)
        self.faults = Faults(self.runtime, self.scheduler, self.barrier, self.thread)

    def start(self) -> None:
        self.thread.start()

    def warm(self, requests: list[Request]) -> None:
        """Computes the prompts of these before the first step, and pins their cached blocks.

        With the cache turned off by a kept configuration they are pinned when it is turned on and
        somebody asks for them. Raises ValueError where they leave no room for the longest request.
        """
        scheduler, allocator = self.scheduler, self.allocator
        config = self.runtime.running.config
        room = allocator.blocks - self.rows.tables.shape[1]
        if not scheduler.prefixes.on:
            log.warning(
                "%s: prefix_warm: nothing is computed now: prefix_cache is off in the kept "
                "configuration (--state), which wins over --prefix-cache",
                self.config.name,
            )
        for request in requests:
            scheduler.prefixes.pin(request.tokens, request.salt)
            if (blocks := scheduler.prefixes.hot_blocks) > room:
                raise ValueError(
                    f"prefix_warm: the first prompts up to {request.id} take {blocks} blocks of "
                    f"the pool, allowed: {room}"
                )
            if not scheduler.prefixes.on:
                continue
            self.submitted_requests += 1
            self.submitted_tokens += request.prompt_tokens
            scheduler.add(request)
            while (plan := scheduler.plan(config, time.monotonic())) is not None:
                tokens, _ = self.runner.forward(plan)
                scheduler.commit(plan, tokens, 0.0, time.monotonic())
        scheduler.prefix_queries = scheduler.prefix_hits = 0

    def stop(self) -> None:
        """Ends the step thread; requests still in flight fail. Then sends the last spans."""
        self.stopping = True
        self.wake.set()
        self.thread.join()
        self.faults.end()
        self.barrier.workshop.close()
        if self.tracing:
            self.tracing.close()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive() and not self.stopping

    @property
    def waiting(self) -> int:
        return self.submitted_requests - self.scheduler.left_requests

    @property
    def in_flight(self) -> int:
        return self.waiting + len(self.scheduler.running)

    @property
    def allocator(self) -> Allocator:
        return self.scheduler.allocator

    @property
    def kv_token_bytes(self) -> dict[str, int]:
        """What the KV of one token takes, by what `kv_dtype` may be."""
        shape, dtype = self.runner.model.shape, self.runner.model.dtype
        return {
            name: Format.of(name, dtype).token_bytes(shape.layers, shape.kv_heads, shape.head_dim)
            for name in KV_DTYPES
        }

    def reading(self) -> Reading:
        version, allocator = self.runtime.running, self.allocator
        waiting = len(self.scheduler.waiting) + len(self.inbox)
        contexts = self.barrier.contexts
        return Reading(
            running=len(self.scheduler.running),
            waiting=waiting,
            # Of the last step: some of them may wait no more.
            deferred=min(self.scheduler.deferred, waiting),
            kv_usage_ratio=allocator.allocated_blocks / allocator.blocks,
            kv_blocks=allocator.blocks,
            kv_dtype=self.runner.pool.kept.name,
            kv_token_bytes=self.kv_token_bytes[version.config.kv_dtype],
            kv_cached_blocks=allocator.cached_blocks,
            kv_evictions=allocator.evictions,
            config_version=version.config_version,
            knobs=version.config.values(),
            captured=self.runner.captured,
            contexts={"built": contexts.built, "reused": contexts.reused},
            rollbacks=self.barrier.rollbacks,
            swap_s=self.barrier.swap_s,
            spans_dropped=self.tracing.dropped if self.tracing else 0,
            memory=memory(self.scheduler),
            stalls=self.scheduler.stalls.count,
            stall_s=self.scheduler.stalls.seconds,
            compactions=self.compactions,
            compaction_s=self.compaction_s,
            tier_hits=self.tier.hits,
            tier_misses=self.tier.misses,
            tier_late=self.tier.ahead.late,
            tier_prefetched=self.tier.ahead.told(),
            tier_bytes_per_s=self.tier.bytes_per_s,
            paused=self.paused,
            tasks=self.task_counts(),
            phase_s=dict(zip(PHASES, self.steps.phase_s, strict=True)),
        )

    def record(self, request: Request) -> None:
        """Its spans, once it has ended and its answer is written."""
        if self.tracing:
            self.tracing.record(request)

    def check_room(self, tokenising: int) -> None:
        """Before a request is read: raises Rejected when more are `tokenising` than may wait."""
        bound = self.config.queue_requests_max
        if tokenising >= bound:
            self.metrics.received[NORMAL] += 1
            message = f"{tokenising} requests are being tokenised, allowed: {bound}"
            self._reject("max_num_queued_reqs", message)

    def submit(self, request: Request) -> None:
        """Queues a request; called from the event loop only. Raises Rejected."""
        self.metrics.received[request.priority] += 1
        if self.draining or self.stopping:
            self._reject("shutting_down", "the engine is shutting down", 503)
        config, now = self.runtime.running.config, time.monotonic()
        lowest = config.shed_below_priority
        if request.priority < lowest:
            self.metrics.shed[request.priority] += 1
            self._reject(
                "shed",
                f"x-priority: {PRIORITIES[request.priority]} requests are turned away now, "
                f"served: {', '.join(PRIORITIES[lowest:])}",
            )
        waiting, bound = self.waiting, self.config.queue_requests_max
        if waiting >= bound:
            self._reject("max_num_queued_reqs", f"{waiting} requests are waiting, allowed: {bound}")
        tokens = self.submitted_tokens - self.scheduler.left_tokens + request.prompt_tokens
        if waiting and tokens > self.config.queue_tokens_max:
            self._reject(
                "max_num_queued_tokens",
                f"{tokens} prompt tokens would wait, allowed: {self.config.queue_tokens_max}",
            )
        if config.backpressure == "on" and self.backpressure.check(waiting, now):
            self._reject(
                "backpressure",
                f"more than {QUEUE_REQUESTS_MAX} requests wait, and the engine is busy "
                f"{self.backpressure.utilisation:.0%} of the time",
            )
        # Last, for what is charged must be served.
        if config.tenant_quotas == "on" and (refusal := self.quotas.charge(request, now)):
            self.metrics.rejected[refusal.reason] += 1
            raise Rejected(refusal.reason, refusal.message, refusal.retry_after_s, refusal.status)
        self.submitted_requests += 1
        self.submitted_tokens += request.prompt_tokens
        self.inbox.append(partial(self.scheduler.add, request))
        self.wake.set()

    def cancel(
        self, request: Request, finish: Finish = Finish.ABORT, error: str = "cancelled"
    ) -> None:
        """Takes effect before the next step; a request that has ended stays as it ended."""
        self.inbox.append(partial(self._abandon, request, finish, error))
        self.wake.set()

    def reset_prefix_cache(self) -> int:
        """Between two steps; returns how many blocks were forgotten. Raises TimeoutError."""
        forgotten: list[int] = []
        with self.runtime.changing:
            self.runtime.boundary.run(lambda: forgotten.append(self.scheduler.prefixes.flush()))
        return forgotten[0]

    def kv_blocks(self) -> tuple[Blocks, Versioned[RuntimeConfig]]:
        """As they are between two steps, and under which configuration. Raises TimeoutError."""
        seen: list[Blocks] = []
        with self.runtime.changing:
            self.runtime.boundary.run(lambda: seen.append(blocks(self.scheduler, self.runner.pool)))
            return seen[0], self.runtime.running

    def pause(self, mode: Pause) -> None:
        """From the next step on; what was submitted before is what `abort` ends. NOT: resumes."""
        self.paused = mode
        self.inbox.append(partial(self._pause, mode))
        self.wake.set()

    def end_all(self) -> None:
        """What runs or waits ends with the error `shutting_down`; takes effect before a step."""
        self.inbox.append(partial(self._fail_all, STOPPED, "shutting_down"))
        self.wake.set()

    def _reject(self, reason: str, message: str, status: int = 429) -> None:
        self.metrics.rejected[reason] += 1
        seconds = math.ceil(self.waiting * self.finish_gap_s)
        raise Rejected(reason, message, min(max(seconds, 1), RETRY_AFTER_S_MAX), status)

    def _prepare(self, before: RuntimeConfig, after: RuntimeConfig) -> Swap | None:
        self._check_tenants(after)
        return self.barrier.prepare(before, after)

    def _check_tenants(self, config: RuntimeConfig) -> None:
        """Raises NotPossible where quotas are on and nobody is listed: all would share one."""
        if config.tenant_quotas == "on" and not self.quotas.listed:
            raise NotPossible("no_tenants", "tenant_quotas", f"tenant_quotas: {NO_TENANTS}")

    def _count_change(self, version: Versioned[RuntimeConfig]) -> None:
        self.metrics.config_changed(version.changed_by)

    def _run(self) -> None:
        while not self.stopping:
            try:
                self._turn()
            except Exception as error:
                log.exception("a step failed; its requests are answered with an error")
                self.metrics.step_errors += 1
                self._fail_running(f"{type(error).__name__}: {error}")
        self._take_in()
        self._fail_all(STOPPED, "shutting_down")

    def _turn(self) -> None:
        """Takes in what came, then runs one step, or waits for something to do."""
        self.wake.clear()
        self._take_in()
        config = self.runtime.take()
        if config.kv_compaction == "on" and self.scheduler.stalls.stalled:
            self._compact()
        now = time.monotonic()
        hold = self.scheduler.hold_until(config)
        if hold > now and not self.stopping:
            self._wait(hold - now)
        elif not self._step(config, now):
            self._wait(IDLE_S_MAX)

    def _wait(self, seconds: float) -> None:
        self.idle.begin(time.monotonic())
        self.wake.wait(seconds)
        self.idle.end(time.monotonic())

    def _take_in(self) -> None:
        while self.inbox:
            self.inbox.popleft()()

    def _pause(self, mode: Pause) -> None:
        if mode is Pause.ABORT:
            self._fail_all(ABORTED, "aborted")
        self.scheduler.paused = mode

    def _compact(self) -> None:
        """Ends the stall of the last step, unless the pool has changed since."""
        began, allocator = time.monotonic(), self.allocator
        if isinstance(allocator, ContiguousAllocator):
            compact(self.rows, self.runner.pool, allocator)
            self.compactions += 1
            self.compaction_s += time.monotonic() - began

    def _step(self, config: RuntimeConfig, began: float) -> bool:
        """One step; False when there was nothing to run."""
        plan = self.scheduler.plan(config, began)
        if plan is None:
            return False
        for chunk in plan.chunks:
            if not chunk.request.config_version:
                chunk.request.config_version = self.runtime.running.config_version
        scheduled, busy = time.monotonic(), time.thread_time()
        tokens, _ = self.runner.forward(plan)
        now = time.monotonic()
        self.metrics.forward_s += now - scheduled
        self.metrics.forward_cpu_s += time.thread_time() - busy
        outcome = self.scheduler.commit(plan, tokens, began, now)
        self.metrics.step(plan, outcome, began, now)
        self.metrics.preemptions = self.scheduler.preemptions
        self.metrics.prefix_queries = self.scheduler.prefix_queries
        self.metrics.prefix_hits = self.scheduler.prefix_hits
        self.metrics.near_ties = self.runner.near_ties
        self.metrics.graph_steps = self.runner.steps
        self.metrics.graph_misses = self.runner.misses
        for request in outcome.finished:
            self._ended(request)
        # Last, so that whoever has an answer finds it counted.
        self.deliver(outcome)
        self._timed(plan, began, scheduled, now)
        return True

    def _timed(self, plan: Plan, began: float, scheduled: float, now: float) -> None:
        runner = self.runner
        step = StepTimes(
            number=self.metrics.steps,
            began=began,
            scheduled=scheduled,
            prepared=runner.prepared,
            forwarded=runner.forwarded,
            sampled=now,
            handed_out=time.monotonic(),
            decode_requests=len(plan.decodes),
            prompt_chunks=len(plan.chunks),
            prompt_tokens=plan.prefill_tokens,
            waiting=len(self.scheduler.waiting),
            mode=runner.mode,
            config_version=self.runtime.running.config_version,
        )
        self.steps.add(step)
        if self.tracing and self.steps.due(now):
            self.tracing.record(step)
            for request in self.scheduler.running:
                if request.first_token and request.first_token < now:
                    generated = int(self.rows.known[request.row]) - request.prompt_tokens
                    request.marks.append((now, generated))

    def _ended(self, request: Request) -> None:
        self.metrics.finished(request)
        self.quotas.settle(request, request.finished)
        gap = min(request.finished - self.finished_at, 1.0) if self.finished_at else 0.0
        self.finish_gap_s += 0.05 * (gap - self.finish_gap_s)
        self.finished_at = request.finished

    def _abandon(
        self, request: Request, finish: Finish, error: str, code: str = "engine_error"
    ) -> None:
        if finish is Finish.ERROR:
            request.error, request.error_code = error, code
        if self.scheduler.abandon(request, finish, time.monotonic()):
            self._ended(request)
            nothing = self.rows.touched[:0]
            self.deliver(Outcome([], [], [], [request], nothing))

    def _fail_running(self, error: str, code: str = "engine_error") -> None:
        for request in list(self.scheduler.running):
            self._abandon(request, Finish.ERROR, error, code)

    def _fail_all(self, error: str, code: str = "engine_error") -> None:
        self._fail_running(error, code)
        for request in list(self.scheduler.waiting):
            self._abandon(request, Finish.ERROR, error, code)
