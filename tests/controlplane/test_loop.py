"""The whole loop in simulated time: queueing model, the agent's real guard, control plane."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from controlplane import loop
from controlplane.accounts import audit
from controlplane.accounts.models import Tenant
from controlplane.actions.links import link_use
from controlplane.actions.models import Action, State
from controlplane.actions.policies import policy_set
from controlplane.actions.selectors import sentence
from controlplane.alerts.models import Channel, Delivery
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.diagnosis.selectors import incident_get, story
from slo.models import Objective
from slo.services import objective_apply
from tests.controlplane.node import SimulatedNode
from tests.controlplane.plant import Plant
from tracing.types import StoreError

pytestmark = pytest.mark.django_db
QUIET_S = 300.0


class House:
    def __init__(self, folder: Path, plant: Plant) -> None:
        self.tenant = Tenant.objects.create(slug="acme", name="Acme")
        self.plant = plant
        self.node = SimulatedNode(self.tenant, plant, folder, plant.now)
        Channel.objects.create(tenant=self.tenant, name="chat", url="http://127.0.0.1:1/")

    def objective(self, slug: str, metric: str, threshold_ms: float, target: float) -> Objective:
        return objective_apply(
            tenant=self.tenant,
            spec={
                "slug": slug,
                "name": slug,
                "service": "chat",
                "indicator": "latency",
                "target": target,
                "fast_burn": 6,
                "spec": {"source": "metric", "metric": metric, "threshold_ms": threshold_ms},
            },
        )

    def answered(self) -> Objective:
        return objective_apply(
            tenant=self.tenant,
            spec={
                "slug": "answered",
                "name": "Requests answered",
                "service": "chat",
                "indicator": "success",
                "target": 0.99,
                "fast_burn": 14.4,
                "spec": {"source": "metric"},
            },
        )

    def run(self, seconds: float) -> None:
        """The agent polls every 2 s, the loop passes every 5 s."""
        end = self.plant.t + seconds
        while self.plant.t < end:
            at = self.plant.t + 1
            now = self.plant.run_until(at)
            self.node.now = now
            if int(at) % 2 == 0:
                self.node.poll()
            if int(at) % 5 == 0:
                loop.run_pass(now, lambda _: self.plant.store)

    def outcome(self) -> str:
        """For the message of a failed test."""
        return "\n".join(
            [
                *(f"{d.made_at:%H:%M:%S} {d.cause}: {d.because} {d.facts}" for d in _diagnoses()),
                *(
                    f"{s.at:%H:%M:%S} {s.to_state}: {s.reason}"
                    for a in Action.objects.all()
                    for s in a.transitions.all()
                ),
            ]
        )


def _diagnoses() -> list[Diagnosis]:
    return list(Diagnosis.objects.order_by("made_at"))


TTFT = "vllm:time_to_first_token_seconds"


@pytest.mark.parametrize("seed", [1, 2])
def test_more_load_breaks_the_promise_and_the_loop_mends_it_with_proof(
    seed: int, tmp_path: Path
) -> None:
    house = House(tmp_path, Plant(seed=seed))
    house.objective("ttft", TTFT, 500, 0.95)
    house.run(QUIET_S)
    assert not Incident.objects.exists()
    house.plant.rate = 36.0
    house.run(300)

    incident = Incident.objects.get()
    assert incident.scope == "engine-0"
    assert (incident.opened_at - incident.bad_since).total_seconds() <= 45
    first = _diagnoses()[0]
    assert first.cause == "running_cap_too_small", house.outcome()
    assert "waited behind a cap of 8 running" in first.because
    action = Action.objects.order_by("created_at")[0]
    assert action.state == State.VERIFIED, house.outcome()
    assert action.changes == {"max_num_seqs": {"from": 8, "to": 32}}
    assert house.plant.values["max_num_seqs"] == 32
    assert "fell from" in action.outcome["sentence"]
    assert incident.state == Incident.State.CLOSED, house.outcome()
    opened, resolved = Delivery.objects.order_by("created_at")
    assert "because" in opened.message["text"]
    assert "max_num_seqs from 8 to 32" in opened.message["action"]
    assert resolved.event == Delivery.Event.RESOLVED
    assert resolved.message["title"].startswith("Over after ")
    assert "Kept max_num_seqs at 32 (was 8) on engine-0" in resolved.message["text"]


def test_where_the_policy_asks_a_person_the_message_carries_the_yes(tmp_path: Path) -> None:
    house = House(tmp_path, Plant())
    house.objective("ttft", TTFT, 500, 0.95)
    policy_set(tenant=house.tenant, actor="ada", now=house.plant.now, values={"mode": "approve"})
    house.run(QUIET_S)
    house.plant.rate = 36.0
    while not Delivery.objects.exists():
        house.run(5)
    house.run(15)
    action = Action.objects.get()
    assert action.state == State.PROPOSED, house.outcome()
    said = Delivery.objects.order_by("created_at")[0].message
    assert set(said["actions"]) == {"approve", "reject"}
    assert house.plant.values["max_num_seqs"] == 8

    token = said["actions"]["approve"].rstrip("/").rpartition("/")[2]
    link_use(token, actor="Ada", now=house.plant.now, signed_in=False, seen={})
    house.run(200)
    action.refresh_from_db()
    assert action.state == State.VERIFIED, house.outcome()
    assert house.plant.values["max_num_seqs"] == 32
    assert audit.verify(house.tenant).holds


def test_ten_quiet_minutes_make_no_incident(tmp_path: Path) -> None:
    house = House(tmp_path, Plant(rate=20.0))
    house.objective("ttft", TTFT, 500, 0.95)
    house.run(600)
    assert not Incident.objects.exists()
    assert not Action.objects.exists()


def test_a_slow_host_is_named_and_a_person_is_asked(tmp_path: Path) -> None:
    house = House(tmp_path, Plant(rate=15.0))
    house.plant.values["max_num_seqs"] = 64
    house.objective("gap", "vllm:inter_token_latency_seconds", 20, 0.95)
    house.run(QUIET_S)
    house.plant.slow = 4.0
    house.run(120)
    assert Incident.objects.get().state == Incident.State.OPEN
    assert {d.cause for d in _diagnoses()} == {"slow_host"}, house.outcome()
    assert not Action.objects.exists()
    text = Delivery.objects.get().message["text"]
    assert "No knob makes a slow host fast: a person has to look at host node-0" in text


# Requests get in each other's way: the more run, the more each of them costs. Seen at small
# batches it is nearly a line, so a larger cap looks good and serves no more.
CROWDED = {"q": 2e-5}


def test_a_remedy_that_does_not_help_is_undone_and_not_repeated(tmp_path: Path) -> None:
    house = House(tmp_path, Plant(rate=15.0, **CROWDED))
    house.objective("ttft", TTFT, 500, 0.95)
    house.run(QUIET_S)
    house.plant.rate = 33.0
    house.run(300)
    actions = list(Action.objects.order_by("created_at"))
    assert len(actions) == 1, house.outcome()
    assert actions[0].state == State.ROLLED_BACK, house.outcome()
    assert house.plant.values["max_num_seqs"] == 8
    assert Incident.objects.get().state == Incident.State.OPEN
    assert "just tried this way" in _diagnoses()[-1].facts["no_action"]

    opened, undone = Delivery.objects.order_by("created_at")
    assert "max_num_seqs from 8 to 32" in opened.message["action"]
    assert undone.event == Delivery.Event.UNDONE
    assert undone.message["title"].startswith("Change undone, still burning after ")
    assert sentence(actions[0]) in undone.message["text"]


def test_where_an_undo_fails_people_are_paged_and_the_autopilot_waits(tmp_path: Path) -> None:
    house = House(tmp_path, Plant(rate=15.0, **CROWDED))
    house.objective("ttft", TTFT, 500, 0.95)
    house.run(QUIET_S)
    house.plant.rate = 33.0
    while not Action.objects.filter(state=State.VERIFYING).exists():
        house.run(5)
    house.plant.apply({"max_wait_ms": 2}, by="person")
    house.run(180)
    action = Action.objects.get()
    assert action.state == State.ROLLBACK_FAILED, house.outcome()
    page = Delivery.objects.get(event=Delivery.Event.STOPPED).message
    assert page["severity"] == "page"
    assert page["title"] == "The autopilot has stopped on engine-0: a change could not be undone"
    assert page["text"] == f"{sentence(action)}."
    assert sentence(action).endswith("leaves engine-0 alone until a person has looked")

    token = page["actions"]["clear"].rstrip("/").rpartition("/")[2]
    link_use(token, actor="Ada", now=house.plant.now, signed_in=False, seen={})
    house.run(60)
    assert "until a person has looked" not in sentence(Action.objects.get(pk=action.pk))
    assert Delivery.objects.filter(event=Delivery.Event.STOPPED).count() == 1


def test_who_is_turned_away_by_a_queue_that_grew_before_is_not_held_against_the_change(
    tmp_path: Path,
) -> None:
    """It overflows after the change, as it would have without; still nothing is proved, so undo."""
    house = House(tmp_path, Plant(rate=15.0, queue_max=200, **CROWDED))
    house.objective("ttft", TTFT, 500, 0.95)
    house.answered()
    house.run(QUIET_S)
    house.plant.rate = 27.0
    house.run(240)
    action = Action.objects.order_by("created_at")[0]
    full = ("vllm:admission_rejections_total", "reason", "max_num_queued_reqs")
    assert house.plant.labelled[full] > 0
    assert action.state == State.ROLLED_BACK, house.outcome()
    assert "no better, as the queue, which was growing, has not gone down" in sentence(action)
    assert house.plant.values["max_num_seqs"] == 8


def test_requests_turned_away_by_the_same_queue_are_part_of_the_same_story(tmp_path: Path) -> None:
    house = House(tmp_path, Plant(rate=15.0, queue_max=2000))
    house.objective("ttft", TTFT, 500, 0.95)
    house.answered()
    house.run(QUIET_S)
    house.plant.rate = 90.0
    house.run(120)
    first, second = Incident.objects.order_by("opened_at")
    assert first.objective.slug == "ttft"
    assert second.part_of == first, house.outcome()
    assert Delivery.objects.get().incident == first
    told = story(incident_get(house.tenant, first.pk))
    assert [hit.objective for hit in told.hits] == ["ttft", "Requests answered"]
    assert "missed “Requests answered”" in told.what
    assert {d.cause for d in _diagnoses()} == {"load_beyond_capacity"}
    assert told.verdict == "infeasible"
    assert "it needs 1 more like engine-0" in told.because


def test_a_promise_missed_for_the_low_tiers_turned_away_changes_nothing_and_they_are_served_again(
    tmp_path: Path,
) -> None:
    house = House(tmp_path, Plant(rate=15.0, priorities={0: 0.4, 1: 0.3, 2: 0.3}, queue_max=400))
    house.plant.values["max_num_seqs"] = 32
    house.objective("ttft", TTFT, 500, 0.95)
    house.answered()
    rules = {"cool_down_harmful_s": 180}
    policy_set(tenant=house.tenant, actor="ada", now=house.plant.now, values=rules)
    house.run(QUIET_S)
    house.plant.rate = 130.0
    house.run(200)
    shed = Action.objects.get()
    assert shed.changes == {"shed_below_priority": {"from": 0, "to": 2}}, house.outcome()
    assert shed.state == State.VERIFIED, house.outcome()
    late = Incident.objects.get(objective__slug="ttft")
    missed = Incident.objects.get(objective__slug="answered")
    assert late.state == Incident.State.CLOSED, house.outcome()
    assert missed.state == Incident.State.OPEN, house.outcome()
    told = story(incident_get(house.tenant, missed.pk))
    assert told.cause == "shed_by_priority", house.outcome()
    assert "requests a second were turned away by their priority (below 2)" in told.because

    house.plant.rate = 20.0
    house.run(130)
    missed.refresh_from_db()
    assert missed.state == Incident.State.OPEN
    (release,) = shed.undone_by.all()
    assert release.changes == {"shed_below_priority": {"from": 2, "to": 0}}


def test_people_are_told_though_the_explanation_fails(tmp_path: Path) -> None:
    house = House(tmp_path, Plant())
    house.objective("ttft", TTFT, 500, 0.95)
    house.run(60)
    house.plant.rate = 36.0

    def broken(*_: Any, **__: Any) -> Any:
        raise StoreError("memory limit exceeded")

    house.plant.store.gauge = broken  # type: ignore[method-assign]
    house.run(120)
    assert Incident.objects.get().opened_at
    assert not Diagnosis.objects.exists()
    text = Delivery.objects.get().message["text"]
    assert "requests missed “ttft” on engine-0 since" in text
    assert "because" not in text


def test_an_explanation_outlives_the_silence_of_the_agent(tmp_path: Path) -> None:
    house = House(tmp_path, Plant())
    house.objective("ttft", TTFT, 500, 0.95)
    policy_set(tenant=house.tenant, actor="ada", now=house.plant.now, values={"mode": "observe"})
    Channel.objects.update(remind_minutes=2)
    house.run(QUIET_S)
    house.plant.rate = 36.0
    while not Delivery.objects.exists():
        house.run(5)
    Delivery.objects.update(state=Delivery.State.SENT)
    house.plant.silent = True
    house.run(360)
    assert {d.cause for d in _diagnoses()} == {"running_cap_too_small"}, house.outcome()
    reminded = Delivery.objects.filter(event=Delivery.Event.REMINDED).latest("created_at").message
    assert reminded["title"].startswith("Still open after ")
    assert "; nothing was measured there since 00:0" in reminded["title"]
    assert "waited behind a cap of 8 running" in reminded["text"]


def test_a_tenant_in_trouble_does_not_stop_the_others(tmp_path: Path) -> None:
    house = House(tmp_path, Plant())
    house.objective("ttft", TTFT, 500, 0.95)
    other = Tenant.objects.create(slug="aaa", name="Aaa")
    house.run(60)

    def reader_of(tenant_id: str) -> Any:
        if tenant_id == str(other.pk):
            raise RuntimeError("store is gone")
        return house.plant.store

    house.plant.run_until(90)
    loop.run_pass(house.plant.now + timedelta(seconds=10), reader_of)
    newest = Objective.objects.get().readings.order_by("-window_end")[0]
    assert newest.window_end > house.plant.now - timedelta(seconds=20)
