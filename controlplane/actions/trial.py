"""Measures a trial: the incident's objective, and the service's others, before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from django.conf import settings

from controlplane.actions import verify
from controlplane.actions.models import Action, Priority
from controlplane.diagnosis.amounts import several
from controlplane.diagnosis.staging import objective_facts
from slo.budget import Counts
from slo.indicator import Unit
from slo.judging import settle_s
from slo.models import Objective, Reading
from tracing.types import Grid, Reader, Signal

# The newest windows before the change: more of them would compare with the way into the incident.
BEFORE_WINDOWS_MAX = 4
AFTER_WINDOWS_MAX = 20
# Windows count that start so much of a window too early: an order comes just after an edge, as the
# passes do, so the window skipped is that of the change itself, and not the whole next one as well.
EARLY = 0.25
# A queue is going down while it is this much shorter than it ever was since the change: it comes
# and goes, and a comparison with the window before would see it fall again and again.
FALLING = 0.9
# It was growing if it grew this much over the windows before the change, and never fell.
GROWN = 2.0
QUEUE_MIN = 5.0  # requests: shorter queues come and go
# The last look is two passes, of which one may come late, and this much before the agent's own
# revert, so that it hears of it first.
ANSWER_S = 4.0
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
    can still come before the agent's own; without any reading by then it is inconclusive. A
    change that has no incident to mend is judged by whether it broke an objective; the end of
    shedding may do without readings where nobody waits. Shedding is judged by goodput.
    """
    incident = action.incident
    assert action.applied_at is not None
    looks = verify.looks_max(
        ttl_s=action.ttl_s,
        window_s=settings.TRIMTAB_CONTROL_WINDOW_S,
        settle_s=settle_s(),
    )
    margin_s = min(2 * settings.TRIMTAB_SCRAPE_S + ANSWER_S, action.ttl_s / 4)
    end = action.applied_at + timedelta(seconds=action.ttl_s - margin_s)
    if incident is None and action.priority != Priority.PERSON and action.undoes_id is None:
        return Judged(verify.Verdict.INCONCLUSIVE, "its incident is gone", {})
    reader = _ahead(action, reader, now)
    queue = _queue(action, reader, now)
    if incident is None:
        promises = _guards(action, reader, queue.gone_at)
        if action.undoes_id is None:
            result = verify.unharmed(promises, looks=looks, last=now >= end)
        else:
            result = verify.served_again(
                promises, looks=looks, last=now >= end,
                nobody_waits=_nobody_waits(action, reader, now),
            )  # fmt: skip
        outcome = {"p_value": None, "looks": result.look, "sentence": result.sentence}
        return Judged(result.verdict, result.sentence, outcome)
    goodput = _by_goodput(action, incident.objective)
    before, after = _samples(action, incident.objective, reader, queue.gone_at, goodput=goodput)
    guards = _guards(action, reader, queue.gone_at, but=incident.objective, answered=not goodput)
    result = verify.verdict(
        before,
        after,
        budget=incident.objective.budget,
        looks=looks,
        last=now >= end,
        guards=guards,
    )
    if goodput:
        result = replace(result, sentence=f"{result.sentence}; who was turned away counts as bad")
    if queue.stays:
        result = verify.Result(verify.Verdict.INCONCLUSIVE, queue.words)
    elif queue.words and not after.windows:
        result = replace(result, sentence=queue.words)
    return Judged(
        result.verdict,
        result.sentence,
        {
            "before": {"good": before.counts.good, "total": before.counts.total},
            "after": {"good": after.counts.good, "total": after.counts.total},
            "unit": after.unit,
            "p_value": result.p_better,
            "looks": result.look,
            "sentence": result.sentence,
            "price": _price(result.harmed),
        },
    )


def _price(harmed: Sequence[verify.Guard]) -> list[dict[str, Any]]:
    """The promises that got worse, with their bad shares and what they may miss."""
    return [
        {
            "objective": g.name,
            "before": g.before.share,
            "after": g.after.share,
            "budget": 1 - g.target,
        }
        for g in harmed
    ]


def _ahead(action: Action, reader: Reader, now: datetime) -> Reader:
    """A reader that has read the queue and the arrivals of the trial and the windows before it."""
    assert action.applied_at is not None
    window_s = settings.TRIMTAB_CONTROL_WINDOW_S
    start = action.applied_at - (BEFORE_WINDOWS_MAX + 1) * timedelta(seconds=window_s)
    end = max(action.applied_at, min(now, _over_at(action)))
    grid = Grid(start, end, window_s)
    return reader.ahead(grid, where=_where(action), metrics=(WAITING, ARRIVALS))


def _where(action: Action) -> dict[str, str]:
    return {"service": action.engine.service, "instance": action.engine.name}


def _by_goodput(action: Action, objective: Objective) -> bool:
    """Whether to count those in time among all who came, and not only among those answered.

    Shedding is to turn requests away, so a promise to answer them all would undo what saves the
    most that can be, and one about those answered alone would keep a gate that is shut. What
    counts is how many are served in time (goodput), where the promise is about requests.
    """
    per_request = objective_facts(objective).measures in ("ttft", "e2e")
    return action.priority == Priority.SAFETY and per_request


def _guards(
    action: Action,
    reader: Reader,
    gone_at: datetime,
    *,
    but: Objective | None = None,
    answered: bool = True,
) -> list[verify.Guard]:
    """The objectives of the action's service, but the one the verdict is about.

    Not `answered`: and but those that count who is turned away.
    """
    objectives = Objective.objects.filter(
        tenant=action.tenant_id, service=action.engine.service, enabled=True
    )
    if but is not None:
        objectives = objectives.exclude(pk=but.pk)
    if not answered:
        objectives = objectives.exclude(indicator="success")
    return [
        verify.Guard(
            other.name, other.target, other.fast_burn, *_samples(action, other, reader, gone_at)
        )
        for other in objectives
    ]


def _samples(
    action: Action,
    objective: Objective,
    reader: Reader,
    gone_at: datetime,
    *,
    goodput: bool = False,
) -> tuple[verify.Sample, verify.Sample]:
    """The engine's control windows before the change, and those of the trial from `gone_at` on,
    give or take EARLY of one."""
    assert action.applied_at is not None
    rows = Reading.objects.filter(
        objective=objective, scope=action.engine.name, signal=Signal.OK
    ).order_by("-window_end")
    since = _before_since(action)
    first = gone_at - timedelta(seconds=EARLY * settings.TRIMTAB_CONTROL_WINDOW_S)
    old = rows.filter(window_end__gt=since, window_end__lte=action.applied_at)
    new = rows.filter(window_end__gt=gone_at, window_end__lte=_over_at(action))
    after = [r for r in new[:AFTER_WINDOWS_MAX] if _start(r) >= first]
    return (
        _sample(list(old[:BEFORE_WINDOWS_MAX]), objective.unit, action, reader, goodput),
        _sample(after, objective.unit, action, reader, goodput),
    )


def _before_since(action: Action) -> datetime:
    assert action.applied_at is not None
    if action.incident is not None:
        return action.incident.run_since
    window = timedelta(seconds=settings.TRIMTAB_CONTROL_WINDOW_S)
    return action.applied_at - BEFORE_WINDOWS_MAX * window


def _over_at(action: Action) -> datetime:
    """When the agent undoes what nobody confirmed: later windows are not the trial's."""
    assert action.applied_at is not None
    return action.applied_at + timedelta(seconds=action.ttl_s)


@dataclass(frozen=True)
class Queue:
    """What became of the queue a change found: windows count from `gone_at` on, unless it `stays`.
    `words` says why none counts yet, or ever; empty when some may."""

    gone_at: datetime
    stays: bool = False
    words: str = ""


def _queue(action: Action, reader: Reader, now: datetime) -> Queue:
    """From when on requests are the new setting's own: one control window after the change (NORMS),
    and not while they come behind the queue it found, late or turned away under any setting.

    How long the queue is counts at its shortest in each window: who queues first is served first,
    so once it was empty nobody of before waits, however many come at once thereafter.

    That queue is gone when it went down and has come to rest, or to nobody. One that was growing
    before the change and rests no lower than it was has not gone at all: it would have grown on
    without the change, so whatever comes of it proves nothing, neither for the change nor against.
    A queue that was steady and stays so is the setting's own, and so is one the change brought.
    """
    assert action.applied_at is not None
    changed_at, window_s = action.applied_at, settings.TRIMTAB_CONTROL_WINDOW_S
    window = timedelta(seconds=window_s)
    windows = (min(now, _over_at(action)) - changed_at) // window
    if windows < 2:
        return Queue(changed_at + window)
    past = Grid(changed_at - BEFORE_WINDOWS_MAX * window, changed_at, window_s)
    found = _waiting(action, reader, past, over="min")
    since = Grid(changed_at, changed_at + windows * window, window_s)
    gone_at, last, lowest, resting = changed_at + window, math.inf, math.inf, 0
    shortest = _waiting(action, reader, since, over="min")
    for end, waiting in zip(since.ends(), shortest, strict=False):
        if waiting < FALLING * lowest:
            gone_at, lowest, resting = end, waiting, 0
        else:
            resting += 1
        last = waiting
        if waiting <= QUEUE_MIN or resting == verify.WINDOWS_MIN:
            break
    known = found and not math.isnan(found[-1])
    told = f"{last:,.0f} in the last window"
    if known:
        told = f"{several(found[-1], 'request', 'requests', ',.0f')} before the change, {told}"
    told = f"({told})"
    rests = resting == verify.WINDOWS_MIN
    if rests and _grew(found) and last >= FALLING * found[-1]:
        words = f"no better, as the queue, which was growing, has not gone down {told}"
        return Queue(gone_at, stays=True, words=words)
    if rests or not QUEUE_MIN < last < math.inf:  # at rest, gone, or not measured
        return Queue(gone_at)
    return Queue(
        gone_at,
        words=f"not proved to be better, as the queue of before was still going down {told}",
    )


def _grew(waiting: Sequence[float]) -> bool:
    steps = pairwise(waiting)
    return (
        len(waiting) > 1
        and all(later >= FALLING * earlier for earlier, later in steps)
        and waiting[-1] >= max(QUEUE_MIN, GROWN * waiting[0])
    )


def _waiting(action: Action, reader: Reader, grid: Grid, *, over: str) -> list[float]:
    """Requests waiting in the engine, one number a window; NaN where not measured."""
    series = reader.gauge(WAITING, grid, where=_where(action), over=over)
    return [float(v) for v in series[0].values] if series else []


def _nobody_waits(action: Action, reader: Reader, now: datetime) -> bool:
    """Whether the queue is seen to be empty, or nearly, in the last two windows."""
    window_s = settings.TRIMTAB_CONTROL_WINDOW_S
    grid = Grid(now - verify.WINDOWS_MIN * timedelta(seconds=window_s), now, window_s)
    waiting = _waiting(action, reader, grid, over="avg")
    # NaN, not measured, compares as false
    return bool(waiting) and all(mean <= QUEUE_MIN for mean in waiting)


def _start(reading: Reading) -> datetime:
    return reading.window_end - timedelta(seconds=reading.window_s)


def _sample(
    newest_first: list[Reading], unit: Unit, action: Action, reader: Reader, goodput: bool
) -> verify.Sample:
    """`goodput` counts all who came as the total; nothing where that was not measured."""
    readings = newest_first[::-1]
    if not readings:
        return verify.Sample((), settings.TRIMTAB_CONTROL_WINDOW_S, unit=unit)
    window_s = readings[0].window_s
    windows = tuple(Counts(r.good, r.total) for r in readings)
    came = _arrivals(readings, action, reader)
    if goodput:
        pairs = zip(windows, came or (), strict=bool(came))
        windows = tuple(replace(w, total=max(w.total, all_)) for w, all_ in pairs)
    return verify.Sample(windows, window_s, None if came is None else sum(came), unit)


def _arrivals(readings: list[Reading], action: Action, reader: Reader) -> list[float] | None:
    """Requests the engine received in each window, None when it does not say."""
    grid = Grid(_start(readings[0]), readings[-1].window_end, readings[0].window_s)
    series = reader.increase(ARRIVALS, grid, where=_where(action))
    if not series:
        return None
    by_end = dict(zip(grid.ends(), series[0].values, strict=True))
    counts = [by_end.get(r.window_end, float("nan")) for r in readings]
    return None if any(c != c for c in counts) else counts
