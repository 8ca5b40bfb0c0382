"""What persons order, and who steps aside for it: simulated time, the agent's real guard."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.accounts import audit
from controlplane.accounts.models import AuditEntry
from controlplane.actions.models import Action, Mode, Priority, State, Verdict
from controlplane.actions.orders import (
    OrderError,
    action_approve,
    action_ask,
    action_reject,
    action_rollback,
    verbs_open,
)
from controlplane.actions.policies import freeze, policy_set
from controlplane.actions.selectors import sentence
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Command, Node
from tests.controlplane.actions.test_interleavings import World, check_ledger
from tests.controlplane.actions.test_propose import propose, step

pytestmark = pytest.mark.django_db


def mode(world: World, word: str) -> None:
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={"mode": word})


def ask(world: World, value: Any = 16, *, trial: bool = False, **more: Any) -> Action:
    world.engine.refresh_from_db()
    more = {"actor": "ada", "values": {"max_num_seqs": value}} | more
    return action_ask(engine=world.engine, now=world.now, trial=trial, **more)


def until(world: World, action: Action, *states: str, seconds: float = 2, steps: int = 150) -> None:
    for _ in range(steps):
        step(world, seconds)
        action.refresh_from_db()
        if action.state in states:
            return
    raise AssertionError(f"still {action.state}, not {states}")


def trial(world: World) -> Action:
    """The autopilot's change, applied and being judged."""
    action, said = propose(world)
    assert action is not None, said
    until(world, action, State.VERIFYING)
    assert world.plant.values["max_num_seqs"] == 32
    return action


# -- approve, reject ------------------------------------------------------------------------


def test_an_approved_proposal_goes_its_way_and_the_log_names_who_said_yes(world: World) -> None:
    mode(world, Mode.APPROVE)
    action, _ = propose(world)
    assert action is not None
    for _ in range(30):  # longer than it would have to be carried out by itself
        step(world, 2)
    action.refresh_from_db()
    assert verbs_open(action) == ("approve", "reject")
    action_approve(action=action, actor="ada", now=world.now)
    until(world, action, State.VERIFIED)
    assert world.plant.values["max_num_seqs"] == 32
    assert action.incident is not None
    assert [d.cured for d in action.incident.diagnoses.filter(cause=action.cause)][-1]
    entry = AuditEntry.objects.get(subject=str(action.pk), verb="approved")
    assert entry.actor == "ada"
    assert audit.verify(world.tenant).holds


def test_a_rejected_proposal_is_not_made_again_for_a_while(world: World) -> None:
    mode(world, Mode.APPROVE)
    action, _ = propose(world)
    assert action is not None
    action_reject(action=action, actor="ada", now=world.now, reason="not during the sale")
    assert action.state == State.REJECTED
    assert sentence(action).endswith("rejected by ada: not during the sale")
    assert "turned down by a person; waiting 10 min" in propose(world)[1]


def test_of_two_who_decide_one_is_quicker(world: World) -> None:
    mode(world, Mode.APPROVE)
    action, _ = propose(world)
    assert action is not None
    late = Action.objects.get(pk=action.pk)
    action_reject(action=action, actor="ada", now=world.now)
    with pytest.raises(OrderError, match="someone was quicker"):
        action_approve(action=late, actor="bob", now=world.now)
    late.refresh_from_db()
    with pytest.raises(OrderError, match="does not wait for a person: it is rejected"):
        action_approve(action=late, actor="bob", now=world.now)


def test_nobody_approves_what_the_engine_has_moved_on_from(world: World) -> None:
    mode(world, Mode.APPROVE)
    action, _ = propose(world)
    assert action is not None
    world.plant.apply({"max_wait_ms": 5}, by="person")
    world.node.poll()
    with pytest.raises(OrderError, match="someone changed the engine's configuration"):
        action_approve(action=action, actor="ada", now=world.now)


def test_nobody_approves_during_a_freeze(world: World) -> None:
    mode(world, Mode.APPROVE)
    action, _ = propose(world)
    assert action is not None
    freeze(tenant=world.tenant, actor="bob", now=world.now, reason="sale")
    action.refresh_from_db()
    assert action.state == State.REJECTED
    assert "is frozen until it is lifted, by bob: sale" in sentence(action)


# -- roll back --------------------------------------------------------------------------------


def test_a_trial_is_undone_at_a_persons_word(world: World) -> None:
    action = trial(world)
    assert action_rollback(action=action, actor="ada", now=world.now, reason="no") == action
    until(world, action, State.ROLLED_BACK)
    assert world.plant.values["max_num_seqs"] == 8
    assert action.verdict == Verdict.INCONCLUSIVE
    assert "rolled back by ada: no" in sentence(action)
    check_ledger(action)


def test_a_kept_change_is_taken_back_by_a_new_action(world: World) -> None:
    action = trial(world)
    until(world, action, State.VERIFIED)
    back = action_rollback(action=action, actor="ada", now=world.now)
    assert back.pk != action.pk
    assert back.undoes == action
    assert back.changes == {"max_num_seqs": {"from": 32, "to": 8}}
    until(world, back, State.VERIFIED)
    assert world.plant.values["max_num_seqs"] == 8
    assert sentence(back) == "Kept max_num_seqs at 8 (was 32) on engine-0: rolled back by ada"
    assert "just moved the other way" in propose(world)[1]
    with pytest.raises(OrderError, match="max_num_seqs is 8 on engine-0 by now, not 32"):
        action_rollback(action=action, actor="ada", now=world.now)


def test_a_kept_change_is_taken_back_during_a_freeze_too(world: World) -> None:
    action = trial(world)
    until(world, action, State.VERIFIED)
    freeze(tenant=world.tenant, actor="bob", now=world.now, reason="sale")
    back = action_rollback(action=action, actor="ada", now=world.now)
    until(world, back, State.VERIFIED)
    assert world.plant.values["max_num_seqs"] == 8


def test_what_has_ended_is_not_rolled_back(world: World) -> None:
    action = trial(world)
    action_rollback(action=action, actor="ada", now=world.now)
    until(world, action, State.ROLLED_BACK)
    with pytest.raises(OrderError, match="is rolled back"):
        action_rollback(action=action, actor="ada", now=world.now)
    with pytest.raises(OrderError, match="cannot be rejected: it is rolled back"):
        action_reject(action=action, actor="ada", now=world.now)


# -- a change of one's own --------------------------------------------------------------------


def test_a_persons_change_is_kept_at_once_and_goes_through_the_agent(world: World) -> None:
    action = ask(world, 20)
    until(world, action, State.VERIFIED)
    assert world.plant.values["max_num_seqs"] == 20
    assert action.verdict == ""
    kinds = Command.objects.filter(action_id=action.pk).values_list("kind", flat=True)
    assert sorted(kinds) == ["apply", "commit"]
    assert action.transitions.first().actor == "ada"  # type: ignore[union-attr]


def test_a_persons_trial_is_judged_by_the_open_incident(world: World) -> None:
    action = ask(world, 16, trial=True)
    assert action.incident == world.incident
    until(world, action, State.VERIFIED)
    assert action.verdict == Verdict.BETTER


def quiet(world: World) -> None:
    Incident.objects.update(state=Incident.State.CLOSED)
    world.before_share = 0.02
    world.objective.readings.update(good=98)


def test_without_an_incident_a_trial_is_kept_when_nothing_got_worse(world: World) -> None:
    quiet(world)
    action = ask(world, 16, trial=True)
    until(world, action, State.VERIFIED)
    assert action.verdict == Verdict.NO_WORSE
    assert "no objective was seen to get worse: “TTFT”" in sentence(action)


def test_without_an_incident_a_trial_that_breaks_a_promise_is_undone(world: World) -> None:
    quiet(world)
    world.after_share = 0.9
    action = ask(world, 16, trial=True)
    until(world, action, State.ROLLED_BACK)
    assert action.verdict == Verdict.WORSE
    assert world.plant.values["max_num_seqs"] == 8


def test_without_an_incident_and_without_data_a_trial_is_undone(world: World) -> None:
    quiet(world)
    world.silent = True
    action = ask(world, 16, trial=True)
    until(world, action, State.ROLLED_BACK)
    assert action.verdict == Verdict.INCONCLUSIVE
    assert "no objective counted 50 in 2 windows" in sentence(action)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"values": {}}, "values: got 0 knobs, allowed: 1 to 8"),
        ({"values": {"warp": 9}}, "warp: engine-0 has no such knob; it has: "),
        ({"values": {"max_num_seqs": 999}}, "got 999, allowed: a whole number from 1 to 256"),
        ({"values": {"max_num_seqs": True}}, "got True, allowed"),
        ({"values": {"max_num_seqs": "many"}}, "got 'many', allowed"),
        ({"values": {"max_num_seqs": 8}}, "engine-0 runs these values already"),
        ({"expected_config_version": 7}, "engine-0 is at configuration 1, not 7"),
    ],
)
def test_what_cannot_be_ordered_is_refused_with_what_can(
    order: dict[str, Any], words: str, world: World
) -> None:
    with pytest.raises(OrderError) as error:
        ask(world, **order)
    assert words in str(error.value)
    assert not Action.objects.exists()


def test_the_policys_bounds_bind_persons_too(world: World) -> None:
    bounds = {"max_num_seqs": {"maximum": 12}}
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={"bounds": bounds})
    with pytest.raises(OrderError, match="allowed: a whole number from 1 to 12"):
        ask(world, 16)


def test_the_same_key_gives_the_same_action(world: World) -> None:
    first = ask(world, 16, key="ticket 7")
    assert ask(world, 16, key="ticket 7").pk == first.pk


def test_nothing_is_ordered_during_a_freeze_nor_past_a_stop_file(world: World) -> None:
    freeze(tenant=world.tenant, actor="bob", now=world.now, reason="sale")
    with pytest.raises(OrderError, match="by bob: sale") as error:
        ask(world)
    assert error.value.code == "forbidden"


def test_a_stop_file_on_the_node_is_heard_and_said(world: World) -> None:
    (world.node.folder / "stop").touch()
    world.node.poll()
    assert Node.objects.get().kill_switch
    assert "the kill switch of node node-0 is on" in propose(world)[1]
    with pytest.raises(OrderError, match="the kill switch of node node-0 is on"):
        ask(world)
    (world.node.folder / "stop").unlink()
    world.node.poll()
    assert propose(world)[0] is not None


def test_a_stop_file_nobody_has_heard_of_yet_stops_the_change_on_the_node(world: World) -> None:
    action = ask(world)
    (world.node.folder / "stop").touch()
    until(world, action, State.FAILED)
    assert world.plant.values["max_num_seqs"] == 8
    assert "kill switch" in sentence(action)


# -- who goes first ---------------------------------------------------------------------------


def test_a_persons_change_supersedes_a_trial_which_is_undone_first(world: World) -> None:
    running = trial(world)
    mine = ask(world, 20)
    running.refresh_from_db()
    assert running.state == State.ROLLING_BACK
    assert f"conflict={mine.pk}: person goes first" in sentence(running)
    assert (mine.state, mine.supersedes) == (State.PROPOSED, running)
    assert mine.changes == {"max_num_seqs": {"from": 8, "to": 20}}
    until(world, running, State.ROLLED_BACK)
    until(world, mine, State.VERIFIED)
    assert world.plant.values["max_num_seqs"] == 20
    seen = [value for _, value in world.history]
    assert seen.index(32) < len(seen) - 1 - seen[::-1].index(8), "not undone in between"
    check_ledger(running)
    check_ledger(mine)


def test_a_persons_change_rejects_a_standing_proposal(world: World) -> None:
    mode(world, Mode.APPROVE)
    standing, _ = propose(world)
    assert standing is not None
    mine = ask(world, 20)
    standing.refresh_from_db()
    assert standing.state == State.REJECTED
    assert f"conflict={mine.pk}" in sentence(standing)
    until(world, mine, State.VERIFIED)


def test_the_second_person_loses_is_told_to_whom_and_stands_in_the_ledger(world: World) -> None:
    first = ask(world, 20, trial=True)
    with pytest.raises(OrderError, match=f"conflict={first.pk}") as error:
        ask(world, 64, actor="bob")
    assert error.value.code == "conflict"
    lost = Action.objects.get(actor="bob")
    assert lost.state == State.REJECTED
    check_ledger(lost)
    first.refresh_from_db()
    assert first.state == State.PROPOSED


def test_a_persons_change_waits_out_an_undo_but_no_longer_than_its_deadline(world: World) -> None:
    running = trial(world)
    world.node.adapter.down = True
    mine = ask(world, 20)
    for _ in range(40):
        step(world, 2)
    mine.refresh_from_db()
    assert mine.state == State.EXPIRED
    assert "was still being undone" in sentence(mine)
    world.node.adapter.down = False
    until(world, running, State.ROLLED_BACK)
    assert world.plant.values["max_num_seqs"] == 8


def test_what_is_being_kept_cannot_be_superseded(world: World) -> None:
    running = trial(world)
    for _ in range(60):
        world.tick(2)
        world.node.guard.step()
        world.reconcile()
        if Command.objects.filter(action_id=running.pk, kind="commit").exists():
            break
        request = world.node.request()
        world.node.take(request, world.node.send(request))
    with pytest.raises(OrderError, match="was just confirmed; it can be taken back once"):
        ask(world, 20)
    running.refresh_from_db()
    assert running.state == State.VERIFYING


def test_the_autopilot_waits_for_a_person(world: World) -> None:
    mine = ask(world, 20)
    action, said = propose(world)
    assert action is None
    assert f"conflict={mine.pk}" in said
    assert mine.priority == Priority.PERSON


def test_a_freeze_undoes_what_is_on_trial_at_once(world: World) -> None:
    running = trial(world)
    freeze(tenant=world.tenant, actor="bob", now=world.now, reason="sale")
    running.refresh_from_db()
    assert running.state == State.ROLLING_BACK
    until(world, running, State.ROLLED_BACK)
    assert world.plant.values["max_num_seqs"] == 8
    assert "frozen until it is lifted, by bob: sale" in sentence(running)
    assert "frozen" in propose(world)[1]
