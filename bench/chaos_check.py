"""What must hold after chaos, counted from the two sides that should agree.

The agent's journal is read here as a file, with SQL of our own: a check that used the agent's code
would share its mistakes.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

# The stages of a change, the one nearest to its side effect first.
STAGES = ("reverting", "applying", "received", "armed")
JOURNAL_KEEPS = 1000  # commands; older ones are forgotten


@dataclass(frozen=True)
class Word:
    """The journal's last word on one command."""

    id: str
    engine: str
    kind: str
    state: str
    trial: str
    config_version: int | None
    values: dict[str, Any]
    at: str

    @property
    def stage(self) -> str:
        """Where it stands between order and end; "" when nothing is open."""
        if self.trial in ("reverting", "armed"):
            return self.trial
        return self.state if self.state in STAGES else ""


def journal(path: Path, *, open_only: bool = False) -> list[Word]:
    """Every command in the journal, oldest first. Empty before the agent made the file."""
    if not path.exists():
        return []
    where = (
        " WHERE state IN ('received', 'applying') OR trial IN ('armed', 'reverting')"
        if open_only
        else ""
    )
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
    try:
        rows = db.execute(
            "SELECT command_id, engine, kind, state, trial, config_version, config_values, at "
            f"FROM command{where} ORDER BY seq"
        ).fetchall()
    except sqlite3.OperationalError:  # killed before it had made its tables
        return []
    finally:
        db.close()
    return [Word(*row[:6], json.loads(row[6]), row[7]) for row in rows]


def stage(path: Path) -> str:
    """The most delicate thing under way, "idle" when there is none."""
    open_now = {word.stage for word in journal(path, open_only=True)}
    return next((name for name in STAGES if name in open_now), "idle")


def config_mismatches(words: list[Word], engine_url: str) -> list[str]:
    """Where an engine differs from what its words read back last: knobs, and the version.

    A version the journal does not know would be a change nobody wrote down.
    """
    body = httpx.get(f"{engine_url}/v1/runtime_config", timeout=10).json()
    read = [word for word in words if word.config_version is not None and word.values]
    if not read:
        return ["the journal never read the engine back"]
    last = max(read, key=lambda word: (word.config_version or 0, word.at))
    wrong = [
        f"{knob}: the engine runs {body['values'].get(knob)}, the journal says {value}"
        for knob, value in last.values.items()
        if body["values"].get(knob) != value
    ]
    if body["config_version"] != last.config_version:
        wrong.append(
            f"config_version: the engine is at {body['config_version']}, "
            f"the journal at {last.config_version}"
        )
    return wrong


def left_in_flight(words: list[Word], report: dict[str, Any]) -> list[str]:
    """Changes without an end: in the journal, among the fleet's commands, among the actions."""
    left = [
        f"journal: {word.kind} {word.id} is {word.state}, trial {word.trial or 'none'}"
        for word in words
        if word.stage or (word.state == "applied" and word.trial not in ("committed", "reverted"))
    ]
    left += [
        f"fleet: {command['kind']} {command['id']} is {command['state'] or 'unanswered'}"
        for command in report["commands"]
        if not command["final"]
    ]
    left += [
        f"actions: {action['what']} is {action['state']}"
        for action in report["actions"]
        if not action["ended"]
    ]
    return left


def told_otherwise(words: list[Word], report: dict[str, Any]) -> list[str]:
    """Where the control plane believes another end than the journal holds."""
    known = {word.id: word for word in words}
    wrong = []
    for command in report["commands"]:
        word = known.get(command["id"])
        if word is not None and word.state != command["state"]:
            wrong.append(
                f"{command['kind']} {command['id']}: fleet {command['state'] or 'unanswered'}, "
                f"journal {word.state}"
            )
    for action in report["actions"]:
        word = known.get(action["apply"] or "")
        if word is None and len(words) >= JOURNAL_KEEPS:
            continue
        trial = word.trial if word else ""
        if (action["state"] == "verified") != (trial == "committed"):
            wrong.append(f"{action['what']}: {action['state']}, journal trial {trial or 'none'}")
    return wrong


def untold(report: dict[str, Any], messages: list[dict[str, Any]]) -> list[str]:
    """Incidents of which not every message in the outbox was heard, once, or that nobody heard of,
    or of more often than they opened. The receiver drops a repeated delivery."""
    wrong = []
    for incident in report["incidents"]:
        heard = Counter(
            message["event"].removeprefix("incident.")
            for message in messages
            if message["event"].startswith("incident.")
            and incident["id"] in message["incident_url"]
        )
        outbox = Counter(event for event, _ in incident["told"])
        if heard != outbox or not 1 <= heard["opened"] <= incident["openings"]:
            wrong.append(
                f"{incident['what']} ({incident['state']}, opened {incident['openings']} times): "
                f"heard {dict(heard)}, in the outbox {dict(outbox)}"
            )
    return wrong


def ends(words: list[Word]) -> Counter[str]:
    """How the changes in the journal ended."""
    return Counter(word.trial or word.state for word in words if word.kind == "apply")
