from __future__ import annotations

import uuid

import pytest

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import Command, Engine
from controlplane.fleet.selectors import commands_of
from controlplane.fleet.services import command_create
from tests.controlplane.fleet.agent_side import GENERATION, START, an_apply, an_engine

pytestmark = pytest.mark.django_db


def test_asking_again_makes_no_second_command(tenant: Tenant) -> None:
    engine, action_id = an_engine(tenant), uuid.uuid4()
    first = an_apply(engine, action_id)
    assert an_apply(engine, action_id) == first
    assert Command.objects.count() == 1
    assert Engine.objects.get().generation == GENERATION + 1


def test_generations_grow_even_from_a_stale_engine(tenant: Tenant) -> None:
    engine = an_engine(tenant)
    stale = Engine.objects.get(pk=engine.pk)
    assert [an_apply(e).generation - GENERATION for e in (engine, stale, engine)] == [1, 2, 3]


def test_an_action_has_its_commands_by_kind(tenant: Tenant) -> None:
    engine, action_id = an_engine(tenant), uuid.uuid4()
    apply = an_apply(engine, action_id)
    commit = command_create(
        engine=engine,
        action_id=action_id,
        kind="commit",
        values={},
        undo={},
        expected_config_version=None,
        ttl_s=90,
        deadline=START,
        target_command_id=apply.pk,
    )
    assert commands_of(action_id) == {"apply": apply, "commit": commit}
    assert commands_of(uuid.uuid4()) == {}


def test_a_revert_of_nothing_is_our_own_mistake(tenant: Tenant) -> None:
    with pytest.raises(AssertionError, match="revert ends which trial"):
        command_create(
            engine=an_engine(tenant),
            action_id=uuid.uuid4(),
            kind="revert",
            values={},
            undo={},
            expected_config_version=None,
            ttl_s=90,
            deadline=START,
        )
