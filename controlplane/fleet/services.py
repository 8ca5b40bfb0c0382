"""Writes of the fleet room: what agents report, and the commands they are given.

Delivery is at least once both ways and either side may die between any two statements. A sync is
one transaction; all it writes is either the newest heartbeat's facts (an older one changes none) or
a result that only ever moves forward. So a sync repeated, overtaken or cut off does no harm.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Coalesce

from controlplane.accounts.models import Tenant
from controlplane.fleet import limits
from controlplane.fleet.models import Command, Engine, Node
from gpu_agent import protocol
from gpu_agent.protocol import COMMAND_STATES_FINAL, CommandKind, CommandState, WireError

logger = logging.getLogger(__name__)

POLLS_PER_SCRAPE = 2.5  # an order waits for 1 s on average at the scrape's default of 5 s
# A heartbeat sent before the newest one heard was overtaken on its way; one sent much before it
# comes from a clock that was set back, and is news again.
OVERTAKEN_WITHIN = timedelta(seconds=60)

# What the agent may say later than what. A trial applied may still be undone by its timer, so
# `reverted` and `failed` end even what was final; nothing leads back.
PROGRESS: dict[str, int] = {
    "": 0,
    CommandState.RECEIVED: 1,
    CommandState.APPLYING: 2,
    CommandState.APPLIED: 3,
    CommandState.REJECTED: 4,
    CommandState.COMMITTED: 4,
    CommandState.FAILED: 4,
    CommandState.REVERTED: 5,
}


class FleetConflict(Exception):
    """Two that claim one identity: an agent id on two hosts, or an engine's name on two nodes; or
    one identity more than a tenant may have."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def sync(*, tenant: Tenant, request: protocol.SyncRequest, now: datetime) -> protocol.SyncReply:
    """Takes in a heartbeat and answers with the open commands, in order of generation.

    A command stays on offer until its result is final. `accepted_results` names the results that
    are final and stored (or unknown here), so nothing the agent has still to say gets forgotten.
    Raises WireError for a message over its limits, FleetConflict for an identity used twice; then
    nothing is stored.
    """
    limits.sync_check(request)
    with transaction.atomic():
        node = _node_hear(tenant, request, now)
        accepted = [r.command_id for r in request.results if _result_store(node, r, now)]
        commands = _commands_offer(node, now)
    return protocol.SyncReply(
        server_time=now.astimezone(UTC).isoformat(),
        commands=[_wire(command) for command in commands],
        accepted_results=list(dict.fromkeys(accepted)),
        poll_after_s=settings.TRIMTAB_SCRAPE_S / POLLS_PER_SCRAPE,
    )


def command_create(
    *,
    engine: Engine,
    action_id: uuid.UUID,
    kind: str,
    values: Mapping[str, Any],
    undo: Mapping[str, Any],
    expected_config_version: int | None,
    ttl_s: float,
    deadline: datetime,
    target_command_id: uuid.UUID | None = None,
) -> Command:
    """The action's command of this kind, made now or found: asking again makes no second one.

    Takes the engine's next generation, under its lock, so generations only grow.
    """
    kind = CommandKind(kind)
    assert kind is CommandKind.APPLY or target_command_id is not None, f"{kind} ends which trial?"
    with transaction.atomic():
        locked = Engine.objects.select_for_update().get(pk=engine.pk)
        command = Command.objects.filter(action_id=action_id, kind=kind).first()
        if command is not None:
            assert command.engine_id == engine.pk, f"action {action_id} changed its engine"
            return command
        locked.generation += 1
        locked.save(update_fields=["generation"])
        engine.generation = locked.generation
        return Command.objects.create(
            tenant_id=locked.tenant_id,
            engine=locked,
            action_id=action_id,
            kind=kind,
            generation=locked.generation,
            target_command_id=target_command_id,
            values=dict(values),
            undo=dict(undo),
            expected_config_version=expected_config_version,
            ttl_s=ttl_s,
            deadline=deadline,
        )


def prune(before: datetime) -> int:
    """Deletes commands finished, engines and nodes last heard before then, with what hangs on them,
    at most 1,000 of each a call; returns how many."""
    old = (
        Command.objects.filter(finished_at__lt=before),
        Engine.objects.filter(last_seen_at__lt=before),
        Node.objects.filter(last_seen_at__lt=before),
    )
    deleted = 0
    for rows in old:
        chosen = list(rows.values_list("pk", flat=True)[: limits.ROWS_PER_PRUNE_MAX])
        rows.model._default_manager.filter(pk__in=chosen).delete()
        deleted += len(chosen)
    return deleted


def _node_hear(tenant: Tenant, request: protocol.SyncRequest, now: datetime) -> Node:
    sent_at = limits.time_of("SyncRequest.sent_at", request.sent_at)
    node = _node_of(tenant, request)
    _same_agent_check(node, request, now)
    overtaken = (
        node.sent_at is not None
        and node.boot_id == request.boot_id
        and timedelta(0) < node.sent_at - sent_at <= OVERTAKEN_WITHIN
    )
    if overtaken:
        Node.objects.filter(pk=node.pk).update(last_seen_at=now)
        return node
    node.name, node.boot_id = request.node, request.boot_id
    node.agent_version = request.agent_version
    node.gpus, node.gpu_status = request.gpus, request.gpu_status[: limits.STATUS_CHARS_MAX]
    node.spool_bytes = request.spool_bytes
    node.spool_dropped_total = request.spool_dropped_total
    node.agent_cpu_seconds = request.cpu_seconds_total
    node.agent_rss_bytes = request.rss_bytes
    node.clock_skew_s = (sent_at - now).total_seconds()
    node.kill_switch = request.kill_switch
    node.sent_at, node.last_seen_at = sent_at, now
    node.stopped_at = now if request.stopping else None
    node.save()
    for report in request.engines:
        _engine_hear(node, report, now)
    return node


def _node_of(tenant: Tenant, request: protocol.SyncRequest) -> Node:
    nodes = Node.objects.select_for_update().filter(tenant=tenant)
    node = nodes.filter(agent_id=request.agent_id).first()
    if node is not None:
        return node
    if nodes.count() >= limits.NODES_PER_TENANT_MAX:
        raise FleetConflict(
            "too_many_nodes",
            f"agent_id={request.agent_id!r} would be one node more than the"
            f" {limits.NODES_PER_TENANT_MAX} a tenant may have; lost ones go with the retention",
        )
    return Node.objects.create(
        tenant=tenant, agent_id=request.agent_id, name=request.node, boot_id=request.boot_id
    )


def _same_agent_check(node: Node, request: protocol.SyncRequest, now: datetime) -> None:
    """A host that took another name or booted afresh was silent meanwhile; if the old one still
    speaks, two agents share an id, most likely by a copied state folder."""
    was, comes = (node.name, node.boot_id), (request.node, request.boot_id)
    if was == comes or not _speaks(node, now):
        return
    raise FleetConflict(
        "agent_conflict",
        f"agent_id={request.agent_id!r} of node {request.node!r} (boot {request.boot_id}) is in use"
        f" by node {node.name!r} (boot {node.boot_id}), heard {_ago_s(node, now):.0f} s ago;"
        " remove the agent_id file of one of them",
    )


def _engine_hear(node: Node, report: protocol.EngineReport, now: datetime) -> None:
    engine = _engine_of(node, report.name, now)
    if engine.node_id != node.pk and _speaks(engine.node, now):
        raise FleetConflict(
            "engine_conflict",
            f"engine {report.name!r} of node {node.name!r} is reported by node"
            f" {engine.node.name!r} too, heard {_ago_s(engine.node, now):.0f} s ago;"
            " give one of the engines another name",
        )
    engine.node = node
    engine.service, engine.adapter, engine.url = report.service, report.adapter, report.url
    engine.reachable = report.reachable
    engine.error = report.error[: limits.ERROR_CHARS_MAX]
    engine.model = report.model or engine.model
    if report.config_version is not None:
        _configuration_hear(engine, report, now)
    if report.reachable:
        engine.last_seen_at = now
    # Not `generation`: command_create may have raised it since this row was read.
    engine.save(
        update_fields=[
            "node",
            "service",
            "adapter",
            "url",
            "reachable",
            "error",
            "model",
            "config_version",
            "values",
            "knobs",
            "changed_by",
            "changed_at",
            "set_by",
            "last_seen_at",
        ]
    )


def _configuration_hear(engine: Engine, report: protocol.EngineReport, now: datetime) -> None:
    """Takes over what was read back, and notes by whom each knob that moved was set."""
    assert report.config_version is not None
    by = limits.words_of(report.changed_by, limits.CHANGED_BY_CHARS_MAX)
    try:
        at = limits.time_of("changed_at", report.changed_at)
    except WireError:
        at = None  # an engine without a clock to tell by: the change is as old as this look
    seen, moved = engine.config_version, report.config_version != engine.config_version
    if seen is not None and moved:
        noted = {
            "by": by,
            "at": (at or now).astimezone(UTC).isoformat(),
            "version": report.config_version,
            "versions": max(1, report.config_version - seen),
        }
        for knob, value in report.values.items():
            if knob in engine.values and engine.values[knob] != value:
                engine.set_by[knob] = {**noted, "from": engine.values[knob]}
    engine.set_by = {knob: note for knob, note in engine.set_by.items() if knob in report.values}
    engine.config_version, engine.values = report.config_version, report.values
    engine.knobs, engine.changed_by, engine.changed_at = report.knobs, by, at


def _engine_of(node: Node, name: str, now: datetime) -> Engine:
    engines = Engine.objects.select_related("node")
    engine = engines.filter(tenant_id=node.tenant_id, name=name).first()
    if engine is not None:
        return engine
    if engines.filter(node=node).count() >= limits.ENGINES_KNOWN_PER_NODE_MAX:
        raise FleetConflict(
            "too_many_engines",
            f"engine {name!r} would be one more than the {limits.ENGINES_KNOWN_PER_NODE_MAX} names"
            f" node {node.name!r} may have used; lost ones go with the retention",
        )
    # Generations start at the clock: were this one pruned and back, its agent would remember.
    return Engine.objects.create(
        tenant_id=node.tenant_id, node=node, name=name, generation=int(now.timestamp())
    )


def _speaks(node: Node, now: datetime) -> bool:
    if node.stopped_at is not None or node.last_seen_at is None:
        return False
    return now - node.last_seen_at <= limits.LATE_AFTER


def _ago_s(node: Node, now: datetime) -> float:
    assert node.last_seen_at is not None
    return (now - node.last_seen_at).total_seconds()


def _result_store(node: Node, result: protocol.CommandResult, now: datetime) -> bool:
    """Stores the result if it is news; whether the agent may forget it."""
    final = result.state in COMMAND_STATES_FINAL
    try:
        command_id = uuid.UUID(result.command_id)
    except ValueError:
        raise WireError(
            f"CommandResult.command_id: got {result.command_id!r}, want a UUID"
        ) from None
    at = limits.time_of("CommandResult.at", result.at)
    command = (
        Command.objects.select_for_update()
        .filter(pk=command_id, tenant_id=node.tenant_id, engine__node=node)
        .first()
    )
    if command is None:
        logger.warning("node %s: result of unknown command %s", node, command_id)
        return True
    earlier = [s for s, progress in PROGRESS.items() if progress < PROGRESS[result.state]]
    news = Command.objects.filter(pk=command.pk, result_state__in=earlier)
    news.update(
        result_state=result.state,
        result_at=at,
        result=result.to_json(),
        finished_at=Coalesce(F("finished_at"), now) if final else None,
    )
    return final


def _commands_offer(node: Node, now: datetime) -> list[Command]:
    unfinished = Command.objects.filter(engine__node=node, finished_at=None)
    offered = list(
        unfinished.select_related("engine").order_by("engine__name", "generation")[
            : limits.COMMANDS_OFFERED_MAX
        ]
    )
    chosen = Command.objects.filter(pk__in=[c.pk for c in offered])
    chosen.update(offers=F("offers") + 1, offered_at=Coalesce(F("offered_at"), now))
    return offered


def _wire(command: Command) -> protocol.Command:
    return protocol.Command(
        command_id=str(command.pk),
        kind=CommandKind(command.kind),
        engine=command.engine.name,
        generation=command.generation,
        deadline=command.deadline.astimezone(UTC).isoformat(),
        values=command.values,
        undo=command.undo,
        expected_config_version=command.expected_config_version,
        ttl_s=command.ttl_s,
        target_command_id=str(command.target_command_id or ""),
    )
