"""A small world for the pages: a chat service whose first tokens are late, as the loop leaves it.

Rows are written through the rooms' services where they have one; telemetry goes in by the real
door. tests/e2e/fill.py fills the TRIMTAB_HOME of a server yet to start with it.
"""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib.auth import get_user_model
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from controlplane.accounts.models import Membership, Tenant
from controlplane.accounts.services import tenant_create
from controlplane.actions.models import Action, State, Transition, Verdict
from controlplane.alerts.models import Channel, Delivery
from controlplane.diagnosis.models import Diagnosis, Evidence, Incident
from controlplane.fleet.models import Engine
from controlplane.fleet.services import command_create, sync
from gpu_agent.protocol import EngineReport, SyncRequest
from slo.budget import Counts
from slo.indicator import REQUESTS
from slo.models import Objective, Reading
from slo.readings import Measured, readings_book
from slo.services import objective_apply
from tracing import wiring
from tracing.types import Signal

PASSWORD = "a long enough password"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
WINDOW_S = 15.0
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
RNG_SEED = 7


@dataclass
class World:
    tenant: Tenant
    now: datetime
    objectives: dict[str, Objective]
    engine: Engine


def member(
    tenant: Tenant,
    name: str = "ada",
    *,
    staff: bool = False,
    role: str = Membership.Role.OPERATOR,
) -> Any:
    users = get_user_model().objects
    user = users.create_user(username=name, password=PASSWORD, is_staff=staff)
    Membership.objects.create(tenant=tenant, user=user, role=role)
    return user


def world(slug: str = "default", *, now: datetime | None = None) -> World:
    """A tenant with one node, one engine, one GPU and four objectives, none of them measured."""
    now = now or datetime.now(UTC)
    tenant = tenant_create(slug=slug, name=slug.capitalize())
    sync(tenant=tenant, request=heartbeat(now), now=now)
    latency = {"indicator": "latency", "service": "chat", "window_days": 30}
    specs: list[dict[str, Any]] = [
        {"slug": "ttft", "name": "First token within 500 ms", "target": 0.99, **latency,
         "spec": {"metric": "vllm:time_to_first_token_seconds", "threshold_ms": 500}},
        {"slug": "tpot", "name": "Each token within 50 ms", "target": 0.95, **latency,
         "spec": {"metric": "vllm:inter_token_latency_seconds", "threshold_ms": 50}},
        {"slug": "answered", "name": "Requests answered", "target": 0.999, "service": "chat",
         "indicator": "success", "spec": {"source": "metric"}},
        {"slug": "code-e2e", "name": "Whole answer within 10 s", "target": 0.95,
         "indicator": "latency", "service": "code",
         "spec": {"metric": "vllm:e2e_request_latency_seconds", "threshold_ms": 10_000}},
    ]  # fmt: skip
    objectives = {s["slug"]: objective_apply(tenant=tenant, spec=s) for s in specs}
    return World(tenant, now, objectives, Engine.objects.get(tenant=tenant))


def heartbeat(now: datetime, **told: Any) -> SyncRequest:
    """`told` replaces what the engine says of itself."""
    knobs = {
        "max_num_seqs": {
            "value": 32, "unit": "requests", "minimum": 1, "maximum": 256, "default": 32,
            "apply_class": "hot", "help": "Requests in the running batch.",
        },
        "max_num_batched_tokens": {
            "value": 2048, "unit": "tokens/step", "minimum": 64, "maximum": 8192, "default": 2048,
            "apply_class": "hot", "help": "Tokens of one step, decodes and prefill chunks.",
        },
        "max_wait_ms": {"value": 0, "unit": "ms", "minimum": 0, "maximum": 50},
        "prefill_chunk_tokens": {"value": 512, "minimum": 32, "maximum": 4096},
        "kv_block_size": {
            "value": 16, "unit": "tokens", "choices": [8, 16, 32, 64, 128], "apply_class": "barrier"
        },
        "graph_capture": {
            "value": "off", "choices": ["on", "off"], "apply_class": "barrier", "supported": False
        },
    }  # fmt: skip
    facts: dict[str, Any] = {
        "name": "engine-0", "service": "chat", "adapter": "reference", "reachable": True,
        "url": "http://127.0.0.1:8100", "model": "llama-1.3m", "config_version": 7,
        "changed_by": "trimtab/autopilot", "changed_at": (now - timedelta(minutes=3)).isoformat(),
        "values": {name: knob["value"] for name, knob in knobs.items()}, "knobs": knobs,
    }  # fmt: skip
    engine = EngineReport(**{**facts, **told})
    gpu = {
        "index": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-5f0c",
        "memory_total_bytes": 85_520_809_984,
        "driver": "570.86.15",
        "mig": False,
    }
    return SyncRequest(
        agent_id="a-1", boot_id="b-1", node="node-a", agent_version="0.1.0",
        sent_at=now.isoformat(), gpus=[gpu], gpu_status="ok", engines=[engine],
        cpu_seconds_total=41.7, rss_bytes=46_300_000, spool_bytes=18_432,
    )  # fmt: skip


def hand(world: World) -> None:
    """max_wait_ms was told to be 5; since a minute ago it is 20, by a person's hand."""
    command = command_create(
        engine=world.engine, action_id=uuid.uuid4(), kind="apply", values={"max_wait_ms": 5},
        undo={"max_wait_ms": 0}, expected_config_version=6, ttl_s=90,
        deadline=world.now - timedelta(minutes=20),
    )  # fmt: skip
    command.result_state, command.finished_at = "applied", world.now
    command.result_at = world.now - timedelta(minutes=20)
    command.save()
    at = world.now + timedelta(seconds=1)
    turned = {
        "config_version": 8, "values": {**world.engine.values, "max_wait_ms": 20},
        "changed_by": "cli/ada", "changed_at": (world.now - timedelta(minutes=1)).isoformat(),
    }  # fmt: skip
    sync(tenant=world.tenant, request=heartbeat(at, **turned), now=at)
    world.engine.refresh_from_db()


# --- readings and telemetry ----------------------------------------------------------------------


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
    """One slow request: a long queue, two chunks of prefill with a gap between them, decode."""
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
        ("prefill", 3, 1, 911, 140, {"chunk_tokens": "256"}),
        ("prefill", 4, 1, 1099, 144, {"chunk_tokens": "156"}),
        ("decode", 5, 1, 1243, 509, {"tokens": "24"}),
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


# --- the story ------------------------------------------------------------------------------------

BECAUSE = (
    "31 requests wait behind a cap of 8 running, and 73 % of the time to the first token is queue"
)
STEPS = (
    (State.PROPOSED, 0, "autopilot", "raise max_num_seqs to cover running and waiting"),
    (State.APPROVED, 0, "autopilot", "within bounds, hot, one step of two"),
    (State.DISPATCHED, 1, "loop", ""),
    (State.ACKNOWLEDGED, 3, "agent node-a", "journaled"),
    (State.APPLIED, 4, "agent node-a", "read back: max_num_seqs 32, version 8"),
    (State.VERIFYING, 5, "loop", "skipping one control window"),
)


def incident(world: World, *, until: State = State.VERIFYING, closed: bool = False) -> Incident:
    """The TTFT incident with its explanation, its action as far as `until`, and its message."""
    now, tenant = world.now, world.tenant
    opened = now - timedelta(minutes=3, seconds=20)
    found = Incident.objects.create(
        tenant=tenant, objective=world.objectives["ttft"], scope="engine-0", trigger="two windows",
        bad_since=opened - timedelta(seconds=32), opened_at=opened, bad_events=184,
        total_events=412, example_trace_id=TRACE_ID,
        state="closed" if closed else "open",
        closed_at=now - timedelta(seconds=40) if closed else None,
    )  # fmt: skip
    explain(world, found, opened + timedelta(seconds=1))
    act(world, found, opened + timedelta(seconds=2), until)
    channel, _made = Channel.objects.get_or_create(
        tenant=tenant, name="chat-oncall", url="http://127.0.0.1:8300/hook"
    )
    what = "184 of 412 requests missed “First token within 500 ms” on engine-0"
    Delivery.objects.create(
        tenant=tenant, channel=channel, incident=found, state="sent", attempts=1, last_status=200,
        message={"title": what, "what": f"{what}.", "text": f"{what}. {BECAUSE}."},
        next_try_at=opened, created_at=opened + timedelta(seconds=1),
        sent_at=opened + timedelta(seconds=3),
    )  # fmt: skip
    return found


def explain(world: World, found: Incident, at: datetime) -> Diagnosis:
    rival = {
        "cause": "batch_too_large", "score": 0.12,
        "because": "a step takes 31 ms, as long as before",
    }  # fmt: skip
    diagnosis = Diagnosis.objects.create(
        incident=found, made_at=at, cause="running_cap_too_small", score=0.91, because=BECAUSE,
        rivals=[rival], remedy=[{"knob": "max_num_seqs", "to": 39, "why": "running + waiting"}],
        window_start=found.bad_since, window_end=at,
    )  # fmt: skip

    def fact(cause: str, supports: bool, sentence: str, scale: tuple[float, float], **columns: Any):
        points = [
            (end.timestamp(), None if i == 9 else scale[0] + scale[1] * lateness(world, end))
            for i, end in enumerate(windows(world, 12)[:44])
        ]
        Evidence.objects.create(
            diagnosis=diagnosis, cause=cause, supports=supports, sentence=sentence,
            before=scale[0], value=scale[0] + scale[1], points=points, **columns,
        )  # fmt: skip

    cap, batch = "running_cap_too_small", "batch_too_large"
    fact(cap, True, "31 requests wait", (0.4, 30.6), metric="vllm:num_requests_waiting",
         unit="requests", threshold=1.0)  # fmt: skip
    fact(cap, True, "8 of 8 allowed requests run all the time", (5.1, 2.9),
         metric="vllm:num_requests_running", unit="requests", threshold=8.0)  # fmt: skip
    fact(cap, True, "Queueing is 73 % of the time to the first token", (0.04, 0.69),
         metric="vllm:request_queue_time_seconds", unit="share", threshold=0.5)  # fmt: skip
    fact(cap, True, "The KV cache has room: 41 % is in use", (0.29, 0.12),
         metric="vllm:kv_cache_usage_perc", unit="share", threshold=0.9)  # fmt: skip
    fact(cap, False, "Arrivals grew only by a third", (5.6, 1.9),
         metric="engine:requests_received_total", unit="1/s")  # fmt: skip
    fact(batch, False, "A step takes 31 ms, as long as before", (0.030, 0.001),
         metric="engine:step_seconds", unit="s", threshold=0.05)  # fmt: skip
    return diagnosis


def goes_on(found: Incident, kept_at: datetime) -> Diagnosis:
    """What a change kept then has left: three windows with a quarter missed, and a look at them
    that explains nothing."""
    Reading.objects.filter(objective=found.objective, window_end__gt=kept_at).delete()
    for number in (1, 2, 3):
        Reading.objects.create(
            objective=found.objective, scope=found.scope, good=75, total=100, signal="ok",
            window_end=kept_at + number * timedelta(seconds=15),
        )  # fmt: skip
    ask = "1 engine serves chat, and it needs 1 more like engine-0"
    at = kept_at + timedelta(seconds=50)
    newest = Diagnosis.objects.create(
        incident=found, made_at=at, cause="unknown", score=0.4, window_start=kept_at, window_end=at,
        because="no cause examined explains it; the nearest, load beyond capacity, fails on: "
        "80 % busy",
        facts={"no_action": "the cause is not known, so nothing is changed"},
        rivals=[
            {"cause": "load_beyond_capacity", "score": 0.4, "because": "87 served",
             "no_remedy": ask},
            {"cause": "slow_host", "score": 0.1, "because": "10 % busy", "no_remedy": ""},
        ],
    )  # fmt: skip
    newest.evidence.create(
        cause="load_beyond_capacity", supports=False, sentence="a step 80 % of the time"
    )
    return newest


def act(world: World, found: Incident, at: datetime, until: State) -> Action:
    action = Action.objects.create(
        tenant=world.tenant, engine=world.engine, incident=found, cause="running_cap_too_small",
        why="up to 39 requests run or wait while there is a queue; 32 is two steps up",
        changes={"max_num_seqs": {"from": 8, "to": 32}}, expected_config_version=7,
        idempotency_key=uuid.uuid4().hex, deadline=at + timedelta(seconds=30), created_at=at,
    )  # fmt: skip
    previous = ""
    for state, after_s, actor, reason in STEPS:
        Transition.objects.create(
            action=action, from_state=previous, to_state=state, at=at + timedelta(seconds=after_s),
            actor=actor, reason=reason,
        )  # fmt: skip
        previous = state
    action.state, action.applied_at = State.VERIFYING, at + timedelta(seconds=4)
    action.save()
    if until in (State.VERIFIED, State.ROLLED_BACK):
        end(action, until, at + timedelta(seconds=80))
    return action


def end(action: Action, state: State, at: datetime) -> None:
    """The verification's last word."""
    better = state == State.VERIFIED
    sentence = (
        "44.7 % of requests missed the objective before and 0.6 % after, at the same load."
        if better
        else "39 % of requests still missed the objective, 45 % before; that may be chance."
    )
    action.outcome = {
        "before": {"good": 228, "total": 412},
        "after": {"good": 341, "total": 343} if better else {"good": 209, "total": 343},
        "p_value": 0.00001 if better else 0.11, "looks": 2, "sentence": sentence, "unit": REQUESTS,
    }  # fmt: skip
    action.verdict = Verdict.BETTER if better else Verdict.INCONCLUSIVE
    action.ended_at, previous = at, action.state
    steps = [state] if better else [State.ROLLING_BACK, state]
    for i, step in enumerate(steps):
        Transition.objects.create(
            action=action, from_state=previous, to_state=step, at=at + timedelta(seconds=i),
            actor="loop", reason=action.verdict,
        )  # fmt: skip
        previous = step
    action.state = state
    action.save()
