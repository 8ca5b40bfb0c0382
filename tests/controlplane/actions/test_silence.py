"""What becomes of a trial nobody answers for: a dead node, a control plane that was away."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from controlplane.actions.models import Action, State, Verdict
from controlplane.actions.selectors import sentence
from controlplane.actions.trial import judge
from controlplane.actions.undo import SILENCE_MAX
from tests.controlplane.actions.test_interleavings import World

pytestmark = pytest.mark.django_db
RESULT_WITHIN = 20  # steps of 2 s


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A trial that runs, on a service that stays bad."""
    world = World(tmp_path, 1)
    world.after_share, world.silent = 0.8, False
    world.propose()
    for _ in range(RESULT_WITHIN):
        world.tick(2)
        world.node.poll()
        world.reconcile()
        if Action.objects.get().state == State.VERIFYING:
            return world
    raise AssertionError(f"still {Action.objects.get().state}")


def away(world: World, minutes: float) -> Action:
    """Time in which the loop runs and the node says nothing."""
    for _ in range(round(minutes * 6)):
        world.tick(10)
        world.reconcile()
    return Action.objects.get()


def test_a_node_that_died_in_a_trial_does_not_hold_its_service_for_ever(world: World) -> None:
    silence = SILENCE_MAX.total_seconds() / 60
    assert away(world, silence).state == State.ROLLING_BACK
    action = away(world, 5)
    assert action.state == State.ROLLBACK_FAILED
    assert "engine-0 is gone, and its agent undoes alone what was not confirmed" in sentence(action)


def test_a_node_that_died_before_it_confirmed_a_better_setting_is_given_up_too(
    world: World,
) -> None:
    world.after_share = 0.02
    action = away(world, 2)
    assert (action.state, action.verdict) == (State.VERIFYING, Verdict.BETTER)
    assert away(world, 15).state == State.ROLLING_BACK
    assert away(world, 15).state == State.ROLLBACK_FAILED


def test_a_node_that_comes_back_in_time_says_that_it_undid_the_trial(world: World) -> None:
    assert away(world, 9).state == State.ROLLING_BACK
    world.node.guard.step()
    world.node.poll()
    world.reconcile()
    assert Action.objects.get().state == State.ROLLED_BACK
    assert world.plant.values["max_num_seqs"] == 8


def test_after_a_sleep_it_is_told_that_the_agent_undid_the_trial(world: World) -> None:
    """The control plane wakes long after; it looks before the agent's next word comes."""
    world.after_share = 0.02
    for _ in range(60):
        world.tick(5)
        world.node.guard.step()
    world.reconcile()
    action = Action.objects.get()
    over_at = action.applied_at + timedelta(seconds=action.ttl_s)
    assert sentence(action).endswith(
        f"it was not judged before its time was over at {over_at:%H:%M:%S}: its agent undoes it"
    )
    world.node.poll()
    world.reconcile()
    action = Action.objects.get()
    assert (action.state, action.verdict) == (State.ROLLED_BACK, Verdict.EXPIRED)
    assert sentence(action).endswith(
        f"the agent undid it by itself at {world.now:%H:%M:%S}, as no commit came in time"
    )
    assert world.plant.values["max_num_seqs"] == 8


def test_a_trial_from_long_ago_is_judged_by_its_own_windows(world: World) -> None:
    """The control plane was away for days: more windows than a grid may have."""
    action = Action.objects.get()
    world.now += timedelta(days=3)
    judged = judge(action, reader=world.plant.store, now=world.now)
    assert judged.verdict is not None
