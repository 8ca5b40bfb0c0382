"""What limits the harm while no knob cures it: the low tiers turned away, engines asked for. Pure.

Priorities are the engine's: 0 low, 1 normal (who says nothing), 2 high, 3 realtime.
"""

from __future__ import annotations

import math

from controlplane.diagnosis.capacity import WAITING
from controlplane.diagnosis.demand import ARRIVALS, REJECTED, SHED, arrivals
from controlplane.diagnosis.finding import Wish
from controlplane.diagnosis.scene import STEPS_PER_WINDOW, Scene, percentile

SHED_KNOB = "shed_below_priority"
SHED_MAX = 2  # high and realtime are never turned away by themselves
AIM = 0.9  # of the capacity: at all of it the queue stays as long as it is
LEVELS = {"low": 0, "normal": 1, "high": 2, "realtime": 3}


def counts_shed(scene: Scene) -> bool:
    """Whether who is turned away by their priority is missed by the objective."""
    counted = scene.objective.spec.get("bad_metrics", ())
    return scene.objective.measures == "success" and not {REJECTED, SHED}.isdisjoint(counted)


def shed_wishes(scene: Scene, capacity: float) -> tuple[tuple[Wish, ...], str]:
    """The lowest threshold that brings the load below AIM of `capacity`, requests a second.

    If none does, the highest that leaves the highest tier that arrives. No wish, with the reason,
    where there is no lower tier to turn away, no knob to do it with, or it would be missed itself.
    """
    if counts_shed(scene):
        return (), f"“{scene.objective.name}” counts requests that are turned away as missed"
    now = scene.engine.number(SHED_KNOB)
    if now is None or not scene.engine.supports(SHED_KNOB):
        return (), "the engine cannot turn requests away by their priority"
    rates = _rates(scene)
    highest = max((level for level, rate in rates.items() if rate > 0), default=0)
    above = [level for level in range(int(now) + 1, SHED_MAX + 1) if level <= highest]
    useful = [level for level in above if _below(rates, level, at_least=now) > 0]
    if not useful:
        return (), "no requests of a lower priority arrive that could be turned away first"
    served = sum(rate for level, rate in rates.items() if level >= now)
    enough = [
        level for level in useful if served - _below(rates, level, at_least=now) <= AIM * capacity
    ]
    target = enough[0] if enough else useful[-1]
    turned = _below(rates, target, at_least=now)
    why = f"{turned:.3g} of {served:.3g} requests a second have a priority below {target}"
    return (Wish(SHED_KNOB, target, why, limit=target),), ""


def kept_per_s(scene: Scene, threshold: float) -> float:
    """Requests per second that arrive with a priority of at least the threshold."""
    return sum(rate for level, rate in _rates(scene).items() if level >= threshold)


def drain_s(scene: Scene, spare_per_s: float) -> float | None:
    """Seconds until those who wait now are served, so many more a second than arrive.

    What a remedy inherits: until then its effect cannot be seen. Now is the last window: a single
    look may fall between two crowds.
    """
    waiting = percentile(scene.steps(WAITING)[-STEPS_PER_WINDOW:], 1)
    if waiting is None or spare_per_s <= 0:
        return None
    return waiting / spare_per_s


def engines_more(scene: Scene, capacity: float) -> int:
    """How many more engines like this one the service needs, if its load is spread evenly."""
    load, engines = arrivals(scene).value, scene.engine.engines
    if load is None or capacity <= 0:
        return 0
    return max(0, math.ceil(engines * load / (AIM * capacity)) - engines)


def _rates(scene: Scene) -> dict[int, float]:
    """Requests per second by priority; a label nobody knows counts as normal."""
    seconds = scene.incident.count * scene.incident.step_s
    rates: dict[int, float] = {}
    for label, count in scene.growth_by(ARRIVALS, "priority").items():
        level = int(label) if label.isdigit() else LEVELS.get(label, LEVELS["normal"])
        rates[level] = rates.get(level, 0.0) + count / seconds
    return rates


def _below(rates: dict[int, float], level: int, *, at_least: float) -> float:
    return sum(rate for own, rate in rates.items() if at_least <= own < level)
