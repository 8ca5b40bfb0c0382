"""The KV pool is full: running requests are sent back and computed again, or none can join them.

Runbook: docs/causes/kv_pool_exhausted.md. A paged pool loses nothing to gaps between its blocks; it
is full because what runs needs more tokens than it has, or because the last block of each request
is mostly empty. The second is cured by smaller blocks. No cap makes room for the first: an engine
lets no more in than its pool holds. Running fewer wins back what is computed again for those sent
back, and nothing else, so it is wished for only where that is worth the places given up. A
contiguous pool is full of what is reserved for tokens yet to come as well. Paging it is a person's:
more may run then than could be put back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from controlplane.diagnosis.cause import (
    CAP,
    INFEASIBLE,
    KV_BLOCKS,
    KV_USED,
    POOL_SHRANK_MAX,
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
    pool_grew,
    score,
    several,
    shed_wishes,
    step_time,
    working,
)

BLOCK, ALLOCATOR = "kv_block_size", "kv_allocator"
STEPS = "engine:steps_total"
FULL_MIN = 0.9  # used at the fullest moment
GREW = 2.0  # preemptions a second, now over before
HARMED_MIN = 0.5  # of what is missed: those sent back, each with all who run
BLOCKED_MIN = 0.5  # of the looks with a queue: memory, not the cap, keeps them waiting
LOOKS_MIN = 2  # one look at a queue may be chance
AIM = 0.9  # of the pool: requests grow while they run
WASTE_LARGER = 0.5  # most of the pool is empty ends of blocks
WASTE_MIN = 0.1  # less of it is not worth a smaller block
BESIDE_WEIGHT = 0.5  # of one of the two signs, where the other is there: either alone is enough
SHRANK_WEIGHT = 2.0  # nothing that is sent to an engine, or slows it, takes memory from it
AGAIN_MIN = 0.1  # of the steps' time: less of it is not worth running fewer


@dataclass(frozen=True)
class Pool:
    """`holds`: how many requests fill it, of the length of those who run; `tokens` each of them has
    half-way through, of those that ended. None: not measured, or not known."""

    holds: float
    tokens: float | None
    block: float | None

    @property
    def fits(self) -> float:
        """Requests that run together without one being sent back."""
        return AIM * self.holds

    @property
    def waste(self) -> float | None:
        """The share of a request's blocks that stays empty: half a block each, an estimate."""
        if self.tokens is None or self.block is None:
            return None
        empty = (self.block - 1) / 2
        return empty / (self.tokens + empty)


class KvPoolExhausted:
    slug = "kv_pool_exhausted"
    label = gettext_noop("KV pool exhausted")

    def examine(self, scene: Scene) -> Finding:
        used, kept = scene.gauge(KV_USED, over="max"), _kept(scene)
        preempted, blocked = scene.rate(PREEMPTIONS), _blocked(scene)
        preempts = _grows(scene, preempted)
        # A gap between tokens begins after the wait.
        waits = scene.objective.measures != "tpot" and (blocked or 0.0) >= BLOCKED_MIN
        pool = _pool(scene)
        evidence = (
            counts_requests(scene),
            _full_fact(used, kept),
            _preempted_fact(scene, preempted, required=not waits),
            _blocked_fact(blocked, required=not preempts),
            *_shrank_fact(scene),
            beyond_fact(scene, wanted=False),
        )
        again = _again(scene)
        remedy, no_remedy = _remedy(scene, pool, again)
        capacity = capacity_per_s(scene, pool.holds) if pool else None
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
            "again": again,
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


def _grows(scene: Scene, preempted: Track) -> bool:
    return bool(preempted.value) and (preempted.value or 0.0) >= _bar_per_s(scene, preempted)


def _bar_per_s(scene: Scene, preempted: Track) -> float:
    """So many sent back a second that it is new, and no trifle: computing one again holds up those
    who run as well, and together they are a good part of what is missed."""
    late, running = scene.late(), scene.gauge(RUNNING).value
    seconds = scene.incident.count * scene.window_s
    trifle = HARMED_MIN * (late or 0.0) / max(1.0, running or 0.0) / seconds
    return max(GREW * (preempted.before or 0.0), trifle)


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
            text += f"; {kept:.0%} more is kept free for what the running requests need next"
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
        text = "Whether running requests were sent back to the queue was not measured"
    else:
        then = "" if preempted.before is None else f", {preempted.before:.2g} a second before"
        text = (
            several(count, "running request was", "running requests were", ".0f")
            + f" sent back to be computed again, {preempted.value:.2g} a second{then}"
        )
    return measured(
        text,
        _grows(scene, preempted),
        track=preempted,
        metric=PREEMPTIONS,
        unit="1/s",
        threshold=_bar_per_s(scene, preempted),
        required=required,
        weight=2 if required or _grows(scene, preempted) else BESIDE_WEIGHT,
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
        "No request was seen to wait for a place"
        if blocked is None
        else f"In {blocked:.0%} of the measurements with requests waiting, fewer ran than the cap "
        "allows"
    )
    held_up = blocked is not None and blocked >= BLOCKED_MIN
    return measured(
        text,
        held_up,
        metric=RUNNING,
        unit="share of the time with a queue",
        value=blocked,
        threshold=BLOCKED_MIN,
        required=required,
        weight=1 if required or held_up else BESIDE_WEIGHT,
    )


def _shrank_fact(scene: Scene) -> tuple[Fact, ...]:
    """Speaks only where the pool has become smaller: it is full at the same load then."""
    blocks, pool = scene.gauge(KV_BLOCKS), pool_grew(scene)
    if blocks.value is None or blocks.before is None or pool is None or pool >= POOL_SHRANK_MAX:
        return ()
    return (
        measured(
            f"The KV cache has {blocks.value:.0f} blocks and had {blocks.before:.0f} before",
            True,
            track=blocks,
            metric=KV_BLOCKS,
            unit="blocks",
            threshold=blocks.before,
            weight=SHRANK_WEIGHT,
        ),
    )


def _pool(scene: Scene) -> Pool | None:
    """From who runs in how much of it: what a request takes is seen, whatever its length."""
    running, used = scene.gauge(RUNNING).value, scene.gauge(KV_USED).value
    if not running or not used:
        return None
    tokens = lengths(scene)
    half_way = tokens[0] + tokens[1] / 2 if tokens else None
    return Pool(running / used, half_way, scene.engine.number(BLOCK))


def _again(scene: Scene) -> float | None:
    """Of the steps' time, the share spent on computing again what was sent back half-way.

    Where no fit tells what a prompt's token costs, it is as if nothing else took time: the most it
    can be.
    """
    sent_back, steps = scene.rate(PREEMPTIONS).value, scene.rate(STEPS).value
    now, tokens, step = working(scene), lengths(scene), step_time(scene)
    if sent_back is None or not steps or now is None or not now.prompt or tokens is None:
        return None
    again = sent_back / steps * (tokens[0] + tokens[1] / 2)
    if step and step.healthy.trusted:
        return min(1.0, step.healthy.b * again / now.step_s)
    return min(1.0, again / now.prompt)


def _remedy(scene: Scene, pool: Pool | None, again: float | None) -> tuple[tuple[Wish, ...], str]:
    """Smaller blocks first where the empty ends are the larger part, else fewer running."""
    cap = scene.engine.number(CAP)
    if pool is None or cap is None:
        return (), "how many requests the KV cache holds is not known"
    wishes = []
    if pool.fits < cap and (again is None or again >= AGAIN_MIN):
        wishes.append(_fewer(pool, again))
    waste = pool.waste
    if waste is not None and waste >= WASTE_MIN and scene.engine.supports(BLOCK):
        assert pool.tokens is not None
        smaller = 2 * WASTE_MIN * pool.tokens + 1
        why = f"about {waste:.0%} of the KV cache is the empty end of somebody's last block"
        place = 0 if waste >= WASTE_LARGER else len(wishes)
        wishes.insert(place, Wish(BLOCK, smaller, why))
    if wishes:
        return tuple(wishes), ""
    return (), _no_remedy(scene, pool, cap, again)


def _fewer(pool: Pool, again: float | None) -> Wish:
    """Down to what fits, and not so far below that more is lost than is won back."""
    fit = several(pool.fits, "request", "requests", ".0f")
    why = f"the KV cache holds {fit} of this length without sending any back"
    if again is None:
        return Wish(CAP, max(1.0, pool.fits), why)
    why += f", and {again:.0%} of the steps' time goes to computing again what was sent back"
    lowest = max(1.0, math.ceil((1 - again) * pool.fits))
    return Wish(CAP, max(1.0, pool.fits), why, limit=lowest)


def _no_remedy(scene: Scene, pool: Pool, cap: float, again: float | None) -> str:
    """Why no knob helps: what waits has no room, whoever is let in."""
    if pool.fits >= cap:
        told = f"the cap of {cap:g} is no more than the KV cache holds"
    else:
        hold = several(pool.holds, "request", "requests", ".0f")
        told = (
            f"the KV cache holds about {hold} whatever the cap of {cap:g}, and only {again:.0%} of "
            "the steps' time goes to computing again what was sent back: fewer at once would serve "
            "fewer"
        )
    if scene.engine.values.get(ALLOCATOR) == "contiguous":
        return (
            f"{told}; its blocks are reserved for all that requests may become: a paged pool, a "
            "larger one or a lower max_tokens helps"
        )
    return f"{told}; its blocks are filled: only a larger pool or shorter requests help"


def _because(scene: Scene, used: Track, preempted: Track) -> str:
    if used.value is None:
        return "it is not measured how full the KV cache is"
    sent = ""
    if preempted.value:
        sent = f" and {preempted.value:.2g} running requests a second were sent back"
    return scene.because(f"the KV cache was {used.value:.0%} full{sent}")


CAUSE = KvPoolExhausted()
