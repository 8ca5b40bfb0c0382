"""The words of a message: pure, from an incident's story to what a receiver is sent.

docs/alerts.md describes every member of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from django.conf import settings
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from controlplane.alerts.models import Channel, Delivery
from controlplane.diagnosis.models import Episode, Incident, Severity
from controlplane.diagnosis.selectors import Story
from controlplane.fleet.models import Engine

MEMBERS_TOLD_MAX = 5
MEMBERS_MAX = 50  # named in full: a message that is too long for its way tells nobody anything
Event: TypeAlias = Delivery.Event


def severity_of(incidents: Iterable[Incident]) -> Severity:
    """The most urgent of those that are told as one."""
    pages = any(incident.severity == Severity.PAGE for incident in incidents)
    return Severity.PAGE if pages else Severity.TICKET


def compose(
    event: Event,
    *,
    incident: Incident,
    members: Sequence[Incident],
    story: Story,
    doing: str,
    earlier: Sequence[str],
    engine: str,
    links: Mapping[str, str],
    stuck_since: datetime | None,
    now: datetime,
) -> dict[str, Any]:
    """The message of `event` about the first incident of a group, the others in `members`."""
    over_at = max((i.closed_at for i in (incident, *members) if i.closed_at), default=None)
    until = over_at if event == Event.RESOLVED and over_at else now
    run = incident.run
    alone = _("It ended without a change of ours") if event == Event.RESOLVED else ""
    parts = [story.what, story.because, doing or alone, *earlier]
    named = {hit.incident.pk for hit in story.hits}
    if unnamed := [member for member in members if member.pk not in named]:
        parts.append(_with_it(unnamed))
    return {
        "event": f"incident.{event.value}",
        "severity": severity_of((incident, *members)).value,
        "title": _title(event, incident, story, _lasted(run, until)),
        "text": sentences(*parts),
        "what": sentences(story.what),
        "incident": str(incident.pk),
        "incident_url": _url(f"incidents/{incident.pk}/"),
        "trace_url": _trace_url(incident),
        "members": [
            {
                "incident": str(member.pk),
                "objective": member.objective.name,
                "engine": member.scope,
                "incident_url": _url(f"incidents/{member.pk}/"),
            }
            for member in members[:MEMBERS_MAX]
        ],
        "objective": incident.objective.name,
        "service": incident.objective.service,
        "engine": engine,
        "cause": story.cause_now,
        "action": doing,
        "actions": dict(links),
        "stuck_since": stamp(stuck_since) if stuck_since else "",
        "bad_since": stamp(run.bad_since),
        "lasted_s": round((until - run.bad_since).total_seconds()),
        "unmeasured_s": round(run.unwatched.total_seconds()),
        "at": stamp(now),
    }


def compose_stop(
    *,
    engine: Engine,
    incident: Incident | None,
    doing: str,
    links: Mapping[str, str],
    now: datetime,
) -> dict[str, Any]:
    """What people are paged with where the autopilot has stopped until one of them looks."""
    page = f"incidents/{incident.pk}/" if incident else "actions/?state=rollback_failed"
    return {
        "event": f"autopilot.{Event.STOPPED.value}",
        "severity": Severity.PAGE.value,
        "title": _("The autopilot has stopped on %s: a change could not be undone") % engine.name,
        "text": sentences(doing),
        "what": "",
        "incident": str(incident.pk) if incident else "",
        "incident_url": _url(page),
        "trace_url": "",
        "service": engine.service,
        "engine": engine.name,
        "action": doing,
        "actions": dict(links),
        "at": stamp(now),
    }


def compose_test(channel: Channel, *, by: str, now: datetime) -> dict[str, Any]:
    """What a channel is sent to see whether it works."""
    # True wherever it is read: by the receiver, or in the log of what did not arrive.
    words = _("%(by)s sends “%(name)s” a test. There is no incident, and nothing to do.")
    return {
        "event": "channel.test",
        "severity": Severity.TICKET.value,
        "title": _("A test from Trimtab"),
        "text": words % {"by": by, "name": channel.name},
        "what": "",
        "incident_url": _url(""),
        "trace_url": "",
        "actions": {},
        "at": stamp(now),
    }


def stamp(at: datetime) -> str:
    return at.astimezone(UTC).isoformat()


def sentences(*parts: str) -> str:
    """Joined, each with a capital letter, unless a knob comes first, and a full stop as its own
    writing has it; empty parts are left out."""
    whole = [
        part if "_" in part.split()[0] else part[0].upper() + part[1:] for part in parts if part
    ]
    return " ".join(
        part if part.endswith((".", "…", "。")) else part + _stop(part) for part in whole
    )


def _stop(part: str) -> str:
    return "。" if "\u4e00" <= part[-1] <= "\u9fff" else "."


def duration(lasted: timedelta) -> str:
    """In words, one unit below an hour and two above."""
    seconds = max(0, round(lasted.total_seconds()))
    if seconds < 90:
        return ngettext("%d second", "%d seconds", seconds) % seconds
    minutes = round(seconds / 60)
    if minutes < 90:
        return ngettext("%d minute", "%d minutes", minutes) % minutes
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return _("%(hours)d h %(minutes)d min") % {"hours": hours, "minutes": minutes}
    days, hours = divmod(hours, 24)
    return _("%(days)d d %(hours)d h") % {"days": days, "hours": hours}


def _lasted(run: Episode, until: datetime) -> str:
    """How long it was seen to go on, and how long nobody looked."""
    seen = duration(until - run.bad_since - run.unwatched)
    if not run.unwatched:
        return seen
    words = _("%(seen)s, and %(unseen)s not measured")
    return words % {"seen": seen, "unseen": duration(run.unwatched)}


def _title(event: Event, incident: Incident, story: Story, lasted: str) -> str:
    where = incident.scope or incident.objective.service
    facts = {
        "title": story.what,
        "lasted": lasted,
        "what": _("“%(objective)s” on %(where)s")
        % {"objective": incident.objective.name, "where": where},
    }
    if event == Event.RESOLVED and incident.lapsed:
        return _("Closed, its end unseen, after %(lasted)s: %(what)s") % facts
    if event == Event.RESOLVED:
        return _("Over after %(lasted)s: %(what)s") % facts
    if event == Event.REMINDED and story.blind:
        return _("Still open after %(lasted)s: %(title)s") % facts
    if event == Event.UNDONE and story.blind:
        return _("Change undone, still open after %(lasted)s: %(title)s") % facts
    if event == Event.REMINDED:
        return _("Still burning after %(lasted)s: %(title)s") % facts
    if event == Event.UNDONE:
        return _("Change undone, still burning after %(lasted)s: %(title)s") % facts
    if event == Event.STUCK:
        return _("Change kept, not enough after %(lasted)s: %(title)s") % facts
    if event == Event.ASKED:
        return _("Approval wanted: %(title)s") % facts
    return _("Burning again: %(title)s") % facts if incident.reopened else story.what


def _with_it(members: Sequence[Incident]) -> str:
    named = [f"“{m.objective.name}” on {m.scope or m.objective.service}" for m in members]
    more = len(named) - MEMBERS_TOLD_MAX
    listed = ", ".join(named[:MEMBERS_TOLD_MAX])
    if more > 0:
        listed += ngettext(" and %d more", " and %d more", more) % more
    return _("With it: %s") % listed


def _url(path: str) -> str:
    return f"{settings.TRIMTAB_PUBLIC_URL}/{path}"


def _trace_url(incident: Incident) -> str:
    return _url(f"traces/{incident.example_trace_id}/") if incident.example_trace_id else ""
