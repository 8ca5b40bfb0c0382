"""Measures a trial: the incident's objective, and the service's others, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings

from controlplane.actions import verify
from controlplane.actions.models import Action
from slo.budget import Counts
from slo.judging import settle_s
from slo.models import Objective, Reading
from tracing.types import Grid, Reader, Signal

# The newest windows before the change: more of them would compare with the way into the incident.
BEFORE_WINDOWS_MAX = 4
AFTER_WINDOWS_MAX = 20
# A queue is going down while a window's is this much shorter than the one before.
FALLING = 0.9
WAITING = "vllm:num_requests_waiting"
ARRIVALS = "engine:requests_received_total"


@dataclass(frozen=True)
class Judged:
    """`verdict` None: wait. `outcome` is what the action keeps of it."""

    verdict: verify.Verdict | None
    sentence: str
    outcome: dict[str, Any]


def judge(action: Action, *, reader: Reader, now: datetime) -> Judged:
    """The verdict on a running trial at `now`.

    One control window after the change is skipped. The last look is taken while a revert of ours
    can still come before the agent's own; without any reading by then it is inconclusive.
    """
    incident = action.incident
    assert action.applied_at is not None
    looks = verify.looks_max(
        ttl_s=action.ttl_s,
        window_s=settings.TRIMTAB_CONTROL_WINDOW_S,
        settle_s=settle_s(),
    )
    end = action.applied_at + timedelta(seconds=action.ttl_s - min(5.0, action.ttl_s / 4))
    if incident is None:
        return Judged(verify.Verdict.INCONCLUSIVE, "its incident is gone", {})
    drained = _drained_at(action, reader, now)
    before, after = _samples(action, incident.objective, reader, drained)
    guards = [
        verify.Guard(other.name, other.budget, *_samples(action, other, reader, drained))
        for other in Objective.objects.filter(
            tenant=action.tenant_id, service=incident.objective.service, enabled=True
        ).exclude(pk=incident.objective_id)
    ]
    result = verify.verdict(
        before,
        after,
        looks=looks,
        last=now >= end,
        guards=guards,
    )
    return Judged(
        result.verdict,
        result.sentence,
        {
            "before": {"good": before.counts.good, "total": before.counts.total},
            "after": {"good": after.counts.good, "total": after.counts.total},
            "p_value": result.p_better,
            "looks": result.look,
            "sentence": result.sentence,
        },
    )


def _samples(
    action: Action, objective: Objective, reader: Reader, drained_at: datetime
) -> tuple[verify.Sample, verify.Sample]:
    """The engine's control windows before the change, and those that began after `drained_at`."""
    assert action.applied_at is not None
    rows = Reading.objects.filter(
        objective=objective, scope=action.engine.name, signal=Signal.OK
    ).order_by("-window_end")
    old = list(rows.filter(window_end__lte=action.applied_at)[: 2 * BEFORE_WINDOWS_MAX])
    if action.incident is not None:
        old = [r for r in old if r.window_end > action.incident.bad_since]
    new = list(rows.filter(window_end__gt=action.applied_at)[:AFTER_WINDOWS_MAX])
    new = [r for r in new if _start(r) >= drained_at]
    return (
        _sample(old[:BEFORE_WINDOWS_MAX], action, reader),
        _sample(new, action, reader),
    )


def _drained_at(action: Action, reader: Reader, now: datetime) -> datetime:
    """From when on requests are the new setting's own: one control window after the change (NORMS),
    and not while the queue it found is still going down.

    Those requests came too late for any setting. A queue that stays is the setting's own.
    """
    assert action.applied_at is not None
    window_s = settings.TRIMTAB_CONTROL_WINDOW_S
    first = action.applied_at + timedelta(seconds=window_s)
    if now - first < timedelta(seconds=window_s):
        return first
    grid = Grid(action.applied_at, now, window_s)
    where = {"service": action.engine.service, "instance": action.engine.name}
    series = reader.gauge(WAITING, grid, where=where, over="avg")
    drained, before = first, None
    for end, waiting in zip(grid.ends(), series[0].values if series else (), strict=False):
        if before is not None and not (before > 1 and waiting < FALLING * before):
            break
        before = waiting
        drained = max(first, end)
    return drained


def _start(reading: Reading) -> datetime:
    return reading.window_end - timedelta(seconds=reading.window_s)


def _sample(newest_first: list[Reading], action: Action, reader: Reader) -> verify.Sample:
    readings = newest_first[::-1]
    if not readings:
        return verify.Sample((), settings.TRIMTAB_CONTROL_WINDOW_S)
    window_s = readings[0].window_s
    windows = tuple(Counts(r.good, r.total) for r in readings)
    return verify.Sample(windows, window_s, _arrivals(readings, action, reader))


def _arrivals(readings: list[Reading], action: Action, reader: Reader) -> float | None:
    """Requests the engine received in the windows, None when it does not say."""
    grid = Grid(_start(readings[0]), readings[-1].window_end, readings[0].window_s)
    where = {"service": action.engine.service, "instance": action.engine.name}
    series = reader.increase(ARRIVALS, grid, where=where)
    if not series:
        return None
    by_end = dict(zip(grid.ends(), series[0].values, strict=True))
    counts = [by_end.get(r.window_end, float("nan")) for r in readings]
    return None if any(c != c for c in counts) else sum(counts)
