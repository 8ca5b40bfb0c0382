"""A change was kept and it goes on: people are told once what is left, and never on a guess."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane import loop
from controlplane.actions.left import left_of
from controlplane.actions.models import Action, State, Verdict
from controlplane.actions.selectors import actions_of
from controlplane.actions.telling import deeds_of
from controlplane.alerts.models import Channel, Delivery
from controlplane.diagnosis.explaining import diagnosis_confirm
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import incident_get
from controlplane.fleet.models import Engine, Node
from tests.controlplane.diagnosis.judged import Story
from tracing.types import Signal

pytestmark = pytest.mark.django_db
BECAUSE = (
    "no cause examined explains it; the nearest, load beyond capacity, fails on: "
    "While requests wait the engine computes 80% of the time"
)
ADVICE = "no setting serves this load; 1 engine serves chat, and it needs 1 more like engine-0"


class Kept(Story):
    """An incident whose change was kept at the end of window 6, and what was judged since."""

    def __init__(self) -> None:
        super().__init__()
        for _ in range(2):
            found = self.judge(60)
        assert found is not None
        self.pk = found.pk
        Channel.objects.create(tenant=self.tenant, name="chat", url="http://127.0.0.1:1/")
        node = Node.objects.create(tenant=self.tenant, name="node-0")
        self.engine = Engine.objects.create(
            tenant=self.tenant, node=node, name="engine-0", service="chat"
        )
        self.look("running_cap_too_small", because="59 requests waited behind a cap of 32")
        self.tell()
        Delivery.objects.update(state=Delivery.State.SENT)
        at = self.now()
        self.judge(7)
        self.action = Action.objects.create(
            tenant=self.tenant, engine=self.engine, incident=found, cause="running_cap_too_small",
            changes={"max_num_seqs": {"from": 32, "to": 128}}, expected_config_version=1,
            idempotency_key="k", deadline=at, state=State.VERIFIED, verdict=Verdict.BETTER,
            created_at=at, applied_at=at, ended_at=self.now(),
            outcome={"sentence": "the share of bad requests fell from 56.0% to 7.4%"},
        )  # fmt: skip
        diagnosis_confirm(incident=found, cause=self.action.cause, acted_at=self.now())

    @property
    def incident(self) -> Incident:
        return incident_get(self.tenant, self.pk)

    def look(self, cause: str, **columns: Any) -> None:
        self.incident.diagnoses.create(
            cause=cause, score=0.4, made_at=self.now(), window_start=self.now(),
            window_end=self.now(), **columns,
        )  # fmt: skip

    def look_in_vain(self) -> None:
        why = {"no_action": "the cause is not known, so nothing is changed"}
        near = {"cause": "load_beyond_capacity", "score": 0.4, "because": "", "no_remedy": ADVICE}
        self.look("unknown", because=BECAUSE, facts=why, rivals=[near])

    def tell(self) -> list[str]:
        """What a pass says; a second one has nothing to add."""
        before = set(Delivery.objects.values_list("pk", flat=True))
        for _ in range(2):
            loop.tell(self.incident, self.now())
        new = Delivery.objects.exclude(pk__in=before).order_by("created_at")
        return [row.event for row in new]


def test_what_goes_on_after_a_kept_change_is_told_once_with_what_the_newest_look_found() -> None:
    story = Kept()
    for _ in range(3):
        story.judge(25)
    assert story.tell() == [], "nobody has looked since"
    story.look_in_vain()
    assert story.tell() == ["stuck"]
    said = Delivery.objects.get(event="stuck").message
    assert said["title"].startswith("Change kept, not enough after ")
    assert said["cause"] == "cause unknown", "what the change cured is not what goes on"
    assert "Kept max_num_seqs at 128 (was 32) on engine-0: " in said["text"]
    since = f"{story.now(4):%H:%M}"
    assert f"Since {since}" in said["text"]
    assert "the share of bad requests fell from 56.0% to 7.4%. Since " in said["text"]
    assert ", 25.0% of 200 requests missed it all the same; that is not explained" in said["text"]
    assert f"{BECAUSE[1:]}. If it is that, {ADVICE}." in said["text"]
    assert said["incident_url"]
    Delivery.objects.update(state=Delivery.State.SENT)
    for _ in range(2):
        story.judge(50)
    story.look_in_vain()
    assert story.tell() == [], "it was told of this change"


def test_what_may_end_by_itself_or_is_not_measured_is_not_told() -> None:
    story = Kept()
    story.judge(25)
    story.judge(25)
    story.look_in_vain()
    assert story.tell() == [], "one whole window since is no run"
    story.judge(2)
    assert story.tell() == [], "the newest was good"
    story.judge(25)
    story.judge(25, signal=Signal.MISSING)
    story.judge(25)
    assert story.tell() == [], "nobody knows about one of the two"
    story.judge(25)
    assert story.tell() == ["stuck"]


def test_nothing_is_left_of_a_change_that_was_undone_or_while_another_is_tried() -> None:
    story = Kept()
    for _ in range(3):
        story.judge(50)
    story.look_in_vain()
    assert left_of(story.incident, actions_of(story.incident)) is not None
    for state in (State.ROLLED_BACK, State.VERIFYING):
        Action.objects.update(state=state)
        assert left_of(story.incident, actions_of(story.incident)) is None
    Action.objects.update(state=State.VERIFIED)
    Incident.objects.update(bad_again_since=story.now(), opened_again_at=story.now())
    assert left_of(story.incident, actions_of(story.incident)) is None, "it is an older run's"


def test_what_is_explained_now_says_why_nothing_more_is_tried() -> None:
    story = Kept()
    for _ in range(3):
        story.judge(50)
    story.look("slow_host", because="the host is slow", facts={"no_action": "no knob helps"})
    assert story.tell() == ["stuck"]
    text = Delivery.objects.get(event="stuck").message["text"]
    assert "The host is slow." in text
    assert Delivery.objects.get(event="stuck").message["cause"] == "slow host"
    assert text.endswith("requests missed it all the same; no knob helps.")


def test_what_was_left_until_it_was_over_is_told_at_the_end_and_when_it_comes_back() -> None:
    story = Kept()
    for _ in range(6):
        story.judge(25)
    story.look_in_vain()
    assert story.tell() == ["stuck"]
    for _ in range(4):
        story.judge(0)
    assert story.incident.state == Incident.State.CLOSED
    assert story.tell() == ["resolved"]
    words = "rom 00:00:51 to 00:02:21, 25.0% of 600 requests missed it all the same"
    assert f"F{words}." in Delivery.objects.get(event="resolved").message["text"]
    for _ in range(2):
        story.judge(60)
    _done, deeds = deeds_of(story.incident, story.now())
    assert f"f{words}" in deeds["earlier"]


def test_a_kept_change_that_ended_it_left_nothing() -> None:
    story = Kept()
    for _ in range(4):
        story.judge(0)
    assert story.incident.state == Incident.State.CLOSED
    assert left_of(story.incident, actions_of(story.incident)) is None


def test_what_was_missed_after_it_was_set_back_was_not_left_by_it() -> None:
    story = Kept()
    Action.objects.update(overridden={"at": story.now(4).isoformat(), "knob": "max_num_seqs"})
    for bad in (*[25] * 3, *[0] * 4):
        story.judge(bad)
    assert story.incident.state == Incident.State.CLOSED
    assert left_of(story.incident, actions_of(story.incident)) is None
