"""The KV pool is full: running requests are sent back and computed again, or none can join them.

Runbook: docs/causes/kv_pool_exhausted.md. A paged pool loses nothing to gaps between its blocks; it
is full because what runs needs more tokens than it has, or because the last block of each request
is mostly empty. The first is cured by running fewer at once, the second by smaller blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from controlplane.diagnosis.cause import (
    CAP,
    INFEASIBLE,
    KV_BLOCKS,
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
    capacity_per_s,
    counts_requests,
    gettext_noop,
    lengths,
    mean,
    measured,
    score,
    several,
    shed_wishes,
)

BLOCK = "kv_block_size"
FULL_MIN = 0.9  # used at the fullest moment
GREW = 2.0  # preemptions a second, now over before
BLOCKED_MIN = 0.5  # of the looks with a queue: memory, not the cap, keeps them waiting
LOOKS_MIN = 2  # one look at a queue may be chance
AIM = 0.9  # of the pool: requests grow while they run
WASTE_LARGER = 0.5  # most of the pool is empty ends of blocks
WASTE_MIN = 0.1  # less of it is not worth a smaller block


@dataclass(frozen=True)
class Pool:
    """`tokens` it holds, `per_request` of them in use half-way through a request, on average.

    `waste` is the share of a request's blocks that stays empty: half a block each, an estimate.
    """

    tokens: float
    per_request: float
    block: float

    @property
    def waste(self) -> float:
        empty = (self.block - 1) / 2
        return empty / (self.per_request + empty)

    @property
    def fits(self) -> float:
        """Requests that run together without one being sent back."""
        return AIM * self.tokens * (1 - self.waste) / self.per_request


class KvPoolExhausted:
    slug = "kv_pool_exhausted"
    label = gettext_noop("KV pool exhausted")

    def examine(self, scene: Scene) -> Finding:
        used, kept = scene.gauge(KV_USED, over="max"), _kept(scene)
        preempted, blocked = scene.rate(PREEMPTIONS), _blocked(scene)
        preempts = _grows(preempted)
        pool = _pool(scene)
        evidence = (
            counts_requests(scene),
            _full_fact(used, kept),
            _preempted_fact(scene, preempted, required=blocked is None or blocked < BLOCKED_MIN),
            _blocked_fact(blocked, required=not preempts),
            *_shrank_fact(scene),
            beyond_fact(scene, wanted=False),
        )
        remedy, no_remedy = _remedy(scene, pool)
        capacity = capacity_per_s(scene, pool.fits) if pool else None
        load = arrivals(scene).value
        beyond = capacity is not None and load is not None and load > capacity
        if beyond and capacity is not None:
            shed, why_not = shed_wishes(scene, capacity)
            remedy, no_remedy = remedy + shed, no_remedy or why_not
        facts = {
            "kv_used": used.value,
            "preemptions_per_s": preempted.value,
            "fits": pool.fits if pool else None,
            "waste": pool.waste if pool else None,
            "capacity_per_s": capacity,
        }
        return Finding(
            self.slug,
            score(evidence),
            _because(scene, used, preempted),
            facts,
            evidence,
            remedy,
            "" if remedy else no_remedy,
            verdict=INFEASIBLE if beyond else "",
            explains=("running_cap_too_small",),
        )


def _grows(preempted: Track) -> bool:
    return bool(preempted.value) and (
        preempted.before is None or (preempted.value or 0.0) >= GREW * preempted.before
    )


def _kept(scene: Scene) -> float:
    """The share kept free, a block for each who runs, so that nobody is sent back at once.

    With few large blocks that is a good part of the pool; 0 where its blocks are not counted.
    """
    blocks, running = scene.gauge(KV_BLOCKS).value, scene.gauge(RUNNING, over="max").value
    return running / blocks if blocks and running else 0.0


def _full_fact(used: Track, kept: float) -> Fact:
    if used.value is None:
        text = "How full the KV cache is was not measured"
    else:
        then = "" if used.before is None else f", {used.before:.0%} before"
        text = f"The KV cache is {used.value:.0%} full at its fullest{then}"
        if kept >= 1 - FULL_MIN:
            text += f"; {kept:.0%} are kept for the next block of those who run"
    full = None if used.value is None else min(1.0, used.value + kept)
    return measured(
        text,
        full is not None and full >= FULL_MIN,
        track=used,
        metric=KV_USED,
        unit="share",
        value=full,
        threshold=FULL_MIN,
        required=True,
    )


def _preempted_fact(scene: Scene, preempted: Track, *, required: bool) -> Fact:
    count = scene.growth(PREEMPTIONS)
    if preempted.value is None or count is None:
        text = "Preemptions were not measured"
    else:
        then = "" if preempted.before is None else f", {preempted.before:.2g} a second before"
        text = (
            f"{count:.0f} running requests were sent back to be computed again, "
            f"{preempted.value:.2g} a second{then}"
        )
    return measured(
        text,
        _grows(preempted),
        track=preempted,
        metric=PREEMPTIONS,
        unit="1/s",
        threshold=GREW * (preempted.before or 0.0),
        required=required,
        weight=2,
    )


def _blocked(scene: Scene) -> float | None:
    """Of the looks with a queue, the share with fewer running than the cap allows."""
    cap = scene.engine.number(CAP)
    if cap is None:
        return None
    looks = [
        running < cap - 1
        for running, waiting in zip(scene.steps(RUNNING), scene.steps(WAITING), strict=False)
        if waiting > 0 and not math.isnan(running)
    ]
    return mean([float(look) for look in looks]) if len(looks) >= LOOKS_MIN else None


def _blocked_fact(blocked: float | None, *, required: bool) -> Fact:
    text = (
        "Requests were not seen to wait for anything"
        if blocked is None
        else f"{blocked:.0%} of the times that requests waited, fewer ran than the cap allows"
    )
    return measured(
        text,
        blocked is not None and blocked >= BLOCKED_MIN,
        metric=RUNNING,
        unit="share of the time with a queue",
        value=blocked,
        threshold=BLOCKED_MIN,
        required=required,
    )


def _shrank_fact(scene: Scene) -> tuple[Fact, ...]:
    """Speaks only where the pool has become smaller: it is full at the same load then."""
    blocks = scene.gauge(KV_BLOCKS)
    if blocks.value is None or blocks.before is None or blocks.value >= 0.99 * blocks.before:
        return ()
    return (
        measured(
            f"The pool has {blocks.value:.0f} blocks and had {blocks.before:.0f} before",
            True,
            track=blocks,
            metric=KV_BLOCKS,
            unit="blocks",
            threshold=blocks.before,
        ),
    )


def _pool(scene: Scene) -> Pool | None:
    """From the pool's size and the requests' lengths; from who runs in how much of it, else."""
    block, blocks, tokens = scene.engine.number(BLOCK), scene.gauge(KV_BLOCKS).value, lengths(scene)
    if block and blocks and tokens:
        prompt, output = tokens
        return Pool(block * blocks, prompt + output / 2, block)
    running, used = scene.gauge(RUNNING).value, scene.gauge(KV_USED).value
    if running and used:
        return Pool(running / used, 1.0, 1.0)  # in units of a request
    return None


def _remedy(scene: Scene, pool: Pool | None) -> tuple[tuple[Wish, ...], str]:
    """Smaller blocks first where the empty ends are the larger part, else fewer running."""
    cap = scene.engine.number(CAP)
    if pool is None or cap is None:
        return (), "how many requests the KV cache holds is not known"
    wishes = []
    if pool.fits < cap:
        fit = several(pool.fits, "request", "requests", ".0f")
        why = f"the KV cache holds {fit} of this length without sending any back"
        wishes.append(Wish(CAP, max(1.0, pool.fits), why))
    if pool.waste >= WASTE_MIN and scene.engine.supports(BLOCK):
        smaller = 2 * WASTE_MIN * pool.per_request + 1
        why = f"about {pool.waste:.0%} of the KV cache is the empty end of somebody's last block"
        place = 0 if pool.waste >= WASTE_LARGER else len(wishes)
        wishes.insert(place, Wish(BLOCK, smaller, why))
    if wishes:
        return tuple(wishes), ""
    return (), (
        f"the cap of {cap:g} is no more than the KV cache holds, and its blocks are filled: only a "
        "larger pool or shorter requests help"
    )


def _because(scene: Scene, used: Track, preempted: Track) -> str:
    if used.value is None:
        return "it is not measured how full the KV cache is"
    sent = ""
    if preempted.value:
        sent = f" and {preempted.value:.2g} running requests a second were sent back"
    return scene.because(f"the KV cache was {used.value:.0%} full{sent}")


CAUSE = KvPoolExhausted()
