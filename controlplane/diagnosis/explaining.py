"""Writes down what explains an incident, and which incidents tell one story."""

from __future__ import annotations

import dataclasses
import logging
from datetime import datetime
from typing import Any

from django.db import transaction

from controlplane.diagnosis.cause import UNKNOWN, Finding, causes
from controlplane.diagnosis.models import Diagnosis, Evidence, Incident
from controlplane.diagnosis.ranking import Ranking, rank
from controlplane.diagnosis.scene import Scene
from controlplane.diagnosis.selectors import diagnosis_of, leads
from controlplane.diagnosis.staging import overlapping, scene_of
from tracing.types import Reader

log = logging.getLogger(__name__)


def incident_explain(*, incident: Incident, reader: Reader, now: datetime) -> Diagnosis | None:
    """Examines every cause and stores what is named with its evidence and its rivals.

    Then it is known whether another incident tells the same story; if so this one joins it.
    `unknown` when none reaches its bar. None when there is nothing to act on here: no window of the
    incident has been read, its engine was not measured in the newest, so that what was found before
    stands, or it is part of another one's story, which is acted on instead.
    """
    scene = scene_of(incident=incident, reader=reader, now=now)
    if scene is None or _unseen(incident, scene):
        return None
    ranking = rank([cause.examine(scene) for cause in causes().values()])
    example = _example_trace(scene)
    with transaction.atomic():
        diagnosis = Diagnosis.objects.create(
            incident=incident,
            made_at=now,
            window_start=scene.incident.start,
            window_end=scene.incident.end,
            **_columns(ranking),
        )
        Evidence.objects.bulk_create(_evidence(diagnosis, ranking))
        if example:
            incident.example_trace_id = example
            incident.save(update_fields=["example_trace_id", "updated_at"])
    # A prefetched list of explanations would hide the one just made.
    getattr(incident, "_prefetched_objects_cache", {}).pop("diagnoses", None)
    incident_join(incident=incident, diagnosis=diagnosis)
    return diagnosis if leads(incident, now=now) else None


def _unseen(incident: Incident, scene: Scene) -> bool:
    """Whether nothing is known of the engine now that was known of it before, which is noted.

    Requests may be heard of all the same: their spans need no agent.
    """
    before, seen = diagnosis_of(incident), scene.measured_until
    if before is None or seen is None or seen >= scene.incident.ends()[-1]:
        return False
    told = f"nothing was measured of {scene.engine.name} since {seen:%H:%M:%S} UTC"
    diagnosis_note(diagnosis=before, no_action=f"{told}, so nothing is changed")
    return True


def incident_join(*, incident: Incident, diagnosis: Diagnosis) -> None:
    """Makes the incident part of the one opened first with the same engine, time and cause.

    But not one that wishes for a remedy part of one that does not: a part's is not taken. A new
    cause of its own takes it out again; an unknown one says nothing.
    """
    if diagnosis.cause == UNKNOWN:
        return
    first = next(
        (
            other
            for other in overlapping(incident)
            if other.part_of_id is None
            and (other.opened_at, other.pk) < (incident.opened_at, incident.pk)
            and _tells_of(other, diagnosis)
        ),
        None,
    )
    if incident.part_of_id == (first.pk if first else None):
        return
    incident.part_of = first
    incident.save(update_fields=["part_of", "updated_at"])
    if first is not None:
        incident.parts.update(part_of=first)
        log.info("incident %s: part of %s", incident, first)


def diagnosis_note(
    *, diagnosis: Diagnosis, no_action: str, next_try_at: datetime | None = None
) -> None:
    """Writes why nothing is done about it, and until when; an empty text takes it back."""
    until = next_try_at.isoformat() if next_try_at else ""
    if diagnosis.facts.get("no_action", "") == no_action:
        return
    diagnosis.facts = diagnosis.facts | {"no_action": str(no_action), "next_try_at": until}
    diagnosis.save(update_fields=["facts"])


def diagnosis_confirm(*, incident: Incident, cause: str, acted_at: datetime) -> None:
    """Marks the explanation a kept change was made for; idempotent.

    It stays the one told when what is left after the change cannot be explained.
    """
    known = incident.diagnoses.filter(made_at__lte=acted_at)
    acted_on = next((diagnosis for diagnosis in known if cause in diagnosis.causes), None)
    if acted_on is not None and not acted_on.cured:
        acted_on.cured = True
        acted_on.save(update_fields=["cured"])


def _columns(ranking: Ranking) -> dict[str, Any]:
    """The columns of a Diagnosis: what is named, else `unknown`."""
    best, named = ranking.best, ranking.named
    facts = dict(best.facts)
    remedy = [dataclasses.asdict(wish) | {"cause": f.cause} for f in named for wish in f.remedy]
    if not remedy:
        facts["no_action"] = best.no_remedy or "nothing is changed without a known cause"
    return {
        "cause": best.cause,
        "score": best.score,
        "because": ranking.because,
        "verdict": best.verdict,
        "facts": facts,
        "also": [_brief(finding) for finding in named[1:]],
        "rivals": [_brief(finding) for finding in ranking.rivals],
        "remedy": remedy,
    }


def _brief(finding: Finding) -> dict[str, Any]:
    return {
        "cause": finding.cause,
        "score": finding.score,
        "because": finding.because,
        "no_remedy": "" if finding.remedy else finding.no_remedy,
    }


def _tells_of(first: Incident, diagnosis: Diagnosis) -> bool:
    """Whether it names this cause, and wishes for a remedy as well if this one does."""
    newest = first.diagnoses.first()
    if newest is None or diagnosis.cause not in newest.causes:
        return False
    return bool(newest.remedy) or not diagnosis.remedy


def _evidence(diagnosis: Diagnosis, ranking: Ranking) -> list[Evidence]:
    return [
        Evidence(
            diagnosis=diagnosis,
            cause=finding.cause,
            supports=fact.supports,
            sentence=fact.sentence,
            metric=fact.metric,
            unit=fact.unit,
            before=fact.before,
            value=fact.value,
            threshold=fact.threshold,
            points=[list(point) for point in fact.points],
        )
        for finding in ranking.named + ranking.rivals
        for fact in finding.evidence
    ]


def _example_trace(scene: Scene) -> str:
    """The slowest request of the incident by what the objective measures; "" when none is kept."""
    spec = scene.objective.spec
    slowest = scene.reader.spans(
        scene.incident.start,
        scene.incident.end,
        service=scene.engine.service,
        instance=scene.engine.name or None,
        name=str(spec.get("span", "llm_request")),
        measure=SPAN_MEASURE.get(scene.objective.measures, "duration"),
        slowest=True,
        limit=1,
    )
    return slowest[0].trace_id if slowest else ""


SPAN_MEASURE = {
    "ttft": "gen_ai.latency.time_to_first_token",
    "tpot": "gen_ai.latency.time_per_output_token",
    "e2e": "gen_ai.latency.e2e",
}
