"""What an agent would send."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import Command, Engine
from controlplane.fleet.services import command_create, sync
from gpu_agent.protocol import CommandKind, CommandResult, CommandState, EngineReport, SyncRequest

START = datetime(2026, 3, 1, tzinfo=UTC)
GENERATION = int(START.timestamp())  # of an engine first heard at START, before any command


def report(name: str = "engine-0", **changes: Any) -> EngineReport:
    facts: dict[str, Any] = {
        "name": name,
        "service": "chat",
        "adapter": "reference",
        "url": "http://127.0.0.1:8100",
        "reachable": True,
        "model": "llama-1.3m",
        "config_version": 7,
        "values": {"max_num_seqs": 32},
        "knobs": {"max_num_seqs": {"value": 32, "minimum": 1, "maximum": 256}},
        **changes,
    }
    return EngineReport(**facts)


def heartbeat(at: datetime = START, **changes: Any) -> SyncRequest:
    facts: dict[str, Any] = {
        "agent_id": "a-1",
        "boot_id": "boot-1",
        "node": "node-0",
        "agent_version": "0.1.0",
        "sent_at": at.isoformat(),
        "engines": [report()],
        **changes,
    }
    return SyncRequest(**facts)


def result(
    command: Command, state: CommandState, at: datetime = START, **more: Any
) -> CommandResult:
    return CommandResult(str(command.pk), CommandKind(command.kind), state, at.isoformat(), **more)


def an_engine(tenant: Tenant) -> Engine:
    sync(tenant=tenant, request=heartbeat(), now=START)
    return Engine.objects.get(tenant=tenant, name="engine-0")


def an_apply(engine: Engine, action_id: uuid.UUID | None = None) -> Command:
    return command_create(
        engine=engine,
        action_id=action_id or uuid.uuid4(),
        kind="apply",
        values={"max_num_seqs": 64},
        undo={"max_num_seqs": 32},
        expected_config_version=7,
        ttl_s=90,
        deadline=START + timedelta(seconds=30),
    )
