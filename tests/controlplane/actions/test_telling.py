"""What messages are given to tell of changes: that one was taken back, whoever was heard when."""

from __future__ import annotations

import pytest

from controlplane.actions.models import Action, State
from controlplane.actions.telling import deeds_of
from controlplane.actions.undo import withdraw
from tests.controlplane.actions.test_interleavings import World
from tests.controlplane.actions.test_orders import until
from tests.controlplane.actions.test_propose import propose

pytestmark = pytest.mark.django_db


def dispatched(world: World) -> Action:
    action, said = propose(world)
    assert action is not None, said
    world.reconcile()
    action.refresh_from_db()
    assert action.state == State.DISPATCHED
    return action


def test_a_change_that_was_undone_before_the_agent_was_heard_of_is_told_as_undone(
    world: World,
) -> None:
    action = dispatched(world)
    world.sync()
    for _ in range(60):
        world.tick(2)
        world.node.guard.step()
    assert world.plant.config_version == 3, "there and back"
    until(world, action, State.ROLLED_BACK)
    assert action.applied_at is None
    (told,), deeds = deeds_of(world.incident, world.now)
    assert "the agent undid it by itself" in told
    assert deeds["undone_at"] == action.ended_at


def test_what_was_never_applied_is_not_told_as_undone(world: World) -> None:
    action = dispatched(world)
    withdraw(action, "never mind", by="person", actor="ada", now=world.now)
    until(world, action, State.ROLLED_BACK)
    assert world.plant.config_version == 1
    assert deeds_of(world.incident, world.now)[1]["undone_at"] is None
