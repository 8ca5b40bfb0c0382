"""Reads of the slo room: how objectives stand, and the readings behind it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _

from controlplane.accounts.models import Tenant
from slo.budget import Counts, attained, budget_left, burn_rate, window_is_bad
from slo.burn import HOUR_S, PAGE, PairState
from slo.judging import pairs_at, settle_s
from slo.models import Objective, Reading
from slo.readings import MEASURED, sums_at_each
from tracing.types import Signal

SERIES_POINTS_MAX = 400
# Judging is late when this many control windows passed without one.
JUDGING_LATE_WINDOWS = 3


class State(models.TextChoices):
    MET = "met", _("met")
    BURNING = "burning", _("burning")
    BREACHED = "breached", _("breached")
    NO_DATA = "no_data", _("no data")


@dataclass(frozen=True)
class Standing:
    """How an objective stands over its window, for the service as a whole.

    breached: the budget is overdrawn. burning: some is left, but the newest window is bad or a
    burn pair fires. no_data: no event in the whole window; nothing is known, which is not "met".
    `signal` is the newest window's, and stale when judging itself fell behind; `stale_s` is then
    the age of the last window that was measured.
    """

    objective: Objective
    state: State
    counts: Counts
    attained: float | None
    budget_left: float | None
    burn_1h: float | None
    signal: Signal
    stale_s: float | None
    fast_burn_now: bool
    last_reading: Reading | None
    pairs: tuple[PairState, ...]


@dataclass(frozen=True)
class BudgetPoint:
    """Budget left over the rolling window that ends `at`; None without events."""

    at: datetime
    left: float | None


def objective_get(*, tenant: Tenant, slug: str) -> Objective | None:
    return Objective.objects.filter(tenant=tenant, slug=slug).first()


def objectives_standing(*, tenant: Tenant, now: datetime) -> list[Standing]:
    """Every enabled objective, the least budget first, those without data last."""
    objectives = Objective.objects.filter(tenant=tenant, enabled=True).order_by("slug")
    found = [standing(objective, now) for objective in objectives]
    return sorted(
        found, key=lambda s: (s.budget_left is None, s.budget_left or 0.0, s.objective.slug)
    )


def standing(objective: Objective, now: datetime) -> Standing:
    """One objective now. A handful of index look-ups, whatever its window."""
    rows = Reading.objects.filter(objective=objective, scope="").order_by("-window_end")
    newest = rows.first()
    signal = _signal_now(newest, now)
    begin = now - timedelta(days=objective.window_days)
    hour_ago = now - timedelta(seconds=HOUR_S)
    sums = sums_at_each(objective, "", [begin, hour_ago, now])
    counts, hour = sums[now] - sums[begin], sums[now] - sums[hour_ago]
    ok = signal == Signal.OK
    bad_now = (
        ok
        and newest is not None
        and window_is_bad(Counts(newest.good, newest.total), objective.target, objective.fast_burn)
    )
    pairs = pairs_at(objective, newest.window_end, trusted=ok) if newest is not None else ()
    left = budget_left(counts, objective.target)
    fast = bad_now or any(p.firing and p.severity == PAGE for p in pairs)
    return Standing(
        objective=objective,
        state=_state(left, burning=fast or any(p.firing for p in pairs)),
        counts=counts,
        attained=attained(counts),
        budget_left=left,
        burn_1h=burn_rate(hour, objective.target),
        signal=signal,
        stale_s=None if signal in MEASURED else _age_s(rows, now),
        fast_burn_now=fast,
        last_reading=newest,
        pairs=pairs,
    )


def counts_between(*, objective: Objective, scope: str, since: datetime, until: datetime) -> Counts:
    """Events of the windows that ended in (since, until]."""
    sums = sums_at_each(objective, scope, [since, until])
    return sums[until] - sums[since]


def budget_series(
    *, objective: Objective, since: datetime, until: datetime, points: int = 120
) -> list[BudgetPoint]:
    """Budget left at up to `points` (at most 400) evenly spaced moments in (since, until]."""
    points = max(1, min(points, SERIES_POINTS_MAX))
    step = (until - since) / points
    ends = [since + step * (i + 1) for i in range(points)]
    window = timedelta(days=objective.window_days)
    sums = sums_at_each(objective, "", [*ends, *(at - window for at in ends)])
    return [
        BudgetPoint(at, budget_left(sums[at] - sums[at - window], objective.target)) for at in ends
    ]


def _signal_now(newest: Reading | None, now: datetime) -> Signal:
    if newest is None:
        return Signal.MISSING
    late = settle_s() + JUDGING_LATE_WINDOWS * settings.TRIMTAB_CONTROL_WINDOW_S
    if now - newest.window_end > timedelta(seconds=late):
        return Signal.STALE
    return Signal(newest.signal)


def _age_s(rows: models.QuerySet[Reading], now: datetime) -> float | None:
    last = rows.filter(signal__in=MEASURED).first()
    return None if last is None else (now - last.window_end).total_seconds()


def _state(left: float | None, *, burning: bool) -> State:
    if left is None:
        return State.NO_DATA
    if left < 0:
        return State.BREACHED
    return State.BURNING if burning else State.MET
