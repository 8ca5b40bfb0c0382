"""A step carries so many tokens that the gap between two tokens misses its objective.

Runbook: docs/causes/batch_too_large.md. A running request gets one token per step, so its gap is
the step's time. That time is fitted as a + b · prompt tokens + c · running requests
(controlplane/diagnosis/step_time.py), and the larger part of what lies above `a` is to blame: the
prompt chunk, or the decode batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.diagnosis.cause import (
    RESIDUAL_MAX,
    STEP_TIME,
    T_MIN,
    Fact,
    Finding,
    Fit,
    Scene,
    StepTime,
    Track,
    Wish,
    gettext_noop,
    mean,
    measured,
    ms,
    points,
    score,
    slower_fact,
    step_time,
)

CHUNK, BUDGET, CAP = "prefill_chunk_tokens", "max_num_batched_tokens", "max_num_seqs"
STEP_EXPLAINS_MIN = 0.5  # most of the gap between tokens is the step
AIM = 0.9  # aim a little below the objective's threshold
CROWDED = 1.25  # more prompt tokens than this many chunks: several prompts share a step

GAP = "vllm:inter_token_latency_seconds"
WAITING = "vllm:num_requests_waiting"


@dataclass(frozen=True)
class Blame:
    """Seconds of a step that matter to the objective, by what they go to.

    At the speed before, if the engine has become slower: what slows it is not the batch's doing.
    """

    step: StepTime
    fit: Fit
    prefill_s: float
    decode_s: float
    threshold_s: float

    @property
    def total_s(self) -> float:
        return self.fit.a + self.prefill_s + self.decode_s

    @property
    def prefill(self) -> bool:
        return self.prefill_s >= self.decode_s

    @property
    def distinct(self) -> bool:
        return (self.fit.t_b if self.prefill else self.fit.t_c) >= T_MIN


class BatchTooLarge:
    slug = "batch_too_large"
    label = gettext_noop("batch or prompt chunk too large for the token latency")

    def examine(self, scene: Scene) -> Finding:
        gap, step = scene.means(GAP), _step_track(scene)
        blame = _blame(scene)
        evidence = (
            _objective_fact(scene),
            _gap_fact(gap, step),
            _fit_fact(blame),
            _over_fact(blame),
            slower_fact(scene, wanted=False, required=False),
            _grew_fact(step),
        )
        remedy, no_remedy = _remedy(scene, blame)
        facts = {
            "step_s": step.value,
            "gap_s": gap.value,
            "threshold_s": scene.objective.threshold_s,
        }
        if blame:
            facts |= {
                "prefill_s": blame.prefill_s,
                "decode_s": blame.decode_s,
                "fixed_s": blame.fit.a,
            }
        because = _because(scene, blame)
        return Finding(self.slug, score(evidence), because, facts, evidence, remedy, no_remedy)


def _objective_fact(scene: Scene) -> Fact:
    times = scene.objective.measures == "tpot"
    says = "times the gap between tokens" if times else "does not time the gap between tokens"
    return Fact(f"“{scene.objective.name}” {says}", times, required=True, weight=0.5)


def _gap_fact(gap: Track, step: Track) -> Fact:
    share = min(1.0, step.value / gap.value) if step.value and gap.value else None
    if share is None:
        text = "How long a step and the gap between tokens take was not measured"
    else:
        text = (
            f"A step takes {ms(step.value)} and the mean gap between tokens is {ms(gap.value)}: "
            f"the step is {share:.0%} of it"
        )
    return measured(
        text,
        share is not None and share >= STEP_EXPLAINS_MIN,
        track=step,
        metric=STEP_TIME,
        unit="share of the gap",
        value=share,
        threshold=STEP_EXPLAINS_MIN,
        required=True,
    )


def _fit_fact(blame: Blame | None) -> Fact:
    if blame is None:
        text = (
            "What a step's time goes to was not measured, or the windows are too few or too alike"
        )
        return measured(text, False, metric=STEP_TIME, required=True, weight=2)
    fit = blame.fit
    text = (
        f"Step time fits {ms(fit.a)} + {fit.b * 1e6:.3g} µs per prompt token + "
        f"{fit.c * 1e6:.3g} µs per running request, missing by {fit.residual:.0%}"
    )
    if not blame.distinct:
        text += "; the part to blame cannot be told from noise"
    return measured(
        text,
        fit.residual <= RESIDUAL_MAX and blame.distinct,
        metric=STEP_TIME,
        unit="relative error",
        value=fit.residual,
        threshold=RESIDUAL_MAX,
        required=True,
        weight=2,
    )


def _over_fact(blame: Blame | None) -> Fact:
    if blame is None:
        return measured(
            "Whether a step exceeds the objective was not measured", False, required=True
        )
    over = blame.total_s > blame.threshold_s
    text = (
        f"The step takes {ms(blame.total_s)}, {'more' if over else 'not more'} than the "
        f"{ms(blame.threshold_s)} allowed: {ms(blame.prefill_s)} go to "
        f"prompt tokens, {ms(blame.decode_s)} to {blame.step.d:.0f} running requests"
    )
    return measured(
        text,
        over,
        metric=STEP_TIME,
        unit="s",
        value=blame.total_s,
        threshold=blame.threshold_s,
        required=True,
        weight=2,
    )


def _grew_fact(step: Track) -> Fact:
    if step.value is None or step.before is None:
        return measured("Whether steps were faster before was not measured", False, weight=0.5)
    grew = step.value > step.before
    text = f"Steps took {ms(step.before)} before and take {ms(step.value)} now"
    return measured(
        text, grew, track=step, metric=STEP_TIME, unit="s", threshold=step.before, weight=0.5
    )


def _remedy(scene: Scene, blame: Blame | None) -> tuple[tuple[Wish, ...], str]:
    if blame is None:
        return (), "what a step's time goes to is not known"
    fit, aim = blame.fit, AIM * blame.threshold_s
    if blame.prefill:
        room = aim - fit.a - blame.decode_s
        if room <= 0:
            return (), f"a step without any prompt token would still take {ms(aim - room)}"
        return _smaller_prefill(scene, blame, room / blame.prefill_s), ""
    waiting = scene.gauge(WAITING).value
    if waiting is None or waiting >= 1:
        what = "it is not known whether requests wait" if waiting is None else f"{waiting:.0f} wait"
        return (), f"{what}: a smaller batch would trade the token latency for TTFT"
    room = aim - fit.a - blame.prefill_s
    if room <= 0:
        return (), f"a step with one running request would still take {ms(aim - room)}"
    fits = room / fit.c
    return (Wish(CAP, fits, f"a step of {fits:.0f} requests takes {ms(aim)}"),), ""


def _smaller_prefill(scene: Scene, blame: Blame, share: float) -> tuple[Wish, ...]:
    """The knob that limits the prompt tokens of a step first, then the other."""
    why = f"a step with {share:.0%} of the prompt tokens takes {ms(AIM * blame.threshold_s)}"
    chunk, budget = scene.engine.number(CHUNK), scene.engine.number(BUDGET)
    wishes = []
    if chunk is not None:
        wishes.append(Wish(CHUNK, chunk * share, why))
    if budget is not None:
        least = blame.step.d  # a budget below the running requests would starve decode
        wishes.append(Wish(BUDGET, max(least, budget * share), why, limit=least))
    if chunk is not None and blame.step.p_high > CROWDED * chunk:
        wishes.reverse()
    return tuple(wishes)


def _because(scene: Scene, blame: Blame | None) -> str:
    if blame is None:
        return "it is not measured what a step's time goes to"
    to = (
        f"{ms(blame.prefill_s)} of them for prompt tokens"
        if blame.prefill
        else f"{ms(blame.decode_s)} of them for {blame.step.d:.0f} running requests"
    )
    return f"{scene.latency()}a step takes {ms(blame.total_s)}, {to}"


def _blame(scene: Scene) -> Blame | None:
    """Which part of a step matters: of a gap objective the heavy step, else the mean one.

    A share objective over gaps is missed by the steps that carry a chunk, even when they are few;
    one over a request's mean gap is missed by the mean step.
    """
    step, threshold = step_time(scene), scene.objective.threshold_s
    if step is None or threshold is None:
        return None
    gaps = "inter_token" in str(scene.objective.spec.get("metric", ""))
    fit = step.healthy
    return Blame(step, fit, fit.b * (step.p_high if gaps else step.p), fit.c * step.d, threshold)


def _step_track(scene: Scene) -> Track:
    """Seconds per step: before, during, per window."""
    rows = points(scene, reference=True), points(scene)
    old, new = (mean([float(v) for v in r[:, 0]]) for r in rows)
    return Track(old, new, scene.means(STEP_TIME).points)


CAUSE = BatchTooLarge()
