"""A small queueing model of an engine, seen only through its metrics, in simulated time.

It stands at the seam of tracing's Reader: continuous batching with chunked prefill, a running cap,
and a paged KV pool that grows with the tokens and sends the latest request back, to be computed
again, when it is short; or a contiguous one, where a request has one run of blocks for all it may
become, laid out and measured by the engine's own code. A step takes

    a + b · prompt tokens + c · running requests + q · running requests² + k · attended + h · held

of CPU, where `attended` are the tokens before each prompt token that is computed, and `held` those
of the requests that decode, plus `eager_s`
when no captured graph runs it (none does a prompt), and `slow` times that where others use the CPU
too; `between` goes by before the next. Seeded, so a test tells the same story every time. A fault
is a change of mechanics (`slow`, `captured`, `kv_tokens`, `rate`, `apply`), never of a number
shown.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from engine.kv.contiguous import ContiguousAllocator
from engine.kv.stats import Memory
from tests.memory_reader import MemoryReader

START = datetime(2026, 3, 1, tzinfo=UTC)
LATENCY = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0)
TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
GAPS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
BOUNDS = {
    "vllm:time_to_first_token_seconds": LATENCY,
    "vllm:e2e_request_latency_seconds": LATENCY,
    "vllm:request_queue_time_seconds": LATENCY,
    "vllm:request_prefill_time_seconds": LATENCY,
    "vllm:inter_token_latency_seconds": GAPS,
    "engine:step_seconds": GAPS,
    "vllm:iteration_tokens_total": TOKENS,
    "vllm:request_prompt_tokens": TOKENS,
    "vllm:request_generation_tokens": TOKENS,
}
KNOBS: dict[str, dict[str, Any]] = {
    "max_num_seqs": {"minimum": 1, "maximum": 256},
    "max_num_batched_tokens": {"minimum": 64, "maximum": 8192},
    "max_wait_ms": {"minimum": 0, "maximum": 50},
    "prefill_chunk_tokens": {"minimum": 32, "maximum": 4096},
    "shed_below_priority": {"minimum": 0, "maximum": 3},
    "kv_block_size": {"choices": [8, 16, 32, 64, 128], "apply_class": "barrier"},
    "graph_capture": {"choices": ["off", "on"], "apply_class": "barrier"},
    "kv_allocator": {"choices": ["contiguous", "paged"], "apply_class": "barrier"},
    "kv_compaction": {"choices": ["off", "on"]},
    "backpressure": {"choices": ["off", "on"]},
    "tenant_quotas": {"choices": ["off", "on"]},
}


@dataclass(eq=False)
class Request:
    """`known` tokens, of which `computed` stand in its `blocks`; the first `prompt` came in.

    `run`: those blocks' numbers in a contiguous pool.
    """

    arrived: float
    prompt: int
    output: int
    priority: int = 1
    known: int = 0
    computed: int = 0
    blocks: int = 0
    run: list[int] = field(default_factory=list)
    started: float | None = None
    touched: float | None = None

    @property
    def decoding(self) -> bool:
        return self.known - self.computed == 1


@dataclass
class Plant:
    """Rates, lengths and mechanics may be changed between calls of `run_until`.

    Lengths vary by `spread` of their mean; `long_share` of the requests have those of
    `long` instead, prompt and output.
    """

    name: str = "engine-0"
    service: str = "chat"
    scrape_s: float = 5.0
    rate: float = 15.0
    prompt: int = 100
    output: int = 40
    spread: float = 0.25
    long_share: float = 0.0
    long: tuple[int, int] = (0, 0)
    priorities: dict[int, float] = field(default_factory=lambda: {1: 1.0})
    queue_max: int = 10_000
    a: float = 0.004
    b: float = 0.00002
    c: float = 0.0003
    q: float = 0.0
    k: float = 0.0
    h: float = 0.0
    between: float = 0.0
    eager_s: float = 0.002
    slow: float = 1.0
    captured: bool = True
    graph_seqs_max: int = 256
    kv_tokens: int = 40_000
    seed: int = 1
    config_version: int = 1
    changed_by: str = ""
    values: dict[str, Any] = field(
        default_factory=lambda: {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "max_wait_ms": 0,
            "prefill_chunk_tokens": 512,
            "shed_below_priority": 0,
            "kv_block_size": 16,
            "graph_capture": "on",
            "kv_allocator": "paged",
            "kv_compaction": "off",
            "backpressure": "off",
            "tenant_quotas": "off",
        }
    )
    silent: bool = False

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.t = 0.0
        self.next_arrival = 0.0
        self.next_scrape = self.scrape_s
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.used = 0  # blocks of the pool
        self.runs = ContiguousAllocator(self.pool)
        self.stalled = 0  # blocks asked for in one run that are free, but apart
        self.counters: dict[str, float] = defaultdict(float)
        self.labelled: dict[tuple[str, str, str], float] = defaultdict(float)
        for level in range(4):
            self.labelled["engine:requests_shed_total", "priority", str(level)] = 0.0
        for reason in ("shed", "max_num_queued_reqs"):
            self.labelled["vllm:admission_rejections_total", "reason", reason] = 0.0
        self.histograms: dict[tuple[str, str], list[float]] = {
            (name, phase): [0.0] * (len(bounds) + 2)
            for name, bounds in BOUNDS.items()
            for phase in (("decode", "mixed") if name == "engine:step_seconds" else ("",))
        }
        self.store = MemoryReader(BOUNDS)

    @property
    def now(self) -> datetime:
        return START + timedelta(seconds=self.t)

    def apply(self, values: dict[str, Any], by: str = "trimtab-agent") -> int:
        self.values.update(values)
        self._lay_out()
        self.config_version += 1
        self.changed_by = by
        self.labelled["engine:config_changes_total", "by", by.split()[0]] += 1
        return self.config_version

    def knobs(self) -> dict[str, dict[str, Any]]:
        table = {
            knob: {"value": self.values[knob], "unit": "", "apply_class": "hot"} | about
            for knob, about in KNOBS.items()
        }
        table["graph_capture"]["seqs_max"] = self.graph_seqs_max
        return table

    def run_until(self, t: float) -> datetime:
        while self.t < t:
            self._arrive()
            began, took = self.t, self._step()
            idle_until = min(self.next_arrival, self.next_scrape, t)
            self.t = self.t + took + self.between if took else max(idle_until, self.t + 1e-6)
            if self.stalled:
                self.counters["engine:kv_alloc_stall_seconds_total"] += self.t - began
            while self.next_scrape <= self.t:
                self._scrape(self.next_scrape)
                self.next_scrape += self.scrape_s
        return self.now

    def _arrive(self) -> None:
        while self.next_arrival <= self.t:
            if self.next_arrival > 0:
                self._receive(self.next_arrival)
            self.next_arrival += self.random.expovariate(self.rate)

    def _receive(self, at: float) -> None:
        lengths = (
            max(1, round(self.random.gauss(n, self.spread * n))) for n in (self.prompt, self.output)
        )
        prompt, output = lengths
        if self.long_share and self.random.random() < self.long_share:
            prompt, output = self.long
        levels, shares = zip(*self.priorities.items(), strict=True)
        priority = levels[0] if len(levels) == 1 else self.random.choices(levels, shares)[0]
        self.labelled["engine:requests_received_total", "priority", str(priority)] += 1
        if priority < self.values["shed_below_priority"]:
            self.labelled["engine:requests_shed_total", "priority", str(priority)] += 1
            self.labelled["vllm:admission_rejections_total", "reason", "shed"] += 1
        elif len(self.waiting) >= self.queue_max:
            self.labelled["vllm:admission_rejections_total", "reason", "max_num_queued_reqs"] += 1
        else:
            self.waiting.append(Request(at, prompt, max(2, output), priority, known=prompt))

    def _step(self) -> float:
        """One engine step; the seconds it took, 0 when there was nothing to do."""
        preempted = self.counters["vllm:num_preemptions_total"]
        if self.stalled and self.values["kv_compaction"] == "on":
            self._lay_out()
        self.stalled = 0
        decoding = [r for r in self.running if r.decoding][: self.values["max_num_batched_tokens"]]
        size = self.values["kv_block_size"]
        for request in decoding:
            if request.computed == request.blocks * size and request in self.running:
                self._own(request, request.computed + 1)
        budget = self.values["max_num_batched_tokens"] - len(decoding)
        chunks: dict[int, int] = {}
        for request in [r for r in self.running if not r.decoding]:
            budget -= self._chunk(request, budget, chunks)
        if self.counters["vllm:num_preemptions_total"] == preempted:
            self._admit(budget, chunks)
        decoding = [r for r in decoding if r in self.running]
        computing = [r for r in self.running if id(r) in chunks]
        if not decoding and not computing:
            return 0.0
        prefill = sum(chunks[id(r)] for r in computing)
        attended = sum(n * (r.computed + n / 2) for r in computing for n in [chunks[id(r)]])
        held = sum(r.computed for r in decoding)
        took = self._took(prefill, len(decoding), self.k * attended + self.h * held)
        self._count_step(took, prefill, len(decoding))
        for request in decoding:
            request.computed += 1
        for request in computing:
            request.computed += chunks[id(request)]
        self._tokens(self.t + took, [r for r in decoding + computing if r.computed == r.known])
        return took

    def _admit(self, budget: int, chunks: dict[int, int]) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.values["max_num_seqs"]:
            request = self.waiting[0]
            first = min(request.known, budget, self.values["prefill_chunk_tokens"])
            if self.running and not self._has_room(request, first):
                break
            self.waiting.popleft()
            if request.started is None:
                request.started = self.t
                self._observe("vllm:request_queue_time_seconds", self.t - request.arrived)
            self.running.append(request)
            budget -= self._chunk(request, budget, chunks)

    def _has_room(self, request: Request, first: int) -> bool:
        if not self.contiguous:
            return self._blocks(first) + len(self.running) <= self._free()
        needed = self._needs(request, first)
        if needed <= self._free() and not self.runs.fits(needed):
            self.stalled = needed
        return self.runs.fits(needed)

    def _chunk(self, request: Request, budget: int, chunks: dict[int, int]) -> int:
        if budget <= 0 or request not in self.running:
            return 0
        size = self.values["prefill_chunk_tokens"]
        count = min(request.known - request.computed, size, budget)
        if not self._own(request, request.computed + count):
            return 0
        chunks[id(request)] = count
        return count

    def _own(self, request: Request, tokens: int) -> bool:
        """Blocks for so many tokens, sending the latest back while the pool is short."""
        needed = self._needs(request, tokens) - request.blocks
        while needed > self._free():
            assert len(self.running) > 1, "the pool is too small for one"
            victim = self.running.pop()
            self._release(victim)
            self.waiting.appendleft(victim)
            self.counters["vllm:num_preemptions_total"] += 1
            if victim is request:
                return False
        if self.contiguous and needed > 0:
            request.run = self.runs.allocate(needed) or []
            assert request.run, "it was let in without a run for it"
        request.blocks += needed
        self.used += needed
        return True

    def _lay_out(self) -> None:
        """All that runs, one behind the other, into a pool as the settings have it now."""
        self.runs = ContiguousAllocator(self.pool)
        for request in sorted(self.running, key=lambda each: each.run[:1]):
            request.blocks = self._needs(request, request.computed)
            request.run = (self.runs.allocate(request.blocks) or []) if self.contiguous else []
        self.used = sum(request.blocks for request in self.running)

    def _needs(self, request: Request, tokens: int) -> int:
        """Blocks for so many of its tokens, or for all there may be but the last."""
        return self._blocks(request.prompt + request.output - 1 if self.contiguous else tokens)

    def _release(self, request: Request) -> None:
        self.used -= request.blocks
        self.runs.release(request.run)
        request.blocks, request.computed, request.run = 0, 0, []

    def _took(self, prefill: int, decode: int, attention_s: float) -> float:
        """Graphs are captured for decode steps of up to `graph_seqs_max` requests."""
        graph = self.values["graph_capture"] == "on" and self.captured
        if graph and (prefill or decode > self.graph_seqs_max):
            graph = False
            reason = "prompt" if prefill else "shape"
            self.labelled["engine:graph_misses_total", "reason", reason] += 1
        self.labelled["engine:graph_steps_total", "mode", "graph" if graph else "eager"] += 1
        fixed = self.a + (0.0 if graph else self.eager_s)
        cpu = fixed + self.b * prefill + self.c * decode + self.q * decode**2 + attention_s
        cpu *= self.random.uniform(0.95, 1.05)
        self.counters["engine:forward_cpu_seconds_total"] += cpu
        self.counters["engine:forward_seconds_total"] += cpu * self.slow
        return cpu * self.slow

    def _count_step(self, took: float, prefill: int, decode: int) -> None:
        self._observe("engine:step_seconds", took, "mixed" if prefill else "decode")
        self._observe("vllm:iteration_tokens_total", prefill + decode)
        self.counters["engine:busy_seconds_total"] += took
        self.counters["engine:steps_total"] += 1
        self.counters["engine:step_prefill_tokens_total"] += prefill
        self.counters["engine:step_decode_tokens_total"] += decode

    def _tokens(self, end: float, sampled: list[Request]) -> None:
        for request in sampled:
            request.known += 1
            if request.touched is None:
                assert request.started is not None
                self._observe("vllm:time_to_first_token_seconds", end - request.arrived)
                self._observe("vllm:request_prefill_time_seconds", end - request.started)
            else:
                self._observe("vllm:inter_token_latency_seconds", end - request.touched)
            request.touched = end
            if request.known - request.prompt >= request.output:
                self._observe("vllm:e2e_request_latency_seconds", end - request.arrived)
                self._observe("vllm:request_prompt_tokens", request.prompt)
                self._observe("vllm:request_generation_tokens", request.output)
                self.counters["vllm:request_success_total"] += 1
                self.running.remove(request)
                self._release(request)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // int(self.values["kv_block_size"]))

    @property
    def contiguous(self) -> bool:
        return bool(self.values["kv_allocator"] == "contiguous")

    @property
    def pool(self) -> int:
        return int(self.kv_tokens // self.values["kv_block_size"])

    def _free(self) -> int:
        return self.pool - self.used

    def _observe(self, metric: str, value: float, phase: str = "") -> None:
        row, bounds = self.histograms[metric, phase], BOUNDS[metric]
        row[bisect_left(bounds, value)] += 1
        row[-1] += value

    def _scrape(self, t: float) -> None:
        if self.silent:
            return
        at = START + timedelta(seconds=t)
        labels = {"service": self.service, "instance": self.name, "node": "node-0"}
        gauges = {
            "vllm:num_requests_running": len(self.running),
            "vllm:num_requests_waiting": len(self.waiting),
            "vllm:kv_cache_usage_perc": 1 - self._free() / self.pool,
            "engine:kv_blocks": self.pool,
            "engine:graph_capture_ready": self.captured,
            "engine:config_version": self.config_version,
        }
        for metric, value in gauges.items():
            self.store.add(metric, at, float(value), labels)
        for knob, value in self.values.items():
            shown = KNOBS[knob]["choices"].index(value) if isinstance(value, str) else value
            self.store.add("engine:knob", at, float(shown), labels | {"knob": knob})
        if self.contiguous:
            self._scrape_runs(at, labels)
        self.counters["vllm:num_preemptions_total"] += 0
        for metric, value in self.counters.items():
            extra = {"finished_reason": "length"} if metric == "vllm:request_success_total" else {}
            self.store.add(metric, at, value, labels | extra)
        for (metric, label, value), count in self.labelled.items():
            self.store.add(metric, at, count, labels | {label: value})
        for (metric, phase), row in self.histograms.items():
            self.store.add(metric, at, tuple(row), labels | ({"phase": phase} if phase else {}))

    def _scrape_runs(self, at: datetime, labels: dict[str, str]) -> None:
        """What a contiguous pool shows beside all others."""
        size = int(self.values["kv_block_size"])
        there = [*self.running, *self.waiting]
        memory = Memory(
            contiguous=True,
            block_size=size,
            total=self.pool,
            runs=self.runs.free_runs()[:, 1],
            asked=tuple(self._needs(request, 0) for request in there),
            stalled=self.stalled,
            waste_tokens=sum(request.blocks * size - request.known for request in self.running),
        )
        gauges = {
            "engine:kv_largest_free_run_blocks": memory.longest,
            "engine:kv_internal_waste_tokens": memory.waste_tokens,
            "engine:kv_fragmentation_entropy": memory.entropy_bits,
            "engine:kv_alloc_stall_blocks": (
                memory.stalled if memory.stalled > memory.longest else None
            ),
        }
        for metric, value in gauges.items():
            if value is not None:
                self.store.add(metric, at, float(value), labels)
        for asked, tokens in memory.stranded_tokens().items():
            self.store.add(
                "engine:kv_stranded_tokens", at, float(tokens), labels | {"asked": asked}
            )
        for bound, count in memory.run_counts():
            self.store.add("engine:kv_free_runs", at, float(count), labels | {"le": bound})
        self.counters["engine:kv_alloc_stall_seconds_total"] += 0
