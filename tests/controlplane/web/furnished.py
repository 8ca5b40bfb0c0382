"""What a tenant that has lived with Trimtab for a while has beside its story: a contract, actions
of other days, silences, tokens, more members and channels, policies, and what fell silent."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any

from controlplane.accounts.models import Membership
from controlplane.accounts.services import token_create, token_revoke
from controlplane.actions.models import Action, Priority, State, Transition
from controlplane.actions.policies import freeze, policy_set
from controlplane.alerts.models import Channel, Delivery
from controlplane.alerts.services import channel_create, silence_create, silence_end
from controlplane.fleet.services import sync
from slo.budget import Counts
from slo.contracts import contract_declare
from slo.models import Settlement
from slo.penalty import period_of
from slo.readings import Measured, readings_book
from slo.services import objective_apply
from tests.controlplane.web.measured import WINDOW_S, windows
from tests.controlplane.web.story import end
from tests.controlplane.web.world import World, heartbeat, member
from tracing.types import Signal

CONTRACT = {
    "slug": "chat-gold", "name": "Chat, gold", "provider": "Platform team",
    "consumer": "Order centre", "objectives": ["ttft", "tpot"], "period": "month", "fee": 12_000,
    "currency": "EUR",
    "terms": {"basis": "step", "percent": 5, "step_percent": 0.1, "cap_percent": 50},
}  # fmt: skip
TIERS = {
    "slug": "code-silver", "name": "Code, silver", "provider": "Platform team",
    "consumer": "Tools team", "objectives": ["code-e2e"], "period": "week",
    "terms": {"basis": "tiers", "tiers": [{"below": 0.95, "percent": 10}]},
}  # fmt: skip


def furnish(world: World) -> None:
    promise(world)
    ledger(world)
    reach(world)
    for name, role in (("grace", Membership.Role.VIEWER), ("edsger", Membership.Role.OPERATOR)):
        member(world.tenant, name, role=role)
    token_create(tenant=world.tenant, kind="ingest", name="collector", actor="ada")
    token_create(tenant=world.tenant, kind="api", name="ci", scopes=["read", "write"], actor="ada")
    lost, _secret = token_create(tenant=world.tenant, kind="agent", name="node-b", actor="ada")
    token_revoke(token=lost, actor="ada")


def promise(world: World) -> None:
    now = world.now
    started = {"starts_on": (now - timedelta(days=40)).date().isoformat()}
    for spec in (CONTRACT, TIERS):
        made = contract_declare(
            tenant=world.tenant, spec={**spec, **started}, actor="ada", now=now
        ).row
    gold = world.tenant.contracts.get(slug="chat-gold")
    this_month, _end = period_of(now, "month")
    start, end_ = period_of(this_month - timedelta(days=1), "month")
    Settlement.objects.create(
        contract=gold, period_start=start, period_end=end_, percent=10,
        amount=1200, currency="EUR", terms=gold.terms, settled_at=end_ + timedelta(hours=8),
    )  # fmt: skip
    assert made.slug == "code-silver"


def past(world: World, minutes: float, state: State, **columns: Any) -> Action:
    """An action that ended so."""
    at = world.now - timedelta(minutes=minutes)
    action = Action.objects.create(
        **{
            "tenant": world.tenant, "engine": world.engine, "cause": "running_cap_too_small",
            "why": "up to 20 requests run or wait while there is a queue",
            "changes": {"max_num_seqs": {"from": 16, "to": 32}},
            "predicted": {"sentence": "20 requests run or wait", "bad_share_max": 0.01},
            "expected_config_version": 6, "idempotency_key": uuid.uuid4().hex,
            "deadline": at + timedelta(seconds=30), "created_at": at, "applied_at": at,
            "state": State.VERIFYING, **columns,
        }
    )  # fmt: skip
    for before, to, actor in (
        ("", State.PROPOSED, action.actor), (State.PROPOSED, State.APPROVED, "ada"),
    ):  # fmt: skip
        Transition.objects.create(
            action=action, from_state=before, to_state=to, at=at, actor=actor, reason="night shift"
        )
    if state in (State.VERIFIED, State.ROLLED_BACK):
        end(action, state, at + timedelta(seconds=80))
    else:
        Action.objects.filter(pk=action.pk).update(state=state, ended_at=at)
    return action


def ledger(world: World) -> None:
    story = Action.objects.filter(tenant=world.tenant, state=State.VERIFYING)
    running = list(story.values_list("pk", flat=True))
    story.update(state=State.APPROVED)  # room for the others while they are made
    for minutes, state, columns in (
        (50, State.VERIFIED, {}),
        (95, State.ROLLED_BACK, {"changes": {"max_num_batched_tokens": {"from": 2048, "to": 512}},
                                 "cause": "batch_too_large"}),
        (200, State.REJECTED, {"actor": "edsger", "cause": "", "predicted": {},
                               "why": "asked for by edsger", "priority": Priority.PERSON,
                               "trial": False}),
    ):  # fmt: skip
        Action.objects.filter(pk__in=running).update(state=State.EXPIRED)
        past(world, minutes, state, **columns)
    Action.objects.filter(pk__in=running).update(state=State.VERIFYING)


def reach(world: World) -> None:
    """A channel that refuses, what it refused, and silences."""
    broken, _secret = channel_create(
        tenant=world.tenant,
        spec={"name": "relay", "url": "http://127.0.0.1:9/hook/very-secret-path", "kind": "webhook",
              "severity_min": "page", "remind_minutes": 0},
        by="ada", now=world.now,
    )  # fmt: skip
    at = world.now - timedelta(minutes=3)
    Delivery.objects.create(
        tenant=world.tenant, channel=broken, event="opened", state="failed", attempts=10,
        message={"title": "First token within 500 ms is missed", "text": "184 of 412 missed it."},
        last_error="connection refused", permanent=False, next_try_at=at, created_at=at,
    )  # fmt: skip
    spec = {"reason": "moving racks", "until": world.now + timedelta(hours=2)}
    held = silence_create(
        tenant=world.tenant, spec={**spec, "service": "code"}, by="ada", now=world.now
    )
    over = silence_create(
        tenant=world.tenant, spec={**spec, "engine": "engine-0"}, by="ada", now=at
    )
    silence_end(silence=over, by="ada", now=world.now)
    Delivery.objects.create(
        tenant=world.tenant, channel=Channel.objects.get(tenant=world.tenant, name="chat-oncall"),
        event="reminded", state="silenced", silence=held, message={"title": "Still", "text": "so"},
        next_try_at=at, created_at=at,
    )  # fmt: skip


def rule(world: World) -> None:
    """Policies of every kind of scope, and a freeze."""
    now, tenant = world.now, world.tenant
    begin, end_ = now + timedelta(hours=3), now + timedelta(hours=9)
    hours = {"from": f"{begin:%H:%M}", "until": f"{end_:%H:%M}", "days": ["fri", "sat"]}
    for scope, values in (
        ({}, {"cool_down_harmful_s": 1200, "quiet_hours": hours}),
        ({"service": "chat"}, {"bounds": {"max_num_seqs": {"minimum": 4, "maximum": 64},
                                          "graph_capture": {"choices": ["on"]}}}),
        ({"engine": "engine-0"}, {"steps_max": 1, "barrier": False}),
    ):  # fmt: skip
        policy_set(tenant=tenant, actor="ada", now=now, values=values, **scope)
    freeze(
        tenant=tenant, actor="ada", now=now, reason="moving racks", service="code",
        until=now + timedelta(hours=2),
    )  # fmt: skip


def grow_old(world: World) -> None:
    """What is not as it should be: a node that fell silent, one stopped by hand with an engine its
    agent cannot read, an objective nothing was heard of for six minutes."""
    tenant, now = world.tenant, world.now
    silent = now - timedelta(minutes=6)
    usual = heartbeat(silent).engines[0]
    lost = replace(usual, name="engine-1", changed_by="cli/grace")
    mute = replace(
        usual, name="engine-2", service="code", reachable=False, values={}, knobs={},
        error="connection refused: http://127.0.0.1:8102/v1/runtime_config",
    )  # fmt: skip
    for agent, name, at, engine, more in (
        ("a-2", "node-b", silent, lost, {}),
        ("a-3", "node-c", now, mute, {"kill_switch": True, "spool_dropped_total": 3}),
    ):
        beat = replace(
            heartbeat(at), agent_id=agent, boot_id=f"b-{agent}", node=name, engines=[engine],
            gpus=[], gpu_status="no GPU: NVML library not found", **more,
        )  # fmt: skip
        sync(tenant=tenant, request=beat, now=at)
    old = objective_apply(
        tenant=tenant,
        spec={"slug": "code-ttft", "name": "First token of code within 2 s", "target": 0.98,
              "indicator": "latency", "service": "code", "window_days": 7,
              "spec": {"metric": "vllm:time_to_first_token_seconds", "threshold_ms": 2000}},
    )  # fmt: skip
    measured = [
        Measured(end - timedelta(minutes=6), Counts(99, 100), Signal.OK)
        for end in windows(world, 20)
    ]
    readings_book(objective=old, scope="", window_s=WINDOW_S, measured=measured)
