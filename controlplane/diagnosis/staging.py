"""Sets the scene for the causes: which engine, which windows, what changed meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Q

from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.scene import (
    METRIC_OF,
    RUNNING,
    STEPS_PER_WINDOW,
    Change,
    EngineFacts,
    ObjectiveFacts,
    Scene,
)
from controlplane.fleet.models import Engine
from controlplane.fleet.selectors import engines_of
from slo.budget import Counts, window_is_bad
from slo.models import Objective, Reading
from tracing.types import Grid, Reader, Series

INCIDENT_WINDOWS_MAX = 20
OVERLAPPING_MAX = 20
HAND_WINDOWS = 4  # a change by hand so shortly before the onset may be why
REFERENCE_WINDOWS_MAX = 20
REFERENCE_WINDOWS_MIN = 4  # of fewer good ones between two runs of bad ones, those before both
# What causes read of an engine, which is read at once. Others are asked of the store one by one.
METRICS = (
    *METRIC_OF.values(),
    RUNNING,
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:kv_cache_usage_perc",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_success_total",
    "vllm:admission_rejections_total",
    "vllm:iteration_tokens_total",
    "engine:busy_seconds_total",
    "engine:config_changes_total",
    "engine:forward_cpu_seconds_total",
    "engine:forward_seconds_total",
    "engine:graph_misses_total",
    "engine:graph_steps_total",
    "engine:knob",
    "engine:kv_alloc_stall_blocks",
    "engine:kv_alloc_stall_seconds_total",
    "engine:kv_blocks",
    "engine:kv_compaction_seconds_total",
    "engine:kv_fragmentation_entropy",
    "engine:kv_free_runs",
    "engine:kv_largest_free_run_blocks",
    "engine:kv_stranded_tokens",
    "engine:requests_failed_total",
    "engine:requests_received_total",
    "engine:requests_shed_total",
    "engine:step_decode_tokens_total",
    "engine:step_prefill_tokens_total",
    "engine:step_seconds",
    "engine:steps_total",
)


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


def overlapping(incident: Incident) -> list[Incident]:
    """Other incidents of the same engine at the same time, the first opened first.

    At most OVERLAPPING_MAX, and none that began long before: it is a story of its own.
    """
    window = timedelta(seconds=settings.TRIMTAB_CONTROL_WINDOW_S)
    rows = Incident.objects.filter(
        Q(closed_at=None) | Q(closed_at__gt=incident.bad_since),
        tenant=incident.tenant_id,
        objective__service=incident.objective.service,
        bad_since__gt=incident.bad_since - INCIDENT_WINDOWS_MAX * window,
    ).exclude(pk=incident.pk)
    if incident.closed_at is not None:
        rows = rows.filter(bad_since__lt=incident.closed_at)
    rows = rows.select_related("objective", "tenant", "part_of").order_by("opened_at", "id")
    engine = engine_of(incident)
    found = rows[:OVERLAPPING_MAX]
    return [other for other in found if engine is not None and engine_of(other) == engine]


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
    end = newest.window_end
    # What else went bad there meanwhile may be the same thing: then it began with the first.
    others = [
        other.run_since
        for other in overlapping(incident)
        if other.closed_at is None or other.closed_at > incident.run_since
    ]
    past, onset = before(incident, min([incident.run_since, *others]), window)
    recent = Grid(max(past, end - 2 * INCIDENT_WINDOWS_MAX * window), end, newest.window_s)
    if past < recent.start:
        long_ago = Grid(past, onset, newest.window_s)
        reader = reader.ahead(long_ago, where=engine.where, metrics=METRICS)
    reader = reader.ahead(recent, where=engine.where, metrics=METRICS)
    changes = changes_of(reader, engine, recent)
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
        bad_since=min([incident.run_since, *others]),
        incident=Grid(start, end, newest.window_s),
        reference=reference_of(past, onset, newest.window_s, changes),
        changes=changes,
    )


def before(incident: Incident, began: datetime, window: timedelta) -> tuple[datetime, datetime]:
    """From when to when it was as it should be, before what `began` then.

    The window before the first bad one is the onset: neither before nor during. What went bad again
    is held against the good windows since, under the settings and the load of late; against those
    before it all where that are too few.
    """
    objective, onset = incident.objective, began - window
    past = onset - REFERENCE_WINDOWS_MAX * window
    if incident.bad_again_since is None:
        return past, onset
    rows = Reading.objects.filter(
        objective=objective, scope=incident.scope, window_end__gt=past, window_end__lte=onset
    )
    bad = [
        row.window_end
        for row in rows
        if window_is_bad(Counts(row.good, row.total), objective.target, objective.fast_burn)
    ]
    good_since = max([past, *bad])
    if onset - good_since >= REFERENCE_WINDOWS_MIN * window:
        return good_since, onset
    first = incident.bad_since - window
    return first - REFERENCE_WINDOWS_MAX * window, first


def reference_of(
    past: datetime, onset: datetime, window_s: float, changes: Sequence[Change]
) -> Grid:
    """The windows before: up to the onset, and to a change by hand shortly before that."""
    window = timedelta(seconds=window_s)
    near = [
        change.at - window
        for change in changes
        if change.by_hand and onset - HAND_WINDOWS * window <= change.at <= onset
    ]
    return Grid(past, max(past + window, min([onset, *near])), window_s)


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
    return EngineFacts(
        engine.name,
        service,
        engine.values,
        engine.knobs,
        engine.config_version,
        engines=len(engines_of(incident.tenant, service=service)),
        node=engine.node.name,
    )


def changes_of(reader: Reader, engine: EngineFacts, grid: Grid) -> tuple[Change, ...]:
    """Knobs seen to move, oldest first, and by whom; `at` is the end of the step it was seen in.

    Steps of a third of a window, about a scrape each, so that two people who change something
    within a window are told apart.
    """
    fine = Grid(grid.start, grid.end, grid.step_s / STEPS_PER_WINDOW)
    knobs = reader.gauge("engine:knob", fine, where=engine.where, by=("knob",), over="last")
    asked = reader.increase("engine:config_changes_total", fine, where=engine.where, by=("by",))
    found = [
        Change(knob, _value(engine, knob, old), _value(engine, knob, new), at, _who(asked, place))
        for one in knobs
        for knob in [one.labels.get("knob", "")]
        for old, new, place, at in _moves(one, fine.ends())
    ]
    return tuple(sorted(found, key=lambda change: change.at))


def _moves(series: Series, ends: list[datetime]) -> list[tuple[float, float, int, datetime]]:
    """(before, after, number of the step, its end) of every move."""
    found, last = [], math.nan
    for place, (end, value) in enumerate(zip(ends, series.values, strict=False)):
        if math.isnan(value):
            continue
        if not math.isnan(last) and value != last:
            found.append((last, float(value), place, end))
        last = float(value)
    return found


def _who(asked: Sequence[Series], place: int) -> str:
    """Who changed the configuration in the step; a person before Trimtab, "" when nobody says.

    Who changes something for the first time has no count before: where none of the counts grew, it
    is who is counted from this step on, or from the next: growth takes two looks.
    """
    grew = [one for one in asked if one.values[place] > 0]
    new = [one for one in asked if _first(one) in (place, place + 1)]
    names = [one.labels.get("by", "") for one in grew or new]
    return min(names, key=lambda name: (name.startswith("trimtab"), name), default="")


def _first(series: Series) -> int | None:
    """The place of the first step that was measured."""
    return next((i for i, value in enumerate(series.values) if not math.isnan(value)), None)


def _value(engine: EngineFacts, knob: str, shown: float) -> float | str:
    """The value as the engine takes it: a gauge shows a word as its place among the choices."""
    words = engine.words(knob)
    if shown in range(len(words)) and isinstance(words[int(shown)], str):
        return str(words[int(shown)])
    return int(shown) if shown.is_integer() else shown
