"""Requests wait because the engine may not run more at once, though it has room to.

Runbook: docs/causes/running_cap_too_small.md. The bars follow from what the cause means: a cap that
explains most of the harm binds most of the time that anyone waits, and most of the latency is spent
in the queue. How often anyone waits decides nothing: bursts harm most of the requests in a small
part of the time.
"""

from __future__ import annotations

import math

from controlplane.diagnosis.cause import (
    CAP,
    KV_USED,
    PREEMPTIONS,
    RUNNING,
    WAITING,
    Fact,
    Finding,
    Scene,
    Track,
    Wish,
    arrivals,
    beyond_fact,
    drain_s,
    gettext_noop,
    mean,
    measured,
    percentile,
    queue_fact,
    queue_follows,
    score,
    several,
    slower_fact,
    waits_fact,
)

AT_CAP = 0.95  # "at the cap", or one below it: a place is empty for a moment when a request ends
BOUND_SHARE_MIN = 0.5  # the cap binds for most of the time that anyone waits
LOOKS_MIN = 2  # one look at a queue may be chance
KV_USED_MAX = 0.9  # above it more running requests would be preempted, not served
KV_USED_AFTER_MAX = 0.95  # what the remedy may fill, were KV to grow with the running requests

SPARE = 0.25  # a remedy holds, and is assumed to serve, this much more than was seen to come


class RunningCapTooSmall:
    slug = "running_cap_too_small"
    label = gettext_noop("running cap too small for the arrivals")

    def examine(self, scene: Scene) -> Finding:
        cap = scene.engine.number(CAP)
        running, waiting = scene.gauge(RUNNING), scene.gauge(WAITING)
        kv = scene.gauge(KV_USED, over="max")
        evidence = (
            waits_fact(scene),
            _bound_fact(scene, cap),
            queue_fact(scene),
            _waiting_fact(waiting),
            _kv_fact(kv),
            _preemption_fact(scene),
            beyond_fact(scene, wanted=False, weight=0.5),
            _speed_fact(scene),
        )
        remedy, no_remedy = _remedy(scene, cap, kv)
        facts = {
            "cap": cap,
            "running": running.value,
            "waiting": waiting.value,
            "queue_share": evidence[2].value,
            "kv_used": kv.value,
            "drain_s": drain_s(scene, SPARE * (arrivals(scene).value or 0.0)),
        }
        total = score(evidence)
        return Finding(
            self.slug,
            total,
            _because(scene, cap, running, waiting),
            facts,
            evidence,
            remedy,
            no_remedy,
            applies=evidence[0].supports,
        )


def _bound_fact(scene: Scene, cap: float | None) -> Fact:
    """Of the time that anyone waited, the share with running ≥ 0.95 × cap."""
    bar = max(1.0, min(AT_CAP * cap, cap - 1)) if cap else math.inf
    both = [
        (r, w)
        for r, w in zip(scene.steps(RUNNING), scene.steps(WAITING), strict=False)
        if cap and not (math.isnan(r) or math.isnan(w))
    ]
    waited = [r >= bar for r, w in both if w > 0]
    measurements = f"the {len(both)} measurements (one every {scene.step_s:.2g} s)"
    share = mean([float(bound) for bound in waited])
    if cap is None:
        text = "How many requests may run at once is not known: no agent reads the engine's knobs"
    elif not both:
        text = "How many requests ran and waited was not measured"
    elif share is None:
        text = f"No request was waiting in any of {measurements}"
    else:
        text = (
            f"Requests were waiting in {len(waited)} of {measurements}, in {sum(waited)} of those "
            f"with all {cap:g} running that the cap allows, or nearly all"
        )
    return measured(
        text,
        share is not None and share >= BOUND_SHARE_MIN and len(waited) >= LOOKS_MIN,
        metric=RUNNING,
        unit="share of the time with a queue",
        value=share,
        threshold=BOUND_SHARE_MIN,
        required=True,
        weight=2,
    )


def _waiting_fact(waiting: Track) -> Fact:
    grew = (
        waiting.value is not None
        and waiting.value >= 1
        and (waiting.before is None or waiting.value >= 2 * waiting.before)
    )
    if waiting.value is None:
        text = "How many requests wait was not measured"
    else:
        then = "" if waiting.before is None else f", {waiting.before:.1f} before"
        text = f"{waiting.value:.1f} requests wait on average{then}"
    return measured(text, grew, track=waiting, metric=WAITING, unit="requests", threshold=1)


def _kv_fact(kv: Track) -> Fact:
    if kv.value is None:
        return measured(
            "How full the KV cache is was not measured",
            False,
            metric=KV_USED,
            threshold=KV_USED_MAX,
        )
    room = kv.value < KV_USED_MAX
    says = "so more could run" if room else "so no more could run: memory is the limit"
    return measured(
        f"The KV cache is {kv.value:.0%} full at its fullest, {says}",
        room,
        track=kv,
        metric=KV_USED,
        unit="share",
        threshold=KV_USED_MAX,
        required=True,
    )


def _preemption_fact(scene: Scene) -> Fact:
    track, count = scene.rate(PREEMPTIONS), scene.growth(PREEMPTIONS)
    none = count is not None and count == 0
    if count is None:
        text = "Whether running requests were sent back to the queue was not measured"
    elif none:
        text = "No running request was sent back to the queue"
    else:
        sent = several(count, "running request was", "running requests were", ".0f")
        text = f"{sent} sent back to the queue: with more running it would be more"
    return measured(
        text,
        none,
        track=track,
        metric=PREEMPTIONS,
        unit="1/s",
        threshold=0,
        required=count is not None,
    )


def _speed_fact(scene: Scene) -> Fact:
    """A slower engine makes a queue under any cap; it decides unless that would be there anyway."""
    return slower_fact(scene, wanted=False, required=queue_follows(scene), weight=0.5)


def _remedy(scene: Scene, cap: float | None, kv: Track) -> tuple[tuple[Wish, ...], str]:
    """A cap that covers who runs and waits, and SPARE more, as far as the KV cache could hold them.

    Asked for is what it takes while there is a queue, as it is then that requests come late; and
    more than that, for a handful of looks does not see the largest crowd.
    Never above the largest graph captured: a batch that outgrows it runs eagerly, more slowly, and
    so does not shrink again by itself.
    """
    looks = zip(scene.steps(RUNNING), scene.steps(WAITING), strict=False)
    crowd = percentile([r + w for r, w in looks if w > 0], 0.9)
    if cap is None or crowd is None:
        return (), "the running cap or the demand for it is not measured"
    demand = (1 + SPARE) * crowd
    held = math.inf
    if kv.value:
        held = cap * KV_USED_AFTER_MAX / kv.value
    graph = scene.engine.graph_seqs_max or math.inf
    want = min(demand, held, graph)
    if want <= cap:
        what = "graphs are captured for" if graph < held else "the KV cache would hold"
        return (), f"{what} no more than {min(held, graph):.0f} running requests"
    run = several(crowd, "request runs or waits", "requests run or wait", ".0f")
    why = f"up to {run} while there is a queue, and there is to be room for {SPARE:.0%} more"
    if held < demand:
        why += f"; the KV cache holds {held:.0f}"
    if graph < demand:
        why += f"; graphs are captured for {graph:.0f}"
    limit = min(held, graph)
    return (Wish(CAP, want, why, limit=limit if limit < math.inf else None),), ""


def _because(scene: Scene, cap: float | None, running: Track, waiting: Track) -> str:
    if cap is None or running.value is None or waiting.value is None:
        return "it is not measured how many requests run and wait under which cap"
    wait = several(waiting.value, "request waited", "requests waited", ".0f")
    behind = f"{wait} behind a cap of {cap:g} running"
    if waiting.value < 0.5:
        run = several(running.value, "request ran", "requests ran", ".0f")
        behind = f"{run} under a cap of {cap:g} and nobody waited"
    return scene.because(behind)


CAUSE = RunningCapTooSmall()
