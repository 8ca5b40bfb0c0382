"""More arrives than the engine can serve at any setting it allows.

Runbook: docs/causes/load_beyond_capacity.md. The step-time fit says what a batch as large as the
engine allows would serve; where more arrives than that, no cap helps and the verdict is infeasible:
turn away the low tiers, if there are any, and ask for engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from controlplane.diagnosis.cause import (
    BUSY,
    INFEASIBLE,
    REJECTED,
    WAITING,
    Fact,
    Finding,
    Scene,
    Wish,
    arrivals,
    arrivals_now,
    beyond_fact,
    ceiling_per_s,
    counts_requests,
    drain_s,
    engines_more,
    gettext_noop,
    kept_per_s,
    mean,
    measured,
    score,
    several,
    shed_wishes,
    slower_fact,
    traffic_fact,
    working,
)

BUSY_MIN = 0.5  # of the time that someone waits the engine is in a step: it does what it can
QUEUE_MIN = 1.0  # a queue shorter than this is none
OVER = "the crowd is over, and the queue it left goes down by itself"

FINISHED = "vllm:request_success_total"


class LoadBeyondCapacity:
    slug = "load_beyond_capacity"
    label = gettext_noop("load beyond capacity")

    def examine(self, scene: Scene) -> Finding:
        evidence = (
            counts_requests(scene),
            beyond_fact(scene, wanted=True, weight=2),
            _queue_fact(scene),
            _busy_fact(scene),
            _served_fact(scene),
            traffic_fact(scene, grew=True, required=True),
            slower_fact(scene, wanted=False, required=False, weight=0.5),
        )
        capacity, load, now = ceiling_per_s(scene), arrivals(scene).value, arrivals_now(scene)
        remedy: tuple[Wish, ...] = ()
        no_remedy, more = "what the engine could serve is not known", 0
        over = capacity is not None and now is not None and now < capacity
        if over:
            no_remedy = f"{now:.3g} requests arrive a second by now, which it serves: {OVER}"
        elif capacity:
            remedy, why_not = shed_wishes(scene, capacity)
            more = engines_more(scene, capacity)
            no_remedy = f"no setting serves this load and {why_not}{_ask(scene, more)}"
        facts = {
            "arrivals_per_s": load,
            "capacity_per_s": capacity,
            "engines": scene.engine.engines,
            "engines_more": more,
            "drain_s": _drain_s(scene, capacity, remedy),
        }
        return Finding(
            self.slug,
            score(evidence),
            _because(scene, load, capacity, more),
            facts,
            evidence,
            remedy,
            no_remedy,
            verdict="" if over else INFEASIBLE,
            explains=(
                "running_cap_too_small",
                "kv_pool_exhausted",
                "kv_fragmentation",
                "batch_too_large",
            ),
        )


def _queue_fact(scene: Scene) -> Fact:
    """Whether the queue grows through the incident, or is full and turns requests away."""
    waiting = [w for w in scene.steps(WAITING) if not math.isnan(w)]
    track, turned = scene.gauge(WAITING), _turned_away(scene)
    third = max(1, len(waiting) // 3)
    first, last = mean(waiting[:third]), mean(waiting[-third:])
    grows = first is not None and last is not None and last > max(first, QUEUE_MIN)
    if first is None or last is None:
        text = "How many requests wait was not measured"
    elif turned:
        away = several(turned, "request was", "requests were")
        text = f"The queue is full and {away} turned away"
    else:
        text = (
            several(first, "request", "requests", ".0f")
            + f" waited in the first third of the incident and {last:.0f} in the last"
        )
    return measured(
        text,
        grows or bool(turned),
        track=track,
        metric=WAITING,
        unit="requests",
        value=last,
        threshold=max(first or 0.0, QUEUE_MIN),
        required=True,
    )


def _turned_away(scene: Scene) -> float:
    by_reason = scene.growth_by(REJECTED, "reason")
    return sum(count for reason, count in by_reason.items() if reason.startswith("max_num_queued"))


def _busy_fact(scene: Scene) -> Fact:
    """Whether it steps while someone waits. One that pauses, or is kept from it, could do more.

    What lies between two steps of one that does not is no pause, and reckoned with in its capacity.
    """
    now, track = working(scene), scene.rate(BUSY)
    share = now.share if now else None
    if track.value is None:
        text = "How much of the time the engine computes was not measured"
    elif share is None:
        text = "No queue lasted long enough to tell how busy the engine is meanwhile"
    else:
        text = f"While requests wait the engine computes {share:.0%} of the time"
    return measured(
        text,
        share is not None and share >= BUSY_MIN,
        track=track,
        metric=BUSY,
        unit="share of the time with a queue",
        value=share,
        threshold=BUSY_MIN,
        required=track.value is not None,
    )


def _served_fact(scene: Scene) -> Fact:
    """Whether fewer requests finish than arrive."""
    done, load = scene.rate(FINISHED), arrivals(scene).value
    if done.value is None or load is None:
        return measured(
            "How many requests finish was not measured", False, metric=FINISHED, weight=0.5
        )
    return measured(
        f"{done.value:.3g} requests finish a second and {load:.3g} arrive",
        done.value < load,
        track=done,
        metric=FINISHED,
        unit="1/s",
        threshold=load,
        weight=0.5,
    )


def _drain_s(scene: Scene, capacity: float | None, remedy: Sequence[Wish]) -> float | None:
    """Seconds until the queue is served with the low tiers turned away; None: it stays."""
    if not capacity or not remedy:
        return None
    return drain_s(scene, capacity - kept_per_s(scene, float(remedy[0].to)))


def _ask(scene: Scene, more: int) -> str:
    if not more:
        return ""
    have = several(scene.engine.engines, "engine serves", "engines serve")
    return f"; {have} {scene.engine.service}, and it needs {more} more like {scene.engine.name}"


def _because(scene: Scene, load: float | None, capacity: float | None, more: int) -> str:
    if load is None or not capacity:
        return "it is not measured what arrives and what the engine could serve"
    if not more:
        return scene.because(
            f"{load:.3g} requests arrived a second, and the engine could serve {capacity:.3g}"
        )
    return scene.because(
        f"{load:.3g} requests arrived a second and no setting lets the engine serve more than "
        f"{capacity:.3g}{_ask(scene, more)}"
    )


CAUSE = LoadBeyondCapacity()
