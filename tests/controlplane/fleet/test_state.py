from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.accounts.models import Tenant
from controlplane.accounts.services import tenant_create
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engine_state, engines_of, node_state, nodes_of
from controlplane.fleet.services import sync
from tests.controlplane.fleet.agent_side import START, an_engine, heartbeat, report

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("silent_s", "state"), [(0, "ok"), (15, "ok"), (16, "late"), (60, "late"), (61, "lost")]
)
def test_silence_is_late_then_lost(tenant: Tenant, silent_s: int, state: str) -> None:
    engine = an_engine(tenant)
    now = START + timedelta(seconds=silent_s)
    assert (engine_state(engine, now), node_state(engine.node, now)) == (state, state)


def test_an_engine_its_agent_cannot_read_is_unreachable(tenant: Tenant) -> None:
    an_engine(tenant)
    at = START + timedelta(seconds=2)
    sync(tenant=tenant, request=heartbeat(at, engines=[report(reachable=False)]), now=at)
    assert engine_state(Engine.objects.get(), at) == "unreachable"
    assert engine_state(Engine.objects.get(), at + timedelta(seconds=61)) == "lost"


def test_an_engine_its_agent_no_longer_names_is_lost_though_the_agent_speaks(
    tenant: Tenant,
) -> None:
    an_engine(tenant)
    at = START + timedelta(seconds=61)
    sync(tenant=tenant, request=heartbeat(at, engines=[]), now=at)
    engine = Engine.objects.get()
    assert (engine_state(engine, at), node_state(engine.node, at)) == ("lost", "ok")


def test_an_agent_that_said_goodbye_is_stopped(tenant: Tenant) -> None:
    an_engine(tenant)
    sync(tenant=tenant, request=heartbeat(stopping=True), now=START)
    engine = Engine.objects.get()
    assert (engine_state(engine, START), node_state(engine.node, START)) == ("lost", "stopped")


def test_lists_are_by_name_and_of_one_tenant(tenant: Tenant) -> None:
    an_engine(tenant_create(slug="other", name="Other"))
    engines = [report("b"), report("a"), report("c", service="embed")]
    sync(tenant=tenant, request=heartbeat(engines=engines), now=START)
    assert [e.name for e in engines_of(tenant)] == ["a", "b", "c"]
    assert [e.name for e in engines_of(tenant, "embed")] == ["c"]
    assert [n.name for n in nodes_of(tenant)] == ["node-0"]
