"""The story told at the end: in order, each thing once, with the client's word on the requests."""

from __future__ import annotations

import time
from typing import Any

import pytest

from controlplane.demo.client import IN_TIME, good_again_s
from controlplane.demo.closing import back, counted, in_short, lines, moments, settled
from controlplane.demo.supervisor import Outage
from engine.load import Request
from engine.replay import Record, Status, summarise

MIDNIGHT = 1767225600.0


def at(seconds: int) -> str:
    return f"2026-01-01T00:{seconds // 60:02d}:{seconds % 60:02d}+00:00"


def diagnosis(second: int, cause: str, because: str, no_action: str) -> dict[str, Any]:
    facts = {"no_action": no_action}
    return {"made_at": at(second), "cause": cause, "because": because, "facts": facts}


def episode(opened: int, closed: int | None = None, bad: float = 9.0) -> dict[str, Any]:
    return {
        "opened_at": at(opened), "closed_at": at(closed) if closed else None,
        "bad_events": bad, "total_events": 1234.0,
    }  # fmt: skip


def incident(**more: Any) -> dict[str, Any]:
    return {
        "opened_at": at(60), "closed_at": at(180), "objective_name": "First token in time",
        "scope": "engine-0", "service": "chat", "state": "closed", "part_of": None,
        "unit": "requests", "episodes": [episode(60, 180)],
        "diagnoses": [
            diagnosis(67, "slow_host", "steps take longer", "look at node-0 again"),
            diagnosis(66, "slow_host", "steps take longer", "look at node-0"),
            diagnosis(65, "unknown", "too little was seen", ""),
        ],
    } | more  # fmt: skip


def action(**more: Any) -> dict[str, Any]:
    return {
        "created_at": at(66), "applied_at": at(67), "ended_at": at(100), "state": "verified",
        "engine": "engine-0", "changes": {"max_num_seqs": {"from": 2, "to": 32}},
        "sentence": "Kept max_num_seqs at 32 (was 2) on engine-0: fewer are late",
        "outcome": {"sentence": "fewer are late"},
    } | more  # fmt: skip


def told(*incidents: dict[str, Any], actions: tuple[dict[str, Any], ...] = ()) -> list[str]:
    deliveries = [{"state": "sent", "sent_at": at(68), "event": "opened", "channel": "terminal"}]
    rows = moments(MIDNIGHT + 30, MIDNIGHT, incidents, actions, deliveries)
    return [f"{when:.0f} {step}: {text}" for when, step, text in rows]


def test_the_story_is_told_in_order_in_seconds_since_it_began() -> None:
    before = {**episode(0), "opened_at": "2025-12-31T00:00:00+00:00"}
    old = incident(opened_at=before["opened_at"], closed_at=None, diagnoses=[], episodes=[before])
    assert told(incident(), old, actions=(action(),)) == [
        "30 detected: “First token in time” on engine-0 is missed",
        "35 explained: unknown: too little was seen",
        "36 explained: slow_host: steps take longer",
        "36 no action: look at node-0",
        "37 acted: max_num_seqs 2 → 32 on engine-0",
        "38 told: opened, to terminal",
        "70 kept: fewer are late",
        "150 over: “First token in time” on engine-0 is met again; 9 of 1,234 requests missed it",
    ]


def test_what_was_missed_is_told_in_what_the_objective_counts() -> None:
    assert told(incident(unit="gaps between tokens"))[-1].endswith(
        "is met again; 9 of 1,234 gaps between tokens missed it"
    )


def test_what_is_part_of_another_story_is_not_explained_twice() -> None:
    part = incident(objective_name="Each token in time", part_of="1")
    assert [line for line in told(part) if "explained" in line or "no action" in line] == []


def test_a_change_that_waited_is_told_when_proposed_and_when_done() -> None:
    slow = told(actions=(action(applied_at=at(80)),))
    assert slow[0] == "36 proposed: max_num_seqs 2 → 32 on engine-0"
    refused = told(actions=(action(applied_at=None, state="rejected"),))
    assert [line.split(":")[0] for line in refused] == ["36 proposed", "38 told", "70 not done"]


def test_a_process_is_back_when_it_answered_again() -> None:
    now = time.monotonic()
    outages = [Outage("agent", now - 10, now - 7.5), Outage("engine", now - 5)]
    rows = back(outages, time.time() - 20)
    assert [(round(when), step, text) for when, step, text in rows] == [
        (12, "back", "agent, 2.5 s later"),
        (20, "not back", "engine"),
    ]


def test_one_line_counts_what_a_run_did_when_it_stops() -> None:
    fared = (Status.OK, Status.OK, Status.REJECTED, Status.PENDING)
    summary = summarise([Record(Request(0.0, 8, 8, "a"), status=status) for status in fared])
    incidents = [
        incident(closed_at=None, state="open"), incident(), incident(closed_at=at(20)),
    ]  # fmt: skip
    actions = [
        action(ended_at=None, state="verifying"), action(), action(state="rolled_back"),
        action(state="expired"), action(ended_at=at(20)),
        action(ended_at=None, state="proposed"),
    ]  # fmt: skip
    assert counted(summary, incidents, actions, MIDNIGHT + 30) == (
        "Sent 4 requests: 2 answered, 1 refused, 1 on their way, 0 lost. Incidents: 3, 1 of them "
        "open. Changes: 1 kept, 1 undone, 1 proposed, 1 under way, to be undone at the next start."
    )
    assert counted(summarise([], 2), [], [], MIDNIGHT) == (
        "Sent 0 requests: 0 answered, 0 lost, 2 answered twice. Incidents: 0, 0 of them open. "
        "Changes: 0 kept, 0 undone."
    )


def test_a_run_counts_the_incidents_that_it_opened_and_not_what_it_inherited() -> None:
    """Four of the run before: one it left over, one that ended in this run, one that is still open
    and one that came back."""
    since, old = MIDNIGHT + 500, {"opened_at": at(60)}
    incidents = [
        incident(**old),
        incident(**old, closed_at=at(520)),
        incident(**old, closed_at=None, state="open", episodes=[episode(60)]),
        incident(**old, closed_at=at(700), episodes=[episode(60, 180), episode(600, 700)]),
        incident(opened_at=at(610), closed_at=None, state="open", episodes=[episode(610)]),
    ]
    told = counted(summarise([], 0), incidents, [], since)
    assert "Incidents: 2, 1 of them open, and 1 open from before. Changes" in told
    assert "Incidents: 0, 0 of them open. Changes" in counted(
        summarise([], 0), incidents[:2], [], since
    )


def test_the_last_lines_say_what_people_ask_for_first() -> None:
    record = Record(Request(0.0, 8, 8, "a"), status=Status.LOST)
    shown = lines(
        [(5.0, "told", "x"), (0.0, "·", "It broke.")], summarise([record]), ["all", "of it"]
    )
    assert [line.split() for line in shown] == [
        ["+0", "s", "·", "It", "broke."],
        ["+5", "s", "told", "x"],
        [],
        ["in", "short", "all"],
        ["of", "it"],
        ["requests", "1:", "1", "lost"],
        ["twice", "0"],
        ["lost", "1"],
    ]


@pytest.mark.parametrize(
    ("rows", "again", "short"),
    [
        (
            ([incident()], [action()]),
            25.0,
            [
                "detected at +30 s",
                "unknown, then slow_host",
                "max_num_seqs 2 → 32 kept",
                f"{IN_TIME}: again at +25 s",
                "over at +150 s",
            ],
        ),
        (
            ([incident(state="open", closed_at=None, diagnoses=[])], []),
            float("inf"),
            [
                "detected at +30 s",
                "not explained",
                "nothing was changed",
                f"{IN_TIME}: not to the end",
                "not over",
            ],
        ),
        (
            ([], []),
            None,
            ["no incident", "nothing was changed", f"{IN_TIME}: throughout"],
        ),
    ],
)  # fmt: skip
def test_in_short(rows: tuple[list[Any], list[Any]], again: float | None, short: list[str]) -> None:
    incidents, actions = rows
    seen = moments(MIDNIGHT + 30, MIDNIGHT, incidents, actions, [])
    assert in_short(seen, incidents, actions, again) == short


def answered(sent_s: float, ttft_s: float, status: Status = Status.OK) -> Record:
    request = Request(sent_s, 8, 8, "a")
    return Record(request, sent_s, sent_s + ttft_s, sent_s + ttft_s, 1, 1, 200, status)


def served(*ttft_s: float) -> list[Record]:
    """Ten requests in each five seconds, from 100 s on."""
    return [answered(100 + 5 * k + i / 2, each) for k, each in enumerate(ttft_s) for i in range(10)]


def test_the_requests_are_in_time_again_after_two_good_windows_in_a_row() -> None:
    assert good_again_s(served(0.1, 2, 0.1, 2, 0.1, 0.1, 2), 100) == 30
    assert good_again_s(served(0.1, 0.1, 0.1), 100) is None
    assert good_again_s(served(0.1, 2, 0.1), 100) == float("inf")
    assert good_again_s([], 100) is None


def test_what_came_before_and_what_was_refused_is_not_counted() -> None:
    early = [answered(99, 9.0)]
    refused = [answered(101, 0.0, Status.REJECTED) for _ in range(20)]
    assert good_again_s([*early, *refused, *served(0.1, 0.1)], 100) is None
    cut_off = [answered(101, 0.1, Status.INTERRUPTED) for _ in range(20)]
    assert good_again_s([*cut_off, *served(0.1, 0.1, 0.1)], 100) == 15


def test_it_is_said_whether_the_engines_settings_are_those_of_the_start() -> None:
    before = {"max_num_seqs": 32, "graph_capture": "on"}
    assert settled(before, dict(before)) == "the engine's settings are those of the start"
    after = before | {"max_num_seqs": 128}
    assert settled(before, after) == "the engine's settings stay changed: max_num_seqs 32 → 128"
