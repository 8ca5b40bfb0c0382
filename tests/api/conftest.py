"""A house with two tenants, each with something of every noun."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib.auth import get_user_model

from controlplane.accounts.models import Membership, Tenant
from controlplane.accounts.services import token_create
from controlplane.actions.policies import freeze
from controlplane.alerts.services import silence_create
from controlplane.fleet.services import command_create
from gpu_agent.protocol import CommandKind
from slo.contracts import contract_declare
from tests.controlplane.web.measured import judge, send
from tests.controlplane.web.story import incident
from tests.controlplane.web.world import TRACE_ID, world


@dataclass
class Household:
    """A tenant, its keys (an owner, an API token, an agent's), and its things by the names that
    addresses have for them."""

    tenant: Tenant
    owner: Any
    api: str
    agent: str
    things: dict[str, str] = field(default_factory=dict)

    def path_parameters(self, path: str, names: list[str]) -> dict[str, str]:
        """A thing of theirs for every name in the address. KeyError for a name nobody told of."""
        noun = next((n for n in ("contracts", "members", "fleet") if f"/{n}/" in f"/{path}"), "")
        return {name: self.things.get(f"{noun}.{name}") or self.things[name] for name in names}


def household(slug: str, *, mark: str = "", telemetry: bool = True) -> Household:
    """`mark` stands in every word of theirs that a person or program could be shown."""
    made = world(slug)
    judge(made)
    if telemetry:
        send(made)
    found = incident(made)
    owner = get_user_model().objects.create_user(username=f"{slug}-owner{mark}")
    Membership.objects.create(tenant=made.tenant, user=owner, role="owner")
    contract_declare(
        tenant=made.tenant,
        spec={
            "slug": "gold",
            "provider": "Platform",
            "consumer": f"The {slug} shop",
            "objectives": ["ttft"],
            "terms": {"basis": "step", "percent": 5, "step_percent": 0.1},
        },
        actor=f"{slug}-owner{mark}",
        now=datetime.now(UTC),
    )
    collector, _ = token_create(tenant=made.tenant, kind="ingest", name=f"collector{mark}")
    _, api = token_create(tenant=made.tenant, kind="api", name=f"ci{mark}")
    _, agent = token_create(tenant=made.tenant, kind="agent", name=f"node{mark}")
    tenant, now, by = made.tenant, datetime.now(UTC), owner.username
    action = found.actions.get()
    command_create(
        engine=action.engine, action_id=action.pk, kind=CommandKind.APPLY, values={}, undo={},
        expected_config_version=7, ttl_s=90, deadline=action.deadline,
    )  # fmt: skip
    policy = freeze(
        tenant=tenant, actor=by, now=now, reason=f"code ships{mark}", service="code"
    )  # fmt: skip
    silence = silence_create(
        tenant=tenant, by=by, now=now,
        spec={"service": "code", "reason": f"code ships{mark}", "until": now + timedelta(days=1)},
    )  # fmt: skip
    things = {
        "policy_id": str(policy.pk),
        "silence_id": str(silence.pk),
        "channel_id": str(tenant.channels.get().pk),
        "fleet.name": f"node-a{mark}",
        "token": "a-link-is-for-whoever-has-it",
        "uidb64": "MQ",
        "verb": "approve",
        "slug": "ttft",
        "contracts.slug": "gold",
        "members.name": owner.username,
        "name": f"engine-0{mark}",
        "incident_id": str(found.pk),
        "action_id": str(action.pk),
        "trace_id": TRACE_ID,
        "token_id": str(collector.pk),
        "member_id": str(Membership.objects.get(user=owner).pk),
    }
    return Household(made.tenant, owner, api, agent, things)
