"""Sets the scene for the causes: which engine, which windows, what changed meanwhile."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.scene import Change, EngineFacts, ObjectiveFacts, Scene
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engines_of
from slo.models import Objective, Reading
from tracing.types import Grid, Reader, Series

INCIDENT_WINDOWS_MAX = 20
REFERENCE_WINDOWS_MAX = 20


def engine_of(incident: Incident) -> Engine | None:
    """The engine an incident is about: its scope, the service's only one, else the worst one.

    Worst: most bad events since it became bad. None when no agent reads such an engine.
    """
    engines = engines_of(incident.tenant, service=incident.objective.service)
    if incident.scope:
        return next((e for e in engines if e.name == incident.scope), None)
    if len(engines) <= 1:
        return next(iter(engines), None)
    bad: dict[str, float] = {}
    rows = Reading.objects.filter(
        objective=incident.objective, window_end__gt=incident.run_since
    ).exclude(scope="")
    for reading in rows:
        bad[reading.scope] = bad.get(reading.scope, 0) + max(0.0, reading.total - reading.good)
    return max(engines, key=lambda e: bad.get(e.name, 0.0))


def scene_of(*, incident: Incident, reader: Reader, now: datetime) -> Scene | None:
    """The incident as a Scene; None while no window of it has been read."""
    newest = (
        Reading.objects.filter(objective=incident.objective, scope=incident.scope)
        .order_by("-window_end")
        .first()
    )
    if newest is None or newest.window_end <= incident.run_since:
        return None
    window = timedelta(seconds=newest.window_s)
    engine = _engine_facts(incident)
    # The window before the first bad one is the onset: neither before nor during.
    onset, end = incident.bad_since - window, newest.window_end
    past = onset - REFERENCE_WINDOWS_MAX * window
    recent = Grid(max(past, end - 2 * INCIDENT_WINDOWS_MAX * window), end, newest.window_s)
    changes = _changes(reader, engine, recent)
    start = max(incident.run_since, end - INCIDENT_WINDOWS_MAX * window)
    if changes:
        # What was true under other settings explains nothing now; the window of the change is
        # half old, so the first whole one after it starts the scene.
        start = max(start, min(changes[-1].at, end - window))
    return Scene(
        reader=reader,
        now=now,
        engine=engine,
        objective=objective_facts(incident.objective),
        bad_since=incident.run_since,
        incident=Grid(start, end, newest.window_s),
        reference=Grid(past, onset, newest.window_s),
        changes=changes,
    )


def objective_facts(objective: Objective) -> ObjectiveFacts:
    threshold = objective.spec.get("threshold_ms")
    return ObjectiveFacts(
        slug=objective.slug,
        name=objective.name,
        indicator=objective.indicator,
        spec=objective.spec,
        target=objective.target,
        threshold_ms=float(threshold) if threshold is not None else None,
    )


def _engine_facts(incident: Incident) -> EngineFacts:
    service = incident.objective.service
    engine = engine_of(incident)
    if engine is None:
        return EngineFacts(incident.scope, service, {}, {})
    return EngineFacts(engine.name, service, engine.values, engine.knobs, engine.config_version)


def _changes(reader: Reader, engine: EngineFacts, grid: Grid) -> tuple[Change, ...]:
    """Knobs seen to move, oldest first, whoever moved them; `at` is the window's end."""
    series = reader.gauge(
        "engine:knob",
        grid,
        where={"service": engine.service, "instance": engine.name},
        by=("knob",),
        over="last",
    )
    found = [change for one in series for change in _moves(one, grid.ends())]
    return tuple(sorted(found, key=lambda change: change.at))


def _moves(series: Series, ends: list[datetime]) -> list[Change]:
    found, last = [], math.nan
    for end, value in zip(ends, series.values, strict=False):
        if math.isnan(value):
            continue
        if not math.isnan(last) and value != last:
            found.append(Change(series.labels.get("knob", ""), last, float(value), end))
        last = float(value)
    return found
