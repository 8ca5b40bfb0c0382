"""How many requests an engine serves a second, and how many it would with more running. Pure.

Reckoned from what it does while somebody waits, for then it has all the work it can take: a step's
fixed part is paid once however many run, and all the rest by each of them,

    step(n) = fixed + n · each,    served(n) = share in steps · n ÷ (output tokens · step(n))

so that what is served now is met exactly, whatever a token costs, and only the fixed part has to be
known to say what more running would bring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.diagnosis.demand import lengths
from controlplane.diagnosis.scene import Scene, evenly
from controlplane.diagnosis.step_time import (
    DECODE,
    PREFILL,
    STEP_TIME,
    STEPS,
    StepTime,
    graph_lost,
    step_time,
)

LOOKS_MIN = 2  # one look at a queue may be chance
FASTEST = 0.01  # of the steps: no step takes less than its fixed part

BUSY = "engine:busy_seconds_total"
WAITING = "vllm:num_requests_waiting"


@dataclass(frozen=True)
class Working:
    """The engine while somebody waits; all the time, where nobody was seen to.

    Seconds of a mean step, its prompt tokens and running requests. `share` of the time in steps,
    while the queue lasts: the rest is what lies between steps, for such an engine never idles. None
    where it is not counted or there was no such time.
    """

    step_s: float
    prompt: float
    running: float
    share: float | None


def working(scene: Scene) -> Working | None:
    """None where steps were not measured, or no request got a token in any."""
    return scene.once(("working",), lambda: _working(scene))


def capacity_per_s(scene: Scene, running: float, *, at_most: bool = False) -> float | None:
    """Requests per second a batch of `running` would serve at the engine's healthy speed.

    `at_most`: with as much of its time paid once as may be within the error. None where it cannot
    be told.
    """
    now, tokens = working(scene), lengths(scene)
    if now is None or tokens is None:
        return None
    step, (prompt, output) = step_time(scene), tokens
    fixed = _fixed(scene, step, at_most=at_most)
    if fixed is None:
        return None
    took = now.step_s
    if step and step.is_slower:
        took *= 1 - (step.slower or 0.0)
    # Once each: what was sent back and computed again is not what a request costs.
    again = max(0.0, now.prompt - prompt * now.running / output)
    if step and step.healthy.trusted:
        took -= step.healthy.b * again
    elif at_most and again:
        took *= 1 - again / now.prompt
    took = max(took, fixed)
    each = (took - fixed) / now.running
    share = 1.0 if now.share is None else now.share
    between = took * (1 / share - 1) if share else 0.0
    if at_most:  # What lies between two steps is at best paid once, too.
        return running / (output * (fixed + between + running * each))
    return share * running / (output * (fixed + running * each))


def _working(scene: Scene) -> Working | None:
    columns = [scene.steps(metric, counter=True) for metric in (STEPS, PREFILL, DECODE)]
    seconds, waiting = scene.sums(STEP_TIME), scene.steps(WAITING)
    looks = [
        ((n, s, p, d), queue > 0)
        for n, p, d, s, queue in zip(*columns, seconds, waiting, strict=False)
        if n > 0 and not math.isnan(s + p + d)
    ]
    queued = [row for row, waited in looks if waited]
    rows = queued if len(queued) >= LOOKS_MIN else [row for row, _ in looks]
    steps, took, prompt, running = (sum(row[i] for row in rows) for i in range(4))
    if not steps or not running:
        return None
    return Working(took / steps, prompt / steps, running / steps, _share(scene, waiting))


def _share(scene: Scene, waiting: Sequence[float]) -> float | None:
    """Of looks that are the third in a row to see a queue: a crowd that comes and goes is none."""
    queued = [False, False]
    for queue in waiting:
        queued.append(queued[-1] if math.isnan(queue) else queue > 0)
    spent = [
        busy
        for busy, in_a_row in zip(
            evenly(scene.steps(BUSY, counter=True)),
            zip(queued, queued[1:], queued[2:], strict=False),
            strict=False,
        )
        if all(in_a_row) and not math.isnan(busy)
    ]
    if len(spent) < LOOKS_MIN:
        return None
    return min(1.0, sum(spent) / (len(spent) * scene.step_s))


def _fixed(scene: Scene, step: StepTime | None, *, at_most: bool) -> float | None:
    """Seconds of a step that are paid however many run; never more than its fastest steps take.

    Those of before tell nothing where steps that replayed a graph then run without one now.
    """
    lost = graph_lost(scene)
    seen = [
        scene.histogram(STEP_TIME, reference=old) for old in ((False,) if lost else (True, False))
    ]
    fastest = min(
        (bound for each in seen if each and (bound := each.bound(FASTEST)) is not None),
        default=None,
    )
    if fastest is None or lost or step is None or not step.healthy.trusted:
        return fastest
    return min(fastest, step.healthy.a_most if at_most else step.healthy.a)
