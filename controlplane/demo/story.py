"""Follows incidents and actions through the REST API and says what changed, in words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from controlplane.demo.house import House

POLL_S = 2.0
# An action's states that are one step to a reader; each other state is its own.
STEP_OF = {
    "approved": "proposed", "dispatched": "proposed", "acknowledged": "proposed",
    "verifying": "applied",
}  # fmt: skip


@dataclass
class Story:
    """What has happened in a house since `since` (unix seconds); `incidents` and `actions` are the
    newest of all times, newest first, as they were last seen."""

    house: House
    say: Callable[[str], None]
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
                for key, sentence in sentences(self.incidents, self.actions):
                    if key not in seen:
                        # A cause that comes back is news again.
                        seen = {other for other in seen if not _supersedes(key, other)} | {key}
                        # What an earlier demo left in the ledger is old news.
                        if not first:
                            self.say(sentence)
                first = False
                await asyncio.sleep(POLL_S)


async def _rows(client: httpx.AsyncClient, noun: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await client.get(f"/{noun}/")).raise_for_status().json()[noun]
    return rows


def _supersedes(new: tuple[str, str], old: tuple[str, str]) -> bool:
    return old[0] == new[0] and all(key[1].startswith("because ") for key in (old, new))


def sentences(
    incidents: list[dict[str, Any]], actions: list[dict[str, Any]]
) -> list[tuple[tuple[str, str], str]]:
    """((id, step), sentence) for every step told so far, oldest first."""
    told: list[tuple[tuple[str, str], str]] = []
    for row in reversed(incidents):
        again = " again" if row["reopened"] else ""
        told.append(((row["id"], f"opened {row['reopened']}"), f"▲ detected{again}: {row['what']}"))
        if (because := row.get("because")) and not row["part_of"]:
            # “TTFT p99 is 2 s because …” says it already.
            link = "" if " because " in because or row["cause"] == "unknown" else "because "
            told.append(((row["id"], "because " + row["cause"]), f"  {link}{because}"))
    told += [
        ((row["id"], STEP_OF.get(row["state"], row["state"])), f"◆ {row['sentence']}")
        for row in reversed(actions)
    ]
    told += [
        (
            (row["id"], f"closed {row['closed_at']}"),
            f"● over: “{row['objective_name']}” is met again",
        )
        for row in reversed(incidents)
        if row["state"] == "closed"
    ]
    return told
