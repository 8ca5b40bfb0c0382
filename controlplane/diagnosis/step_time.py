"""What an engine's step takes its time for, and how many requests that lets it serve.

Fitted on the engine's own windows, before and during an incident, in thirds of a control window:

    step = a + b · prompt tokens + c · running requests        a, b, c ≥ 0

Windows may be compared on means because the model is linear. Pure; numpy only.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from controlplane.diagnosis.demand import GREW_MIN, demand_grew, lengths
from controlplane.diagnosis.scene import Scene

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

RESIDUAL_MAX = 0.25  # a fit that misses by more is not trusted (LOOP 3.6)
SLOWER_MAX = 0.15  # steps this much slower than before at the same tokens: another cause
T_MIN = 2.0  # a coefficient this many standard errors from 0 is told apart from noise
POINTS_MIN = 8  # three coefficients want more than three points
BACK_POINTS_MIN = 5  # of an incident's first windows, to be drawn back to the windows before
STEPS_MIN = 5  # a point of fewer steps is noise

STEP_TIME = "engine:step_seconds"
STEPS = "engine:steps_total"
PREFILL = "engine:step_prefill_tokens_total"
DECODE = "engine:step_decode_tokens_total"
STEP_TOKENS = "vllm:iteration_tokens_total"
BUDGET = "max_num_batched_tokens"


@dataclass(frozen=True)
class Fit:
    """Seconds. `t_b`, `t_c`: standard errors from 0; `residual`: root mean square miss ÷ mean."""

    a: float
    b: float
    c: float
    t_b: float
    t_c: float
    residual: float

    @property
    def trusted(self) -> bool:
        return self.residual <= RESIDUAL_MAX

    @property
    def cheapest(self) -> Fit:
        """With tokens as cheap as two standard errors allow: what it serves then is the most."""
        b = self.b * max(0.0, 1 - T_MIN / self.t_b) if self.t_b else 0.0
        c = self.c * max(0.0, 1 - T_MIN / self.t_c) if self.t_c else 0.0
        return replace(self, b=b, c=c)

    def step_s(self, prompt: float, running: float) -> float:
        return self.a + self.b * prompt + self.c * running

    def served_per_s(self, running: float, prompt: float, output: float) -> float | None:
        """Requests of so many tokens that a batch of `running` finishes per second.

        Each gets a token a step, so running ÷ output of them finish in it and as many start.
        None where neither of its tokens' costs can be told from noise: either alone bounds it.
        """
        if not self.trusted or max(self.t_b, self.t_c) < T_MIN or output <= 0:
            return None
        finished = running / output
        return finished / self.step_s(prompt * finished, running)


@dataclass(frozen=True)
class StepTime:
    """`fit` over all windows, `before` over the reference alone, None when that cannot be fitted.

    `p`, `d`: mean prompt and decode tokens of an incident's step, `p_high` of its heavy one.
    `slower` is the share of the step that `before` does not explain, None when it cannot be told;
    it says something above `slower_max`. `fixed`: what is left of the step when `before`'s costs
    of its tokens are taken off.
    """

    fit: Fit
    before: Fit | None
    p: float
    d: float
    p_high: float
    slower: float | None
    slower_max: float
    fixed: float | None

    @property
    def is_slower(self) -> bool:
        return self.slower is not None and self.slower > self.slower_max

    @property
    def healthy(self) -> Fit:
        """The engine as it is when nothing slows it: mixed windows would blame the tokens."""
        return self.before if self.is_slower and self.before else self.fit


def step_time(scene: Scene) -> StepTime | None:
    """None while too few windows were measured, or all too alike to learn from."""
    return scene.once(("step_time",), lambda: _step_time(scene))


def capacity_per_s(scene: Scene, running: float, *, at_most: bool = False) -> float | None:
    """Requests per second a batch of `running` would serve at the engine's healthy speed.

    `at_most`: within the error of the fit.
    """
    step, tokens = step_time(scene), lengths(scene)
    if step is None or tokens is None:
        return None
    fit = step.healthy
    return (fit.cheapest if at_most else fit).served_per_s(running, *tokens)


def points(scene: Scene, *, reference: bool = False) -> Matrix:
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


def _step_time(scene: Scene) -> StepTime | None:
    old, new = points(scene, reference=True), points(scene)
    both = _fit(np.concatenate([old, new]))
    if both is None or not len(new):
        return None
    before = _fit(old)
    p, d = float(new[:, 1].mean()), float(new[:, 2].mean())
    fixed = slower = None
    if before is not None:
        fixed = float(new[:, 0].mean()) - before.b * p - before.c * d
        slower = _excess(before, old, new)
    return StepTime(
        fit=both,
        before=before,
        p=p,
        d=d,
        p_high=_heavy_prefill(scene, p, d),
        slower=slower,
        slower_max=SLOWER_MAX if _comparable(scene, old, new) else SLOWER_MAX * _stretch(old, new),
        fixed=fixed,
    )


def _comparable(scene: Scene, old: Matrix, new: Matrix) -> bool:
    """Whether steps far larger than those before may be held against a line through those.

    A line through small batches misses large ones where the cost of a request grows with them. Not
    so when no more work arrives: the batches are larger because the steps are slower. Nor when the
    line through the large ones, drawn back, lies above the small ones of before: costs that grow
    with the batch would have it below.
    """
    more = demand_grew(scene)
    if more is not None and more < GREW_MIN:
        return True
    now = _fit(new, points_min=BACK_POINTS_MIN)
    excess = _excess(now, new, old) if now else None
    return excess is not None and excess < -SLOWER_MAX


def _fit(rows: Matrix, *, points_min: int = POINTS_MIN) -> Fit | None:
    """None when there are too few points, or a column that never moves."""
    if len(rows) < points_min:
        return None
    design, times = _design(rows), rows[:, 0]
    coefficients = nonnegative_least_squares(design, times)
    error = times - design @ coefficients
    noise = float(error @ error) / (len(rows) - design.shape[1])
    try:
        spread = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * noise)
    except np.linalg.LinAlgError:
        return None
    return Fit(
        a=float(coefficients[0]),
        b=float(coefficients[1]),
        c=float(coefficients[2]),
        t_b=float(coefficients[1] / max(spread[1], 1e-12)),
        t_c=float(coefficients[2] / max(spread[2], 1e-12)),
        residual=float(np.sqrt(np.mean(error**2)) / times.mean()),
    )


def _design(rows: Matrix) -> Matrix:
    return np.column_stack([np.ones(len(rows)), rows[:, 1:]])


def _excess(fit: Fit, fitted: Matrix, rows: Matrix) -> float | None:
    """How much more the steps of `rows` take than a fit of others lets expect, as a share of them.

    None when those others are too few or too alike to tell, with two standard errors, on which side
    of SLOWER_MAX it lies.
    """
    design = _design(fitted)
    actual, mix = float(rows[:, 0].mean()), np.array([1.0, *rows[:, 1:].mean(axis=0)])
    expected = fit.step_s(float(mix[1]), float(mix[2]))
    error = fitted[:, 0] - design @ np.array([fit.a, fit.b, fit.c])
    spread = float(mix @ np.linalg.inv(design.T @ design) @ mix)
    noise = float(error @ error) / (len(fitted) - design.shape[1])
    excess = (actual - expected) / actual
    doubt = T_MIN * math.sqrt(spread * noise) / actual
    if doubt > SLOWER_MAX and abs(excess) - doubt <= SLOWER_MAX:
        return None
    return excess


def _stretch(old: Matrix, new: Matrix) -> float:
    """How far beyond what was seen before the incident's steps lie, 1 or more."""
    if not len(old):
        return 1.0
    seen, now = old[:, 1:].max(axis=0), new[:, 1:].mean(axis=0)
    return float(max(1.0, *(now / np.maximum(seen, 1e-9))))


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


def nonnegative_least_squares(design: Matrix, target: Vector) -> Vector:
    """Least squares with coefficients ≥ 0, by trying every subset of the columns."""
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
