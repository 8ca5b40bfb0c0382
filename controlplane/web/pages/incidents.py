"""/incidents/ and /incidents/<id>/: what went wrong, why, what was done, what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any
from uuid import UUID

from django.http import Http404, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from controlplane.actions.models import Action
from controlplane.actions.orders import verbs_open
from controlplane.diagnosis.models import Diagnosis, Evidence, Incident
from controlplane.diagnosis.selectors import Rival, incident_get, incidents_recent
from controlplane.web.access import TenantRequest, minutes_of, page, send
from controlplane.web.charts import RANGES, questions
from controlplane.web.story import lines_of
from controlplane.web.templatetags.ui import duration
from slo.budget import Counts
from slo.burn import PAIRS
from slo.indicator import Unit
from slo.selectors import counts_between

INCIDENTS_MAX = 100
BEFORE = timedelta(hours=1)


@dataclass(frozen=True)
class Compared:
    """What an action's verification counted, before and after; bad shares of so many `unit`."""

    before: float | None
    after: float | None
    before_total: int
    after_total: int
    unit: Unit
    p_value: float | None
    looks: int
    sentence: str
    price: tuple[dict[str, Any], ...] = ()  # what other promises lost, as Action.outcome has it

    @property
    def by_chance(self) -> float | None:
        """How likely the fall from before to after would be had the change done nothing."""
        if self.before is None or self.after is None or self.after >= self.before:
            return None
        return self.p_value


@page
def incidents(request: TenantRequest) -> HttpResponse:
    lines = lines_of(incidents_recent(request.tenant, INCIDENTS_MAX))
    is_open = any(line.incident.state == Incident.State.OPEN for line in lines)
    context = {"lines": lines, "page_state": "bad" if is_open else "ok"}
    return send(request, "incidents.html", context, parts=("list",))


@page
def incident(request: TenantRequest, incident_id: UUID) -> HttpResponse:
    """Raises Http404 for another tenant's incident as for one that never was."""
    try:
        found = incident_get(request.tenant, incident_id)
    except Incident.DoesNotExist:
        raise Http404(f"incident {incident_id} is not one of {request.tenant}") from None
    (line,) = lines_of([found])
    told, minutes = line.told, minutes_of(request, _minutes_around(found))

    # Templates call what they use, once: a part that is fetched again costs only itself.
    @cache
    def actions() -> list[tuple[Action, Compared | None, tuple[str, ...], Explained | None]]:
        return [
            (done, compared(done), verbs_open(done), _explained(done, found, told.diagnosis))
            for done in reversed(line.actions)
        ]

    context = {
        "line": line,
        "incident": found,
        "counted": _counted(found),
        "before": cache(lambda: _before(found)),
        "axis": _axis([*told.evidence_for, *told.evidence_against], told.rivals),
        "look_axis": _axis([], told.nearest),
        "actions": actions,
        "judged": lambda: any(counts is not None for _action, counts, *_more in actions()),
        "charts": questions(found.objective),
        "minutes": minutes,
        "ranges": RANGES,
        "page_state": {"bad": "bad", "act": "act", "ok": "ok"}[line.state],
    }
    return send(request, "incident.html", context, parts=("story", "reasons"))


@dataclass(frozen=True)
class Explained:
    """What a change was made for, with the evidence for and against it."""

    diagnosis: Diagnosis
    evidence: list[Evidence]

    @property
    def axis(self) -> tuple[float, float]:
        return _axis(self.evidence, [])


def _explained(action: Action, found: Incident, shown: Diagnosis | None) -> Explained | None:
    """None where the page shows that explanation already, or another of the same cause, for what
    the action was made for; and of an action that was made for none."""
    if shown is not None and action.cause in shown.causes and action.created_at >= found.run_since:
        return None
    made = found.diagnoses.filter(made_at__lte=action.created_at).prefetch_related("evidence")
    acted_on = next((diagnosis for diagnosis in made if action.cause in diagnosis.causes), None)
    if acted_on is None:
        return None
    evidence = [row for row in acted_on.evidence.all() if row.cause == action.cause]
    return Explained(acted_on, evidence)


def _counted(found: Incident) -> str:
    """From when on the headline counts; what missed before stands in the budget alone."""
    pair = next((pair for pair in PAIRS if found.trigger == f"burn {pair.name}"), None)
    if pair is None:
        return _("Counted from the start of the bad control windows in a row that opened it.")
    words = _("Counted from the first window that was not good when %(long)s burned too fast.")
    return words % {"long": duration(pair.long_s)}


def _before(found: Incident) -> Counts | None:
    """What missed in the hour before; None where that has an episode, which is told by itself."""
    if found.reopened:
        return None
    return counts_between(
        objective=found.objective,
        scope=found.scope,
        since=found.bad_since - BEFORE,
        until=found.bad_since,
    )


def _minutes_around(found: Incident) -> int:
    """The smallest range that still shows the incident's beginning."""
    age = (timezone.now() - found.bad_since + timedelta(minutes=5)).total_seconds() / 60
    return next((minutes for minutes in RANGES if minutes >= age), max(RANGES))


def _axis(named: Sequence[Evidence], rivals: Sequence[Rival]) -> tuple[float, float]:
    """First and last time of one look's evidence, whose sparklines share it (unix seconds)."""
    rows = [*named, *(row for rival in rivals for row in rival.evidence)]
    times = [point[0] for row in rows for point in row.points]
    return (min(times), max(times)) if times else (0.0, 1.0)


def compared(action: Action) -> Compared | None:
    """None until the verification has counted something."""
    before, after = (_counts(action.outcome.get(side)) for side in ("before", "after"))
    if before is None or after is None:
        return None
    return Compared(
        before=_bad_share(before),
        after=_bad_share(after),
        before_total=round(before[1]),
        after_total=round(after[1]),
        unit=Unit(*action.outcome["unit"]),
        p_value=action.outcome.get("p_value"),
        looks=int(action.outcome.get("looks") or 0),
        sentence=str(action.outcome.get("sentence", "")),
        price=tuple(action.outcome.get("price", ())),
    )


def _counts(side: Any) -> tuple[float, float] | None:
    if not isinstance(side, dict) or side.get("total") is None:
        return None
    return float(side.get("good") or 0), float(side["total"])


def _bad_share(counts: Sequence[float]) -> float | None:
    good, total = counts
    return max(total - good, 0.0) / total if total else None
