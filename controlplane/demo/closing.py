"""The story at its end: what happened when, in seconds since what it is about began.

What the control plane did is read from its REST API; how the requests fared is the client's word.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from controlplane.demo.client import IN_TIME
from controlplane.demo.house import House
from controlplane.demo.supervisor import Outage
from engine.replay import Status, Summary

Row = Mapping[str, Any]
Moment = tuple[float, str, str]
Settings = Mapping[str, Any]

STEP_COLUMNS = 10
TEXT_AT = len("+0000 s  ") + STEP_COLUMNS + 1  # the column where a line of the story goes on
SLOW_S = 5.0  # from proposed to applied: more is worth a line
ENDED = {  # an action's last state → the step
    "verified": "kept",
    "rolled_back": "undone",
    "rejected": "not done",
    "expired": "not done",
    "failed": "not done",
    "rollback_failed": "not undone",
}
# Where the run ends before its trial, agent and engine end too; the agent's journal has it still.
UNDER_WAY = "under way, to be undone at the next start"
FARED = {  # what became of a request; the first and the last are said of none as well
    Status.OK: "answered",
    Status.REJECTED: "refused",
    Status.FAILED: "failed",
    Status.INTERRUPTED: "cut off",
    Status.PENDING: "on their way",
    Status.LOST: "lost",
}


def ledger(house: House) -> tuple[list[Row], list[Row], list[Row]]:
    """Incidents with their `diagnoses`, actions, deliveries; the newest 100 of each."""
    incidents = house.api("incidents/?limit=100")["incidents"]
    for row in incidents:
        row["diagnoses"] = house.api(f"incidents/{row['id']}/diagnoses/?limit=200")["diagnoses"]
    return (
        incidents,
        house.api("actions/?limit=100")["actions"],
        house.api("deliveries/?limit=100")["deliveries"],
    )


def moments(
    began_at: float, since: float, incidents: Sequence[Row], actions: Sequence[Row],
    deliveries: Sequence[Row],
) -> list[Moment]:  # fmt: skip
    """(seconds since `began_at`, step, sentence), in order; what was before `since` is left out."""
    every = (*_incidents(incidents), *_actions(actions), *_deliveries(deliveries))
    told = [(stamp(at), step, text) for at, step, text in every if at]
    return in_order((at - began_at, step, text) for at, step, text in told if at >= since)


def in_order(told: Iterable[Moment]) -> list[Moment]:
    """By time alone: what happened in the same pass stays as it was told."""
    return sorted(told, key=lambda moment: moment[0])


def stamp(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _incidents(incidents: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    for row in reversed(incidents):
        where = f"“{row['objective_name']}” on {row['scope'] or row['service']}"
        for number, run in enumerate(row["episodes"]):
            again = " again" if number else ""
            yield run["opened_at"], "detected", f"{where} is missed{again}"
            missed = f"{run['bad_events']:,.0f} of {run['total_events']:,.0f} {row['unit']}"
            yield run["closed_at"], "over", f"{where} is met again; {missed} missed it"
        if not row["part_of"]:  # what is part of another story is explained there
            yield from _explained(row["diagnoses"])


def _explained(diagnoses: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    """Each cause as it was named, and the first reason given to do nothing about it."""
    cause, reason_told = "", False
    for made in reversed(diagnoses):
        if made["cause"] != cause:
            yield made["made_at"], "explained", f"{made['cause']}: {made['because']}"
            cause, reason_told = made["cause"], False
        if not reason_told and (reason := made["facts"].get("no_action")):
            yield made["made_at"], "no action", reason
            reason_told = True


def _actions(actions: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    for row in reversed(actions):
        applied, what = row["applied_at"], f"{steps(row)} on {row['engine']}"
        if not applied or stamp(applied) - stamp(row["created_at"]) > SLOW_S:
            yield row["created_at"], "proposed", what
        yield applied, "acted", what
        came_of_it = row["outcome"].get("sentence") or row["sentence"]
        yield row["ended_at"], ENDED.get(row["state"]) or str(row["state"]), came_of_it


def steps(action: Row) -> str:
    return ", ".join(f"{knob} {c['from']} → {c['to']}" for knob, c in action["changes"].items())


def _deliveries(deliveries: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    for row in reversed(deliveries):
        if row["state"] == "sent":
            yield row["sent_at"], "told", f"{row['event']}, to {row['channel']}"


def back(outages: Sequence[Outage], began_at: float) -> list[Moment]:
    """When each process that was killed answered again."""
    now = time.monotonic()
    since = now - (time.time() - began_at)
    return [
        (
            outage.ended - since,
            "back",
            f"{outage.victim}, {outage.ended - outage.began:.1f} s later",
        )
        if outage.over
        else (now - since, "not back", outage.victim)
        for outage in outages
    ]


def lines(told: Iterable[Moment], summary: Summary, short: Sequence[str]) -> list[str]:
    """As printed; what people ask for first comes last, where they look."""
    shown = [f"{at:+5.0f} s  {step:<{STEP_COLUMNS}} {text}" for at, step, text in in_order(told)]
    counts = ", ".join(f"{n:,} {status}" for status, n in summary.counts.items() if n)
    return [
        *shown,
        "",
        *(f"{'' if i else 'in short':<9} {part}" for i, part in enumerate(short)),
        f"requests  {summary.sent:,}: {counts}",
        f"twice     {summary.duplicated}",
        f"lost      {summary.counts[Status.LOST]}",
    ]


def in_short(
    told: Sequence[Moment], incidents: Sequence[Row], actions: Sequence[Row],
    good_again_s: float | None,
) -> list[str]:  # fmt: skip
    """Detected, cause, action and what came of it, and since when the requests are in time.

    `told` are the story's moments, the rows those of the same time, `good_again_s` is the client's.
    """
    detected = [at for at, step, _ in told if step == "detected"]
    if detected:
        causes = [made["cause"] for row in incidents if not row["part_of"]
                  for made in row["diagnoses"]]  # fmt: skip
        named = ", then ".join(dict.fromkeys(reversed(causes))) or "not explained"
        parts = [f"detected at {detected[0]:+.0f} s", named]
    else:
        parts = ["no incident"]
    parts += [f"{steps(row)} {ENDED.get(row['state'], row['state'])}" for row in reversed(actions)]
    if not actions:
        parts.append("nothing was changed")
    if good_again_s is None:
        parts.append(f"{IN_TIME}: throughout")
    elif good_again_s == float("inf"):
        parts.append(f"{IN_TIME}: not to the end")
    else:
        parts.append(f"{IN_TIME}: again at {good_again_s:+.0f} s")
    still = any(row["state"] == "open" for row in incidents)
    over = [at for at, step, _ in told if step == "over"]
    parts += ["not over"] if still else [f"over at {over[-1]:+.0f} s"] if over else []
    return parts


def counted(
    summary: Summary, incidents: Sequence[Row], actions: Sequence[Row], since: float
) -> str:
    """What a run did in short, from what is known when it stops; `since` is when it began.

    Incidents are those it opened, for the first time or again. What an earlier one left open is
    said beside them.
    """
    fared = [
        f"{summary.counts[status]:,} {word}"
        for status, word in FARED.items()
        if summary.counts[status] or status in (Status.OK, Status.LOST)
    ]
    if summary.duplicated:
        fared.append(f"{summary.duplicated:,} answered twice")
    came = [
        _state_of(row) for row in actions if not row["ended_at"] or stamp(row["ended_at"]) >= since
    ]
    changes = [
        f"{came.count(word)} {word}"
        for word in ("kept", "undone", "not undone", "proposed", UNDER_WAY)
        if word in came or word in ("kept", "undone")
    ]
    return (
        f"Sent {summary.sent:,} requests: {', '.join(fared)}. "
        f"Incidents: {_opened(incidents, since)}. Changes: {', '.join(changes)}."
    )


def opened_since(incidents: Sequence[Row], since: float) -> list[Row]:
    """Those that opened after `since` (unix seconds), for the first time or again."""
    return [row for row in incidents if stamp(row["episodes"][-1]["opened_at"]) >= since]


def _opened(incidents: Sequence[Row], since: float) -> str:
    is_open = [row for row in incidents if row["state"] == "open"]
    opened = opened_since(incidents, since)
    old = sum(row not in opened for row in is_open)
    return f"{len(opened)}, {len(is_open) - old} of them open" + (
        f", and {old} open from before" if old else ""
    )


def _state_of(action: Row) -> str | None:
    """What came of a change so far, in a word."""
    if action["ended_at"]:
        return ENDED.get(action["state"])
    return "proposed" if action["state"] == "proposed" else UNDER_WAY


def settled(before: Settings, after: Settings) -> str:
    """What the engine runs at the end, against what it ran at the start."""
    changed = [f"{knob} {before[knob]} → {value}" for knob, value in after.items()
               if value != before[knob]]  # fmt: skip
    if changed:
        return f"the engine's settings stay changed: {', '.join(changed)}"
    return "the engine's settings are those of the start"
