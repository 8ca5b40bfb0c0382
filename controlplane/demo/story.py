"""Follows incidents and actions through the REST API and says what changed, in words.

Each step is told with the time the pages have for it (docs/pages.md), not with that of the look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

from controlplane.demo.house import House

POLL_S = 2.0
# An action's states that are one step to a reader; each other state is its own.
STEP_OF = {
    "approved": "proposed", "dispatched": "proposed", "acknowledged": "proposed",
    "verifying": "applied",
}  # fmt: skip


@dataclass(frozen=True)
class Told:
    """A step in words; `key` is whose it is and which."""

    key: tuple[str, str]
    at: datetime
    words: str


@dataclass
class Story:
    """What has happened in a house since `since` (unix seconds); `incidents` and `actions` are the
    newest of all times, newest first, as they were last seen."""

    house: House
    say: Callable[[str, datetime], None]
    since: float = field(default_factory=time.time)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)

    async def follow(self) -> None:
        """Until cancelled; a control plane that does not answer may be restarting: asked again."""
        seen: set[tuple[str, str]] = set()
        headers = {"Authorization": f"Bearer {self.house.secrets['api']}"}
        async with httpx.AsyncClient(
            base_url=f"{self.house.web_url}/api/v1", headers=headers, timeout=10
        ) as client:
            first = True
            while True:
                try:
                    self.incidents = await _rows(client, "incidents")
                    self.actions = await _rows(client, "actions")
                except httpx.HTTPError:
                    await asyncio.sleep(POLL_S)
                    continue
                for told in steps_told(self.incidents, self.actions):
                    if told.key not in seen:
                        # A cause that comes back is news again.
                        old = {other for other in seen if _supersedes(told.key, other)}
                        seen = seen - old | {told.key}
                        # What an earlier demo left in the ledger is old news.
                        if not first:
                            self.say(told.words, told.at)
                first = False
                await asyncio.sleep(POLL_S)


async def _rows(client: httpx.AsyncClient, noun: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await client.get(f"/{noun}/")).raise_for_status().json()[noun]
    return rows


def _supersedes(new: tuple[str, str], old: tuple[str, str]) -> bool:
    return old[0] == new[0] and all(key[1].startswith("because ") for key in (old, new))


def steps_told(incidents: list[dict[str, Any]], actions: list[dict[str, Any]]) -> list[Told]:
    """Every step so far, in the order of their times."""
    told: list[Told] = []
    for row in reversed(incidents):
        told += _incident(row)
    for row in reversed(actions):
        step = STEP_OF.get(row["state"], row["state"])
        at = row["applied_at"] if step == "applied" else row["transitions"][-1]["at"]
        if step == "proposed":
            at = row["created_at"]
        told.append(Told((row["id"], step), _time(at), f"◆ {row['sentence']}"))
    return sorted(told, key=lambda one: one.at)


def _incident(row: dict[str, Any]) -> list[Told]:
    key, runs = row["id"], row["episodes"]
    again = " again" if len(runs) > 1 else ""
    seen = f"▲ detected{again}: {row['what']}"
    told = [Told((key, f"opened {len(runs)}"), _time(runs[-1]["opened_at"]), seen)]
    if (because := row.get("because")) and not row["part_of"]:
        # “TTFT p99 is 2 s because …” says it already.
        link = "" if " because " in because or row["cause"] == "unknown" else "because "
        step = f"because {len(runs)} {row['cause']}"
        told.append(Told((key, step), _time(row["explained_at"]), f"  {link}{because}"))
    if row["state"] == "closed":
        over = f"● over: “{row['objective_name']}” is met again"
        told.append(Told((key, f"closed {row['closed_at']}"), _time(row["closed_at"]), over))
    return told


def _time(stamp: str) -> datetime:
    return datetime.fromisoformat(stamp).astimezone(UTC)
