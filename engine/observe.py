"""What the engine measures: vLLM's metric names, and ours under `engine:`.

Recorded into plain numbers and arrays, once per step, by the step thread (admissions: by the event
loop); turned into Prometheus families only when somebody asks. Bucket bounds are those of vLLM
0.33, so its dashboards and rules read this engine unchanged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from engine.config import EngineConfig
from engine.exec.capture import Captured
from engine.families import REQUEST_S, TOKEN_GAP_S, TTFT_S, counter, gauge
from engine.knobs import KNOBS, Value
from engine.kv.stats import Memory
from engine.pause import MODES, Pause
from engine.sched.request import PRIORITIES, Finish, Request
from engine.sched.scheduler import Outcome, Plan

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_S = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
CHANGERS_MAX = 16  # label values of engine:config_changes_total; the rest count as "other"
REJECTIONS = (
    *("max_num_queued_reqs", "max_num_queued_tokens", "shed", "shutting_down"),
    *("backpressure", "tenant_quota", "tenant_burst"),
)


def steps_1_2_5(maximum: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to `maximum`, as vLLM's build_1_2_5_buckets."""
    bounds: list[float] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > maximum:
                return tuple(bounds)
            bounds.append(float(mantissa * power))
        power *= 10


class Histogram:
    """Cumulative buckets over `bounds`. Plain numbers: a step counts few, and numpy's calls cost
    more than the counting."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = [float(bound) for bound in bounds]
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        return list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))


@dataclass(frozen=True)
class Reading:
    """The gauges of one moment, read from the engine when /metrics is asked for."""

    running: int
    waiting: int
    deferred: int
    kv_usage_ratio: float
    kv_blocks: int
    kv_dtype: str
    kv_token_bytes: int
    kv_cached_blocks: int
    kv_evictions: int
    config_version: int
    knobs: dict[str, Value]
    captured: Captured | None
    contexts: dict[str, int]
    rollbacks: int
    swap_s: float
    spans_dropped: int
    memory: Memory
    stalls: int
    stall_s: float
    compactions: int
    compaction_s: float
    tier_hits: int
    tier_misses: int
    tier_late: int
    tier_prefetched: dict[str, int]  # tokens, by what became of them
    tier_bytes_per_s: float
    paused: Pause
    phase_s: dict[str, float]
    tasks: dict[str, int]


class Metrics:
    """The collector of one engine and its own registry; `render` gives the exposition."""

    def __init__(self, config: EngineConfig, read: Callable[[], Reading]) -> None:
        self.config = config
        self.read = read
        tokens = steps_1_2_5(config.model_len_max)
        self.received = [0] * len(PRIORITIES)
        self.shed = [0] * len(PRIORITIES)
        self.rejected = dict.fromkeys(REJECTIONS, 0)
        self.succeeded = {reason: 0 for reason in Finish if reason is not Finish.ERROR}
        self.failed = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_cached_tokens = 0
        self.prompt_computed_tokens = 0
        self.generation_tokens = 0
        self.step_prefill_tokens = 0
        self.step_decode_tokens = 0
        self.steps = 0
        self.step_errors = 0
        self.busy_s = 0.0
        self.near_ties = 0
        self.forward_s = 0.0
        self.forward_cpu_s = 0.0
        self.graph_steps = {"compiled": 0, "graph": 0, "eager": 0}
        self.graph_misses = {"prompt": 0, "shape": 0}
        self.changes: dict[str, int] = {}
        self.time_to_first_token = Histogram(TTFT_S)
        self.inter_token = Histogram(TOKEN_GAP_S)
        self.time_per_output_token = Histogram(TOKEN_GAP_S)
        self.e2e = Histogram(REQUEST_S)
        self.queue = Histogram(REQUEST_S)
        self.inference = Histogram(REQUEST_S)
        self.prefill = Histogram(REQUEST_S)
        self.decode = Histogram(REQUEST_S)
        self.request_prompt = Histogram(tokens)
        self.request_generation = Histogram(tokens)
        self.request_max_tokens = Histogram(tokens)
        self.request_preemptions = Histogram(PREEMPTIONS)
        self.request_computed = Histogram(tokens)
        self.iteration_tokens = Histogram(STEP_TOKENS)
        self.step_seconds = {phase: Histogram(STEP_S) for phase in ("decode", "mixed")}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def step(self, plan: Plan, outcome: Outcome, began: float, now: float) -> None:
        """One step that began at `began` and whose tokens were there at `now`."""
        prefill = plan.prefill_tokens
        self.steps += 1
        self.busy_s += now - began
        self.step_prefill_tokens += prefill
        self.step_decode_tokens += len(plan.decodes)
        self.generation_tokens += len(outcome.tokens)
        self.iteration_tokens.add(prefill + len(plan.decodes))
        self.step_seconds["mixed" if prefill else "decode"].add(now - began)
        self.inter_token.observe(outcome.gaps_s.tolist())
        for request in outcome.first:
            self.prompt_cached_tokens += request.cached_tokens
            self.prompt_computed_tokens += request.prompt_tokens - request.cached_tokens
            self.time_to_first_token.add(now - request.arrived)

    def finished(self, request: Request) -> None:
        """A request has ended, however it did."""
        assert request.finish is not None
        if request.finish is Finish.ERROR:
            self.failed += 1
            return
        self.succeeded[request.finish] += 1
        if request.finish is Finish.ABORT:
            return
        self.e2e.add(request.finished - request.arrived)
        self.queue.add(request.queue_s)
        self.prefill.add(request.prefill_s)
        self.decode.add(request.decode_s)
        self.inference.add(request.prefill_s + request.decode_s)
        self.time_per_output_token.add(request.time_per_output_token_s)
        self.request_prompt.add(request.prompt_tokens)
        self.request_computed.add(request.prompt_tokens - request.cached_tokens)
        self.request_generation.add(request.generated)
        self.request_max_tokens.add(request.max_tokens)
        self.request_preemptions.add(request.preemptions)

    def config_changed(self, changed_by: str) -> None:
        """Counts by the first word of `changed_by`, a bounded set."""
        by = (changed_by.replace("/", " ").split() or ["unknown"])[0]
        if by not in self.changes and len(self.changes) >= CHANGERS_MAX:
            by = "other"
        self.changes[by] = self.changes.get(by, 0) + 1

    def collect(self) -> Iterator[Metric]:
        reading = self.read()
        yield from self._gauges(reading)
        yield from self._memory(reading.memory)
        yield from self._counters(reading)
        yield from self._histograms()

    @property
    def labels(self) -> dict[str, str]:
        return {"model_name": self.config.model_name, "engine": self.config.name}

    def _gauges(self, reading: Reading) -> Iterator[Metric]:
        labels = self.labels
        for name, value, text in (
            ("vllm:num_requests_running", reading.running, "Requests in the running batch."),
            ("vllm:num_requests_waiting", reading.waiting, "Requests waiting to be run."),
            ("vllm:kv_cache_usage_perc", reading.kv_usage_ratio, "KV cache usage; 1 is full."),
            ("engine:kv_blocks", reading.kv_blocks, "Blocks of the KV pool."),
            ("engine:kv_token_bytes", reading.kv_token_bytes, "What the KV of a token takes."),
            (
                "engine:kv_cached_blocks",
                reading.kv_cached_blocks,
                "Blocks of the KV pool with KV that nobody uses yet: cached, or copied ahead.",
            ),
            ("engine:graph_capture_ready", int(reading.captured is not None), "1: steps replay."),
            (
                "engine:graph_capture_seconds",
                reading.captured.seconds if reading.captured else 0.0,
                "What capturing, or loading, what is in use took.",
            ),
            ("engine:config_swap_seconds", reading.swap_s, "Pause of the last barrier change."),
            ("engine:config_version", reading.config_version, "Version of the running config."),
        ):
            yield gauge(name, text, [(labels, value)])
        yield gauge(
            "engine:tier_copy_bytes_per_second",
            "How fast KV was lately copied to the host, or back; 0 before any was.",
            [({**labels, "tier": "host"}, reading.tier_bytes_per_s)],
        )
        reasons = {"capacity": reading.waiting - reading.deferred, "deferred": reading.deferred}
        yield gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting: for their turn; deferred, for a prefix that is being computed.",
            [({**labels, "reason": k}, v) for k, v in reasons.items()],
        )
        yield gauge(
            "engine:knob",
            "Running value of a knob, in its unit; of words the place among them: off 0, on 1.",
            [({**labels, "knob": k}, number(k, value)) for k, value in reading.knobs.items()],
        )
        yield gauge(
            "engine:paused",
            "1: stands still, by POST /pause with this mode.",
            [({**labels, "mode": mode}, reading.paused is mode) for mode in MODES],
        )
        if reading.tasks:
            yield gauge(
                "engine:tasks",
                "Tasks kept, by state.",
                [({**labels, "state": k}, v) for k, v in reading.tasks.items()],
            )
        size = int(reading.knobs["kv_block_size"])
        info = {
            "block_size": str(size),
            "num_gpu_blocks": str(reading.kv_blocks),
            "kv_cache_size_tokens": str(reading.kv_blocks * size),
            "cache_dtype": reading.kv_dtype,
            "enable_prefix_caching": str(reading.knobs["prefix_cache"] == "on"),
        }
        yield gauge("vllm:cache_config_info", "The KV cache.", [({**labels, **info}, 1)])

    def _memory(self, memory: Memory) -> Iterator[Metric]:
        """How the free blocks of the KV pool lie, and what those in use waste."""
        labels, entropy, stranded = self.labels, memory.entropy_bits, memory.stranded_tokens()
        yield gauge(
            "engine:kv_free_runs",
            "Runs of consecutive free blocks of at most `le` blocks.",
            [({**labels, "le": le}, count) for le, count in memory.run_counts()],
        )
        for name, value, text in (
            ("engine:kv_largest_free_run_blocks", memory.longest, "Blocks of the longest of them."),
            (
                "engine:kv_internal_waste_tokens",
                memory.waste_tokens,
                "Room in allocated blocks for tokens that their sequence does not have.",
            ),
        ):
            yield gauge(name, text, [(labels, value)])
        if entropy is not None:
            text = "Entropy of the free runs, in bits; of a contiguous pool only."
            yield gauge("engine:kv_fragmentation_entropy", text, [(labels, entropy)])
        if memory.stalled > memory.longest:  # or one has been freed since the last step
            text = "Blocks in one run that the request asks for that finds no run so long."
            yield gauge("engine:kv_alloc_stall_blocks", text, [(labels, memory.stalled)])
        if stranded:
            yield gauge(
                "engine:kv_stranded_tokens",
                "Free, and of no use to requests of the size asked for; 0 where blocks are paged.",
                [({**labels, "asked": size}, tokens) for size, tokens in stranded.items()],
            )

    def _counters(self, reading: Reading) -> Iterator[Metric]:
        labels = self.labels
        dropped, rollbacks = reading.spans_dropped, reading.rollbacks
        # Read once, and summed, not subtracted: a step may end meanwhile, and no counter may fall.
        cached, computed = self.prompt_cached_tokens, self.prompt_computed_tokens
        for name, value, text in (
            ("vllm:num_preemptions", self.preemptions, "Preemptions (KV computed again later)."),
            ("vllm:prompt_tokens", computed + cached, "Prompt tokens of requests prefilled."),
            ("vllm:prompt_tokens_cached", cached, "Of these, found in the prefix cache."),
            ("vllm:prefix_cache_queries", self.prefix_queries, "Tokens looked up in it."),
            ("vllm:prefix_cache_hits", self.prefix_hits, "Of these, found."),
            ("engine:prefix_evictions", reading.kv_evictions, "Cached blocks the pool needed."),
            ("vllm:generation_tokens", self.generation_tokens, "Tokens generated."),
            ("engine:requests_failed", self.failed, "Requests the engine could not finish."),
            ("engine:steps", self.steps, "Steps run."),
            ("engine:step_errors", self.step_errors, "Steps that raised; their requests failed."),
            ("engine:busy_seconds", self.busy_s, "Time spent in steps."),
            ("engine:forward_seconds", self.forward_s, "Time spent in the model, a part of busy."),
            ("engine:forward_cpu_seconds", self.forward_cpu_s, "CPU the step thread got in it."),
            ("engine:step_prefill_tokens", self.step_prefill_tokens, "Prompt tokens computed."),
            ("engine:step_decode_tokens", self.step_decode_tokens, "Decode tokens computed."),
            ("engine:near_ties", self.near_ties, "Greedy choices decided by the reference."),
            ("engine:config_rollbacks", rollbacks, "Changes taken back by their own proof."),
            ("engine:spans_dropped", dropped, "Requests whose spans were not delivered."),
            ("engine:kv_alloc_stalls", reading.stalls, "Requests no free run was long enough for."),
            ("engine:kv_alloc_stall_seconds", reading.stall_s, "Time some request waited so."),
            ("engine:kv_compactions", reading.compactions, "Times sequences were moved together."),
            ("engine:kv_compaction_seconds", reading.compaction_s, "What that took."),
        ):
            yield counter(name, text, [(labels, value)])
        for name, value, text in (
            ("engine:tier_hits", reading.tier_hits, "Preempted requests whose KV was copied back."),
            ("engine:tier_misses", reading.tier_misses, "Preempted requests it had no room for."),
            ("engine:tier_prefetch_late", reading.tier_late, "Pieces a step was too short for."),
        ):
            yield counter(name, text, [({**labels, "tier": "host"}, value)])
        yield counter(
            "engine:tier_prefetch_tokens",
            "Tokens copied back ahead of their turn: begun, and of these used and rolled back.",
            [
                ({**labels, "tier": "host", "outcome": k}, v)
                for k, v in reading.tier_prefetched.items()
            ],
        )
        yield counter(
            "engine:step_phase_seconds",
            "Time spent in steps, by phase.",
            [({**labels, "phase": k}, v) for k, v in reading.phase_s.items()],
        )
        sources = {"local_compute": computed, "local_cache_hit": cached}
        yield counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens of requests prefilled, by where their KV came from.",
            [({**labels, "source": k}, v) for k, v in sources.items()],
        )
        for name, counts, text in (
            ("engine:requests_received", self.received, "Well-formed requests that arrived."),
            ("engine:requests_shed", self.shed, "Requests turned away for their priority."),
        ):
            by_priority = zip(PRIORITIES, counts, strict=True)
            yield counter(name, text, [({**labels, "priority": k}, v) for k, v in by_priority])
        yield counter(
            "engine:graph_steps",
            "Steps by how they ran: compiled; graph, replayed; eager, op by op.",
            [({**labels, "mode": k}, v) for k, v in self.graph_steps.items()],
        )
        yield counter(
            "engine:graph_contexts",
            "Times graphs were wanted for a block size and dtype: built; reused, built before.",
            [({**labels, "outcome": k}, v) for k, v in reading.contexts.items()],
        )
        yield counter(
            "engine:graph_misses",
            "Steps nothing captured covers: with (long) prompt chunks, or of too many shapes.",
            [({**labels, "reason": k}, v) for k, v in self.graph_misses.items()],
        )
        yield counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [({**labels, "finished_reason": k}, v) for k, v in self.succeeded.items()],
        )
        yield counter(
            "vllm:admission_rejections",
            "Requests turned away at the door, by reason.",
            [({**labels, "reason": k}, v) for k, v in self.rejected.items()],
        )
        yield counter(
            "engine:config_changes",
            "Changes of the running configuration, by who asked.",
            [({**labels, "by": k}, v) for k, v in dict(self.changes).items()],
        )

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From arrival.", self.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Gap between two tokens.", self.inter_token),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean gap after the first token, per request.",
                self.time_per_output_token,
            ),
            ("vllm:e2e_request_latency_seconds", "From arrival to the last token.", self.e2e),
            ("vllm:request_queue_time_seconds", "Waiting for the first step.", self.queue),
            ("vllm:request_inference_time_seconds", "Prefill and decode.", self.inference),
            ("vllm:request_prefill_time_seconds", "First step to first token.", self.prefill),
            ("vllm:request_decode_time_seconds", "First token to last.", self.decode),
            ("vllm:request_prompt_tokens", "Prompt tokens of a request.", self.request_prompt),
            (
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were not found in the prefix cache.",
                self.request_computed,
            ),
            ("vllm:request_generation_tokens", "Tokens generated.", self.request_generation),
            ("vllm:request_params_max_tokens", "max_tokens asked.", self.request_max_tokens),
            ("vllm:request_num_preemptions", "Preemptions.", self.request_preemptions),
            ("vllm:iteration_tokens_total", "Tokens of one step.", self.iteration_tokens),
        ):
            yield family(name, text, [(self.labels, histogram)])
        yield family(
            "engine:step_seconds",
            "Wall time of a step: scheduling, forward, bookkeeping. mixed: with prompt chunks.",
            [({**self.labels, "phase": k}, v) for k, v in self.step_seconds.items()],
        )


def number(knob: str, value: Value) -> float:
    """A knob's value as a sample."""
    return float(KNOBS[knob].ladder.index(value) if isinstance(value, str) else value)


def family(name: str, text: str, samples: list[tuple[dict[str, str], Histogram]]) -> Metric:
    metric = HistogramMetricFamily(name, text, labels=list(samples[0][0]))
    for labels, histogram in samples:
        metric.add_metric(list(labels.values()), histogram.buckets(), histogram.sum)
    return metric
