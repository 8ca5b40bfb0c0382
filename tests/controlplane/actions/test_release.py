"""What was shed is served again: when it is time, on trial, and seldom where it does not work."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from controlplane.actions.models import UNDER_WAY, Action, Priority, State, Verdict
from controlplane.actions.policies import freeze, policy_set
from controlplane.actions.selectors import sentence
from controlplane.diagnosis.models import Incident
from tests.controlplane.actions.test_interleavings import World
from tests.controlplane.actions.test_orders import ask, until
from tests.controlplane.actions.test_propose import propose, step

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path, 3)
    made.after_share, made.silent = 0.02, False
    return made


@pytest.fixture
def shed(world: World) -> Action:
    """Shedding (here of the running cap) that was kept, and the incident over."""
    action, _ = propose(world)
    assert action is not None
    Action.objects.update(priority=Priority.SAFETY)
    until(world, action, State.VERIFIED)
    Incident.objects.update(state=Incident.State.CLOSED, closed_at=world.now)
    world.before_share = 0.02
    return action


def wait(world: World, minutes: float) -> None:
    """In small steps while something is on trial."""
    end = world.now + timedelta(minutes=minutes)
    while world.now < end:
        on_trial = Action.objects.filter(state__in=UNDER_WAY).exists()
        step(world, 4 if on_trial else 30)


def releases() -> list[Action]:
    return list(Action.objects.filter(priority=Priority.TUNING).order_by("created_at"))


def test_it_is_served_again_a_cool_down_after_the_incident(world: World, shed: Action) -> None:
    wait(world, 9.5)
    assert not releases()
    wait(world, 4)
    (release,) = releases()
    release.refresh_from_db()
    assert release.undoes == shed
    assert (release.state, release.verdict) == (State.VERIFIED, Verdict.NO_WORSE)
    assert world.plant.values["max_num_seqs"] == 8
    assert "no objective was seen to get worse" in sentence(release)
    wait(world, 30)
    assert len(releases()) == 1


def test_where_it_breaks_a_promise_it_is_undone_and_tried_ever_less_often(
    world: World, shed: Action
) -> None:
    world.before_share = 0.9  # which is what 8 running requests give
    wait(world, 45)
    tried = releases()
    assert {t.verdict for t in tried} == {Verdict.WORSE}
    assert len(tried) == 2
    gap = tried[1].created_at - tried[0].created_at
    assert gap >= timedelta(minutes=20)
    assert world.plant.values["max_num_seqs"] == 32


def test_not_while_it_burns_nor_in_a_freeze_nor_when_observing(world: World, shed: Action) -> None:
    Incident.objects.update(state=Incident.State.OPEN)
    wait(world, 12)
    assert not releases()
    Incident.objects.update(state=Incident.State.CLOSED)
    freeze(tenant=world.tenant, actor="ada", now=world.now, reason="r",
           until=world.now + timedelta(minutes=2))  # fmt: skip
    wait(world, 1.5)
    assert not releases()
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={"mode": "observe"})
    wait(world, 3)
    assert not releases()


def test_asking_a_person_first_where_the_policy_says_so(world: World, shed: Action) -> None:
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={"mode": "approve"})
    wait(world, 13)
    (release,) = releases()
    assert release.state == State.PROPOSED


def test_a_repair_goes_before_it(world: World, shed: Action) -> None:
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={"mode": "approve"})
    wait(world, 11)
    (release,) = releases()
    mine = ask(world, 64)
    release.refresh_from_db()
    assert release.state == State.REJECTED
    assert f"conflict={mine.pk}" in sentence(release)


def test_not_what_somebody_has_moved_since(world: World, shed: Action) -> None:
    world.plant.apply({"max_num_seqs": 64}, by="person")
    wait(world, 12)
    assert not releases()
