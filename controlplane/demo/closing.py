"""The story at its end: what happened when, in seconds since what it is about began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from controlplane.demo.house import House
from controlplane.demo.supervisor import Outage
from engine.replay import Status, Summary

Row = Mapping[str, Any]
Moment = tuple[float, str, str]


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
    told: list[Moment] = []
    for at, step, text in (*_incidents(incidents), *_actions(actions), *_deliveries(deliveries)):
        if at and (when := datetime.fromisoformat(at).timestamp()) >= since:
            told.append((when - began_at, step, text))
    return sorted(told)


def _incidents(incidents: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    for row in incidents:
        yield row["opened_at"], "detected", row["what"]
        last = ""
        for made in reversed(row["diagnoses"]):
            if made["cause"] != last:
                yield made["made_at"], "explained", f"{made['cause']}: {made['because']}"
            last = made["cause"]
        if row["no_action"] and row["diagnoses"]:
            yield row["diagnoses"][0]["made_at"], "no action", row["no_action"]
        yield row["closed_at"], "over", f"{row['objective']} is met again"


def _actions(actions: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    for row in actions:
        steps = ", ".join(f"{k} {c['from']} → {c['to']}" for k, c in row["changes"].items())
        yield row["created_at"], "proposed", f"{steps} on {row['engine']}"
        yield row["applied_at"], "acted", steps
        yield row["ended_at"], row["state"].replace("_", " "), row["sentence"]


def _deliveries(deliveries: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    for row in deliveries:
        if row["state"] == "sent":
            yield row["sent_at"], "told", f"{row['event']}: {row['title']}"


def lines(
    events: Sequence[tuple[float, str]], told: Sequence[Moment], outages: Sequence[Outage],
    summary: Summary,
) -> list[str]:  # fmt: skip
    """As printed. `events` are (seconds since the story began, what was done)."""
    every = sorted([*told, *((at, "·", what) for at, what in events)])
    shown = [f"{at:+6.0f} s  {step:<11} {text}" for at, step, text in every]
    for outage in outages:
        back = f"{outage.ended - outage.began:.1f} s" if outage.over else "never"
        shown.append(f"          {'back':<11} {outage.victim} after {back}")
    counts = ", ".join(f"{n:,} {status}" for status, n in summary.counts.items() if n)
    shown.append(f"requests  {summary.sent:,}: {counts}")
    shown.append(f"twice     {summary.duplicated}")
    shown.append(f"lost      {summary.counts[Status.LOST]}")
    return shown
