"""The product's main job, on real processes: detected, explained, told, acted, verified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.demo.house import House
from controlplane.demo.receiver import Receiver
from engine.replay import Status

from .houses import Traffic, new_house, runs, until

CAP = "max_num_seqs"
CAP_TOO_SMALL = 1


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = new_house(tmp_path, TRIMTAB_AUTOPILOT="1")
    yield house
    house.stop()


def test_the_loop_closes_on_a_cap_set_too_small(house: House) -> None:
    # More than this cap carries, also where other tests had the machine while it was measured; a
    # third or so of what a higher one does.
    rate = 1.6 * house.capacity(4.0, {CAP: CAP_TOO_SMALL}).requests_per_s
    messages: list[dict[str, Any]] = []
    receiver = Receiver(house.ports.receiver, messages.append)
    house.start()
    house.configure({CAP: CAP_TOO_SMALL}, by="a hand")
    with Traffic(house, rate) as traffic:
        incident = until(lambda: explained(house), 120, "an incident with its cause")
        until(lambda: messages, 20, "a message")
        until(lambda: runs(house)[CAP] > CAP_TOO_SMALL, 30, "a higher cap in the engine")
        until(lambda: ended_actions(house), 60, "an action's end")
    until(lambda: not in_flight(house), 60, "the end of every action")
    receiver.close()

    # A slow engine's queue may fill up and turn requests away before any first token is late.
    assert incident["objective"] in ("chat-ttft", "chat-success")
    assert f"behind a cap of {CAP_TOO_SMALL} running" in incident["because"]
    about = [m for m in messages if incident["id"] in m["incident_url"]]
    # Told of once; what may follow is told of it too: that it was undone, or was not enough.
    [message] = [m for m in about if m["event"] == "incident.opened"]
    assert about[0] == message
    assert message["objective"] == incident["objective_name"]
    assert message["title"] in message["text"]
    first = ended_actions(house)[0]
    assert first["incident"] == incident["id"]
    assert first["changes"][CAP]["from"] == CAP_TOO_SMALL < first["changes"][CAP]["to"]
    assert first["state"] in ("verified", "rolled_back")
    assert first["verdict"]
    assert first["outcome"]["sentence"]
    assert runs(house)[CAP] == said_to_run(ended_actions(house))
    lost = [r for r in traffic.records if r.status not in (Status.OK, Status.REJECTED)]
    assert lost == []
    assert all(record.answers <= 1 for record in traffic.records)
    assert traffic.replayer.unsolicited == 0


def explained(house: House) -> dict[str, Any] | None:
    rows: list[dict[str, Any]] = house.api("incidents/")["incidents"]
    told = (row for row in rows if row["cause"] == "running_cap_too_small" and not row["part_of"])
    return next(told, None)


def actions(house: House) -> list[dict[str, Any]]:
    """Oldest first."""
    rows: list[dict[str, Any]] = house.api("actions/")["actions"]
    return rows[::-1]


def ended_actions(house: House) -> list[dict[str, Any]]:
    return [action for action in actions(house) if action["ended_at"]]


def in_flight(house: House) -> list[dict[str, Any]]:
    return [action for action in actions(house) if not action["ended_at"]]


def said_to_run(ended: list[dict[str, Any]]) -> int:
    """The cap the engine must run, if every action ended as its row says."""
    cap = CAP_TOO_SMALL
    for action in ended:
        if action["state"] == "verified" and CAP in action["changes"]:
            cap = action["changes"][CAP]["to"]
    return cap
