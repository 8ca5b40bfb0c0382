"""Where an undo fails, the autopilot leaves the engine alone until a person has looked."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.accounts.models import AuditEntry
from controlplane.actions import retention
from controlplane.actions.links import links_of
from controlplane.actions.models import Action, Mode, State
from controlplane.actions.orders import OrderError, action_clear, action_rollback, verbs_open
from controlplane.actions.policy import undo_failed
from controlplane.actions.selectors import sentence, undos_failed
from controlplane.actions.telling import stops_of
from tests.controlplane.actions.test_interleavings import World
from tests.controlplane.actions.test_orders import ask, mode, trial, until
from tests.controlplane.actions.test_propose import propose

pytestmark = pytest.mark.django_db


@pytest.fixture
def failed(world: World) -> Action:
    """A trial somebody turned another knob during: the agent undoes nothing behind their back."""
    action = trial(world)
    world.plant.apply({"max_num_seqs": 12}, by="person")
    action_rollback(action=action, actor="ada", now=world.now)
    until(world, action, State.ROLLBACK_FAILED)
    world.tick(700)  # past every cool-down
    world.node.poll()
    return action


def test_nothing_is_proposed_there_and_the_story_says_why(world: World, failed: Action) -> None:
    action, said = propose(world)
    assert action is None
    assert said == (
        "max_num_seqs 8 → 32 on engine-0 could not be undone: "
        "the autopilot waits until a person has looked"
    )


def test_its_sentence_says_what_went_wrong_and_who_is_waited_for(
    world: World, failed: Action
) -> None:
    told = sentence(failed)
    assert told.startswith(
        "Could not undo the change of max_num_seqs from 8 to 32 on engine-0: rolled back by"
    )
    assert "person" in told, "who changed it meanwhile"
    assert told.endswith("; the autopilot leaves engine-0 alone until a person has looked")


def test_once_a_person_has_looked_the_autopilot_goes_on(world: World, failed: Action) -> None:
    assert verbs_open(failed) == ("clear",)
    assert set(links_of(failed, world.now)) == {"clear"}
    action_clear(action=failed, actor="ada", now=world.now, reason="it runs 12, as bob wants")
    assert undo_failed(world.engine) == ""
    assert not undos_failed(world.tenant)
    assert verbs_open(failed) == ()
    assert "until a person has looked" not in sentence(failed)
    assert propose(world)[0] is not None
    entry = AuditEntry.objects.get(subject=str(failed.pk), verb="cleared")
    assert (entry.actor, entry.detail["reason"]) == ("ada", "it runs 12, as bob wants")


def test_looking_twice_is_looking_once(world: World, failed: Action) -> None:
    action_clear(action=failed, actor="ada", now=world.now)
    action_clear(action=failed, actor="bob", now=world.now)
    assert Action.objects.get(pk=failed.pk).cleared_by == "ada"
    assert AuditEntry.objects.filter(verb="cleared").count() == 1


def test_there_is_nothing_to_look_at_where_nothing_failed(world: World) -> None:
    action = trial(world)
    with pytest.raises(OrderError, match="holds nobody up: it is verifying"):
        action_clear(action=action, actor="ada", now=world.now)


def test_a_person_may_change_the_engine_meanwhile(world: World, failed: Action) -> None:
    order = ask(world, 24)
    until(world, order, State.VERIFIED)
    assert world.plant.values["max_num_seqs"] == 24
    assert undo_failed(world.engine), "a change is no look"


def lost(world: World) -> Action:
    """A change whose answer the agent never got; the engine may have been told anything since."""
    action, said = propose(world)
    assert action is not None, said
    world.reconcile()
    world.sync()
    world.node.adapter.lose_next_answer = True
    world.node.guard.step()
    assert world.plant.values["max_num_seqs"] == 32
    return action


def test_a_change_nobody_can_say_was_made_waits_for_a_person_too(world: World) -> None:
    action = lost(world)
    world.plant.apply({"max_num_seqs": 12}, by="person")
    until(world, action, State.ROLLBACK_FAILED)
    assert "indeterminate after a lost answer: changed by hand since" in sentence(action)
    (stop,) = stops_of(world.tenant, world.now)
    assert (stop["about"], set(stop["links"])) == (action.pk, {"clear"})


def test_also_where_it_was_asked_to_be_undone_before_the_agent_was_heard_of(world: World) -> None:
    action = lost(world)
    world.plant.apply({"max_num_seqs": 12}, by="person")
    world.tick(60)
    world.reconcile()
    action.refresh_from_db()
    assert action.state == State.ROLLING_BACK
    until(world, action, State.ROLLBACK_FAILED)
    assert world.plant.values["max_num_seqs"] == 12


def test_where_the_engine_runs_what_it_did_before_there_is_nothing_to_look_at(world: World) -> None:
    action = lost(world)
    world.plant.apply({"max_num_seqs": 8}, by="person")
    until(world, action, State.FAILED)
    assert sentence(action).startswith("Could not change max_num_seqs from 8 to 32 on engine-0")
    assert stops_of(world.tenant, world.now) == []


def test_a_standing_proposal_falls_with_it(world: World) -> None:
    mode(world, Mode.APPROVE)
    proposal, _ = propose(world)
    assert proposal is not None
    Action.objects.create(
        tenant=world.tenant, engine=world.engine, changes={"max_wait_ms": {"from": 0, "to": 2}},
        expected_config_version=0, idempotency_key="failed", deadline=world.now,
        state=State.ROLLBACK_FAILED, created_at=world.now, ended_at=world.now,
    )  # fmt: skip
    world.reconcile()
    proposal.refresh_from_db()
    assert proposal.state == State.REJECTED
    assert "could not be undone" in sentence(proposal)


def test_retention_leaves_what_nobody_has_looked_at(world: World, failed: Action) -> None:
    later = world.now + timedelta(days=400)
    assert retention.prune(later) == 0
    action_clear(action=failed, actor="ada", now=world.now)
    assert retention.prune(later) == 1
