"""The safety invariants, one by one; where another file proves one at length, it is named.

 1 never two actions in flight on one engine            2 what was applied is kept or undone in time
 3 nothing is done on stale or missing data             4 never out of bounds, never over max step
 5 at most a fifth of a fleet on trial                  6 no request lost: tests/engine, bench
 7 the node's stop file counts, whatever we say         8 same input, same decision
 9 three failures in an hour: a person decides         10 no quality-changing knob by itself
11 nothing is tuned, only mended
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction

from controlplane.actions.conflict import Conflict, make_way, trials_full
from controlplane.actions.knob import STEPS_MAX, knobs
from controlplane.actions.ledger import begin
from controlplane.actions.models import NEXT, UNDER_WAY, Action, Priority, State, Verdict
from controlplane.actions.orders import OrderError, action_approve, action_ask
from controlplane.actions.policies import policy_set
from controlplane.actions.policy import rules_of, waits_for_person
from controlplane.actions.reconcile import reconcile
from controlplane.actions.undo import CannotUndo, withdraw
from controlplane.fleet.models import Engine
from controlplane.fleet.services import command_create
from slo.models import Reading
from tests.controlplane.actions.test_interleavings import World
from tests.controlplane.actions.test_orders import trial, until
from tests.controlplane.actions.test_propose import ended, propose, step, twin
from tracing.types import Signal

pytestmark = pytest.mark.django_db


def new(world: World, state: str, priority: int = Priority.REPAIR, **columns: Any) -> Action:
    values = {
        "tenant": world.tenant, "engine": world.engine, "priority": priority, "state": state,
        "changes": {"max_num_seqs": {"from": 8, "to": 16}}, "expected_config_version": 1,
        "idempotency_key": f"{random.random()}", "deadline": world.now + timedelta(seconds=30),
        "created_at": world.now,
    }  # fmt: skip
    return Action(**(values | columns))


# 1 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", sorted(UNDER_WAY))
@pytest.mark.parametrize("second", sorted(UNDER_WAY))
def test_1_the_database_refuses_a_second_action_in_flight(
    first: str, second: str, world: World
) -> None:
    new(world, first).save()
    with pytest.raises(IntegrityError), transaction.atomic():
        new(world, second).save()


def test_1_the_database_refuses_a_second_that_waits(world: World) -> None:
    begin(new(world, State.PROPOSED), reason="r")
    with pytest.raises(IntegrityError), transaction.atomic():
        begin(new(world, State.PROPOSED), reason="r")


def test_1_one_that_waits_does_not_start_beside_one_under_way(world: World) -> None:
    running = trial(world)
    begin(new(world, State.PROPOSED), reason="another worker proposed it at the same moment")
    for _ in range(5):
        step(world, 2)
        states = Action.objects.exclude(pk=running.pk).values_list("state", flat=True)
        assert not set(states) & UNDER_WAY


# 2 -------------------------------------------------------------------------------------------


def test_2_an_undo_is_open_from_wherever_the_engine_may_have_been_changed() -> None:
    for state in (State.DISPATCHED, State.ACKNOWLEDGED, State.APPLIED, State.VERIFYING):
        assert State.ROLLING_BACK in NEXT[state]


@pytest.mark.parametrize("stop_at", [State.DISPATCHED, State.APPLIED, State.VERIFYING])
def test_2_a_control_plane_that_is_gone_leaves_nothing_unproven(stop_at: str, world: World) -> None:
    """It dies at each state of a trial; the node alone is back in time, and it is found out."""
    action, _ = propose(world)
    assert action is not None
    world.reconcile()
    while action.state != stop_at:
        world.node.poll()
        world.tick(1)
        world.reconcile()
        action.refresh_from_db()
        if action.state == State.VERIFYING:
            break
    began = world.now
    while (world.now - began).total_seconds() <= action.ttl_s + 1:
        world.tick(1)
        world.node.guard.step()  # nobody answers its syncs
    assert world.plant.values["max_num_seqs"] == 8
    until(world, action, State.ROLLED_BACK, State.EXPIRED)


# 3 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", [Signal.MISSING, Signal.STALE, Signal.NO_TRAFFIC])
def test_3_only_measured_windows_are_ground_to_act_on(signal: str, world: World) -> None:
    Reading.objects.update(signal=signal, good=0, total=0)
    assert "nothing was measured: nothing is changed" in propose(world)[1]


# 4 -------------------------------------------------------------------------------------------


def test_4_no_wish_leads_out_of_bounds_or_over_the_largest_step(world: World) -> None:
    """Any wish, from anywhere, under any policy; seeded."""
    dice = random.Random(4)
    knob = knobs()["max_num_seqs"]
    for _ in range(120):
        Action.objects.all().delete()
        low = dice.randint(1, 64)
        high = dice.randint(low, 256)
        bounds = {"max_num_seqs": {"minimum": low, "maximum": high}}
        steps = dice.randint(1, STEPS_MAX)
        policy_set(
            tenant=world.tenant, actor="ada", now=world.now,
            values={"bounds": bounds, "steps_max": steps},
        )  # fmt: skip
        current, want = dice.randint(1, 256), dice.randint(-10, 9_999)
        Engine.objects.update(values=world.engine.values | {"max_num_seqs": current})
        diagnosis = world.diagnosis()
        diagnosis.remedy = [{"knob": "max_num_seqs", "to": want, "why": "w"}]
        action, _ = propose(world, diagnosis)
        if action is None:
            continue
        change = action.changes["max_num_seqs"]
        assert low <= change["to"] <= high
        between = [r for r in knob.ladder if min(change.values()) < r < max(change.values())]
        assert len([r for r in between if low <= r <= high]) < steps
        assert (change["to"] > change["from"]) == (want > change["from"])


# 5 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engines", "most"), [(1, 1), (4, 1), (10, 2), (25, 5)])
def test_5_a_fifth_of_a_fleet_at_most_is_on_trial(engines: int, most: int, world: World) -> None:
    fleet = [world.engine, *(twin(world, f"engine-{n}") for n in range(1, engines))]
    for engine in fleet:
        if not trials_full(engine, world.now):
            new(world, State.VERIFYING, engine=engine).save()
    assert Action.objects.count() == most


# 7 -------------------------------------------------------------------------------------------


def test_7_a_stop_file_that_cannot_be_lifted_from_here(world: World) -> None:
    action = action_ask(
        engine=world.engine, values={"max_num_seqs": 16}, actor="ada", now=world.now, trial=False
    )
    (world.node.folder / "stop").touch()
    until(world, action, State.FAILED)
    assert world.plant.values["max_num_seqs"] == 8


def test_7_a_stop_file_leaves_the_way_back_open(world: World) -> None:
    action = trial(world)
    (world.node.folder / "stop").touch()
    withdraw(action, "smoke", by="person", actor="ada", now=world.now)
    until(world, action, State.ROLLED_BACK)
    assert world.plant.values["max_num_seqs"] == 8


# 8 -------------------------------------------------------------------------------------------


def test_8_the_same_facts_give_the_same_decision(world: World) -> None:
    diagnosis = world.diagnosis()
    first, _ = propose(world, diagnosis)
    assert first is not None
    facts = (first.changes, first.predicted, first.ttl_s, first.idempotency_key)
    Action.objects.all().delete()
    again, _ = propose(world, diagnosis)
    assert again is not None
    assert (again.changes, again.predicted, again.ttl_s, again.idempotency_key) == facts


# 9 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.FAILED, State.ROLLED_BACK, State.ROLLBACK_FAILED])
def test_9_after_three_failures_within_an_hour_a_person_decides(state: str, world: World) -> None:
    for minutes in (20, 40):
        ended(world, state, ago_s=60 * minutes)
    action, _ = propose(world)
    assert action is not None
    assert waits_for_person(action, rules_of(world.engine), world.now) == ""
    ended(world, state, ago_s=3_599)
    said = waits_for_person(action, rules_of(world.engine), world.now)
    assert said == "3 actions on this engine failed or were undone within an hour"
    assert waits_for_person(action, rules_of(world.engine), world.now + timedelta(seconds=2)) == ""


# 10 ------------------------------------------------------------------------------------------


def test_10_no_knob_that_changes_what_is_answered_is_turned(world: World) -> None:
    changing = ("kv_dtype", "dtype", "model", "kv_layout")
    assert not set(changing) & set(knobs())
    diagnosis = world.diagnosis()
    diagnosis.remedy = [{"knob": slug, "to": "int8", "why": "w"} for slug in changing]
    assert "no knob 'kv_dtype'" in propose(world, diagnosis)[1]


# 11 ------------------------------------------------------------------------------------------


def test_11_the_autopilot_mends_open_incidents_and_tunes_nothing(world: World) -> None:
    action, _ = propose(world)
    assert action is not None
    assert action.incident == world.incident
    assert action.priority in (Priority.REPAIR, Priority.SAFETY)


# Who goes first ------------------------------------------------------------------------------


@pytest.mark.parametrize("newcomer", Priority.values)
@pytest.mark.parametrize("state", [State.PROPOSED, State.VERIFYING, State.ROLLING_BACK])
@pytest.mark.parametrize("holder", Priority.values)
def test_person_before_rollback_before_safety_before_repair_before_tuning(
    holder: int, state: str, newcomer: int, world: World
) -> None:
    held = new(world, state, holder)
    held.save()
    command_create(
        engine=world.engine, action_id=held.pk, kind="apply", values={"max_num_seqs": 16},
        undo={"max_num_seqs": 8}, expected_config_version=1, ttl_s=90, deadline=held.deadline,
    )  # fmt: skip
    mine = new(world, State.PROPOSED, newcomer)
    holds = Priority.ROLLBACK if state == State.ROLLING_BACK else holder
    if newcomer <= holds:
        with pytest.raises(Conflict, match=f"conflict={held.pk}"):
            make_way(mine, now=world.now)
        return
    make_way(mine, now=world.now)
    held.refresh_from_db()
    assert held.state == (State.REJECTED if state == State.PROPOSED else State.ROLLING_BACK)
    assert mine.supersedes == (None if state == State.PROPOSED else held)


def test_an_action_that_is_being_kept_is_not_withdrawn(world: World) -> None:
    action = trial(world)
    until(world, action, State.VERIFIED)
    assert action.verdict == Verdict.BETTER
    with pytest.raises(CannotUndo, match="is kept"):
        withdraw(action, "w", by="person", actor="ada", now=world.now)


def test_what_waited_for_its_yes_is_held_to_the_bounds_of_now(world: World) -> None:
    action, _ = propose(world)
    assert action is not None
    to = action.changes["max_num_seqs"]["to"]
    policy_set(
        tenant=world.tenant, actor="ada", now=world.now,
        values={"mode": "approve", "bounds": {"max_num_seqs": {"maximum": to - 1}}},
    )  # fmt: skip
    with pytest.raises(OrderError, match=f"got {to}, allowed: a whole number from"):
        action_approve(action=action, actor="ada", now=world.now)


def test_shedding_that_waits_for_a_person_undoes_no_trial(world: World) -> None:
    holder = new(world, State.VERIFYING)
    holder.save()
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={"mode": "approve"})
    mine = new(
        world, State.PROPOSED, Priority.SAFETY, supersedes=holder, incident=world.incident,
        expected_config_version=world.engine.config_version,
    )  # fmt: skip
    holder.state = State.ROLLED_BACK
    holder.save()
    mine.save()
    reconcile(mine, reader=world.plant.store, now=world.now)
    mine.refresh_from_db()
    assert mine.state == State.PROPOSED, "it took the place of another without a person's yes"
