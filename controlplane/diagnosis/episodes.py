"""The episodes of an incident: what was counted in each, and from when to when it was."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import F, QuerySet, Sum, Window
from django.db.models.functions import Greatest, Lag
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from controlplane.diagnosis.models import Episode, Incident
from slo.models import Reading
from slo.readings import MEASURED

HOLE_WINDOWS = 4  # a scrape or two that failed is no news
HOLES_MAX = 20


def recount(incident: Incident) -> None:
    """Bad and total events of its newest run, and the stretches of it that were not measured."""
    rows = Reading.objects.filter(
        objective=incident.objective, scope=incident.scope, window_end__gt=incident.run_since
    )
    sums = rows.aggregate(all=Sum("total"), bad=Sum(Greatest(F("total") - F("good"), 0.0)))
    incident.total_events = sums["all"] or 0
    incident.bad_events = sums["bad"] or 0
    incident.unmeasured = _holes(rows)
    incident.save(update_fields=["total_events", "bad_events", "unmeasured", "updated_at"])


def _holes(rows: QuerySet[Reading]) -> list[list[str]]:
    """[from, to] of each stretch of HOLE_WINDOWS and more between two windows that were measured;
    the newest HOLES_MAX, oldest first."""
    measured = rows.filter(signal__in=MEASURED).annotate(
        former=Window(Lag("window_end"), order_by="window_end")
    )
    wide = timedelta(seconds=HOLE_WINDOWS * settings.TRIMTAB_CONTROL_WINDOW_S)
    found = measured.filter(window_end__gt=F("former") + wide).order_by("-window_end")[:HOLES_MAX]
    return [
        [row.former.isoformat(), (row.window_end - timedelta(seconds=row.window_s)).isoformat()]
        for row in reversed(found)
    ]


def earlier_words(incident: Incident) -> str:
    """How much was missed in the episode before the newest, "" where it is the first."""
    *earlier, _newest = incident.runs
    if not earlier:
        return ""
    last = earlier[-1]
    words = ngettext(
        "before, %(bad)s of %(total)s %(counted)s missed it %(when)s",
        "before, the last of %(times)d times, %(bad)s of %(total)s %(counted)s missed it %(when)s",
        len(earlier),
    )
    return words % {
        "times": len(earlier),
        "bad": f"{last.bad_events:,.0f}",
        "total": f"{last.total_events:,.0f}",
        "counted": _(incident.objective.unit.word(last.total_events)),
        "when": when(last),
    }


def when(episode: Episode, *, end_seen: bool = True) -> str:
    """Since when, once it was seen to end from when to when, and what of it nobody watched."""
    since = {"since": clock(episode.bad_since)}
    if episode.closed_at is None or not end_seen:
        said = _("since %(since)s") % since
    else:
        said = _("from %(since)s to %(until)s") % {**since, "until": clock(episode.closed_at)}
    if not episode.holes:
        return said
    newest = ", ".join(f"{clock(start)}–{clock(end)}" for start, end in episode.holes[-2:])
    more = "… " if len(episode.holes) > 2 else ""
    return _("%(when)s (not measured %(holes)s)") % {"when": said, "holes": more + newest}


def clock(at: datetime) -> str:
    """The time of day as every sentence has it."""
    return f"{timezone.localtime(at):%H:%M:%S}"
