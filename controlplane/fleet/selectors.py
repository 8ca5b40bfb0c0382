"""Reads of the fleet room: nodes, engines, their commands, and how long ago they were heard."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from typing import Literal

from django.db.models import F

from controlplane.accounts.models import Tenant
from controlplane.fleet.limits import (
    COMMANDS_LOOKED_AT_MAX,
    LATE_AFTER,
    LIST_ROWS_MAX,
    LOST_AFTER,
)
from controlplane.fleet.models import Command, Engine, Node

NodeState = Literal["ok", "late", "lost", "stopped"]
EngineState = Literal["ok", "late", "lost", "unreachable"]


def commands_of(action_id: uuid.UUID) -> dict[str, Command]:
    """The action's commands by kind: apply, commit, revert; only those that exist."""
    commands = Command.objects.filter(action_id=action_id).select_related("engine")
    return {command.kind: command for command in commands}


def engines_of(tenant: Tenant, service: str | None = None) -> list[Engine]:
    """Engines by name, each with its node loaded; at most 1,000."""
    engines = Engine.objects.filter(tenant=tenant).select_related("node").order_by("name")
    if service is not None:
        engines = engines.filter(service=service)
    return list(engines[:LIST_ROWS_MAX])


def nodes_of(tenant: Tenant) -> list[Node]:
    """Nodes by name; at most 1,000."""
    return list(Node.objects.filter(tenant=tenant).order_by("name", "agent_id")[:LIST_ROWS_MAX])


def node_named(tenant: Tenant, name: str) -> Node | None:
    """The node of that name heard last; a host that was set up anew has an older namesake."""
    nodes = Node.objects.filter(tenant=tenant, name=name)
    return nodes.order_by(F("last_seen_at").desc(nulls_last=True)).first()


def commands_answered(engines: Iterable[Engine]) -> dict[uuid.UUID, list[Command]]:
    """By engine's key its commands that were answered, oldest first: of the newest 2,000 of all
    these engines. One query."""
    answered = Command.objects.filter(engine__in=engines).exclude(result_state="")
    found: dict[uuid.UUID, list[Command]] = defaultdict(list)
    for command in answered.order_by("-created_at", "-generation")[:COMMANDS_LOOKED_AT_MAX]:
        found[command.engine_id].append(command)
    return {engine: commands[::-1] for engine, commands in found.items()}


def node_state(node: Node, now: datetime) -> NodeState:
    """late after 15 s of silence, lost after 60; stopped when the agent said goodbye."""
    if node.stopped_at is not None:
        return "stopped"
    return _heard(node.last_seen_at, now)


def engine_state(engine: Engine, now: datetime) -> EngineState:
    """unreachable: its agent speaks but cannot read it. late, lost: nothing was read back for 15 s,
    60 s, or its agent fell silent or stopped; then no command would arrive."""
    node = node_state(engine.node, now)
    if node in ("lost", "stopped"):
        return "lost"
    if not engine.reachable:
        return "unreachable"
    own = _heard(engine.last_seen_at, now)
    return "late" if own == "ok" and node == "late" else own


def _heard(at: datetime | None, now: datetime) -> Literal["ok", "late", "lost"]:
    if at is None or now - at > LOST_AFTER:
        return "lost"
    return "late" if now - at > LATE_AFTER else "ok"
