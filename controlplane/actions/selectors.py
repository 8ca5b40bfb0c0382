"""Reads actions and says in words what was done and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from django.db.models import Max, QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from controlplane.accounts.models import Tenant
from controlplane.actions.left import Left
from controlplane.actions.models import IN_FLIGHT, Action, State
from controlplane.actions.standing import overridden_words
from controlplane.actions.verify import share
from controlplane.diagnosis.episodes import earlier_words
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import explanation_of
from controlplane.fleet.models import Engine

RECENT_MAX = 500


def actions_of(incident: Incident) -> list[Action]:
    """The incident's actions, oldest first, with their transitions."""
    return list(actions_all(incident.tenant).filter(incident=incident).order_by("created_at", "id"))


def action_in_flight(engine: Engine) -> Action | None:
    """The one that ranks highest: what runs, or a person's that waits for its undo."""
    rows = Action.objects.filter(engine=engine, state__in=IN_FLIGHT).select_related("engine")
    return max(rows, key=lambda action: action.rank, default=None)


def action_get(tenant: Tenant, action_id: UUID | str) -> Action:
    """Raises Action.DoesNotExist; another tenant's action does not exist."""
    return actions_all(tenant).get(pk=action_id)


def actions_in_flight(tenant: Tenant) -> list[Action]:
    """Oldest first."""
    return list(actions_all(tenant).filter(state__in=IN_FLIGHT).order_by("created_at", "id"))


def actions_recent(tenant: Tenant, limit: int = 50) -> list[Action]:
    """Newest first; at most RECENT_MAX."""
    return list(actions_all(tenant)[: min(limit, RECENT_MAX)])


def undos_failed(tenant: Tenant) -> list[Action]:
    """Those nobody has looked at yet, oldest first."""
    rows = actions_all(tenant).filter(state=State.ROLLBACK_FAILED, cleared_at=None)
    return list(rows.order_by("ended_at", "id"))


def acting(incident: Incident) -> bool:
    """Whether an action of the incident has not come to its end yet."""
    return Action.objects.filter(incident=incident, ended_at=None).exists()


def acted_at(incident: Incident) -> datetime | None:
    """When the incident's newest action ended, None while there is none."""
    ended: datetime | None = incident.actions.aggregate(at=Max("ended_at"))["at"]
    return ended


def actions_since(actions: Sequence[Action], at: datetime) -> list[Action]:
    """Those begun at that time or later, or under way still."""
    return [action for action in actions if action.created_at >= at or not action.ended_at]


def earlier_of(incident: Incident, acted: Sequence[Action], left: Left | None) -> list[str]:
    """What an incident had come to before it opened again, in sentences: how much was missed, what
    explained it, what was done and what that `left`. Of several times the newest; none where it is
    the first."""
    *earlier, run = incident.runs
    if not earlier:
        return []
    explained = explanation_of(incident, earlier[-1])
    lately = actions_since(acted, run.bad_since)
    done = [a for a in actions_since(acted, earlier[-1].bad_since) if a not in lately]
    because = explained.because if explained else ""
    told = [because, *map(sentence, done), left.words if left else ""]
    return [earlier_words(incident), *filter(None, told)]


def sentence(action: Action) -> str:
    """What the action did and what came of it, as one line of the story."""
    # What is kept stands where it is: a way there is no thing to keep.
    kept = action.state == State.VERIFIED
    step = _("%(knob)s at %(to)s (was %(from)s)") if kept else _("%(knob)s from %(from)s to %(to)s")
    steps = ", ".join(
        step % {"knob": knob, "from": change["from"], "to": change["to"]}
        for knob, change in action.changes.items()
    )
    told = _(OUTCOME_WORDS[action.state]) % {"steps": steps, "engine": action.engine.name}
    outcome = str(action.outcome.get("sentence", ""))
    told = f"{told}: {outcome}" if outcome else told
    if short := short_of(action):
        told = _("%(told)s; at most %(predicted)s was predicted") % {
            "told": told,
            "predicted": share(short),
        }
    if over := overridden_words(action):
        told = _("%(told)s; %(over)s") % {"told": told, "over": over}
    if not action.holds:
        return told
    waits = _("the autopilot leaves %s alone until a person has looked") % action.engine.name
    return f"{told}; {waits}"


def short_of(action: Action) -> float | None:
    """The bad share that was predicted at most, where more than that was measured after a change
    that was kept; None elsewhere."""
    most, after = action.predicted.get("bad_share_max"), action.outcome.get("after") or {}
    if action.state != State.VERIFIED or most is None or not after.get("total"):
        return None
    return float(most) if 1 - after["good"] / after["total"] > most else None


# State → its sentence, marked here and translated when told.
OUTCOME_WORDS: dict[str, str] = {
    State.PROPOSED: gettext_noop("Proposes %(steps)s on %(engine)s"),
    State.APPROVED: gettext_noop("Will change %(steps)s on %(engine)s"),
    State.DISPATCHED: gettext_noop("Told the agent to change %(steps)s on %(engine)s"),
    State.ACKNOWLEDGED: gettext_noop("The agent is changing %(steps)s on %(engine)s"),
    State.APPLIED: gettext_noop("Changed %(steps)s on %(engine)s"),
    State.VERIFYING: gettext_noop("Changed %(steps)s on %(engine)s, now checking"),
    State.VERIFIED: gettext_noop("Kept %(steps)s on %(engine)s"),
    State.REJECTED: gettext_noop("Did not change %(steps)s on %(engine)s"),
    State.EXPIRED: gettext_noop("Did not change %(steps)s on %(engine)s"),
    State.FAILED: gettext_noop("Could not change %(steps)s on %(engine)s"),
    State.ROLLING_BACK: gettext_noop("Undoing the change of %(steps)s on %(engine)s"),
    State.ROLLED_BACK: gettext_noop("Undid the change of %(steps)s on %(engine)s"),
    State.ROLLBACK_FAILED: gettext_noop("Could not undo the change of %(steps)s on %(engine)s"),
}


def actions_all(tenant: Tenant) -> QuerySet[Action]:
    """Newest first, each with its engine and its transitions; for the caller to narrow and page."""
    rows = Action.objects.filter(tenant=tenant).select_related("engine", "incident", "tenant")
    return rows.prefetch_related("transitions")
