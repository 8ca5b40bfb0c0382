"""Whether a request, an order or a change that came out wrong would be seen."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from engine.load import Request
from engine.replay import Record, Status


def record(status: Status, tokens: int = 0) -> Record:
    request = Request(at_s=0.0, prompt_tokens=8, output_tokens=tokens, id="r")
    return Record(request, status=status, tokens=tokens)


RECORDS = [record(Status.OK, 5), record(Status.OK, 7), record(Status.REJECTED)]
AGREES = Counter(received=3, answered=2, refused=1, tokens=12)


def unbalanced(**engine: int) -> list[str]:
    found: list[str] = import_module("conservation").unbalanced(
        "engine-0", RECORDS, Counter({**AGREES, **engine})
    )
    return found


def test_a_client_and_an_engine_that_agree_are_balanced() -> None:
    assert unbalanced() == []


def test_one_request_and_one_token_too_few_are_seen() -> None:
    assert unbalanced(received=4, tokens=11) == [
        "engine-0: sent and received: client 3, engine 4",
        "engine-0: tokens: client 12, engine 11",
    ]


def action(action_id: str, **columns: Any) -> dict[str, Any]:
    plain = {"id": action_id, "what": action_id, "apply": "a", "by_person": True, "undoes": False}
    return {**plain, **columns}


def test_an_order_carried_out_twice_is_seen_and_an_undo_is_none() -> None:
    hands = [SimpleNamespace(ordered=["one"])]
    rows = [
        action("one"),
        action("undo", undoes=True),
        action("never sent to the agent", apply=None),
        action("autopilot's", by_person=False),
        action("again"),
    ]
    found = import_module("conservation").orders_doubled(hands, {"actions": rows})
    assert found == ["again is nobody's order"]


def test_what_the_journal_has_forgotten_is_not_held_against_it() -> None:
    check = import_module("chaos_check")
    report = {
        "commands": [],
        "actions": [{"id": "1", "what": "old", "state": "verified", "apply": "gone"}],
    }
    word = check.Word("a", "engine-0", "apply", "applied", "committed", 2, {}, "")
    assert check.told_otherwise([word], report) == ["old: verified, journal trial none"]
    assert check.told_otherwise([word] * check.JOURNAL_KEEPS, report) == []


def test_each_opening_is_told_once_and_so_is_what_came_of_it() -> None:
    check = import_module("chaos_check")
    told = [["opened", "sent"], ["resolved", "sent"], ["opened", "sent"]]
    incident = {"id": "i1", "what": "late", "state": "open", "openings": 2, "told": told}
    heard = [{"event": f"incident.{event}", "incident_url": "/incidents/i1/"} for event, _ in told]
    report = {"incidents": [incident]}
    stop = {"event": "autopilot.stopped", "incident_url": "/incidents/i1/"}
    assert check.untold(report, heard) == check.untold(report, [*heard, stop]) == []
    assert check.untold(report, heard[:2])
    assert check.untold(report, [*heard, heard[0]])
    assert check.untold({"incidents": [incident | {"openings": 1}]}, heard)
    assert check.untold({"incidents": [incident | {"told": []}]}, [])
