"""Who set a knob last, and whether it runs what it was told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from controlplane.accounts.models import Tenant
from controlplane.accounts.services import tenant_create
from controlplane.fleet.drift import drift
from controlplane.fleet.models import Command, Engine
from controlplane.fleet.selectors import commands_answered, node_named
from controlplane.fleet.services import command_create, sync
from gpu_agent.protocol import CommandState
from tests.controlplane.fleet.agent_side import (
    START,
    an_apply,
    an_engine,
    heartbeat,
    report,
    result,
)

pytestmark = pytest.mark.django_db


def commands_to(engine: Engine) -> list[Command]:
    return commands_answered([engine]).get(engine.pk, [])


def reads(tenant: Tenant, second: float, version: int, cap: int, **more: Any) -> Engine:
    """What the engine holds `second` s after the start, as its agent tells it."""
    at = START + timedelta(seconds=second)
    told = report(config_version=version, values={"max_num_seqs": cap}, **more)
    sync(tenant=tenant, request=heartbeat(at, engines=[told]), now=at)
    return Engine.objects.get(tenant=tenant, name="engine-0")


def test_a_knob_seen_to_move_names_who_moved_it(tenant: Tenant) -> None:
    an_engine(tenant)
    at = (START + timedelta(seconds=1)).isoformat()
    engine = reads(tenant, 2, 8, 48, changed_by="cli/ada\n", changed_at=at)
    assert engine.changed_by == "cli/ada"
    assert engine.set_by == {
        "max_num_seqs": {"by": "cli/ada", "at": at, "from": 32, "version": 8, "versions": 1}
    }
    # Another version that leaves the knob alone, and one that was never seen in between.
    assert reads(tenant, 4, 9, 48, changed_by="bob").set_by["max_num_seqs"]["by"] == "cli/ada"
    assert reads(tenant, 6, 12, 64, changed_by="eve").set_by["max_num_seqs"]["versions"] == 3


def test_the_first_look_blames_nobody(tenant: Tenant) -> None:
    assert reads(tenant, 0, 8, 48, changed_by="cli/ada").set_by == {}


def test_a_time_no_engine_should_say_does_not_stop_the_sync(tenant: Tenant) -> None:
    an_engine(tenant)
    engine = reads(tenant, 2, 8, 48, changed_by="ada", changed_at="yesterday")
    assert engine.changed_at is None
    assert engine.set_by["max_num_seqs"]["at"] == (START + timedelta(seconds=2)).isoformat()


def answered(tenant: Tenant, command: Command, state: CommandState) -> None:
    at = START + timedelta(seconds=1)
    told = heartbeat(at, results=[result(command, state, at)])
    sync(tenant=tenant, request=told, now=at)


def test_a_hand_that_turns_what_was_commanded_is_drift(tenant: Tenant) -> None:
    engine = an_engine(tenant)
    command = an_apply(engine)
    answered(tenant, command, CommandState.APPLIED)
    told = command.values["max_num_seqs"]
    engine = reads(tenant, 2, 8, told, changed_by="trimtab/agent")
    assert drift(engine, commands_to(engine)) == []
    engine = reads(tenant, 4, 9, told + 1, changed_by="cli/ada")
    (found,) = drift(engine, commands_to(engine))
    assert (found.knob, found.commanded.value, found.runs) == ("max_num_seqs", told, told + 1)
    assert found.by == "cli/ada"


def test_what_was_undone_is_commanded_as_it_was_before(tenant: Tenant) -> None:
    engine = an_engine(tenant)
    command = an_apply(engine)
    answered(tenant, command, CommandState.REVERTED)
    engine = reads(tenant, 2, 9, command.undo["max_num_seqs"])
    assert drift(engine, commands_to(engine)) == []
    (found,) = drift(reads(tenant, 3, 10, 77), commands_to(engine))
    assert found.commanded.value == command.undo["max_num_seqs"]


def test_a_revert_brings_back_what_its_trial_had_found(tenant: Tenant) -> None:
    engine = an_engine(tenant)
    trial = an_apply(engine)
    answered(tenant, trial, CommandState.APPLIED)
    undoing = command_create(
        engine=engine, action_id=trial.action_id, kind="revert", values={}, undo={}, ttl_s=90,
        expected_config_version=None, deadline=trial.deadline, target_command_id=trial.pk,
    )  # fmt: skip
    answered(tenant, undoing, CommandState.REVERTED)
    engine = reads(tenant, 3, 9, trial.undo["max_num_seqs"])
    assert drift(engine, commands_to(engine)) == []


def test_what_was_never_commanded_never_drifts(tenant: Tenant) -> None:
    an_engine(tenant)
    engine = reads(tenant, 2, 8, 48)
    an_apply(engine)  # on its way, not answered
    assert drift(engine, commands_to(engine)) == []


def test_a_node_is_found_by_name_within_its_tenant(tenant: Tenant) -> None:
    an_engine(tenant_create(slug="other", name="Other"))
    assert node_named(tenant, "node-0") is None
    an_engine(tenant)
    found = node_named(tenant, "node-0")
    assert found is not None
    assert found.tenant == tenant
