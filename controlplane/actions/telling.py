"""What of the actions messages tell: of those of an incident, and where a person must look."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TypedDict
from uuid import UUID

from controlplane.accounts.models import Tenant
from controlplane.actions.left import left_in, left_of
from controlplane.actions.links import links_of
from controlplane.actions.models import Action, State
from controlplane.actions.selectors import (
    actions_of,
    actions_since,
    earlier_of,
    sentence,
    undos_failed,
)
from controlplane.diagnosis.models import Incident
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import commands_of
from gpu_agent.protocol import CommandState


class Deeds(TypedDict):
    """What it had come to before it opened again; the engine acted on, or the incident's; what a
    person may do now; when a change was last taken back, and when one was kept that left something
    nothing more is tried against, or None."""

    earlier: list[str]
    engine: str
    links: Mapping[str, str]
    undone_at: datetime | None
    stuck_since: datetime | None


class Stop(TypedDict):
    """An engine the autopilot leaves alone, the action it is `about`, and what a person may do."""

    about: UUID
    engine: Engine
    incident: Incident | None
    doing: str
    links: Mapping[str, str]


def deeds_of(incident: Incident, now: datetime) -> tuple[list[str], Deeds]:
    """What is being done about the incident in words, at the end all that was done, and the rest.

    While it burns that is the newest action and the one undone last: who reads nothing but messages
    has to learn that what they were told is no more. Of a kept one also what it left. What was done
    before it opened again is told apart.
    """
    acted = actions_of(incident)
    lately = actions_since(acted, incident.run_since)
    undone = [action for action in lately if _undone(action)]
    told = lately if incident.closed_at else list(dict.fromkeys([*undone[-1:], *lately[-1:]]))
    left = left_of(incident, acted)
    before = left_in(incident, incident.runs[-2], acted) if incident.reopened else None
    deeds = Deeds(
        earlier=earlier_of(incident, acted, before),
        engine=acted[-1].engine.name if acted else incident.scope,
        links=links_of(acted[-1], now) if acted else {},
        undone_at=max((a.ended_at for a in undone if a.ended_at), default=None),
        stuck_since=left.kept_at if left and not left.until else None,
    )
    done = list(map(sentence, told))
    return [*done, left.words, *left.nearest] if left else done, deeds


def stops_of(tenant: Tenant, now: datetime) -> list[Stop]:
    """Where an undo failed and nobody has looked yet, oldest first."""
    return [
        Stop(
            about=failed.pk,
            engine=failed.engine,
            incident=failed.incident,
            doing=sentence(failed),
            links=links_of(failed, now),
        )
        for failed in undos_failed(tenant)
    ]


def _undone(action: Action) -> bool:
    """Whether it took back what had been changed: a trial by its end, a kept change by another.

    A trial may be over before its agent was heard of at all, who says so then.
    """
    if action.state == State.ROLLED_BACK:
        words = (command.result_state for command in commands_of(action.pk).values())
        return action.applied_at is not None or CommandState.REVERTED in words
    return action.state == State.VERIFIED and action.undoes_id is not None
