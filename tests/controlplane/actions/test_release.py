"""What was shed is served again: when it is time, on trial, and seldom where it does not work."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from controlplane.actions import retention
from controlplane.actions.models import UNDER_WAY, Action, Priority, State, Verdict
from controlplane.actions.orders import action_clear, action_reject
from controlplane.actions.policies import freeze, policy_set
from controlplane.actions.selectors import sentence
from controlplane.diagnosis.cause import SHED_BY_PRIORITY
from controlplane.diagnosis.models import Diagnosis, Incident
from slo.models import Reading
from tests.controlplane.actions.test_interleavings import WINDOW_S, World
from tests.controlplane.actions.test_orders import ask, until
from tests.controlplane.actions.test_propose import propose, step
from tracing.types import Signal

pytestmark = pytest.mark.django_db
KNOB = "shed_below_priority"
WAITING = "vllm:num_requests_waiting"


class Shedding(World):
    """Bad while everyone is served, by `serving_share`; good while priorities below `enough` are
    not.

    `comes` and `served_only` are the requests a window while everyone is served, and while not.
    """

    enough = 1
    serving_share = 0.8
    comes = 100
    served_only = 100
    waiting: float | None = 0.0
    measured = True

    def diagnosis(self, to: int = 1) -> Diagnosis:
        return Diagnosis.objects.create(
            incident=self.incident, made_at=self.now, cause="load_beyond_capacity", score=1,
            because="more comes than is done", remedy=[{"knob": KNOB, "to": to, "why": "w"}],
            window_start=self.now, window_end=self.now,
        )  # fmt: skip

    def tick(self, seconds: float) -> None:
        self.history.append((self.now, self.plant.values[KNOB]))
        self.now += timedelta(seconds=seconds)
        self.node.now = self.now
        if self.waiting is not None:
            where = {"service": "chat", "instance": "engine-0"}
            self.plant.store.add(WAITING, self.now, self.waiting, where)
        self._read()

    def _read(self) -> None:
        while self.read_until + timedelta(seconds=WINDOW_S + 6.5) <= self.now:
            self.read_until += timedelta(seconds=WINDOW_S)
            before = [value for at, value in self.history if at <= self.read_until]
            sheds = bool(before) and before[-1] >= self.enough
            total, share = (self.served_only, 0.02) if sheds else (self.comes, self.serving_share)
            signal = Signal.OK if total else Signal.NO_TRAFFIC
            Reading.objects.create(
                objective=self.objective, scope="engine-0", window_end=self.read_until,
                window_s=WINDOW_S, total=total if self.measured else 0,
                good=total - round(total * share) if self.measured else 0,
                signal=signal if self.measured else Signal.MISSING,
            )  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> Shedding:
    return Shedding(tmp_path, 3)


def keep(world: Shedding, to: int = 1) -> Action:
    """Shedding that was kept, and its incident over; the load then goes down."""
    world.serving_share, world.enough = 0.8, to
    Incident.objects.update(state=Incident.State.OPEN, good_windows=0)
    world.incident.refresh_from_db()
    for _ in range(8):
        step(world, 15)
    action, said = propose(world, world.diagnosis(to))
    assert action is not None, said
    assert action.priority == Priority.SAFETY
    until(world, action, State.VERIFIED)
    Incident.objects.update(state=Incident.State.CLOSED, closed_at=world.now)
    world.serving_share = 0.02
    return action


@pytest.fixture
def shed(world: Shedding) -> Action:
    return keep(world)


def wait(world: World, minutes: float) -> None:
    """In small steps while something is on trial."""
    end = world.now + timedelta(minutes=minutes)
    while world.now < end:
        on_trial = Action.objects.filter(state__in=UNDER_WAY).exists()
        step(world, 4 if on_trial else 30)


def releases() -> list[Action]:
    return list(Action.objects.filter(priority=Priority.TUNING).order_by("created_at"))


def test_it_is_served_again_a_cool_down_after_the_incident(world: Shedding, shed: Action) -> None:
    wait(world, 9.5)
    assert not releases()
    wait(world, 4)
    (release,) = releases()
    assert release.undoes == shed
    assert (release.state, release.verdict) == (State.VERIFIED, Verdict.NO_WORSE)
    assert world.plant.values[KNOB] == 0
    assert "no objective was seen to get worse" in sentence(release)
    wait(world, 30)
    assert len(releases()) == 1


def test_where_it_breaks_a_promise_it_is_undone_and_tried_ever_less_often(
    world: Shedding, shed: Action
) -> None:
    world.serving_share = 0.9
    wait(world, 45)
    tried = releases()
    assert {t.verdict for t in tried} == {Verdict.WORSE}
    assert len(tried) == 2
    gap = tried[1].created_at - tried[0].created_at
    assert gap >= timedelta(minutes=20)
    assert world.plant.values[KNOB] == 1


def test_not_while_it_burns_nor_in_a_freeze_nor_when_observing(
    world: Shedding, shed: Action
) -> None:
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


@pytest.mark.parametrize(("also", "ends"), [([], True), ([{"cause": "slow_host"}], False)])
def test_a_promise_missed_for_the_shedding_itself_does_not_hold_up_its_end(
    world: Shedding, shed: Action, also: list[dict[str, str]], ends: bool
) -> None:
    """It is missed as long as people are turned away: waiting for its end would never end."""
    Incident.objects.update(state=Incident.State.OPEN)
    Diagnosis.objects.create(
        incident=world.incident, made_at=world.now, cause=SHED_BY_PRIORITY, score=1, also=also,
        because="turned away", window_start=world.now, window_end=world.now,
    )  # fmt: skip
    wait(world, 14)
    assert bool(releases()) is ends


def test_asking_a_person_first_where_the_policy_says_so(world: Shedding, shed: Action) -> None:
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={"mode": "approve"})
    wait(world, 13)
    (release,) = releases()
    assert release.state == State.PROPOSED
    action_reject(action=release, actor="ada", now=world.now)
    wait(world, 18)
    assert len(releases()) == 1, "a no counts as a try: twice the wait"
    wait(world, 4)
    assert len(releases()) == 2


def test_a_repair_goes_before_it(world: Shedding, shed: Action) -> None:
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={"mode": "approve"})
    wait(world, 11)
    (release,) = releases()
    mine = ask(world, 64)
    release.refresh_from_db()
    assert release.state == State.REJECTED
    assert f"conflict={mine.pk}" in sentence(release)


def test_not_what_somebody_has_moved_since(world: Shedding, shed: Action) -> None:
    world.plant.apply({KNOB: 2}, by="person")
    wait(world, 12)
    assert not releases()


def test_not_what_somebody_has_moved_and_moved_back_since(world: Shedding, shed: Action) -> None:
    for value in (2, 1):
        world.plant.apply({KNOB: value}, by="person")
        step(world, 2)
    wait(world, 12)
    assert not releases()


# -- where too few come to prove anything ---------------------------------------------------------


@pytest.mark.parametrize("few", [0, 3])
def test_at_night_everyone_is_served_again_at_the_first_try(
    world: Shedding, shed: Action, few: int
) -> None:
    world.comes = world.served_only = few
    wait(world, 14)
    (release,) = releases()
    assert (release.state, release.verdict) == (State.VERIFIED, Verdict.NO_WORSE)
    assert "too few to compare, and no promise is broken" in sentence(release)
    assert world.plant.values[KNOB] == 0


def test_where_most_were_turned_away_the_promise_is_judged_by_what_comes_now(
    world: Shedding, shed: Action
) -> None:
    world.served_only = 5
    wait(world, 14)
    (release,) = releases()
    assert release.verdict == Verdict.NO_WORSE
    assert "“TTFT”: 2% of" in sentence(release)


def test_and_a_promise_that_is_broken_ends_it_at_once(world: Shedding, shed: Action) -> None:
    world.served_only, world.serving_share, world.waiting = 5, 0.9, 40.0
    wait(world, 14)
    (release,) = releases()
    assert (release.state, release.verdict) == (State.ROLLED_BACK, Verdict.WORSE)
    assert "“TTFT” is broken: 90% of 200 requests bad" in sentence(release)


def test_not_when_the_few_fare_badly(world: Shedding, shed: Action) -> None:
    world.comes = world.served_only = 4
    world.serving_share = 1.0
    wait(world, 14)
    (release,) = releases()
    assert (release.state, release.verdict) == (State.ROLLED_BACK, Verdict.INCONCLUSIVE)
    assert "no good sign: “TTFT”: 100% of" in sentence(release)


@pytest.mark.parametrize("waiting", [40.0, None])
def test_few_answers_are_no_few_requests_while_a_queue_stands_or_is_not_seen(
    world: Shedding, shed: Action, waiting: float | None
) -> None:
    world.comes, world.waiting = 0, waiting
    world.plant.store.samples[WAITING].clear()
    wait(world, 14)
    (release,) = releases()
    assert (release.state, release.verdict) == (State.ROLLED_BACK, Verdict.INCONCLUSIVE)
    assert "the queue is not seen to be empty" in sentence(release)


def test_serving_again_does_not_hold_up_shedding(world: Shedding, shed: Action) -> None:
    world.comes = world.served_only = 3
    wait(world, 14)
    assert world.plant.values[KNOB] == 0
    world.comes = world.served_only = 100
    wait(world, 2)
    again = keep(world)
    assert world.plant.values[KNOB] == 1
    wait(world, 15)
    assert len(releases()) == 1, "what did not last is tried again after twice the wait"
    wait(world, 8)
    assert [r.undoes for r in releases()] == [shed, again]


# -- what stands on the engine counts -------------------------------------------------------------


def test_what_could_not_be_undone_is_served_again_too(world: Shedding, shed: Action) -> None:
    Action.objects.filter(pk=shed.pk).update(state=State.ROLLBACK_FAILED)
    wait(world, 14)
    assert not releases(), "the autopilot waits for a person"
    shed.refresh_from_db()
    action_clear(action=shed, actor="ada", now=world.now)
    wait(world, 4)
    (release,) = releases()
    assert (release.undoes, release.state) == (shed, State.VERIFIED)
    assert world.plant.values[KNOB] == 0


def test_retention_leaves_what_still_turns_people_away(world: Shedding, shed: Action) -> None:
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={"mode": "observe"})
    wait(world, 1)
    assert retention.prune(world.now) == 0
    policy_set(tenant=world.tenant, actor="ada", now=world.now, values={})
    wait(world, 14)
    assert world.plant.values[KNOB] == 0
    assert retention.prune(world.now) == 2
    assert not Action.objects.exists()


def test_trying_goes_on_when_old_tries_are_pruned(world: Shedding, shed: Action) -> None:
    world.serving_share = 0.9
    wait(world, 40)
    first, second = releases()
    first.delete()
    wait(world, 45)
    assert releases()[:1] == [second]
    assert len(releases()) >= 2


def test_an_earlier_step_is_taken_back_a_cool_down_after_the_later_one(world: Shedding) -> None:
    first = keep(world)
    step(world, 30)
    second = keep(world, to=2)
    assert world.plant.values[KNOB] == 2
    wait(world, 14)
    assert [r.undoes for r in releases()] == [second]
    assert world.plant.values[KNOB] == 1
    wait(world, 6)
    assert len(releases()) == 1
    wait(world, 8)
    assert [r.undoes for r in releases()] == [second, first]
    assert world.plant.values[KNOB] == 0


def test_of_two_that_made_the_value_the_newest_says_when(world: Shedding) -> None:
    keep(world)
    world.plant.apply({KNOB: 0}, by="person")
    wait(world, 30)
    second = keep(world)
    wait(world, 9)
    assert not releases()
    wait(world, 5)
    assert [r.undoes for r in releases()] == [second]


def test_a_try_that_a_freeze_ended_is_not_held_against_it(world: Shedding, shed: Action) -> None:
    wait(world, 11)
    (release,) = releases()
    assert release.state in UNDER_WAY
    freeze(tenant=world.tenant, actor="ada", now=world.now, reason="r",
           until=world.now + timedelta(minutes=1))  # fmt: skip
    wait(world, 9)
    assert len(releases()) == 1
    wait(world, 5)
    assert len(releases()) == 2
