"""Enough of a contiguous KV pool is free, but in no one run: who asks for a long one waits for it.

Runbook: docs/causes/kv_fragmentation.md. Only where a request has its blocks in a row; of a paged
pool nothing is asked, as any free block of it serves any request. A full pool is told apart by what
is free in total: a stall is counted only while that is enough. Entropy tells how evenly the free
blocks are spread over their runs, neither how many there are nor how many are asked for: it stands
beside the number of runs and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.diagnosis.cause import (
    CAP,
    KV_BLOCKS,
    KV_USED,
    POOL_SHRANK_MAX,
    WAITING,
    Fact,
    Finding,
    Scene,
    Track,
    Wish,
    arrivals,
    beyond_fact,
    capacity_per_s,
    drain_s,
    gettext_noop,
    mean,
    measured,
    pool_grew,
    queue_fact,
    score,
    several,
    waits_fact,
)

ALLOCATOR, COMPACTION, BLOCK = "kv_allocator", "kv_compaction", "kv_block_size"
KNOBS = "engine:knob"
STALLS = "engine:kv_alloc_stall_seconds_total"
STALLED_FOR = "engine:kv_alloc_stall_blocks"
LONGEST = "engine:kv_largest_free_run_blocks"
RUNS = "engine:kv_free_runs"
ENTROPY = "engine:kv_fragmentation_entropy"
STRANDED = "engine:kv_stranded_tokens"
MOVING = "engine:kv_compaction_seconds_total"

# Of the time that anyone waits. It makes the rest: behind a stall a queue forms, which fills the
# pool once the stall is over. Where a pool is just too small, hardly any of the time is a stall's.
STALLED_MIN = 0.25
LOOKS_MIN = 2  # one look at a queue may be chance
STRANDED_MIN = 0.5  # most of what is free is of no use to the largest


@dataclass(frozen=True)
class Short:
    """Means of the looks at which a request was stalled, in blocks. `asked`: for in one run."""

    free: float
    longest: float
    asked: float


class KvFragmentation:
    slug = "kv_fragmentation"
    label = gettext_noop("KV pool fragmented")

    def examine(self, scene: Scene) -> Finding:
        waits, runs = waits_fact(scene), _runs_fact(scene)
        if not runs.supports:
            because = "no request is known to need its KV blocks in one run"
            evidence: tuple[Fact, ...] = (waits, runs)
            return Finding(
                self.slug, score(evidence), because, evidence=evidence, no_remedy=because,
                applies=False,
            )  # fmt: skip
        stalled, short = scene.rate(STALLS), _short(scene)
        evidence = (
            waits,
            runs,
            _stalled_fact(scene, stalled),
            queue_fact(scene),
            _longest_fact(scene, short),
            _stranded_fact(scene),
            beyond_fact(scene, wanted=False, weight=0.5),
        )
        remedy, no_remedy = _remedy(scene, short)
        pool = pool_grew(scene)
        shrank = pool is not None and pool < POOL_SHRANK_MAX
        facts = {
            "stalled": stalled.value,
            "free_blocks": short.free if short else None,
            "longest_free_run_blocks": short.longest if short else None,
            "asked_blocks": short.asked if short else None,
            "drain_s": _drain_s(scene),
        }
        return Finding(
            self.slug,
            score(evidence),
            _because(scene, stalled, short),
            facts,
            evidence,
            remedy,
            no_remedy,
            # Runs that are reserved fill a pool as much as tokens do.
            explains=("running_cap_too_small", *(() if shrank else ("kv_pool_exhausted",))),
            applies=waits.supports,
        )


def _runs_fact(scene: Scene) -> Fact:
    kind = scene.engine.values.get(ALLOCATOR)
    text = {
        "contiguous": "A request gets one run of KV blocks for all it may become "
        f"({ALLOCATOR} is contiguous)",
        "paged": f"Any free KV block serves any request ({ALLOCATOR} is paged)",
    }.get(str(kind), f"{scene.engine.name} has no {ALLOCATOR}: it is not known to need one run")
    return measured(
        text,
        kind == "contiguous",
        metric=KNOBS,
        value=None if kind is None else float(kind == "paged"),
        threshold=0,
        required=True,
        weight=0.5,
    )


def _stalled_fact(scene: Scene, stalled: Track) -> Fact:
    """Of the time that anyone waits, the share in which free blocks lay apart.

    Queues come and go between two looks, stalls are timed: whoever is stalled waits.
    """
    looks = [waiting > 0 for waiting in scene.steps(WAITING) if not math.isnan(waiting)]
    share = None
    if stalled.value is not None and sum(looks) >= LOOKS_MIN:
        share = stalled.value / max(stalled.value, sum(looks) / len(looks))
    if stalled.value is None:
        text = "How long requests wait for free blocks that lie apart was not measured"
    else:
        then = "" if stalled.before is None else f", {stalled.before:.0%} before"
        text = (
            f"For {stalled.value:.0%} of the time{then}, a request waited though blocks enough "
            "were free, in runs too short for it"
        )
        if share is None:
            text += "; requests were seen waiting too seldom to tell more"
        else:
            text += f": {share:.0%} of the time that any waited"
    return measured(
        text,
        share is not None and share >= STALLED_MIN,
        track=stalled,
        metric=STALLS,
        unit="share of the time with a queue",
        value=share,
        threshold=STALLED_MIN,
        required=True,
        weight=3,
    )


def _short(scene: Scene) -> Short | None:
    """None where no look fell into a stall, or the pool was not measured there."""
    columns = [scene.steps(metric) for metric in (KV_USED, KV_BLOCKS, LONGEST, STALLED_FOR)]
    looks = [
        ((1 - used) * blocks, longest, asked)
        for used, blocks, longest, asked in zip(*columns, strict=False)
        if not math.isnan(used + blocks + longest + asked)
    ]
    return Short(*map(_mean, zip(*looks, strict=True))) if looks else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _longest_fact(scene: Scene, short: Short | None) -> Fact:
    longest = scene.gauge(LONGEST)
    if short is None:
        text = "In no measurement a request was waiting for a longer run than any free one"
        return measured(text, False, track=longest, metric=LONGEST, unit="blocks", weight=0.5)
    text = (
        f"While a request waited for {short.asked:.0f} blocks in one run, {short.free:.0f} were "
        f"free and the longest run of them had {short.longest:.0f}"
    )
    runs, entropy = scene.gauge_by(RUNS, "le").get("+Inf"), scene.gauge(ENTROPY)
    if runs is not None and entropy.value is not None and runs >= 1:
        text += (
            f" ({several(runs, 'free run', 'free runs', '.1f')} on average, with an entropy of "
            f"{entropy.value:.1f} bits; {math.log2(runs):.1f} if all were of one length)"
        )
    return measured(
        text,
        short.longest < short.asked <= short.free,
        track=Track(longest.before, short.longest, longest.points),
        metric=LONGEST,
        unit="blocks",
        threshold=short.asked,
    )


def _stranded_fact(scene: Scene) -> Fact:
    """Of what is free, how much serves nobody who asks for as much as the largest."""
    free, stranded = _free_tokens(scene), scene.gauge_by(STRANDED, "asked")
    largest = stranded.get("largest")
    if not free or largest is None:
        text = "How much of the free memory serves no request was not measured"
        return measured(text, False, metric=STRANDED, weight=0.5)
    text = (
        f"Of {free:,.0f} free tokens {largest:,.0f} are of no use to a request as large as the "
        f"largest that runs or waits, {stranded.get('median', 0.0):,.0f} to one of the median size"
    )
    return measured(
        text,
        largest >= STRANDED_MIN * free,
        metric=STRANDED,
        unit="share of the free tokens",
        value=min(1.0, largest / free),
        threshold=STRANDED_MIN,
    )


def _free_tokens(scene: Scene) -> float | None:
    size = scene.engine.number(BLOCK)
    looks = zip(scene.steps(KV_USED), scene.steps(KV_BLOCKS), strict=False)
    free = mean([(1 - used) * blocks for used, blocks in looks])
    return None if free is None or size is None else free * size


def _remedy(scene: Scene, short: Short | None) -> tuple[tuple[Wish, ...], str]:
    """Moving together first: a stall means that enough is free, so it is over with that.

    It is hot, and undone by a word. A paged pool is exchanged between two steps, and may not be
    undone: more may run in it by then than there are runs for. It is left for where moving is not
    to be had, was not kept, or is on and has not sufficed.
    """
    wishes, moves = [], scene.engine.values.get(COMPACTION) == "on"
    if scene.engine.supports(COMPACTION) and not moves:
        why = "moved together, what is free is one run"
        if short:
            why += f" of {short.free:.0f} blocks; {short.asked:.0f} are asked for"
        wishes.append(Wish(COMPACTION, "on", why))
    if scene.engine.supports(ALLOCATOR):
        why = "in a paged pool any free block serves any request"
        if moves and (moving := scene.rate(MOVING).value) is not None:
            why += f"; sequences are moved together already, for {moving:.1%} of the time"
        wishes.append(Wish(ALLOCATOR, "paged", why))
    if wishes:
        return tuple(wishes), ""
    return (), "the engine can neither move its sequences together nor page its pool while it runs"


def _drain_s(scene: Scene) -> float | None:
    """Once memory does not hold up who waits, the cap does."""
    cap, load = scene.engine.number(CAP), arrivals(scene).value
    capacity = None if cap is None else capacity_per_s(scene, cap)
    return None if capacity is None or load is None else drain_s(scene, capacity - load)


def _because(scene: Scene, stalled: Track, short: Short | None) -> str:
    if stalled.value is None:
        return "it is not measured whether free blocks that lie apart keep requests waiting"
    text = f"for {stalled.value:.0%} of the time a request found no run of free blocks long enough"
    if short:
        text += (
            f": it asked for {short.asked:.0f} in one, {short.free:.0f} were free and "
            f"{short.longest:.0f} the longest run"
        )
    return scene.because(text)


CAUSE = KvFragmentation()
