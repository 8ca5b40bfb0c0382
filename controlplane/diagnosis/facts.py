"""Facts: measured sentences for or against a cause, and the score they add up to.

A fact carries the number it speaks of, the bar it is held against and the metric both come from, so
that a page can show where the sentence is from. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.diagnosis.capacity import capacity_per_s
from controlplane.diagnosis.demand import (
    ARRIVALS,
    GREW_MIN,
    arrivals,
    demand_grew,
    demand_text,
    pool_grew,
)
from controlplane.diagnosis.scene import (
    METRIC_OF,
    STEPS_PER_WINDOW,
    WORD_OF,
    Histogram,
    Point,
    Scene,
    Track,
    evenly,
)
from controlplane.diagnosis.step_time import SLOWER_MAX, STEP_TIME, T_MIN, step_time

# What a cause can reach at most when one fact it cannot do without fails or was not measured.
SCORE_REFUTED_MAX = 0.4
BEYOND_MIN = 1.1  # arrivals so far above what the engine serves are no error of the estimate
POOL_SHRANK_MAX = 0.99  # of the pool of before
QUEUE_SHARE_MIN = 0.5  # most of the latency is waiting

CAP = "max_num_seqs"
QUEUE_TIME = "vllm:request_queue_time_seconds"
PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(frozen=True)
class Fact:
    """One measured sentence for (`supports`) or against a cause.

    `required`: without it the cause cannot be named. `weight` is its share in the score. `points`
    are (unix seconds, value or None) per control window.
    """

    sentence: str
    supports: bool
    metric: str = ""
    unit: str = ""
    before: float | None = None
    value: float | None = None
    threshold: float | None = None
    points: tuple[Point, ...] = ()
    required: bool = False
    weight: float = 1.0


def support(evidence: Sequence[Fact]) -> float:
    """Weight of the supporting facts over the weight of all, 0 to 1."""
    total = sum(fact.weight for fact in evidence)
    return sum(fact.weight for fact in evidence if fact.supports) / total if total else 0.0


def score(evidence: Sequence[Fact]) -> float:
    """`support`, but at most SCORE_REFUTED_MAX when a required fact does not support."""
    refuted = any(fact.required and not fact.supports for fact in evidence)
    return round(min(support(evidence), SCORE_REFUTED_MAX if refuted else 1.0), 3)


def measured(
    sentence: str,
    supports: bool,
    *,
    track: Track | None = None,
    metric: str = "",
    unit: str = "",
    threshold: float | None = None,
    value: float | None = None,
    required: bool = False,
    weight: float = 1.0,
) -> Fact:
    """A Fact with its numbers taken from a Track."""
    return Fact(
        sentence,
        supports,
        metric=metric,
        unit=unit,
        before=track.before if track else None,
        value=value if value is not None else (track.value if track else None),
        threshold=threshold,
        points=track.points if track else (),
        required=required,
        weight=weight,
    )


def counts_requests(scene: Scene) -> Fact:
    """For causes that harm whatever of a request is timed or counted."""
    known = scene.objective.measures != "other"
    what = "requests or their tokens" if known else "neither requests nor their tokens"
    text = f"“{scene.objective.name}” times or counts {what}"
    return Fact(text, known, required=True, weight=0.5)


def waits_fact(scene: Scene) -> Fact:
    """For causes that make requests wait: a gap between tokens begins after that."""
    waits = scene.objective.measures in ("ttft", "e2e", "success")
    says = "suffers" if waits else "does not suffer"
    text = f"“{scene.objective.name}” {says} from requests waiting before they run"
    return Fact(text, waits, required=True, weight=0.5)


def queue_fact(scene: Scene) -> Fact:
    """Whether most of the latency the objective measures is spent in the queue."""
    kind = scene.objective.measures if scene.objective.measures in METRIC_OF else "ttft"
    share = _share(scene.histogram(QUEUE_TIME), scene.histogram(METRIC_OF[kind]))
    before = _share(
        scene.histogram(QUEUE_TIME, reference=True),
        scene.histogram(METRIC_OF[kind], reference=True),
    )
    track = scene.means(QUEUE_TIME)
    if share is None:
        text = "How long requests queued was not measured"
    else:
        then = "" if before is None else f" ({before:.0%} before)"
        text = f"The mean wait in the queue is {share:.0%} of the mean {WORD_OF[kind]}{then}"
    return measured(
        text,
        share is not None and share >= QUEUE_SHARE_MIN,
        track=Track(before, share, track.points),
        metric=QUEUE_TIME,
        unit=f"share of {WORD_OF[kind]}",
        threshold=QUEUE_SHARE_MIN,
        required=True,
        weight=2,
    )


def _share(part: Histogram | None, whole: Histogram | None) -> float | None:
    """Mean over mean, so that requests counted in one and not yet in the other don't matter."""
    if part is None or whole is None or part.mean is None or not whole.mean:
        return None
    return min(1.0, part.mean / whole.mean)


def slower_fact(
    scene: Scene,
    *,
    wanted: bool,
    required: bool = True,
    weight: float = 1,
    bar: float | None = None,
) -> Fact:
    """Whether steps take longer than before at the same tokens, wanted or not.

    Where that cannot be told it supports neither, and decides only against who wants it. `bar` is
    for who knows from elsewhere that something slows the steps.
    """
    step = step_time(scene)
    slower = step.slower if step else None
    if step is None or slower is None:
        text = (
            "Whether steps take longer than before for as many tokens cannot be told: they were "
            "not measured both before and now, or too seldom or too much alike"
        )
        return measured(
            text,
            False,
            metric=STEP_TIME,
            required=required and wanted,
            weight=weight if wanted else 0.5,
        )
    bar = step.slower_max if bar is None else bar
    slowed = slower > bar
    if slowed:
        text = (
            f"Steps take longer than before for as many tokens, by {slower:.0%} of their time: "
            "something slows them"
        )
    elif slower <= 0:
        text = "Steps take no longer than before for as many tokens"
    elif bar > 2 * SLOWER_MAX:
        text = (
            f"Steps take longer than before for as many tokens, by {slower:.0%} of their time; but "
            "steps are so much larger, or requests so much longer, that less than "
            f"{bar:.0%} says nothing"
        )
    else:
        text = f"Steps take as long as before for as many tokens, within {bar:.0%}"
    return measured(
        text,
        slowed is wanted,
        metric=STEP_TIME,
        unit="share of the step",
        value=max(0.0, slower),
        threshold=bar,
        required=required,
        weight=weight,
    )


def beyond_fact(scene: Scene, *, wanted: bool, required: bool = True, weight: float = 1) -> Fact:
    """Whether more arrives than the engine would serve under the largest cap it allows.

    More than crowds that come and go may bring by chance: they make a window bad that holds many of
    them, and it is bad windows that are looked at. Where it cannot be told it supports neither, and
    decides only against who wants it.
    """
    load, ceiling = arrivals(scene), ceiling_per_s(scene)
    most = ceiling_per_s(scene, at_most=True)
    if load.value is None or not ceiling or not most:
        return measured(
            "What the engine could serve at most was not measured, or not well enough to tell",
            False,
            track=load,
            metric=ARRIVALS,
            required=required and wanted,
            weight=weight if wanted else 0.5,
        )
    bar, chance = max(BEYOND_MIN * ceiling, most), _arrivals_doubt(scene)
    beyond = load.value - chance >= bar
    text = (
        f"{load.value:.3g} requests arrive a second; by its step times the engine could serve "
        f"about {ceiling:.3g} a second, and {bar:.3g} at the very most, with {_cap_max(scene):g} "
        "running, the highest cap it allows"
    )
    if load.value >= bar and not beyond:
        text += f"; they come in crowds, and {chance:.3g} of them may be chance"
    return measured(
        text,
        beyond is wanted,
        track=load,
        metric=ARRIVALS,
        unit="1/s",
        threshold=bar,
        required=required,
        weight=weight,
    )


def _arrivals_doubt(scene: Scene) -> float:
    """Two standard errors of the mean of `arrivals` by crowds shorter than a window, in requests/s.

    Told by how looks within a window differ: what differs between windows is no chance.
    """
    looks = [each / scene.step_s for each in evenly(scene.steps(ARRIVALS, counter=True))]
    windows = [
        [each for each in looks[at : at + STEPS_PER_WINDOW] if not math.isnan(each)]
        for at in range(0, len(looks), STEPS_PER_WINDOW)
    ]
    spread = [statistics.variance(each) for each in windows if len(each) > 1]
    if not spread:
        return 0.0
    return T_MIN * math.sqrt(statistics.fmean(spread) / sum(map(len, windows)))


def traffic_fact(scene: Scene, *, grew: bool, required: bool = False, weight: float = 1) -> Fact:
    """Whether more work arrives than before, as wanted or not.

    Where that is not known it supports neither and never decides.
    """
    more = demand_grew(scene)
    return measured(
        demand_text(scene),
        more is not None and (more >= GREW_MIN) is grew,
        metric=ARRIVALS,
        unit="× before",
        value=more,
        threshold=GREW_MIN,
        required=required and more is not None,
        weight=weight,
    )


def serves(scene: Scene, running: float | None) -> bool | None:
    """Whether so many running would serve what arrives, at the speed of before; None: unknown."""
    capacity = None if running is None else capacity_per_s(scene, running)
    load = arrivals(scene).value
    return None if capacity is None or load is None else capacity >= BEYOND_MIN * load


def queue_follows(scene: Scene) -> bool:
    """Whether an engine that became slower needs nothing else for a queue: no more arrives than
    before, or no more than its cap would serve at the speed of before."""
    more = demand_grew(scene)
    return more is None or more < GREW_MIN or serves(scene, scene.engine.number(CAP)) is True


def ceiling_per_s(scene: Scene, *, at_most: bool = False) -> float | None:
    """What the engine would serve with the largest cap it allows, did memory suffice.

    `at_most`: within the error of the fit.
    """
    cap = _cap_max(scene)
    return None if cap is None else capacity_per_s(scene, cap, at_most=at_most)


def _cap_max(scene: Scene) -> float | None:
    return scene.engine.maximum(CAP) or scene.engine.number(CAP)


def follows_from_slowness(scene: Scene) -> tuple[str, ...]:
    """The causes whose signs an engine that became slower brings by itself.

    Queues and larger batches, unless more arrives; a KV cache that is full, or has no free run long
    enough, unless the pool shrank.
    """
    more, pool = demand_grew(scene), pool_grew(scene)
    follow = []
    if queue_follows(scene):
        follow.append("running_cap_too_small")
    if more is None or more < GREW_MIN:
        follow += ["load_beyond_capacity", "batch_too_large"]
    if pool is None or pool >= POOL_SHRANK_MAX:
        follow += ["kv_pool_exhausted", "kv_fragmentation"]
    return tuple(follow)
