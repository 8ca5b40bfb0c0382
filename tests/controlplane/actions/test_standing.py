"""A kept change stands until somebody sets its knob anew; then it is told so and not taken back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from controlplane.actions.left import left_of
from controlplane.actions.links import links_of
from controlplane.actions.models import Action, State
from controlplane.actions.orders import OrderError, action_rollback, verbs_open
from controlplane.actions.selectors import actions_of, sentence
from controlplane.actions.standing import overridden_note, overridden_words
from controlplane.fleet.models import Command
from controlplane.fleet.services import command_create
from gpu_agent.protocol import CommandKind
from tests.controlplane.actions.test_interleavings import World
from tests.controlplane.actions.test_left import Kept

pytestmark = pytest.mark.django_db


class Standing(Kept):
    """The same, with what the engine is known to run, and who set it."""

    def __init__(self) -> None:
        super().__init__()
        self.runs(128, "trimtab-agent apply x")
        self.note()

    def runs(self, value: int, by: str) -> None:
        at = (self.now() + timedelta(minutes=3)).isoformat()
        self.engine.values = {"max_num_seqs": value}
        self.engine.set_by = {"max_num_seqs": {"by": by, "at": at}}
        self.engine.save()

    def note(self) -> Action:
        overridden_note(self.tenant, self.now())
        return Action.objects.select_related("engine").get(pk=self.action.pk)


def test_a_kept_change_stands_while_its_engine_runs_it() -> None:
    action = Standing().note()
    assert action.overridden == {}
    assert verbs_open(action) == ("rollback",)
    assert overridden_words(action) == ""


def test_a_kept_change_that_was_set_back_says_so_and_is_not_to_be_rolled_back() -> None:
    story = Standing()
    story.runs(32, "start of the demo")
    action = story.note()
    at = f"{story.now() + timedelta(minutes=3):%H:%M:%S}"
    assert overridden_words(action) == f"set back to 32 at {at} by start of the demo"
    assert sentence(action).startswith(
        "Kept max_num_seqs at 128 (was 32) on engine-0: the share of bad requests fell"
    )
    assert sentence(action).endswith(f"; set back to 32 at {at} by start of the demo")
    assert verbs_open(action) == ()
    assert links_of(action, story.now()) == {}
    with pytest.raises(OrderError, match="stands no more: max_num_seqs was set to 32 since"):
        action_rollback(action=action, actor="ada", now=story.now())


def test_it_does_not_stand_again_when_somebody_sets_the_same_value() -> None:
    story = Standing()
    story.runs(64, "ada")
    assert story.note().overridden["by"] == "ada"
    story.runs(128, "bob")
    action = story.note()
    assert overridden_words(action).startswith("set to 64 at ")
    assert verbs_open(action) == ()


def test_while_another_change_is_on_trial_nobody_knows_what_will_stand() -> None:
    story = Standing()
    trial: dict[str, Any] = {
        "tenant": story.tenant, "engine": story.engine, "actor": "ada", "created_at": story.now(),
        "changes": {"max_num_seqs": {"from": 128, "to": 64}}, "expected_config_version": 2,
        "idempotency_key": "other", "deadline": story.now(), "state": State.VERIFYING,
    }  # fmt: skip
    other = Action.objects.create(**trial)
    command = command_create(
        engine=story.engine, action_id=other.pk, kind=CommandKind.APPLY, values={}, undo={},
        expected_config_version=None, ttl_s=90, deadline=story.now(),
    )  # fmt: skip
    story.runs(64, f"trimtab-agent apply {command.pk}")
    assert story.note().overridden == {}
    Action.objects.filter(pk=other.pk).update(state=State.VERIFIED)
    assert overridden_words(story.note()).endswith(" by ada"), "whose change the agent made"


def test_nothing_is_left_of_a_change_that_stands_no_more() -> None:
    story = Standing()
    for _ in range(3):
        story.judge(50)
    story.look_in_vain()
    assert left_of(story.incident, actions_of(story.incident)) is not None
    story.runs(32, "start of the demo")
    story.note()
    assert left_of(story.incident, actions_of(story.incident)) is None


def test_the_ledger_has_the_time_at_which_the_agent_made_the_change(world: World) -> None:
    """The pass that hears of it comes seconds later."""
    world.propose()
    for _ in range(20):
        world.node.poll()
        Command.objects.exclude(result_state="").update(result_at=world.now)
        world.tick(3)
        world.reconcile()
        if Action.objects.get().state == State.VERIFYING:
            break
    action = Action.objects.get()
    at = {step.to_state: step.at for step in action.transitions.all()}
    assert at["applied"] == action.applied_at
    assert at["dispatched"] <= at["applied"] < at["verifying"]
