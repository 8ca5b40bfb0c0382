"""Reads incidents and tells their story in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db.models import Prefetch, Q, QuerySet
from django.utils.translation import gettext as _

from controlplane.accounts.models import Tenant
from controlplane.diagnosis import cause as contract
from controlplane.diagnosis.episodes import clock, when
from controlplane.diagnosis.models import Diagnosis, Episode, Evidence, Incident
from slo.models import Objective, Reading
from tracing.types import Signal

RECENT_MAX = 500
PART_WAITS_WINDOWS = 4  # a part still burning so long after its story ended is told by itself


@dataclass(frozen=True)
class Rival:
    """A cause that was examined and not named, with what was measured for and against it."""

    cause: str
    label: str
    score: float
    because: str
    evidence: list[Evidence]


@dataclass(frozen=True)
class Hit:
    """An objective the story is about: how it fared since it became bad."""

    incident: Incident
    objective: str
    bad: float
    total: float


@dataclass(frozen=True)
class Blind:
    """Since when nothing is known of an open incident: not measured, or nothing came."""

    since: datetime
    signal: Signal


@dataclass(frozen=True)
class Story:
    """An incident in words; actions' part is told by actions.selectors.

    `because` is empty until explained, and tells of a second fault as well; `also` lists it.
    `no_action` says why nothing is tried, as the newest look found, whatever explanation is told;
    `look` is that one where it goes on unexplained after what is told was cured. `blind` is there
    while nobody knows whether it goes on at all. `verdict` is empty, or "infeasible". `hits` are
    the incident and those that are part of it. The evidence is read when it is asked for: only the
    page of one incident shows it.
    """

    what: str
    because: str = ""
    cause: str = ""
    cause_label: str = ""
    score: float = 0.0
    no_action: str = ""
    verdict: str = ""
    hits: list[Hit] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    look: Diagnosis | None = None
    blind: Blind | None = None

    @property
    def cause_now(self) -> str:
        """The label of what the newest look found, whatever was cured before."""
        return cause_label(self.look.cause) if self.look else self.cause_label

    @property
    def label(self) -> str:
        """The cause in a few words, and whether it is still the one."""
        if self.look is None:
            return self.cause_label
        return _("%(cause)s, cured; the rest unexplained") % {"cause": self.cause_label}

    @property
    def evidence_for(self) -> list[Evidence]:
        return [e for e in self._evidence if e.cause == self.cause and e.supports]

    @property
    def evidence_against(self) -> list[Evidence]:
        return [e for e in self._evidence if e.cause == self.cause and not e.supports]

    @property
    def also(self) -> list[Rival]:
        return _told(self.diagnosis.also, self._evidence) if self.diagnosis else []

    @property
    def rivals(self) -> list[Rival]:
        return _rivals(self.diagnosis, self._evidence) if self.diagnosis else []

    @cached_property
    def nearest(self) -> list[Rival]:
        """What `look` examined, the nearest cause first."""
        return _rivals(self.look, list(self.look.evidence.all())) if self.look else []

    @property
    def advice(self) -> str:
        """What a person can do about what `look` did not explain."""
        return advice(self.look) if self.look else ""

    @cached_property
    def _evidence(self) -> list[Evidence]:
        if self.diagnosis is None:
            return []
        return list(self.diagnosis.evidence.all())


def incidents_open(tenant: Tenant) -> list[Incident]:
    """Open incidents, oldest first."""
    return list(_incidents(tenant).filter(state=Incident.State.OPEN).order_by("opened_at", "id"))


def incidents_recent(tenant: Tenant, limit: int = 50) -> list[Incident]:
    """Newest first, open or closed; at most RECENT_MAX."""
    return list(_incidents(tenant).order_by("-opened_at", "id")[: min(limit, RECENT_MAX)])


def incidents_asked(
    tenant: Tenant,
    *,
    state: str | None = None,
    objective: str | None = None,
    engine: str | None = None,
    since: datetime | None = None,
) -> QuerySet[Incident]:
    """Those that fit everything given: the objective's slug, the engine's name, opened `since`."""
    given = {
        "state": state, "objective__slug": objective, "scope": engine, "opened_at__gte": since,
    }  # fmt: skip
    return _incidents(tenant).filter(**{k: v for k, v in given.items() if v is not None})


def incidents_during(
    tenant: Tenant, *, service: str, engine: str, since: datetime, until: datetime
) -> list[Incident]:
    """Those of the engine, or of its whole service, that went on at some time in between; oldest
    first."""
    rows = _incidents(tenant).filter(
        Q(closed_at=None) | Q(closed_at__gte=since),
        objective__service=service,
        scope__in=("", engine),
        bad_since__lte=until,
    )
    return list(rows.order_by("opened_at", "id")[:RECENT_MAX])


def incidents_of(objective: Objective, limit: int = 50) -> list[Incident]:
    """Newest first, of one objective."""
    rows = _incidents(objective.tenant).filter(objective=objective)
    return list(rows.order_by("-opened_at", "id")[: min(limit, RECENT_MAX)])


def incident_get(tenant: Tenant, incident_id: UUID | str) -> Incident:
    """Raises Incident.DoesNotExist; another tenant's incident does not exist."""
    return _incidents(tenant).get(pk=incident_id)


def diagnosis_of(incident: Incident) -> Diagnosis | None:
    """The current explanation: the newest of what goes on, and of no earlier episode."""
    return next(iter(diagnoses_in(incident, incident.run)), None)


def diagnoses_in(incident: Incident, episode: Episode) -> list[Diagnosis]:
    """The explanations made in one episode, newest first."""
    end = episode.closed_at
    return [
        made
        for made in incident.diagnoses.all()
        if episode.opened_at <= made.made_at and (end is None or made.made_at <= end)
    ]


def explanation_of(incident: Incident, episode: Episode | None = None) -> Diagnosis | None:
    """The explanation that is told of an episode, or the newest: the last one made, unless that is
    `unknown` and a change was kept.

    What is left unexplained after a kept change takes nothing back from what it cured.
    """
    made = diagnoses_in(incident, episode or incident.run)
    if not made or made[0].cause != contract.UNKNOWN:
        return made[0] if made else None
    return next((diagnosis for diagnosis in made if diagnosis.cured), made[0])


def diagnosis_due(incident: Incident, *, now: datetime, acted_at: datetime | None = None) -> bool:
    """Whether the incident wants a new explanation.

    Not explained yet, or the last action (ended at `acted_at`) has two windows of new facts behind
    it, or a quarter of its episode's age has passed: the longer it lasts the rarer it is asked,
    so an incident open for days keeps tens of explanations, not thousands. While windows are good,
    nothing goes on that could be explained; while none is measured, nothing is known that could
    take back what was.
    """
    return _look_due(incident, now, acted_at) and blind_of(incident) is None


def _look_due(incident: Incident, now: datetime, acted_at: datetime | None) -> bool:
    window_s = settings.TRIMTAB_CONTROL_WINDOW_S
    last = diagnosis_of(incident)
    if last is None:
        return True
    if incident.good_windows:
        return False
    if acted_at is not None and acted_at > last.made_at:
        return now >= looks_again_at(acted_at)
    wait_s = max(window_s, (last.made_at - incident.run.opened_at).total_seconds() / 4)
    return now >= last.made_at + timedelta(seconds=wait_s)


def blind_of(incident: Incident) -> Blind | None:
    """None while the newest window of its scope was measured and something came, or it is over."""
    if incident.state != Incident.State.OPEN:
        return None
    rows = Reading.objects.filter(objective=incident.objective, scope=incident.scope)
    newest = rows.order_by("-window_end").first()
    if newest is None or newest.signal == Signal.OK:
        return None
    signal = Signal(newest.signal)
    known = [Signal.OK] if signal == Signal.NO_TRAFFIC else [Signal.OK, Signal.NO_TRAFFIC]
    last = rows.filter(signal__in=known).order_by("-window_end").first()
    return Blind(last.window_end if last else incident.bad_since, signal)


def looks_again_at(acted_at: datetime) -> datetime:
    """When an action that ended at `acted_at` has two windows of new facts behind it."""
    return acted_at + timedelta(seconds=2 * settings.TRIMTAB_CONTROL_WINDOW_S)


def leads(incident: Incident, *, now: datetime) -> bool:
    """Whether the incident is a story of its own: not part of one that is open or just ended."""
    first = incident.part_of
    if first is None:
        return True
    wait = timedelta(seconds=PART_WAITS_WINDOWS * settings.TRIMTAB_CONTROL_WINDOW_S)
    return first.closed_at is not None and now > first.closed_at + wait


def story_due(incident: Incident, *, now: datetime) -> bool:
    """Whether people are to be told: once explained, and unexplained after two windows.

    An explanation that fails is no reason to keep quiet about what it should explain. What is part
    of another story is told there.
    """
    if not leads(incident, now=now):
        return False
    wait = timedelta(seconds=2 * settings.TRIMTAB_CONTROL_WINDOW_S)
    return diagnosis_of(incident) is not None or now > incident.run.opened_at + wait


def advice(unexplained: Diagnosis) -> str:
    """What a person can do about what is unknown, as the nearest cause has it."""
    nearest: dict[str, Any] = next(iter(unexplained.rivals), {})
    if why := nearest.get("no_remedy"):
        return _("if it is that, %(why)s") % {"why": why}
    return _("no knob is known to help: a person has to look into it")


def cause_label(slug: str) -> str:
    """The translated label of a cause."""
    return _(contract.label(slug))


def story(incident: Incident) -> Story:
    """What went wrong and, once explained, because of what."""
    diagnosis, newest = explanation_of(incident), diagnosis_of(incident)
    hits = [_hit(each) for each in (incident, *incident.parts.all())]
    blind = blind_of(incident)
    what = _what(incident, hits, blind)
    if diagnosis is None or newest is None:
        return Story(what=what, hits=hits, numbers=_numbers(incident), blind=blind)
    return Story(
        what=what,
        because=diagnosis.because,
        cause=diagnosis.cause,
        cause_label=cause_label(diagnosis.cause),
        score=diagnosis.score,
        no_action=_no_action(diagnosis, newest),
        verdict=diagnosis.verdict,
        hits=hits,
        numbers=_numbers(incident) | diagnosis.facts,
        diagnosis=diagnosis,
        look=newest if newest != diagnosis and incident.state == Incident.State.OPEN else None,
        blind=blind,
    )


def _rivals(diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> list[Rival]:
    return [_without_claim(each) for each in _told(diagnosis.rivals, evidence)]


def _without_claim(rival: Rival) -> Rival:
    """What it examined alone: of a rival “TTFT p99 is 2 s because …” is not so."""
    return replace(rival, because=rival.because.partition(" because ")[2] or rival.because)


def _told(findings: Sequence[Mapping[str, Any]], evidence: Sequence[Evidence]) -> list[Rival]:
    return [
        Rival(
            cause=finding["cause"],
            label=cause_label(finding["cause"]),
            score=finding["score"],
            because=finding["because"],
            evidence=[e for e in evidence if e.cause == finding["cause"]],
        )
        for finding in findings
    ]


def _hit(incident: Incident) -> Hit:
    return Hit(incident, incident.objective.name, incident.bad_events, incident.total_events)


def _incidents(tenant: Tenant) -> QuerySet[Incident]:
    parts = Prefetch("parts", Incident.objects.select_related("objective").order_by("opened_at"))
    rows = Incident.objects.filter(tenant=tenant).select_related("objective", "tenant", "part_of")
    return rows.prefetch_related("diagnoses", "episodes", parts)


def _what(incident: Incident, hits: Sequence[Hit], blind: Blind | None) -> str:
    what = _("%(bad)s of %(total)s %(counted)s missed “%(objective)s” on %(scope)s %(when)s") % {
        "bad": f"{incident.bad_events:,.0f}",
        "total": f"{incident.total_events:,.0f}",
        "counted": _(incident.objective.unit.word(incident.total_events)),
        "objective": incident.objective.name,
        "scope": incident.scope or incident.objective.service,
        "when": when(incident.run, end_seen=not incident.lapsed),
    }
    for hit in hits[1:]:
        what += _("; %(bad)s of %(total)s %(counted)s missed “%(objective)s”") % {
            "bad": f"{hit.bad:,.0f}",
            "total": f"{hit.total:,.0f}",
            "counted": _(hit.incident.objective.unit.word(hit.total)),
            "objective": hit.objective,
        }
    if blind is not None:
        what += (
            _("; no requests came there since %(since)s")
            if blind.signal == Signal.NO_TRAFFIC
            else _("; nothing was measured there since %(since)s")
        ) % {"since": clock(blind.since)}
    return f"{what}, {_(incident.lapsed)}" if incident.lapsed else what


def _no_action(told: Diagnosis, newest: Diagnosis) -> str:
    """Why nothing is tried: where the told one is cured, because the rest is not explained."""
    if told != newest:
        return _("what goes on since is not explained, so nothing more is changed")
    return str(newest.facts.get("no_action", ""))


def _numbers(incident: Incident) -> dict[str, Any]:
    total = incident.total_events
    return {
        "bad": incident.bad_events,
        "total": total,
        "bad_share": incident.bad_events / total if total else None,
        "target": incident.objective.target,
    }
