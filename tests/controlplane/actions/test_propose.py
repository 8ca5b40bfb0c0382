"""What is proposed, and what is refused with which words."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from controlplane.actions.conflict import trials_full
from controlplane.actions.models import Action, State
from controlplane.actions.selectors import sentence
from controlplane.actions.services import action_propose
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.fleet.models import Command, Engine, Node
from slo.models import Reading
from tests.controlplane.actions.test_interleavings import World
from tracing.types import Signal

pytestmark = pytest.mark.django_db


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, 3)


def propose(world: World, diagnosis: Diagnosis | None = None) -> tuple[Action | None, str]:
    diagnosis = diagnosis or world.diagnosis()
    world.engine.refresh_from_db()
    action = action_propose(
        incident=world.incident, diagnosis=diagnosis, engine=world.engine, now=world.now
    )
    return action, diagnosis.facts.get("no_action", "")


def ended(world: World, state: str, *, up: bool = True, ago_s: float = 60) -> Action:
    low, high = 8, 32
    return Action.objects.create(
        tenant=world.tenant,
        engine=world.engine,
        changes={"max_num_seqs": {"from": low, "to": high} if up else {"from": high, "to": low}},
        expected_config_version=0,
        idempotency_key=f"{state}-{ago_s}-{Action.objects.count()}",
        deadline=world.now,
        state=state,
        created_at=world.now,
        ended_at=world.now - timedelta(seconds=ago_s),
        cleared_at=world.now,
    )


def test_the_wish_becomes_a_change_with_its_undo(world: World) -> None:
    action, _ = propose(world)
    assert action is not None
    assert action.changes == {"max_num_seqs": {"from": 8, "to": 32}}
    assert action.state == State.PROPOSED
    assert action.expected_config_version == 1


def test_a_change_that_goes_part_of_the_way_says_what_is_wished_for(world: World) -> None:
    diagnosis = world.diagnosis()
    diagnosis.remedy = [{"knob": "max_num_seqs", "to": 178.75, "why": "143 run or wait"}]
    action, _ = propose(world, diagnosis)
    assert action is not None
    assert action.predicted["sentence"] == (
        "143 run or wait; that asks for 179, and 32 is as far as one change goes"
    )
    assert action.predicted["bad_share_max"] is None


def test_the_same_diagnosis_gives_the_same_action(world: World) -> None:
    diagnosis = world.diagnosis()
    first, _ = propose(world, diagnosis)
    assert first is not None
    Action.objects.filter(pk=first.pk).update(state=State.EXPIRED)
    again, _ = propose(world, diagnosis)
    assert again is not None
    assert again.pk == first.pk


def test_a_queue_that_has_to_drain_gets_more_time(world: World) -> None:
    diagnosis = world.diagnosis()
    diagnosis.facts = {"drain_s": 18.0}
    action, _ = propose(world, diagnosis)
    assert action is not None
    assert action.ttl_s == 108
    Action.objects.all().delete()
    diagnosis.facts = {"drain_s": 5000.0}
    action, _ = propose(world, diagnosis)
    assert action is not None
    assert action.ttl_s == 180


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cause": "unknown"}, "the cause is not known"),
        ({"remedy": [], "facts": {"no_action": "12 wait: no"}}, "12 wait: no"),
        ({"remedy": [{"knob": "warp", "to": 9, "why": ""}]}, "no knob 'warp'"),
        (
            {"remedy": [{"knob": "max_num_seqs", "to": 60, "why": "", "limit": 12}]},
            "no step above it within 1 to 12",
        ),
    ],
)
def test_what_cannot_be_done_is_said(world: World, wrong: dict[str, Any], words: str) -> None:
    diagnosis = world.diagnosis()
    for name, value in wrong.items():
        setattr(diagnosis, name, value)
    action, said = propose(world, diagnosis)
    assert action is None
    assert words in said


def test_one_action_at_a_time_on_an_engine(world: World) -> None:
    assert propose(world)[0] is not None
    action, said = propose(world)
    assert action is None
    assert "another action is in flight on engine-0: max_num_seqs 8 → 32" in said


def test_what_was_just_undone_is_not_tried_again_and_said_when_it_may(world: World) -> None:
    undone = ended(world, State.ROLLED_BACK)
    diagnosis = world.diagnosis()
    _none, said = propose(world, diagnosis)
    assert undone.ended_at is not None
    again = undone.ended_at + timedelta(minutes=3)
    assert "just tried this way" in said
    assert said.endswith(f"waiting 3 min, until {again:%H:%M:%S}")
    diagnosis.refresh_from_db()
    assert diagnosis.next_try_at == again


def test_after_the_cool_down_it_may_be_tried_again(world: World) -> None:
    ended(world, State.ROLLED_BACK, ago_s=601)
    assert propose(world)[0] is not None


def test_what_was_just_moved_is_not_turned_back(world: World) -> None:
    ended(world, State.VERIFIED, up=False)
    assert "just moved the other way" in propose(world)[1]


def test_the_next_rungs_may_follow_a_step_that_helped(world: World) -> None:
    ended(world, State.VERIFIED, up=True)
    assert propose(world)[0] is not None


def test_no_action_on_an_engine_nobody_hears(world: World) -> None:
    world.tick(40)
    assert "engine engine-0 is late" in propose(world)[1]


def test_no_action_on_an_engine_nobody_can_read(world: World) -> None:
    world.node.adapter.down = True
    world.node.poll()
    world.node.poll()
    assert "engine engine-0 is unreachable" in propose(world)[1]


def test_no_action_on_windows_that_are_good_again(world: World) -> None:
    world.incident.good_windows = 1
    assert "the newest windows are not bad" in propose(world)[1]


def test_no_action_on_stale_readings(world: World) -> None:
    world.now += timedelta(seconds=90)
    world.node.now = world.now
    world.node.poll()
    assert "nothing was measured" in propose(world)[1]


@pytest.fixture
def standing(world: World, settings: Any) -> Action:
    """A proposal in a house that only observes, older than it would take to carry it out."""
    settings.TRIMTAB_AUTOPILOT = False
    action, _ = propose(world)
    assert action is not None
    for _ in range(10):
        step(world, 30)
    action.refresh_from_db()
    return action


def step(world: World, seconds: float) -> None:
    world.tick(seconds)
    world.node.poll()
    world.reconcile()


def test_observing_only_a_proposal_stands(standing: Action) -> None:
    assert standing.state == State.PROPOSED
    assert sentence(standing) == "Proposes max_num_seqs from 8 to 32 on engine-0"
    assert not Command.objects.exists()


def test_a_proposal_stands_until_the_incident_is_over(world: World, standing: Action) -> None:
    Incident.objects.update(state=Incident.State.CLOSED)
    step(world, 2)
    standing.refresh_from_db()
    assert standing.state == State.REJECTED
    assert sentence(standing) == (
        "Did not change max_num_seqs from 8 to 32 on engine-0: the incident is over without it"
    )


def test_a_proposal_stands_until_somebody_turns_a_knob(world: World, standing: Action) -> None:
    world.plant.apply({"max_num_seqs": 32}, by="person")
    step(world, 2)
    standing.refresh_from_db()
    assert standing.state == State.REJECTED
    assert "someone changed the engine's configuration" in sentence(standing)


def test_a_proposal_from_before_the_autopilot_was_switched_on_is_made_anew(
    world: World, standing: Action, settings: Any
) -> None:
    settings.TRIMTAB_AUTOPILOT = True
    step(world, 2)
    standing.refresh_from_db()
    assert standing.state == State.EXPIRED
    assert propose(world)[0] is not None


def test_a_proposal_that_only_stands_is_no_trial(world: World, standing: Action) -> None:
    other = twin(world, "engine-1")
    assert not trials_full(other, world.now)


def test_what_a_person_keeps_at_once_is_no_trial(world: World) -> None:
    kept, tried = (
        Action.objects.create(
            tenant=world.tenant, engine=twin(world, name), expected_config_version=0, trial=trial,
            idempotency_key=name, deadline=world.now, state=State.APPLIED, created_at=world.now,
        )
        for name, trial in (("engine-1", False), ("engine-2", True))
    )  # fmt: skip
    assert "in trial already: 1 of 3" in trials_full(world.engine, world.now)
    tried.delete()
    assert not trials_full(world.engine, world.now), f"{kept.pk} is being kept"


def twin(world: World, name: str, silent_s: float = 0) -> Engine:
    seen = world.now - timedelta(seconds=silent_s)
    node = Node.objects.create(
        tenant=world.tenant, agent_id=name, name=name, boot_id="b", last_seen_at=seen
    )
    return Engine.objects.create(
        tenant=world.tenant, node=node, name=name, service="chat", adapter="plant", url="u",
        reachable=True, last_seen_at=seen,
    )  # fmt: skip


def test_the_dead_are_no_peers(world: World) -> None:
    """A fifth of five that serve is one, whoever has served in the past."""
    assert propose(world)[0] is not None
    live = [twin(world, f"engine-{n}") for n in range(1, 5)]
    for n in range(10):
        twin(world, f"old-{n}", silent_s=86_400)
    assert trials_full(live[0], world.now) == "engines of chat in trial already: 1 of 5"


def test_windows_that_come_late_are_ground_to_act_on(world: World) -> None:
    """The newest is stale yet, the one before was measured and is bad."""
    newest = Reading.objects.latest("window_end")
    Reading.objects.filter(pk=newest.pk).update(signal=Signal.STALE, good=0, total=0)
    assert propose(world)[0] is not None


def test_three_failures_in_an_hour_end_the_autopilot_for_the_engine(world: World) -> None:
    for minutes in (11, 20, 50):
        ended(world, State.ROLLED_BACK, ago_s=60 * minutes)
    action, _ = propose(world)
    assert action is not None
    world.reconcile()
    action.refresh_from_db()
    assert action.state == State.PROPOSED


def test_a_changed_configuration_rejects_the_action(world: World) -> None:
    action, _ = propose(world)
    assert action is not None
    world.plant.apply({"max_wait_ms": 5}, by="person")
    world.node.poll()
    world.reconcile()
    action.refresh_from_db()
    assert action.state == State.REJECTED
    assert "someone changed the engine's configuration" in action.transitions.last().reason  # type: ignore[union-attr]
    assert Engine.objects.get().values["max_num_seqs"] == 8
