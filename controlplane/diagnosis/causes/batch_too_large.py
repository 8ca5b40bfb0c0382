"""A step carries so many tokens that the gap between two tokens misses its objective.

Runbook: docs/causes/batch_too_large.md. A running request gets one token per step, so a gap that is
too long is a step that is. Steps are counted by how long they take and by whether a prompt chunk
was among them; that tells what the long ones hold, whatever a token of it costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from controlplane.diagnosis.cause import (
    RUNNING,
    STEP_TIME,
    WAITING,
    Fact,
    Finding,
    Histogram,
    Scene,
    Track,
    Wish,
    gettext_noop,
    graph_lost,
    measured,
    ms,
    score,
    several,
    slower_fact,
    step_time,
)

CHUNK, BUDGET, CAP = "prefill_chunk_tokens", "max_num_batched_tokens", "max_num_seqs"
EXPLAINED_MIN = 0.5  # of the gaps that are too long, by steps that are
HEALTHY_MIN = 0.5  # of the long steps would be too long at the speed of before as well
TOKENS_MIN = 0.5  # of a long step goes to its tokens
HEAVY = 0.1  # of the long steps, so many take longer than the one that is reckoned with
LIGHT = 0.01  # of the steps: what one takes with next to no tokens
LOADED = 0.9  # of the steps without a prompt: what one takes with many running
AIM = 0.9  # aim a little below the objective's threshold
# Lower with prompts: the last tokens of a long one take longer than the mean, and short ones become
# no smaller than they are. Played, a chunk that was to end at 0.9 left three quarters and more.
PROMPT_AIM = 0.8
LONGEST = 0.99  # of the prompts are no longer than the one that is reckoned with
STEPS_MIN = 5  # fewer steps say nothing

GAP = "vllm:inter_token_latency_seconds"
PROMPT = "vllm:request_prompt_tokens"
PROMPT_TOKENS = "engine:step_prefill_tokens_total"
MIXED = "mixed"  # the phase of steps with a prompt chunk


@dataclass(frozen=True)
class Long:
    """The steps that take longer than the `threshold_s` the objective allows for a gap.

    `share` of all steps, `healthy` of them at the speed of before, `gaps` of the long gaps they
    make. A heavy one of them takes `least_s` with next to no tokens, and in seconds more for its
    prompt tokens, `token_s` for each, and for its `running` requests. At the speed of before, if
    that is known: what slows the engine is not the batch's doing.
    """

    threshold_s: float
    share: float
    healthy: float
    gaps: float
    least_s: float
    prefill_s: float
    decode_s: float
    running: float
    token_s: float

    @property
    def total_s(self) -> float:
        return self.least_s + self.prefill_s + self.decode_s

    @property
    def plain_s(self) -> float:
        """Of the step without its prompt tokens."""
        return self.least_s + self.decode_s

    @property
    def prefill(self) -> bool:
        return self.prefill_s >= self.decode_s


class BatchTooLarge:
    slug = "batch_too_large"
    label = gettext_noop("batch or prompt chunk too large for the token latency")

    def examine(self, scene: Scene) -> Finding:
        long = _long(scene)
        evidence = (
            _objective_fact(scene),
            _gap_fact(scene, long),
            _over_fact(scene, long),
            _tokens_fact(long),
            slower_fact(scene, wanted=False, required=False),
            _grew_fact(scene, long),
        )
        remedy, no_remedy = _remedy(scene, long)
        facts = {
            "threshold_s": scene.objective.threshold_s,
            "long_share": long.share if long else None,
            "step_s": long.total_s if long else None,
            "prefill_s": long.prefill_s if long else None,
            "decode_s": long.decode_s if long else None,
            "least_s": long.least_s if long else None,
        }
        return Finding(
            self.slug,
            score(evidence),
            _because(scene, long),
            facts,
            evidence,
            remedy,
            no_remedy,
            applies=evidence[0].supports,
        )


def _objective_fact(scene: Scene) -> Fact:
    times = scene.objective.measures == "tpot"
    says = "times the gap between tokens" if times else "does not time the gap between tokens"
    return Fact(f"“{scene.objective.name}” {says}", times, required=True, weight=0.5)


def _gap_fact(scene: Scene, long: Long | None) -> Fact:
    """A step gives each running request one gap: so many gaps the long steps must have made."""
    if long is None:
        text = "How long steps and the gaps between tokens are was not measured"
    else:
        text = (
            f"{long.gaps:.0%} of the gaps between tokens longer than {ms(long.threshold_s)} come "
            "from steps that are longer, as each step is one gap for every running request"
        )
    return measured(
        text,
        long is not None and long.gaps >= EXPLAINED_MIN,
        metric=GAP,
        unit="share of the long gaps",
        value=long.gaps if long else None,
        threshold=EXPLAINED_MIN,
        required=True,
    )


def _over_fact(scene: Scene, long: Long | None) -> Fact:
    if long is None:
        text = "Whether steps take longer than is allowed for a gap was not measured"
    else:
        text = (
            f"{long.share:.1%} of the steps take longer than the {ms(long.threshold_s)} allowed "
            f"for a gap, and {long.healthy:.0%} of those would at the engine's earlier speed too"
        )
    return measured(
        text,
        long is not None and long.share > 0 and long.healthy >= HEALTHY_MIN,
        metric=STEP_TIME,
        unit="share of the long steps",
        value=long.healthy if long else None,
        threshold=HEALTHY_MIN,
        required=True,
        weight=2,
    )


def _tokens_fact(long: Long | None) -> Fact:
    """A step that is too long with next to no tokens in it is not too large."""
    if long is None:
        text, share = "What a step's time goes to was not measured", None
    else:
        share = (long.prefill_s + long.decode_s) / long.total_s
        text = (
            f"A long step takes {ms(long.total_s)}: {ms(long.prefill_s)} for prompt tokens, "
            f"{ms(long.decode_s)} for {_running(long)}, and {ms(long.least_s)} that even a step "
            "with next to no tokens takes"
        )
    return measured(
        text,
        share is not None and share >= TOKENS_MIN,
        metric=STEP_TIME,
        unit="share of a long step",
        value=share,
        threshold=TOKENS_MIN,
        required=True,
        weight=2,
    )


def _grew_fact(scene: Scene, long: Long | None) -> Fact:
    old = scene.histogram(STEP_TIME, reference=True)
    if long is None or old is None or not old.count:
        text = "How long steps took before was not measured"
        return measured(text, False, metric=STEP_TIME, weight=0.5)
    before = old.above(long.threshold_s) / old.count
    return measured(
        f"{long.share:.1%} of the steps take longer than {ms(long.threshold_s)}, "
        f"{before:.1%} did before",
        long.share > before,
        track=Track(before, long.share),
        metric=STEP_TIME,
        unit="share of steps",
        threshold=before,
        weight=0.5,
    )


def _remedy(scene: Scene, long: Long | None) -> tuple[tuple[Wish, ...], str]:
    if long is None:
        return (), "what a step's time goes to is not known"
    if long.prefill:
        return _smaller_prefill(scene, long)
    aim = AIM * long.threshold_s
    waiting = scene.gauge(WAITING).value
    if waiting is None or waiting >= 1:
        what = "it is not known whether requests wait"
        if waiting is not None:
            what = several(waiting, "request waits", "requests wait", ".0f")
        return (), f"{what}: fewer at once would shorten the gaps and lengthen the wait"
    room = aim - long.least_s - long.prefill_s
    if room <= 0:
        return (), f"a step with one running request would still take {ms(aim - room)}"
    fits = long.running * min(1.0, room / long.decode_s)
    those = several(fits, "request", "requests", ".0f")
    return (Wish(CAP, fits, f"a step of {those} takes {ms(aim)}"),), ""


def _smaller_prefill(scene: Scene, long: Long) -> tuple[tuple[Wish, ...], str]:
    """The budget first, which no number of prompts in a step exceeds; either the whole way.

    A prompt takes as many more steps as its share of each is smaller, and each that still is too
    long gives every running request a gap that is: half the way does harm.
    """
    room = PROMPT_AIM * long.threshold_s - long.plain_s
    if room <= 0:
        return (), f"a step without any prompt token would still take {ms(long.plain_s)}"
    wishes = (*_smaller_budget(scene, long, room), *_smaller_chunk(scene, long, room))
    return wishes, "" if wishes else "the engine has no knob for the prompt tokens of a step"


def _smaller_budget(scene: Scene, long: Long, room: float) -> tuple[Wish, ...]:
    if scene.engine.number(BUDGET) is None or not long.token_s:
        return ()
    fits = long.running + room / long.token_s
    why = f"a step of {fits:.0f} tokens takes {ms(PROMPT_AIM * long.threshold_s)}"
    # A budget below the running requests would starve decode.
    return (Wish(BUDGET, fits, why, limit=long.running, whole=True),)


def _smaller_chunk(scene: Scene, long: Long, room: float) -> tuple[Wish, ...]:
    """As many prompts share a step as do now, so that each has to give the same part of its chunk.

    A chunk larger than a prompt, or than all prompt tokens of a step, is none to begin with.
    """
    chunk, prompts = scene.engine.number(CHUNK), scene.histogram(PROMPT)
    if chunk is None:
        return ()
    longest = prompts.quantile(LONGEST) if prompts else None
    most = long.prefill_s / long.token_s if long.token_s else math.inf
    share = min(1.0, room / long.prefill_s)
    why = f"a step with {share:.0%} of the prompt tokens takes {ms(PROMPT_AIM * long.threshold_s)}"
    return (Wish(CHUNK, share * min(chunk, most, longest or math.inf), why, whole=True),)


def _because(scene: Scene, long: Long | None) -> str:
    if long is None:
        return "it is not measured what a step's time goes to"
    to = (
        f"{ms(long.prefill_s)} of them for prompt tokens"
        if long.prefill
        else f"{ms(long.decode_s)} of them for {_running(long)}"
    )
    return scene.because(
        f"{long.share:.1%} of the steps took longer than the {ms(long.threshold_s)} allowed for a "
        f"gap: a heavy one took {ms(long.total_s)}, {to}"
    )


def _running(long: Long) -> str:
    return several(long.running, "running request", "running requests", ".0f")


def _long(scene: Scene) -> Long | None:
    threshold, running = scene.objective.threshold_s, scene.gauge(RUNNING, over="max").value
    steps, gaps = scene.histogram(STEP_TIME), scene.histogram(GAP)
    if threshold is None or not running or not steps or not gaps or not steps.count:
        return None
    step = step_time(scene)
    speed = 1 - (step.slower or 0.0) if step and step.is_slower else 1.0
    long, long_gaps = steps.above(threshold), gaps.above(threshold)
    heavy = _within(steps, 1 - HEAVY * long / steps.count) * speed
    before = None if graph_lost(scene) else scene.histogram(STEP_TIME, reference=True)
    light = [(steps.bound(LIGHT) or heavy) * speed, (before and before.bound(LIGHT)) or heavy]
    least = min(heavy, *light)
    prefill = _prefill_s(scene, heavy, least, speed)
    mean_running = scene.gauge(RUNNING).value or running
    return Long(
        threshold_s=threshold,
        share=long / steps.count,
        healthy=steps.above(threshold / speed) / long if long else 0.0,
        gaps=min(1.0, long * mean_running / long_gaps) if long_gaps else 0.0,
        least_s=least,
        prefill_s=prefill,
        decode_s=heavy - least - prefill,
        running=running,
        token_s=_token_s(scene, prefill, heavy - prefill, running, speed),
    )


def _token_s(scene: Scene, prefill_s: float, plain_s: float, running: float, speed: float) -> float:
    """Of a prompt token: the mean, or more where the budget lets in too few to make a heavy step.

    The mean is what steps with prompts take longer than others: sums tell it, and buckets of tokens
    each twice as large as the last do not. A token takes longer the more come before it.
    """
    mixed, tokens = scene.histogram_by(STEP_TIME, "phase").get(MIXED), scene.growth(PROMPT_TOKENS)
    if mixed is None or not tokens:
        return 0.0
    budget = scene.engine.number(BUDGET)
    least = prefill_s / max(1.0, budget - running) if budget else 0.0
    return max(least, (mixed.sum * speed - mixed.count * plain_s) / tokens)


def _prefill_s(scene: Scene, heavy: float, least: float, speed: float) -> float:
    """What a heavy step takes longer than one with many running and no prompt chunk.

    Where all steps have one, its tokens' share: one costs about as much as a running request.
    """
    plain = [h for phase, h in scene.histogram_by(STEP_TIME, "phase").items() if phase != MIXED]
    if plain and plain[0].count >= STEPS_MIN:
        return max(0.0, heavy - max(least, _within(plain[0], LOADED) * speed))
    step = step_time(scene)
    if step is None or not step.p + step.d:
        return 0.0
    return (heavy - least) * step.p / (step.p + step.d)


def _within(histogram: Histogram, q: float) -> float:
    """The quantile, or the last bound where it is above all of them."""
    found = histogram.quantile(q)
    return min(histogram.bounds[-1], math.inf if found is None else found)


CAUSE = BatchTooLarge()
