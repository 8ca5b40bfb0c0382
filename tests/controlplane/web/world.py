"""A small world for the pages: a chat service on one node, as nobody has measured it yet.

What was measured of it: measured.py. What went wrong and was done about it: story.py. Rows are
written through the rooms' services where they have one. tests/e2e/fill.py fills the TRIMTAB_HOME
of a server yet to start with it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib.auth import get_user_model

from controlplane.accounts.models import Membership, Tenant
from controlplane.accounts.services import tenant_create
from controlplane.fleet.models import Engine
from controlplane.fleet.services import command_create, sync
from gpu_agent.protocol import EngineReport, SyncRequest
from slo.models import Objective
from slo.services import objective_apply

PASSWORD = "a long enough password"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


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
