"""A step carries so many tokens that the gap between two tokens misses its objective.

Runbook: docs/causes/batch_too_large.md. A running request gets one token per step, so its gap is
the step's time. That time is fitted on the engine's own windows as

    step = a + b · prompt tokens + c · running requests        (a, b, c ≥ 0)

and the larger part of what lies above `a` is to blame: the prompt chunk, or the decode batch.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from controlplane.diagnosis.cause import (
    Fact,
    Finding,
    Scene,
    Track,
    Wish,
    gettext_noop,
    mean,
    measured,
    score,
)

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

CHUNK, BUDGET, CAP = "prefill_chunk_tokens", "max_num_batched_tokens", "max_num_seqs"
STEP_EXPLAINS_MIN = 0.5  # most of the gap between tokens is the step
RESIDUAL_MAX = 0.25  # a fit that misses by more is not trusted (LOOP 3.6)
UNEXPLAINED_MAX = 0.15  # steps this much slower than before at the same tokens: another cause
T_MIN = 2.0  # a coefficient this many standard errors from 0 is told apart from noise
POINTS_MIN = 8  # three coefficients want more than three points
STEPS_MIN = 5  # a point of fewer steps is noise
AIM = 0.9  # aim a little below the objective's threshold
CROWDED = 1.25  # more prompt tokens than this many chunks: several prompts share a step

STEP_TIME = "engine:step_seconds"
STEPS = "engine:steps_total"
PREFILL = "engine:step_prefill_tokens_total"
DECODE = "engine:step_decode_tokens_total"
GAP = "vllm:inter_token_latency_seconds"
STEP_TOKENS = "vllm:iteration_tokens_total"
WAITING = "vllm:num_requests_waiting"


@dataclass(frozen=True)
class StepTime:
    """The fit; seconds. `p`, `d`: mean prompt and decode tokens of an incident's step."""

    a: float
    b: float
    c: float
    t_b: float
    t_c: float
    residual: float
    unexplained: float | None
    p: float
    d: float
    p_high: float


@dataclass(frozen=True)
class Blame:
    """Seconds of a step that matter to the objective, by what they go to."""

    fit: StepTime
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
            _unexplained_fact(blame),
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
            f"A step takes {_ms(step.value)} and the mean gap between tokens is {_ms(gap.value)}: "
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
        f"Step time fits {_ms(fit.a)} + {fit.b * 1e6:.3g} µs per prompt token + "
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
        f"The step takes {_ms(blame.total_s)}, {'more' if over else 'not more'} than the "
        f"{_ms(blame.threshold_s)} allowed: {_ms(blame.prefill_s)} go to "
        f"prompt tokens, {_ms(blame.decode_s)} to {blame.fit.d:.0f} running requests"
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


def _unexplained_fact(blame: Blame | None) -> Fact:
    if blame is None:
        return measured("Whether something else slows the steps was not measured", False)
    slower = blame.fit.unexplained
    if slower is None:
        return measured("Whether the engine itself became slower cannot be told", False, weight=0.5)
    ok = slower <= UNEXPLAINED_MAX
    text = (
        "The steps are as fast as their tokens let expect"
        if ok
        else f"The steps are {slower:.0%} slower than their tokens explain: something else slows"
    )
    return measured(
        text, ok, unit="relative error", value=slower, threshold=UNEXPLAINED_MAX, required=True
    )


def _grew_fact(step: Track) -> Fact:
    if step.value is None or step.before is None:
        return measured("Whether steps were faster before was not measured", False, weight=0.5)
    grew = step.value > step.before
    text = f"Steps took {_ms(step.before)} before and take {_ms(step.value)} now"
    return measured(text, grew, track=step, metric=STEP_TIME, unit="s", weight=0.5)


def _remedy(scene: Scene, blame: Blame | None) -> tuple[tuple[Wish, ...], str]:
    if blame is None:
        return (), "what a step's time goes to is not known"
    fit, aim = blame.fit, AIM * blame.threshold_s
    if blame.prefill:
        room = aim - fit.a - blame.decode_s
        if room <= 0:
            return (), f"a step without any prompt token would still take {_ms(aim - room)}"
        return _smaller_prefill(scene, blame, room / blame.prefill_s), ""
    waiting = scene.gauge(WAITING).value
    if waiting is None or waiting >= 1:
        what = "it is not known whether requests wait" if waiting is None else f"{waiting:.0f} wait"
        return (), f"{what}: a smaller batch would trade the token latency for TTFT"
    room = aim - fit.a - blame.prefill_s
    if room <= 0:
        return (), f"a step with one running request would still take {_ms(aim - room)}"
    fits = room / fit.c
    return (Wish(CAP, fits, f"a step of {fits:.0f} requests takes {_ms(aim)}"),), ""


def _smaller_prefill(scene: Scene, blame: Blame, share: float) -> tuple[Wish, ...]:
    """The knob that limits the prompt tokens of a step first, then the other."""
    why = f"a step with {share:.0%} of the prompt tokens takes {_ms(AIM * blame.threshold_s)}"
    chunk, budget = scene.engine.number(CHUNK), scene.engine.number(BUDGET)
    wishes = []
    if chunk is not None:
        wishes.append(Wish(CHUNK, chunk * share, why))
    if budget is not None:
        least = blame.fit.d  # a budget below the running requests would starve decode
        wishes.append(Wish(BUDGET, max(least, budget * share), why, limit=least))
    if chunk is not None and blame.fit.p_high > CROWDED * chunk:
        wishes.reverse()
    return tuple(wishes)


def _because(scene: Scene, blame: Blame | None) -> str:
    if blame is None:
        return "it is not measured what a step's time goes to"
    to = (
        f"{_ms(blame.prefill_s)} of them for prompt tokens"
        if blame.prefill
        else f"{_ms(blame.decode_s)} of them for {blame.fit.d:.0f} running requests"
    )
    return f"{scene.latency()}a step takes {_ms(blame.total_s)}, {to}"


def _blame(scene: Scene) -> Blame | None:
    """Which part of a step matters: of a gap objective the heavy step, else the mean one.

    A share objective over gaps is missed by the steps that carry a chunk, even when they are few;
    one over a request's mean gap is missed by the mean step.
    """
    fit, threshold = _fit(scene), scene.objective.threshold_s
    if fit is None or threshold is None:
        return None
    gaps = "inter_token" in str(scene.objective.spec.get("metric", ""))
    return Blame(fit, fit.b * (fit.p_high if gaps else fit.p), fit.c * fit.d, threshold)


def _fit(scene: Scene) -> StepTime | None:
    old, new = _points(scene, reference=True), _points(scene)
    points = np.concatenate([old, new])
    if len(points) < POINTS_MIN or not len(new):
        return None
    design = np.column_stack([np.ones(len(points)), points[:, 1:]])
    times = points[:, 0]
    coefficients = _nonnegative_least_squares(design, times)
    error = times - design @ coefficients
    noise = float(error @ error) / max(1, len(points) - 3)
    try:
        spread = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * noise)
    except np.linalg.LinAlgError:
        return None  # a column that never moves: nothing to learn from it
    p, d = float(new[:, 1].mean()), float(new[:, 2].mean())
    return StepTime(
        a=float(coefficients[0]),
        b=float(coefficients[1]),
        c=float(coefficients[2]),
        t_b=float(coefficients[1] / max(spread[1], 1e-12)),
        t_c=float(coefficients[2] / max(spread[2], 1e-12)),
        residual=float(np.sqrt(np.mean(error**2)) / times.mean()),
        unexplained=_unexplained(old, new),
        p=p,
        d=d,
        p_high=_heavy_prefill(scene, p, d),
    )


def _unexplained(old: Matrix, new: Matrix) -> float | None:
    """How much slower the incident's steps are than the windows before let expect, as a share.

    None when those are too few or too alike to tell within UNEXPLAINED_MAX.
    """
    if len(old) < POINTS_MIN:
        return None
    design = np.column_stack([np.ones(len(old)), old[:, 1:]])
    coefficients = _nonnegative_least_squares(design, old[:, 0])
    error = old[:, 0] - design @ coefficients
    actual, mix = float(new[:, 0].mean()), np.array([1.0, *new[:, 1:].mean(axis=0)])
    try:
        spread = float(mix @ np.linalg.inv(design.T @ design) @ mix)
    except np.linalg.LinAlgError:
        return None
    noise = float(error @ error) / (len(old) - 3)
    if T_MIN * math.sqrt(spread * noise) > UNEXPLAINED_MAX * actual:
        return None
    return (actual - float(mix @ coefficients)) / actual


def _points(scene: Scene, *, reference: bool = False) -> Matrix:
    """Rows of (seconds, prompt tokens, decode tokens) per step; shape (points, 3)."""
    columns = [
        scene.steps(name, counter=True, reference=reference) for name in (STEPS, PREFILL, DECODE)
    ]
    seconds = scene.sums(STEP_TIME, reference=reference)
    rows = [
        (s / n, p / n, d / n)
        for n, p, d, s in zip(*columns, seconds, strict=False)
        if n >= STEPS_MIN and not math.isnan(p + d + s)
    ]
    return np.array(rows, dtype=np.float64).reshape(len(rows), 3)


def _heavy_prefill(scene: Scene, p: float, d: float) -> float:
    """Prompt tokens in a heavy step (p99 of tokens per step less the decode), at least the mean.

    Never above what the knobs allow; the mean when tokens per step are not measured.
    """
    tokens = scene.histogram(STEP_TOKENS)
    high = tokens.quantile(0.99) if tokens else None
    budget = scene.engine.number(BUDGET)
    allowed = math.inf if budget is None else budget - d
    if high is None or (math.isinf(high) and math.isinf(allowed)):
        return p
    return max(p, min(high - d, allowed))


def _nonnegative_least_squares(
    design: Matrix,
    target: Vector,
) -> Vector:
    """Least squares with coefficients ≥ 0, by trying every subset of the three columns."""
    best, best_error = np.zeros(design.shape[1]), math.inf
    for size in range(1, design.shape[1] + 1):
        for columns in itertools.combinations(range(design.shape[1]), size):
            part = design[:, columns]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(np.sum((target - part @ found) ** 2))
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(design.shape[1]), error
                best[list(columns)] = found
    return best


def _step_track(scene: Scene) -> Track:
    """Seconds per step: before, during, per window."""
    rows = _points(scene, reference=True), _points(scene)
    old, new = (mean([float(v) for v in r[:, 0]]) for r in rows)
    return Track(old, new, scene.means(STEP_TIME).points)


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1000:.3g} ms"


CAUSE = BatchTooLarge()
