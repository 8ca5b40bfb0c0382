"""An hour of the world as it was measured: first tokens came late, and were mended by the action.

Readings are booked; metrics and spans go in by the real door.
"""

from __future__ import annotations

import asyncio
import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from slo.budget import Counts
from slo.readings import Measured, readings_book
from tests.controlplane.web.world import TRACE_ID, World
from tracing import wiring
from tracing.types import Signal

WINDOW_S = 15.0
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
RNG_SEED = 7


def aligned(at: datetime) -> datetime:
    return datetime.fromtimestamp(at.timestamp() // WINDOW_S * WINDOW_S, UTC)


def windows(world: World, minutes: int = 60) -> list[datetime]:
    end = aligned(world.now) - timedelta(seconds=WINDOW_S)
    count = int(minutes * 60 / WINDOW_S)
    return [end - timedelta(seconds=WINDOW_S * i) for i in range(count)][::-1]


def lateness(world: World, at: datetime) -> float:
    """How bad it is, 0 to 1: it rises four minutes ago and mends half a minute after the action."""
    age = (world.now - at).total_seconds() / 60
    rise = 1 / (1 + math.exp((age - 4.2) * 9))
    mended = 1 / (1 + math.exp((2.7 - age) * 9))
    return rise * mended


def judge(world: World) -> None:
    """An hour of readings: TTFT overdrawn, TPOT nearly, success met, code never measured."""
    rng = random.Random(RNG_SEED)
    shares = {
        "ttft": lambda bad: 0.002 + 0.45 * bad,
        "tpot": lambda bad: 0.043 + 0.02 * bad,
        "answered": lambda bad: 0.0002,
    }
    for slug, share in shares.items():
        measured = []
        for end in windows(world):
            gap = 31 < (world.now - end).total_seconds() / 60 < 33
            total = float(rng.randint(70, 110))
            bad = sum(rng.random() < share(lateness(world, end)) for _ in range(int(total)))
            counts = None if gap else Counts(total - bad, total)
            signal = Signal.STALE if gap else Signal.OK
            measured.append(Measured(end, counts, signal))
        for scope in ("", "engine-0"):
            readings_book(
                objective=world.objectives[slug], scope=scope, window_s=WINDOW_S, measured=measured
            )


def pairs(labels: dict[str, str]) -> list[KeyValue]:
    return [KeyValue(key=k, value=AnyValue(string_value=v)) for k, v in labels.items()]


RESOURCE = {"service.name": "chat", "service.instance.id": "engine-0", "host.name": "node-a"}


def metrics_body(world: World) -> bytes:
    """An hour of TTFT and ITL histograms and of running, waiting and the cap, every 15 s."""
    rng = random.Random(RNG_SEED)
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    resource.resource.attributes.extend(pairs(RESOURCE))
    metrics = resource.scope_metrics.add().metrics
    names = ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds")
    histograms = {name: metrics.add(name=name) for name in names}
    for metric in histograms.values():
        metric.histogram.aggregation_temporality = 2
    gauges = {
        name: metrics.add(name=name)
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "engine:knob")
    }
    sums = {name: [0] * (len(BOUNDS) + 1) for name in names}
    for end in windows(world):
        if 31 < (world.now - end).total_seconds() / 60 < 33:
            continue
        at = int(end.timestamp() * 1e9) - 2_000_000_000
        bad = lateness(world, end)
        for name, scale in zip(names, (0.12 + 0.9 * bad, 0.028 + 0.01 * bad), strict=True):
            for _ in range(90):
                value = scale * rng.lognormvariate(0, 0.45)
                sums[name][sum(value > bound for bound in BOUNDS)] += 1
            histograms[name].histogram.data_points.add(
                time_unix_nano=at, explicit_bounds=BOUNDS, bucket_counts=sums[name],
                count=sum(sums[name]), sum=0.0,
            )  # fmt: skip
        mended = (world.now - end).total_seconds() < 195
        cap = 32.0 if mended else 8.0
        running = min(cap, 5 + 3 * bad + (9 if mended else 0) + rng.random() * 2)
        readings = (running, max(0.0, 31 * bad + rng.uniform(-1, 1)), cap)
        for (name, metric), value in zip(gauges.items(), readings, strict=True):
            labels = {"knob": "max_num_seqs"} if name == "engine:knob" else {}
            metric.gauge.data_points.add(
                time_unix_nano=at, as_double=value, attributes=pairs(labels)
            )
    return request.SerializeToString()


def trace_body(world: World) -> bytes:
    """One slow request: a long queue, two chunks of prefill with a gap between them, decode.

    As the engine sends it: the answer in windows, the first of which ends at a sampled step.
    """
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.extend(pairs(RESOURCE))
    spans = resource.scope_spans.add().spans
    start = int((world.now - timedelta(minutes=3.5)).timestamp() * 1e9)
    trace = bytes.fromhex(TRACE_ID)
    attributes = {
        "gen_ai.latency.time_to_first_token": "1.243", "gen_ai.latency.time_in_queue": "0.911",
        "gen_ai.usage.prompt_tokens": "412", "gen_ai.usage.completion_tokens": "24",
        "gen_ai.response.model": "llama-1.3m", "trimtab.config_version": "7",
        "gen_ai.request.id": "cmpl-0af7651916cd43dd",
        "gen_ai.latency.time_in_model_prefill": "0.284",
        "gen_ai.latency.time_in_model_decode": "0.509",
    }  # fmt: skip
    rows = (
        ("llm_request", 1, 0, 0, 1760, attributes),
        ("queue", 2, 1, 0, 911, {}),
        ("prefill", 3, 1, 911, 140, {"trimtab.chunk_tokens": "256"}),
        ("prefill", 4, 1, 1099, 144, {"trimtab.chunk_tokens": "156"}),
        ("decode", 5, 1, 1243, 503, {"trimtab.window_tokens": "23", "trimtab.step": "831"}),
        ("engine.step", 6, 1, 1719, 27, {"trimtab.step": "831", "trimtab.step.requests": "32"}),
        ("decode", 7, 1, 1746, 6, {"trimtab.window_tokens": "1"}),
        ("detokenize", 8, 1, 1752, 8, {}),
    )
    for name, number, parent, begin_ms, took_ms, carried in rows:
        span = spans.add(name=name, trace_id=trace, span_id=bytes([0] * 7 + [number]), kind=2)
        span.parent_span_id = bytes([0] * 7 + [parent]) if parent else b""
        span.start_time_unix_nano = start + begin_ms * 1_000_000
        span.end_time_unix_nano = span.start_time_unix_nano + took_ms * 1_000_000
        span.attributes.extend(pairs(carried))
    add_requests(world, resource.scope_spans[0].spans)
    return request.SerializeToString()


def add_requests(world: World, spans: Any) -> None:
    """Every eight seconds of the last hour one request, slow while it is bad; a few failed."""
    rng = random.Random(RNG_SEED)
    for second in range(4, 3600, 8):
        end = world.now - timedelta(seconds=second)
        took_s = (0.12 + 0.9 * lateness(world, end)) * rng.lognormvariate(0.9, 0.5)
        queue_s = took_s * (0.02 + 0.6 * lateness(world, end))
        prefill_s = took_s * 0.15
        failed = rng.random() < 0.015
        number = second + 16
        span = spans.add(
            name="llm_request", kind=2, trace_id=number.to_bytes(16, "big"),
            span_id=number.to_bytes(8, "big"),
        )  # fmt: skip
        span.end_time_unix_nano = int(end.timestamp() * 1e9)
        span.start_time_unix_nano = span.end_time_unix_nano - int(took_s * 1e9)
        if failed:
            span.status.code, span.status.message = 2, "the client went away"
        carried = {
            "gen_ai.request.id": f"cmpl-{rng.randbytes(8).hex()}",
            "gen_ai.latency.time_in_queue": f"{queue_s:.4f}",
            "gen_ai.latency.time_in_model_prefill": f"{prefill_s:.4f}",
            "gen_ai.latency.time_in_model_decode": f"{took_s - queue_s - prefill_s:.4f}",
            "gen_ai.latency.time_to_first_token": f"{queue_s + prefill_s:.4f}",
            "gen_ai.usage.prompt_tokens": str(rng.randint(20, 900)),
            "gen_ai.usage.completion_tokens": str(rng.randint(8, 64)),
        }
        span.attributes.extend(pairs(carried))


def send(world: World) -> None:
    """The telemetry, in by the real door and durable."""
    send_metrics(world, metrics_body(world))

    async def go() -> None:
        door = wiring.door()
        with door.room(str(world.tenant.pk)) as room:
            await door.traces(str(world.tenant.pk), lambda: trace_body(world), room)

    asyncio.run(go())


def send_metrics(world: World, body: bytes) -> None:
    async def go() -> None:
        door = wiring.door()
        with door.room(str(world.tenant.pk)) as room:
            await door.metrics(str(world.tenant.pk), lambda: body, room)

    asyncio.run(go())
