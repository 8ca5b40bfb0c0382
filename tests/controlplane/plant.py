"""A small queueing model of an engine, seen only through its metrics, in simulated time.

It stands at the seam of tracing's Reader: continuous batching with chunked prefill, a running cap
and a KV pool; a step takes a + b · prompt tokens + c · running requests, times `slow`. Seeded, so
a test tells the same story every time.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tracing.types import Grid, HistogramSeries, Labels, Series, ShareSeries, Span

START = datetime(2026, 3, 1, tzinfo=UTC)
LATENCY = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0)
TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
GAPS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
BOUNDS = {
    "vllm:time_to_first_token_seconds": LATENCY,
    "vllm:e2e_request_latency_seconds": LATENCY,
    "vllm:request_queue_time_seconds": LATENCY,
    "vllm:inter_token_latency_seconds": GAPS,
    "engine:step_seconds": GAPS,
    "vllm:iteration_tokens_total": TOKENS,
}
KNOBS = {
    "max_num_seqs": (1, 256),
    "max_num_batched_tokens": (64, 8192),
    "max_wait_ms": (0, 50),
    "prefill_chunk_tokens": (32, 4096),
}


@dataclass
class Request:
    arrived: float
    prompt: int
    output: int
    prefilled: int = 0
    decoded: int = 0
    started: float = 0.0


@dataclass
class Plant:
    """Rates and lengths may be changed between calls of `run_until`."""

    name: str = "engine-0"
    service: str = "chat"
    scrape_s: float = 5.0
    rate: float = 15.0
    prompt: int = 100
    output: int = 40
    a: float = 0.004
    b: float = 0.00002
    c: float = 0.0003
    slow: float = 1.0
    kv_tokens: float = 40_000
    seed: int = 1
    config_version: int = 1
    values: dict[str, int] = field(
        default_factory=lambda: {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "max_wait_ms": 0,
            "prefill_chunk_tokens": 512,
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
        self.counters: dict[str, float] = defaultdict(float)
        self.histograms = {name: [0.0] * (len(b) + 2) for name, b in BOUNDS.items()}
        self.store = MemoryReader()

    @property
    def now(self) -> datetime:
        return START + timedelta(seconds=self.t)

    def apply(self, values: dict[str, Any], by: str = "agent") -> int:
        self.values.update(values)
        self.config_version += 1
        return self.config_version

    def knobs(self) -> dict[str, dict[str, Any]]:
        return {
            knob: {
                "value": self.values[knob],
                "unit": "",
                "minimum": low,
                "maximum": high,
                "apply_class": "hot",
            }
            for knob, (low, high) in KNOBS.items()
        }

    def run_until(self, t: float) -> datetime:
        while self.t < t:
            self._arrive()
            took = self._step()
            idle_until = min(self.next_arrival, self.next_scrape, t)
            self.t = self.t + took if took else max(idle_until, self.t + 1e-6)
            while self.next_scrape <= self.t:
                self._scrape(self.next_scrape)
                self.next_scrape += self.scrape_s
        return self.now

    def _arrive(self) -> None:
        while self.next_arrival <= self.t:
            if self.next_arrival > 0:
                lengths = (max(1, round(self.random.gauss(n, n / 4))) for n in self._lengths())
                prompt, output = lengths
                self.waiting.append(Request(self.next_arrival, prompt, max(2, output)))
                self.counters["engine:requests_received_total"] += 1
            self.next_arrival += self.random.expovariate(self.rate)

    def _lengths(self) -> tuple[int, int]:
        return self.prompt, self.output

    def _step(self) -> float:
        """One engine step; the seconds it took, 0 when there was nothing to do."""
        while self.waiting and len(self.running) < self.values["max_num_seqs"]:
            request = self.waiting[0]
            if self._kv() + request.prompt > self.kv_tokens:
                break
            self.waiting.popleft()
            request.started = self.t
            self._observe("vllm:request_queue_time_seconds", self.t - request.arrived)
            self.running.append(request)
        if not self.running:
            return 0.0
        decoding = [r for r in self.running if r.prefilled >= r.prompt]
        budget = self.values["max_num_batched_tokens"] - len(decoding)
        prefill = 0
        for request in self.running:
            if request.prefilled < request.prompt and budget > 0:
                chunk = min(
                    request.prompt - request.prefilled, self.values["prefill_chunk_tokens"], budget
                )
                request.prefilled += chunk
                budget -= chunk
                prefill += chunk
        took = self.slow * (self.a + self.b * prefill + self.c * len(decoding))
        took *= self.random.uniform(0.95, 1.05)
        self._count_step(took, prefill, len(decoding))
        self._tokens(took, decoding)
        return took

    def _count_step(self, took: float, prefill: int, decode: int) -> None:
        self._observe("engine:step_seconds", took)
        self._observe("vllm:iteration_tokens_total", prefill + decode)
        self.counters["engine:steps_total"] += 1
        self.counters["engine:step_prefill_tokens_total"] += prefill
        self.counters["engine:step_decode_tokens_total"] += decode

    def _tokens(self, took: float, decoding: list[Request]) -> None:
        end = self.t + took
        for request in self.running:
            if request in decoding:
                request.decoded += 1
                self._observe("vllm:inter_token_latency_seconds", took)
            elif request.prefilled >= request.prompt:
                request.decoded = 1
                self._observe("vllm:time_to_first_token_seconds", end - request.arrived)
        for request in [r for r in self.running if r.decoded >= r.output]:
            self._observe("vllm:e2e_request_latency_seconds", end - request.arrived)
            self.counters["vllm:request_success_total"] += 1
            self.running.remove(request)

    def _kv(self) -> float:
        return sum(r.prompt + r.output for r in self.running)

    def _observe(self, metric: str, value: float) -> None:
        row, bounds = self.histograms[metric], BOUNDS[metric]
        index = next((i for i, bound in enumerate(bounds) if value <= bound), len(bounds))
        row[index] += 1
        row[-1] += value

    def _scrape(self, t: float) -> None:
        if self.silent:
            return
        at = START + timedelta(seconds=t)
        labels = {"service": self.service, "instance": self.name, "node": "node-0"}
        gauges = {
            "vllm:num_requests_running": len(self.running),
            "vllm:num_requests_waiting": len(self.waiting),
            "vllm:kv_cache_usage_perc": self._kv() / self.kv_tokens,
            "engine:config_version": self.config_version,
        }
        for metric, value in gauges.items():
            self.store.add(metric, at, float(value), labels)
        for knob, value in self.values.items():
            self.store.add("engine:knob", at, float(value), labels | {"knob": knob})
        self.counters["vllm:num_preemptions_total"] += 0
        for metric, value in self.counters.items():
            shown = dict(labels)
            if metric == "vllm:request_success_total":
                shown["finished_reason"] = "length"
            self.store.add(metric, at, value, shown)
        for metric, row in self.histograms.items():
            self.store.add(metric, at, tuple(row), labels)


Value = float | tuple[float, ...]


class MemoryReader:
    """Samples in lists, read as tracing.types promises; one series per metric and label set."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[tuple[tuple[str, str], ...], list[tuple[datetime, Value]]]] = (
            defaultdict(dict)
        )
        self.stored_spans: list[Span] = []

    def add(self, metric: str, at: datetime, value: Value, labels: Labels) -> None:
        key = tuple(sorted(labels.items()))
        self.samples[metric].setdefault(key, []).append((at, value))

    def _matching(self, metric: str, where: Labels | None) -> list[tuple[Labels, Any]]:
        return [
            (dict(key), samples)
            for key, samples in self.samples[metric].items()
            if (where or {}).items() <= dict(key).items()
        ]

    def increase(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[Series]:
        groups: dict[tuple[str, ...], list[float]] = {}
        for labels, samples in self._matching(metric, where):
            values = [_growth(samples, end, grid.step_s) for end in grid.ends()]
            key = tuple(labels.get(name, "") for name in by)
            groups[key] = _sum(groups.get(key), values)
        return [Series(dict(zip(by, k, strict=True)), v) for k, v in groups.items()]

    def gauge(
        self,
        metric: str,
        grid: Grid,
        *,
        where: Labels | None = None,
        by: Sequence[str] = (),
        over: str = "avg",
    ) -> list[Series]:
        fold = {
            "avg": lambda v: sum(v) / len(v),
            "max": max,
            "min": min,
            "last": lambda v: v[-1],
        }[over]
        groups: dict[tuple[str, ...], list[float]] = {}
        for labels, samples in self._matching(metric, where):
            windows = [_inside(samples, end, grid.step_s) for end in grid.ends()]
            values = [fold(w) if w else math.nan for w in windows]
            key = tuple(labels.get(name, "") for name in by)
            groups[key] = _sum(groups.get(key), values)
        return [Series(dict(zip(by, k, strict=True)), v) for k, v in groups.items()]

    def histogram(
        self, metric: str, grid: Grid, *, where: Labels | None = None, by: Sequence[str] = ()
    ) -> list[HistogramSeries]:
        found = []
        for labels, samples in self._matching(metric, where):
            width = len(samples[0][1])
            columns = [[(at, row[i]) for at, row in samples] for i in range(width)]
            rows = [[_growth(c, end, grid.step_s) for c in columns] for end in grid.ends()]
            shown = {name: labels.get(name, "") for name in by}
            counts, sums = [row[:-1] for row in rows], [row[-1] for row in rows]
            found.append(HistogramSeries(shown, BOUNDS[metric], counts, sums))
        return found

    def span_share(
        self,
        grid: Grid,
        *,
        service: str,
        name: str,
        measure: str,
        threshold_s: float | None,
        by: Sequence[str] = (),
    ) -> list[ShareSeries]:
        return []

    def last_seen(self, metric: str, *, where: Labels | None = None) -> datetime | None:
        times = [samples[-1][0] for _, samples in self._matching(metric, where)]
        return max(times, default=None)

    def span_last_seen(
        self, *, service: str, name: str, instance: str | None = None
    ) -> datetime | None:
        ends = [s.end_ns for s in self.stored_spans if instance in (None, s.instance)]
        return datetime.fromtimestamp(max(ends) / 1e9, UTC) if ends else None

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.stored_spans if span.trace_id == trace_id]

    def spans(
        self,
        start: datetime,
        end: datetime,
        *,
        service: str | None = None,
        instance: str | None = None,
        name: str | None = None,
        measure: str = "duration",
        slowest: bool = False,
        limit: int = 50,
    ) -> list[Span]:
        wanted = [
            span
            for span in self.stored_spans
            if start.timestamp() < span.end_ns / 1e9 <= end.timestamp()
            and instance in (None, span.instance)
        ]
        return sorted(wanted, key=lambda s: -s.duration_ns)[:limit]


def _sum(a: list[float] | None, b: list[float]) -> list[float]:
    if a is None:
        return b
    return [
        y if math.isnan(x) else x if math.isnan(y) else x + y for x, y in zip(a, b, strict=True)
    ]


def _edges(
    samples: Sequence[tuple[datetime, Any]], end: datetime, step_s: float
) -> tuple[int, int]:
    start = end - timedelta(seconds=step_s)
    return (
        bisect_right(samples, start, key=lambda s: s[0]),
        bisect_right(samples, end, key=lambda s: s[0]),
    )


def _inside(samples: Sequence[tuple[datetime, Any]], end: datetime, step_s: float) -> list[Any]:
    low, high = _edges(samples, end, step_s)
    return [value for _, value in samples[low:high]]


def _growth(samples: Sequence[tuple[datetime, Any]], end: datetime, step_s: float) -> float:
    low, high = _edges(samples, end, step_s)
    if low == high:
        return math.nan
    before = samples[low - 1][1] if low else samples[0][1]
    return float(samples[high - 1][1] - before)
