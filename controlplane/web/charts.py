"""The three charts of an objective: each asks one question and shows every gap in the data.

What share missed it (slo's readings), how long they took (the indicator's histogram), how many
requests run and wait (the engines' gauges). Shown times are the right edges of windows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from controlplane.actions.models import Action, State
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.scene import METRIC_OF, Histogram
from controlplane.diagnosis.staging import objective_facts
from slo.budget import bad_share_bar
from slo.models import Objective, Reading
from tracing import query
from tracing.types import Grid, HistogramSeries, Reader, Series, Signal

# Range in minutes → how many control windows one point covers.
RANGES: dict[int, int] = {15: 1, 60: 1, 360: 4, 1440: 20}
MINUTES_DEFAULT = 60
MARKS_MAX = 200

Values = list[float | None]


@dataclass(frozen=True)
class Line:
    """`values` has one entry per window, None where nothing was measured; `style` "", dash, dot.
    What is set, not measured, is `stepped`: it holds until the window in which it was changed."""

    label: str
    values: Values
    style: str = ""
    stepped: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "style": self.style,
            "stepped": self.stepped,
            "values": self.values,
        }


@dataclass(frozen=True)
class Question:
    """A chart before its data: what stands in the page."""

    key: str
    title: str
    question: str


def questions(objective: Objective) -> list[Question]:
    """The charts of an objective, in the order of the page."""
    time_questions = {
        "ttft": _("How long does the first token take?"),
        "tpot": _("How long does each further token take?"),
    }
    asked = time_questions.get(
        objective_facts(objective).measures, _("How long does a request take?")
    )
    missing = _("What share of %(counted)s missed this objective?")
    return [
        Question("bad", _("Missed"), missing % {"counted": _(objective.unit.many)}),
        Question("latency", _("Latency"), asked),
        Question("load", _("Load"), _("How many requests run, and how many wait?")),
    ]


def grid_of(minutes: int, now: datetime) -> Grid:
    """The windows of a range, aligned as the loop aligns them, up to the last one that ended."""
    step_s = settings.TRIMTAB_CONTROL_WINDOW_S * RANGES[minutes]
    end = datetime.fromtimestamp(now.timestamp() // step_s * step_s, UTC)
    count = max(1, math.ceil(minutes * 60 / step_s))
    return Grid(end - timedelta(seconds=step_s * count), end, step_s)


def series_of(objective: Objective, *, minutes: int, now: datetime) -> dict[str, Any]:
    """Everything the charts of an objective draw, ready for JSON."""
    grid = grid_of(minutes, now)
    reader = query.reader(str(objective.tenant_id))
    drawn = {
        question.key: CHARTS[question.key](objective, reader, grid)
        for question in questions(objective)
    }
    return {
        "objective": objective.slug,
        "minutes": minutes,
        "step_s": grid.step_s,
        "x": [end.timestamp() for end in grid.ends()],
        "charts": drawn,
        "marks": marks_of(objective, grid),
    }


Drawn = dict[tuple[str, str, datetime], list[float | None]]


def newest_point(objective: Objective, drawn: Drawn) -> dict[str, Any] | None:
    """The charts' values in the newest judged window; None when there is none.

    `drawn` keeps, over the objectives of one look, what they share: the load is the service's.
    """
    newest = (
        Reading.objects.filter(objective=objective, scope="")
        .order_by("-window_end")
        .values_list("window_end", "window_s")
        .first()
    )
    if newest is None:
        return None
    end, step_s = newest
    grid = Grid(end - timedelta(seconds=step_s), end, step_s)
    reader = query.reader(str(objective.tenant_id))
    values = {}
    for question in questions(objective):
        owner = objective.service if question.key == "load" else str(objective.pk)
        place = (question.key, owner, end)
        if place not in drawn:
            lines = CHARTS[question.key](objective, reader, grid)["lines"]
            drawn[place] = [line["values"][-1] for line in lines]
        values[question.key] = drawn[place]
    return {"objective": objective.slug, "step_s": step_s, "at": end.timestamp(), "values": values}


# --- the three charts ---


def missed(objective: Objective, reader: Reader, grid: Grid) -> dict[str, Any]:
    """Share of bad events per window, in per cent; the bound is where a window counts as bad."""
    good: dict[int, float] = defaultdict(float)
    total: dict[int, float] = defaultdict(float)
    readings = Reading.objects.filter(
        objective=objective, scope="", signal=Signal.OK,
        window_end__gt=grid.start, window_end__lte=grid.end,
    )  # fmt: skip
    for end, ok, events in readings.values_list("window_end", "good", "total"):
        window = math.ceil((end - grid.start).total_seconds() / grid.step_s - 1e-6) - 1
        good[window] += ok
        total[window] += events
    values: Values = [
        round(100 * (total[i] - good[i]) / total[i], 3) if total.get(i) else None
        for i in range(grid.count)
    ]
    bar = 100 * bad_share_bar(objective.target, objective.fast_burn)
    return chart("%", [Line(_("missed"), values)], bar, _("opens an incident"))


def latency(objective: Objective, reader: Reader, grid: Grid) -> dict[str, Any]:
    """p50 and p99 of what the objective times, in seconds; the bound is its threshold."""
    known = objective_facts(objective)
    metric = METRIC_OF.get(known.measures, METRIC_OF["e2e"])
    if objective.spec.get("source") == "metric" and objective.indicator == "latency":
        metric = objective.spec.get("metric", metric)
    found = reader.histogram(metric, grid, where={"service": objective.service})
    lines = [Line(label, _quantile(found, grid, q), style) for label, q, style in QUANTILES]
    return chart("s", lines, known.threshold_s, _("objective"))


QUANTILES = (("p99", 0.99, ""), ("p50", 0.50, ""))


def _quantile(found: Sequence[HistogramSeries], grid: Grid, q: float) -> Values:
    if not found:
        return [None] * grid.count
    series = found[0]
    values: Values = []
    for counts in series.counts:
        if any(math.isnan(count) for count in counts):
            values.append(None)
            continue
        value = Histogram(tuple(series.bounds), tuple(counts), 0.0).quantile(q)
        # Above the last bound the data does not say how far: draw the bound itself.
        values.append(series.bounds[-1] if value == math.inf else value)
    return values


def load(objective: Objective, reader: Reader, grid: Grid) -> dict[str, Any]:
    """Requests running and waiting over the service's engines, and the cap on running ones."""
    where = {"service": objective.service}
    cap = {**where, "knob": "max_num_seqs"}
    running = reader.gauge("vllm:num_requests_running", grid, where=where)
    waiting = reader.gauge("vllm:num_requests_waiting", grid, where=where)
    capped = reader.gauge("engine:knob", grid, where=cap, over="last")
    return chart(
        "",
        [
            Line(_("running"), _known(running, grid)),
            Line(_("waiting"), _known(waiting, grid)),
            Line(_("cap"), _known(capped, grid), "dash", stepped=True),
        ],
    )


def _known(found: Sequence[Series], grid: Grid) -> Values:
    if not found:
        return [None] * grid.count
    return [None if math.isnan(value) else round(value, 3) for value in found[0].values]


def chart(
    unit: str, lines: Sequence[Line], bound: float | None = None, bound_label: str = ""
) -> dict[str, Any]:
    return {
        "unit": unit,
        "lines": [line.to_json() for line in lines],
        "bound": bound,
        "bound_label": bound_label,
    }


Draw = Callable[[Objective, Reader, Grid], dict[str, Any]]
CHARTS: dict[str, Draw] = {"bad": missed, "latency": latency, "load": load}


# --- what happened ---


def marks_of(objective: Objective, grid: Grid) -> list[dict[str, Any]]:
    """Incidents of the objective, actions on its service and what was undone of them; oldest
    first."""
    marks = []
    for incident in _seen_in(objective, grid):
        label = _("incident on %(scope)s") % {"scope": incident.scope or objective.service}
        marks += [
            _mark("incident", run.opened_at, label, incident)
            for run in incident.runs[-MARKS_MAX:]
            if grid.start < run.opened_at <= timezone.now()
        ]
    turned = (
        Action.objects.filter(tenant=objective.tenant_id, applied_at__isnull=False)
        .filter(Q(engine__service=objective.service) | Q(incident__objective=objective))
        .filter(Q(applied_at__gt=grid.start) | Q(ended_at__gt=grid.start))
        .select_related("engine", "incident")
    )
    for action in turned.order_by("-applied_at")[:MARKS_MAX]:
        undone_at = action.ended_at if action.state == State.ROLLED_BACK else None
        undone = _("undone: %(change)s") % {"change": action}
        for kind, at, label in (
            ("action", action.applied_at, str(action)),
            ("undo", undone_at, undone),
        ):
            if at is not None and at > grid.start:
                marks.append(_mark(kind, at, label, action.incident))
    return sorted(marks, key=lambda mark: mark["at"])


def _seen_in(objective: Objective, grid: Grid) -> list[Incident]:
    """Incidents that opened in the time of the grid, once or again."""
    first, again = Q(opened_at__gt=grid.start), Q(opened_again_at__gt=grid.start)
    found = Incident.objects.filter(first | again, objective=objective)
    return list(found.prefetch_related("episodes").order_by("-opened_at")[:MARKS_MAX])


def _mark(kind: str, at: datetime, label: str, incident: Incident | None) -> dict[str, Any]:
    href = reverse("incident", args=[incident.pk]) if incident else ""
    return {"kind": kind, "at": at.timestamp(), "label": label, "href": href}
