"""People are paged once where the autopilot has stopped, whatever becomes of the incident."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta

import pytest

from controlplane.alerts.models import Channel, Delivery, Silence
from controlplane.alerts.outbox import deliver_due
from controlplane.alerts.services import silence_end
from controlplane.alerts.stops import stop_tell
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Engine, Node
from tests.controlplane.alerts.receiver import NOW, Receiver

pytestmark = pytest.mark.django_db
MINUTE = timedelta(minutes=1)
ABOUT = uuid.uuid4()


@pytest.fixture
def engine(incident: Incident) -> Engine:
    node = Node.objects.create(tenant=incident.tenant, agent_id="a", name="node-0")
    return Engine.objects.create(
        tenant=incident.tenant, node=node, name="engine-0", service="chat", adapter="a", url="u"
    )


def channel(engine: Engine, name: str, url: str = "http://127.0.0.1:1/") -> Channel:
    return Channel.objects.create(tenant=engine.tenant, name=name, url=url, severity_min="page")


def tell(engine: Engine, now: datetime, incident: Incident | None = None) -> list[Delivery]:
    """A second pass has nothing to add."""
    facts = {"about": ABOUT, "engine": engine, "incident": incident, "now": now}
    words = {"doing": "Could not undo it", "links": {"clear": "https://x/"}}
    made = stop_tell(**facts, **words)  # type: ignore[arg-type]
    assert stop_tell(**facts, **words) == []  # type: ignore[arg-type]
    return made


def silence(of: Engine, **scope: str) -> Silence:
    return Silence.objects.create(
        tenant=of.tenant, created_at=NOW, until=NOW + 60 * MINUTE, by="ada", reason="r", **scope
    )


def test_every_channel_is_paged_once(engine: Engine, incident: Incident) -> None:
    channel(engine, "one")
    assert [row.channel.name for row in tell(engine, NOW, incident)] == ["one"]
    channel(engine, "two")
    assert [row.channel.name for row in tell(engine, NOW + 60 * MINUTE)] == ["two"]
    first, second = Delivery.objects.order_by("created_at")
    assert first.message["severity"] == second.message["severity"] == "page"
    assert first.message["incident_url"].endswith(f"/incidents/{incident.pk}/")
    assert second.message["incident_url"].endswith("/actions/?state=rollback_failed")


def test_it_is_sent_like_any_other_message(engine: Engine, receiver: Receiver) -> None:
    channel(engine, "hook", receiver.url)
    tell(engine, NOW)
    assert deliver_due(NOW) == 1
    assert receiver.got[-1][2]["event"] == "autopilot.stopped"


@pytest.mark.parametrize("scope", [{"engine": "engine-0"}, {"service": "chat"}])
def test_what_a_silence_held_back_is_told_when_it_ends(
    engine: Engine, scope: dict[str, str]
) -> None:
    channel(engine, "one")
    held = silence(engine, **scope)
    (row,) = tell(engine, NOW)
    assert (row.state, row.silence) == (Delivery.State.SILENCED, held)
    silence_end(silence=held, by="ada", now=NOW + MINUTE)
    (row,) = tell(engine, NOW + 2 * MINUTE)
    assert row.state == Delivery.State.PENDING


def test_a_silence_of_something_else_holds_nothing_back(engine: Engine) -> None:
    channel(engine, "one")
    silence(engine, engine="engine-1")
    silence(engine, engine="engine-0", objective="ttft")
    assert tell(engine, NOW)[0].state == Delivery.State.PENDING
