"""/objectives/ and /objectives/<slug>/: what was promised, how it stands, how fast it is spent."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from django.http import HttpResponse
from django.shortcuts import get_object_or_404
from django.utils import timezone
from django.utils.translation import gettext as _

from controlplane.accounts.models import Tenant
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.selectors import incidents_of, incidents_open
from controlplane.diagnosis.services import BAD_WINDOWS_TO_OPEN, FAST_BURN
from controlplane.web.access import TenantRequest, minutes_of, page, send
from controlplane.web.charts import RANGES, marks_of, questions
from controlplane.web.story import StoryLine, lines_of
from controlplane.web.templatetags.ui import age
from slo.budget import EVENTS_MIN, Counts, bad_share_bar, burn_rate, window_is_bad
from slo.burn import PairState
from slo.indicator import indicators
from slo.models import Objective, Reading
from slo.selectors import BudgetPoint, Standing, State, budget_series, objectives_standing, standing
from tracing.types import Grid, Signal

INCIDENTS_MAX = 20
BUDGET_POINTS = 60
# What parts the times below the budget's curve: whole minutes, hours or days.
TICK_STEPS = tuple(
    timedelta(minutes=minutes)
    for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 7200, 14400, 43200)
)
TICKS_MAX = 6
TICK_X_MAX = 84.0  # in % of the width: to the right of it stands "now", on a phone too
# A burn rate this near to its factor is worth a look before it fires.
NEAR = 0.7

PAGE_STATES = {State.BREACHED: "bad", State.BURNING: "warn", State.MET: "ok", State.NO_DATA: "none"}


@dataclass(frozen=True)
class ObjectiveRow:
    """An objective in a table, with the story of its open incident if it has one."""

    standing: Standing
    line: StoryLine | None

    @property
    def stale(self) -> bool:
        return self.standing.signal in ("stale", "missing")


def objective_rows(tenant: Tenant, now: datetime, lines: list[StoryLine]) -> list[ObjectiveRow]:
    """Every enabled objective, worst budget first."""
    open_lines = {
        line.incident.objective_id: line
        for line in lines
        if line.incident.state == Incident.State.OPEN
    }
    return [
        ObjectiveRow(found, open_lines.get(found.objective.pk))
        for found in objectives_standing(tenant=tenant, now=now)
    ]


@page
def objectives(request: TenantRequest) -> HttpResponse:
    rows = objective_rows(request.tenant, timezone.now(), lines_of(incidents_open(request.tenant)))
    context = {"rows": rows, "page_state": page_state(rows)}
    return send(request, "objectives.html", context, parts=("list",))


def page_state(rows: list[ObjectiveRow]) -> str:
    """The worst state of any objective, as the favicon shows it."""
    states = {PAGE_STATES[row.standing.state] for row in rows}
    return next((state for state in ("bad", "warn", "ok") if state in states), "none")


@page
def objective(request: TenantRequest, slug: str) -> HttpResponse:
    found = get_object_or_404(Objective, tenant=request.tenant, slug=slug)
    now = timezone.now()
    stands = standing(found, now)
    since = _since(found, now)

    # Templates call what they use, once: a part that is fetched again costs only itself.
    @cache
    def budget() -> Curve | None:
        points = budget_series(objective=found, since=since, until=now, points=BUDGET_POINTS)
        return budget_curve(points)

    context = {
        "objective": found,
        "standing": stands,
        "events_left": _events_left(stands),
        "overdrawn": stands.budget_left is not None and stands.budget_left < 0,
        "bar": bad_share_bar(found.target, found.fast_burn),
        "budget": budget,
        "budget_ticks": budget_ticks(since, now),
        "budget_marks": cache(lambda: budget_marks(found, since, now)),
        "now": now,
        "rules": cache(lambda: burn_rules(stands)),
        "describe": indicators()[found.indicator].describe(found.spec),
        "counted": _(found.unit.many),
        "lines": cache(lambda: lines_of(incidents_of(found, INCIDENTS_MAX))),
        "charts": questions(found),
        "minutes": minutes_of(request),
        "ranges": RANGES,
        "spec": spec_text(found),
        "page_state": PAGE_STATES[stands.state],
    }
    return send(request, "objective.html", context, parts=("state", "burn", "incidents"))


def _since(found: Objective, now: datetime) -> datetime:
    """The start of the window, or of the data when the objective is younger."""
    start = now - timedelta(days=found.window_days)
    first = Reading.objects.filter(objective=found, scope="").order_by("window_end").first()
    return max(start, first.window_end - timedelta(seconds=first.window_s)) if first else start


def _events_left(stands: Standing) -> float | None:
    """How many more bad events the budget has room for, or is over by; None without events."""
    if stands.attained is None:
        return None
    return abs(stands.counts.total * stands.objective.budget - stands.counts.bad)


@dataclass(frozen=True)
class Rule:
    """A rule that opens incidents, as it stands: burn rates over two windows (seconds), what they
    are compared with, and the newest incident it opened."""

    state: str
    severity: str
    factor: float
    short: float | None
    short_s: float
    long: float | None
    long_s: float
    note: str
    opened: Incident | None


def burn_rules(stands: Standing) -> list[Rule]:
    """The fast rule of two control windows in a row, then the pairs."""
    newest: dict[str, Incident] = {}
    for incident in incidents_of(stands.objective, INCIDENTS_MAX):
        newest.setdefault(incident.trigger, incident)
    fast = _fast_rule(stands, newest.get(FAST_BURN))
    return [*([fast] if fast else []), *(
        Rule(
            state=_pair_state(pair),
            severity=pair.severity,
            factor=pair.factor,
            short=_weighed(pair.burn_short, pair, pair.short_s),
            short_s=pair.short_s,
            long=pair.weighed_long,
            long_s=pair.long_s,
            note=_why_quiet(pair, stands),
            opened=newest.get(f"burn {pair.name}"),
        )
        for pair in stands.pairs
    )]  # fmt: skip


def _fast_rule(stands: Standing, opened: Incident | None) -> Rule | None:
    """None before anything was judged."""
    objective = stands.objective
    rows = Reading.objects.filter(objective=objective, scope="").order_by("-window_end")
    counts = [Counts(row.good, row.total) for row in rows[:BAD_WINDOWS_TO_OPEN]]
    if not counts or stands.last_reading is None:
        return None
    window_s = stands.last_reading.window_s
    target, bar = objective.target, bad_share_bar(objective.target, objective.fast_burn)
    bad = stands.signal == Signal.OK and window_is_bad(counts[0], target, objective.fast_burn)
    return Rule(
        state="near" if bad else "quiet" if counts[0].total else "no_data",
        severity="page",
        factor=bar / objective.budget,
        short=burn_rate(counts[0], target),
        short_s=window_s,
        long=burn_rate(sum(counts, Counts(0, 0)), target),
        long_s=window_s * BAD_WINDOWS_TO_OPEN,
        note=_("each of two control windows in a row"),
        opened=opened,
    )


def _weighed(burn: float | None, pair: PairState, window_s: float) -> float | None:
    """What a factor is compared with: time without history counts as time without burn."""
    measured_s = pair.covered * pair.long_s
    return None if burn is None else burn * min(measured_s / window_s, 1.0)


def _pair_state(pair: PairState) -> str:
    if pair.firing:
        return "firing"
    burning = [burn for burn in (pair.burn_long, pair.burn_short) if burn is not None]
    if not burning:
        return "no_data"
    return "near" if max(burning) * pair.covered > NEAR * pair.factor else "quiet"


def _why_quiet(pair: PairState, stands: Standing) -> str:
    """Why nothing fires though the burn rates may look like it; "" where they say it all."""
    if not pair.can_fire:
        return _("can never fire: even if everything missed, it would not burn so fast")
    if pair.firing:
        return ""
    if pair.covered < 1:
        words = _("measured for %(time)s so far; the rest of the window counts as quiet")
        return words % {"time": age(pair.covered * pair.long_s)}
    if stands.signal != Signal.OK:
        return _("nothing fires without fresh data")
    if not pair.enough:
        words = _("at least %(n)d %(counted)s are wanted in the long window")
        return words % {"n": EVENTS_MIN, "counted": _(stands.objective.unit.many)}
    return ""


@dataclass(frozen=True)
class Curve:
    """Budget left over time as an SVG path in a box 100 wide and 100 high, with its grid.

    `grid` lists (height from the top in %, share of the budget).
    """

    path: str
    grid: tuple[tuple[float, float], ...]
    zero: float


def budget_marks(found: Objective, since: datetime, now: datetime) -> list[dict[str, Any]]:
    """What happened in the time of the budget's curve, as the charts have it; `x` in % of it."""
    span_s = max((now - since).total_seconds(), 1.0)
    marks = marks_of(found, Grid(since, now, span_s))
    return [mark | {"x": 100 * (mark["at"] - since.timestamp()) / span_s} for mark in marks]


@dataclass(frozen=True)
class Tick:
    """A time below a curve, `x` in % of its width; said as the day where it is midnight."""

    x: float
    at: datetime

    @property
    def words(self) -> str:
        return f"{self.at:%H:%M}" if self.at.hour or self.at.minute else f"{self.at:%m-%d}"


def budget_ticks(since: datetime, now: datetime) -> list[Tick]:
    """Times in UTC that are multiples of one step, each where it is between `since` and `now`."""
    span = max(now - since, timedelta(seconds=1))
    step = next((step for step in TICK_STEPS if span <= TICKS_MAX * step), TICK_STEPS[-1])
    first = math.ceil(since.timestamp() / step.total_seconds()) * step.total_seconds()
    ticks = []
    at = datetime.fromtimestamp(first, UTC)
    while (x := 100 * ((at - since) / span)) <= TICK_X_MAX:
        ticks.append(Tick(x, at))
        at += step
    return ticks


def budget_curve(points: list[BudgetPoint]) -> Curve | None:
    """None when no point has a value. The scale goes from full to empty, further if overdrawn."""
    known = [point.left for point in points if point.left is not None]
    if not known:
        return None
    low = min(0.0, *known)

    def y(left: float) -> float:
        return 100 * (1 - left) / (1 - low)

    steps, pen = [], "M"
    for i, point in enumerate(points):
        if point.left is None:
            pen = "M"
            continue
        steps.append(f"{pen}{100 * (i + 1) / len(points):.2f} {y(point.left):.2f}")
        pen = "L"
    # A deep overdraft presses full and empty together: then only empty gets a line.
    shares = (1.0, 0.5, 0.0) if low > -0.25 else (1.0, 0.0, low) if low > -3 else (0.0, low)
    return Curve("".join(steps), tuple((y(share), share) for share in shares), y(0.0))


def spec_text(found: Objective) -> str:
    """The objective as `PUT /api/v1/objectives/<slug>/` takes it."""
    spec = {
        "slug": found.slug,
        "name": found.name,
        "service": found.service,
        "indicator": found.indicator,
        "spec": found.spec,
        "target": found.target,
        "window_days": found.window_days,
        "fast_burn": found.fast_burn,
        "enabled": found.enabled,
    }
    return json.dumps(spec, indent=2, ensure_ascii=False)
