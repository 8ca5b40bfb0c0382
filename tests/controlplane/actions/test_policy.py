"""Policies: the narrowest scope wins, column by column, and what each column does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from controlplane.accounts.models import AuditEntry, Tenant
from controlplane.actions import policies
from controlplane.actions.grant import Refused, grant
from controlplane.actions.knob import Knob, knobs
from controlplane.actions.models import Action, Mode, Policy, Priority, State, Verdict
from controlplane.actions.policies import PolicyError, freeze, policy_delete, policy_set, unfreeze
from controlplane.actions.policy import Rules, rules_of, waits_for_person
from tests.controlplane.actions.test_interleavings import World
from tests.controlplane.actions.test_propose import ended, propose, step

pytestmark = pytest.mark.django_db
NIGHT = {"from": "22:00", "until": "07:00", "time_zone": "Europe/Berlin"}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, 3)


def put(world: World, *, service: str = "", engine: str = "", **values: Any) -> Policy:
    return policy_set(
        tenant=world.tenant, actor="ada", now=world.now, values=values, service=service,
        engine=engine,
    )  # fmt: skip


# -- which one holds ------------------------------------------------------------------------


def test_without_a_policy_the_autopilot_acts(world: World) -> None:
    rules = rules_of(world.engine)
    assert rules == Rules()
    assert (rules.mode, rules.cool_down_harmful_s, rules.cool_down_unproven_s) == ("auto", 600, 180)


def test_the_narrowest_scope_wins_column_by_column(world: World) -> None:
    put(world, mode="observe", steps_max=1, failures_per_hour_max=9)
    put(world, service="chat", mode="approve", failures_per_hour_max=5)
    put(world, engine="engine-0", mode="auto")
    put(world, service="code", mode="propose")
    rules = rules_of(world.engine)
    assert (rules.mode, rules.failures_per_hour_max, rules.steps_max) == ("auto", 5, 1)
    assert rules.origin == {
        "mode": "engine engine-0",
        "failures_per_hour_max": "service chat",
        "steps_max": "the tenant",
    }


def test_another_tenants_policy_is_not_ours(world: World) -> None:
    other = Tenant.objects.create(slug="other", name="Other")
    policy_set(tenant=other, actor="eve", now=world.now, values={"mode": "observe"})
    assert rules_of(world.engine).mode == Mode.AUTO


@pytest.mark.parametrize(
    ("said", "holds"), [("auto", "propose"), ("approve", "propose"), ("observe", "observe")]
)
def test_the_installation_is_the_ceiling(
    said: str, holds: str, world: World, settings: Any
) -> None:
    settings.TRIMTAB_AUTOPILOT = False
    put(world, engine="engine-0", mode=said)
    assert rules_of(world.engine).mode == holds


def test_a_freeze_of_a_wider_scope_is_not_lifted_by_a_narrower_one(world: World) -> None:
    put(world, engine="engine-0", mode="auto")
    freeze(tenant=world.tenant, actor="ada", now=world.now, reason="launch day")
    assert "the tenant is frozen until it is lifted, by ada: launch day" in rules_of(
        world.engine
    ).frozen(world.now)


def test_a_freeze_ends_by_itself_or_is_lifted(world: World) -> None:
    until = world.now + timedelta(minutes=5)
    policy = freeze(
        tenant=world.tenant, actor="ada", now=world.now, reason="test", until=until, service="chat"
    )
    assert rules_of(world.engine).frozen(until - timedelta(seconds=1))
    assert not rules_of(world.engine).frozen(until)
    unfreeze(policy=policy, actor="ada", now=world.now)
    assert not rules_of(world.engine).frozen(world.now)
    verbs = AuditEntry.objects.filter(noun="policy").values_list("verb", flat=True)
    assert list(verbs) == ["frozen", "unfrozen"]


# -- modes ----------------------------------------------------------------------------------


def test_observing_nothing_is_proposed_and_the_story_says_so(world: World) -> None:
    put(world, service="chat", mode="observe")
    action, said = propose(world)
    assert action is None
    assert said == "service chat says observe: nothing is proposed"


@pytest.mark.parametrize("mode", ["propose", "approve"])
def test_a_person_decides_about_a_proposal(mode: str, world: World) -> None:
    put(world, mode=mode)
    action, _ = propose(world)
    assert action is not None
    step(world, 2)
    action.refresh_from_db()
    assert action.state == State.PROPOSED
    said = waits_for_person(action, rules_of(world.engine), world.now)
    assert said == f"the tenant says {mode}: a person decides"


def test_in_quiet_hours_a_person_decides(world: World) -> None:
    put(world, quiet_hours={"from": "00:00", "until": "23:59", "time_zone": "UTC"})
    action, _ = propose(world)
    assert action is not None
    step(world, 2)
    action.refresh_from_db()
    assert action.state == State.PROPOSED


# -- quiet hours ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "quiet"),
    [
        ("2026-03-02T20:59:59", False),  # Monday, 21:59 in Berlin
        ("2026-03-02T21:00:00", True),
        ("2026-03-03T05:59:59", True),  # the night that began on Monday
        ("2026-03-03T06:00:00", False),
        ("2026-03-03T21:00:00", False),  # Tuesday
        ("2026-07-06T20:00:00", True),  # Monday, summer time
    ],
)
def test_quiet_hours_go_by_the_local_clock_over_midnight_on_the_days_named(
    at: str, quiet: bool
) -> None:
    rules = Rules(quiet_hours=NIGHT | {"days": ["mon"]})
    said = rules.quiet(datetime.fromisoformat(at).replace(tzinfo=UTC))
    assert said == ("quiet hours until 07:00 Europe/Berlin" if quiet else "")


# -- bounds, steps, cool-downs ----------------------------------------------------------------


def test_bounds_narrow_what_may_be_set(world: World) -> None:
    put(world, bounds={"max_num_seqs": {"maximum": 20}})
    action, _ = propose(world)
    assert action is not None
    assert action.changes["max_num_seqs"]["to"] == 16


def test_a_step_may_be_made_smaller(world: World) -> None:
    put(world, steps_max=1)
    action, _ = propose(world)
    assert action is not None
    assert action.changes["max_num_seqs"]["to"] == 16


def undone(world: World, verdict: str, ago_s: float, **outcome: Any) -> Action:
    action = ended(world, State.ROLLED_BACK, ago_s=ago_s)
    action.verdict, action.outcome = verdict, outcome
    action.save()
    return action


@pytest.mark.parametrize(
    ("verdict", "outcome", "ago_s", "again"),
    [
        (Verdict.INCONCLUSIVE, {}, 179, False),
        (Verdict.INCONCLUSIVE, {}, 181, True),
        (Verdict.EXPIRED, {}, 181, True),
        (Verdict.WORSE, {}, 181, False),
        (Verdict.WORSE, {}, 601, True),
        (Verdict.INCONCLUSIVE, {"withdrawn": "person"}, 181, False),
    ],
)
def test_what_could_not_be_proved_may_be_tried_sooner_than_what_did_harm(
    verdict: str, outcome: dict[str, Any], ago_s: float, again: bool, world: World
) -> None:
    undone(world, verdict, ago_s, **outcome)
    action, said = propose(world)
    assert (action is not None) == again, said
    assert again or "just tried this way and not kept; waiting" in said


@pytest.mark.parametrize(
    ("tried", "verdict", "again"),
    [
        (16, Verdict.INCONCLUSIVE, True),
        (32, Verdict.INCONCLUSIVE, False),
        (16, Verdict.WORSE, False),
    ],
)
def test_a_step_too_short_to_prove_anything_may_be_followed_by_a_longer_one(
    tried: int, verdict: str, again: bool, world: World
) -> None:
    action = undone(world, verdict, ago_s=5)
    action.changes = {"max_num_seqs": {"from": 8, "to": tried}}
    action.save()
    longer, said = propose(world)
    assert (longer is not None) == again, said
    assert longer is None or longer.changes["max_num_seqs"]["to"] == 32


def test_the_cool_downs_are_the_policys(world: World) -> None:
    put(world, cool_down_unproven_s=30, cool_down_harmful_s=3600)
    undone(world, Verdict.INCONCLUSIVE, 40)
    assert propose(world)[0] is not None
    Action.objects.all().delete()
    undone(world, Verdict.WORSE, 3500)
    assert "waiting 60 min" in propose(world)[1]


def test_what_a_freeze_or_a_person_ended_is_no_failure_of_the_change(world: World) -> None:
    for ago_s in (700, 800, 900):
        undone(world, Verdict.INCONCLUSIVE, ago_s, withdrawn="frozen")
    action, _ = propose(world)
    assert action is not None
    assert waits_for_person(action, rules_of(world.engine), world.now) == ""
    put(world, failures_per_hour_max=1)
    undone(world, Verdict.INCONCLUSIVE, 1000)
    assert "1 actions on this engine failed" in waits_for_person(
        action, rules_of(world.engine), world.now
    )


def test_the_end_of_shedding_tried_in_vain_is_no_failure(world: World) -> None:
    """It is tried for as long as the load stays; what a person takes back is another thing."""
    put(world, failures_per_hour_max=1)
    shed = ended(world, State.VERIFIED, ago_s=900)
    release = undone(world, Verdict.WORSE, 700)
    release.undoes, release.priority = shed, Priority.TUNING
    release.save()
    action, _ = propose(world)
    assert action is not None
    assert waits_for_person(action, rules_of(world.engine), world.now) == ""
    release.priority = Priority.PERSON
    release.save()
    assert "1 actions on this engine failed" in waits_for_person(
        action, rules_of(world.engine), world.now
    )


# -- choices and barriers ---------------------------------------------------------------------

GRAPHS = Knob(
    slug="graph_capture", label="graph capture", choices=("on", "off"), apply_class="barrier"
)
REPORTED = {"value": "off", "choices": ["on", "off"], "apply_class": "barrier", "supported": True}


def wish(world: World, to: Any, rules: Rules | None = None, **reported: Any) -> Any:
    world.engine.values["graph_capture"] = "off"
    world.engine.knobs["graph_capture"] = REPORTED | reported
    want = {"knob": "graph_capture", "to": to, "why": "w"}
    return grant(GRAPHS, want, world.engine, rules or Rules())


def test_a_choice_is_granted_as_it_is(world: World) -> None:
    assert wish(world, "on") == "on"


@pytest.mark.parametrize(
    ("to", "rules", "reported", "words"),
    [
        ("off", None, {}, "graph_capture is off already"),
        ("often", None, {}, "often is not allowed, only: on, off"),
        ("on", None, {"choices": ["off"]}, "on is not allowed, only: off"),
        ("on", Rules(bounds={"graph_capture": {"choices": ["off"]}}), {}, "only: off"),
        ("on", None, {"supported": False, "reason": "no CUDA here"}, "no CUDA here"),
        ("on", None, {"apply_class": "drain"}, "cannot be changed while engine-0 serves"),
    ],
)
def test_a_choice_nobody_offers_is_refused(
    to: str, rules: Rules | None, reported: dict[str, Any], words: str, world: World
) -> None:
    said = wish(world, to, rules, **reported)
    assert isinstance(said, Refused)
    assert words in said


@pytest.mark.parametrize(
    ("to", "maximum", "granted"),
    [(128, 256, 128), (100, 256, 100), (128, 64, None), (8, 256, None)],
)
def test_a_value_in_force_before_is_gone_back_to_whole_within_bounds(
    to: int, maximum: int, granted: int | None, world: World
) -> None:
    want = {"knob": "max_num_seqs", "to": to, "why": "w", "exact": True}
    rules = Rules(steps_max=1, bounds={"max_num_seqs": {"maximum": maximum}})
    said = grant(knobs()["max_num_seqs"], want, world.engine, rules)
    assert said == granted if granted else isinstance(said, Refused)


def test_a_number_is_not_set_to_a_word(world: World) -> None:
    want = {"knob": "max_num_seqs", "to": "on", "why": "w"}
    assert "on is no number" in grant(knobs()["max_num_seqs"], want, world.engine, Rules())  # type: ignore[operator]


def test_a_barrier_knob_is_turned_by_itself_unless_the_policy_wants_a_person(world: World) -> None:
    action = ended(world, State.VERIFIED)
    action.changes = {"graph_capture": {"from": "off", "to": "on"}}
    wish(world, "on")
    action.engine = world.engine
    assert waits_for_person(action, Rules(), world.now) == ""
    said = waits_for_person(action, Rules(barrier=False), world.now)
    assert said == "graph_capture holds up the engine while it is swapped: a person decides"


# -- writing them ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mode": "yolo"}, "mode: got 'yolo', allowed: observe, propose, approve, auto"),
        ({"speed": 1}, "speed: got 1, allowed: only barrier, bounds"),
        ({"cool_down_harmful_s": -1}, "allowed: a whole number from 0 to 86400"),
        ({"steps_max": 3}, "steps_max: got 3, allowed: a whole number from 1 to 2"),
        ({"steps_max": True}, "steps_max: got True"),
        ({"barrier": "yes"}, "barrier: got 'yes', allowed: true, false or null"),
        ({"bounds": {"warp": {}}}, "bounds.warp: got {}, allowed: knobs: "),
        ({"bounds": {"max_num_seqs": {"maximum": 999}}}, "bounds.max_num_seqs.maximum: got 999"),
        (
            {"bounds": {"max_num_seqs": {"minimum": 64, "maximum": 32}}},
            "bounds.max_num_seqs.minimum",
        ),
        (
            {"bounds": {"graph_capture": {"choices": []}}},
            "bounds.graph_capture.choices: got [], allowed: some of off, on",
        ),
        ({"quiet_hours": {"from": "22:00"}}, "quiet_hours: got"),
        ({"quiet_hours": {"from": "25:00", "until": "07:00"}}, "quiet_hours.from: got '25:00'"),
        (
            {"quiet_hours": {"from": "22:00", "until": "07:00", "time_zone": "Mars/Olympus"}},
            "quiet_hours.time_zone: got 'Mars/Olympus', allowed: an IANA name",
        ),
        ({"mode": "x" * 1_000_000}, f"mode: got '{'x' * 99}…, allowed: observe"),
        ({"bounds": {"graph_capture": {"choices": ["on"] * 1000}}}, "bounds.graph_capture.choices"),
        (
            {"quiet_hours": {"from": "22:00", "until": "07:00", "days": ["mon"] * 1000}},
            "quiet_hours.days",
        ),
        (
            {"quiet_hours": {"from": "22:00", "until": "07:00", "days": ["moon"]}},
            "quiet_hours.days",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    values: dict[str, Any], words: str, world: World
) -> None:
    with pytest.raises(PolicyError, match="allowed") as error:
        put(world, **values)
    assert words in str(error.value)
    assert not Policy.objects.exists()


def test_a_policy_is_for_a_service_or_an_engine(world: World) -> None:
    with pytest.raises(PolicyError, match="a service or an engine, not both"):
        put(world, service="chat", engine="engine-0", mode="auto")


def test_what_is_left_out_is_as_the_wider_scope_has_it_and_changes_are_audited(
    world: World,
) -> None:
    put(world, mode="approve", steps_max=1)
    policy = put(world, mode="propose")
    assert policy.steps_max is None
    entry = AuditEntry.objects.order_by("number").last()
    assert entry is not None
    assert entry.actor == "ada"
    assert entry.detail == {"changed": {"mode": ["approve", "propose"], "steps_max": [1, None]}}
    policy_delete(policy=policy, actor="ada", now=world.now)
    assert rules_of(world.engine) == Rules()


def test_a_freeze_wants_a_reason_and_an_end_that_is_to_come(world: World) -> None:
    with pytest.raises(PolicyError, match="reason: got ''"):
        freeze(tenant=world.tenant, actor="ada", now=world.now, reason=" ")
    with pytest.raises(PolicyError, match="allowed: a time after"):
        freeze(tenant=world.tenant, actor="ada", now=world.now, reason="r", until=world.now)


def test_a_frozen_scopes_policy_is_not_deleted(world: World) -> None:
    policy = freeze(tenant=world.tenant, actor="ada", now=world.now, reason="r")
    with pytest.raises(PolicyError, match="after the freeze is lifted"):
        policy_delete(policy=policy, actor="ada", now=world.now)


# -- two at once ----------------------------------------------------------------------------


def test_lifting_a_freeze_keeps_what_was_set_since_somebody_looked(world: World) -> None:
    freeze(tenant=world.tenant, actor="ada", now=world.now, reason="sale")
    looked_at = Policy.objects.get()
    put(world, bounds={"max_num_seqs": {"maximum": 16}})
    unfreeze(policy=looked_at, actor="bob", now=world.now)
    policy = Policy.objects.get()
    assert (policy.frozen_at, policy.bounds) == (None, {"max_num_seqs": {"maximum": 16}})


def test_a_policy_frozen_since_somebody_looked_is_not_deleted(world: World) -> None:
    looked_at = put(world, mode="propose")
    freeze(tenant=world.tenant, actor="ada", now=world.now, reason="sale")
    with pytest.raises(PolicyError, match="after the freeze is lifted"):
        policy_delete(policy=looked_at, actor="bob", now=world.now)
    assert rules_of(world.engine).frozen(world.now)


def test_what_is_deleted_already_is_neither_lifted_nor_deleted_again(world: World) -> None:
    looked_at = put(world, mode="propose")
    for _ in range(2):
        policy_delete(policy=looked_at, actor="bob", now=world.now)
    unfreeze(policy=looked_at, actor="bob", now=world.now)
    assert not Policy.objects.exists()
    assert AuditEntry.objects.filter(verb="deleted").count() == 1


def test_a_freeze_gets_hold_of_what_moves_on_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list was read before the loop moved the action on."""
    action, _ = propose(world)
    assert action is not None
    before = Action.objects.select_related("engine", "tenant").get()
    step(world, 2)
    assert Action.objects.get().version > before.version
    monkeypatch.setattr(policies, "_in_flight", lambda policy: [before])
    freeze(tenant=world.tenant, actor="ada", now=world.now, reason="sale")
    assert Action.objects.get().outcome["withdrawn"] == "frozen"
