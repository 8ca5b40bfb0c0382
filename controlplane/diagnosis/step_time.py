"""What an engine's step takes its time for, and whether it takes longer than it did before.

Fitted on the engine's own windows, before and during an incident, in thirds of a control window:

    step = a + b · prompt tokens + c · running requests        a, b, c ≥ 0

Windows may be compared on means because the model is linear. Pure; numpy only.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from controlplane.diagnosis.demand import GREW_MIN, demand_grew, longer
from controlplane.diagnosis.scene import Scene, Track

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

RESIDUAL_MAX = 0.25  # a fit that misses by more is not trusted (LOOP 3.6)
SLOWER_MAX = 0.15  # steps this much slower than before at the same tokens: another cause
T_MIN = 2.0  # so many standard errors tell a number apart from noise
POINTS_MIN = 8  # three coefficients want more than three points
BACK_POINTS_MIN = 5  # of an incident's first windows, to be drawn back to the windows before
STEPS_MIN = 5  # a point of fewer steps is noise
STARVED_MAX = 0.5  # with less of the CPU it got before, the model takes twice as long for that
EAGER_GREW_MAX = 0.1  # more of the steps run without a captured graph than before: that slows them

STEP_TIME = "engine:step_seconds"
STEPS = "engine:steps_total"
PREFILL = "engine:step_prefill_tokens_total"
DECODE = "engine:step_decode_tokens_total"
GRAPH_STEPS = "engine:graph_steps_total"
GRAPH_MISSES = "engine:graph_misses_total"
FORWARD = "engine:forward_seconds_total"
FORWARD_CPU = "engine:forward_cpu_seconds_total"
GPU_CLOCK = "gpu:sm_clock_hertz"


@dataclass(frozen=True)
class Fit:
    """Seconds. `a_error`: standard error of `a`; `residual`: root mean square miss ÷ mean."""

    a: float
    b: float
    c: float
    a_error: float
    residual: float

    @property
    def trusted(self) -> bool:
        return self.residual <= RESIDUAL_MAX

    @property
    def a_most(self) -> float:
        return self.a + T_MIN * self.a_error

    def step_s(self, prompt: float, running: float) -> float:
        return self.a + self.b * prompt + self.c * running


@dataclass(frozen=True)
class StepTime:
    """`fit` over all windows, `before` over the reference alone, None when that cannot be fitted.

    `p`, `d`: mean prompt and decode tokens of an incident's step. `slower` is the share of the step
    that `before` does not explain, None when it cannot be told; it says something above
    `slower_max`. `fixed`: what is left of the step when `before`'s costs of its tokens are taken
    off.
    """

    fit: Fit
    before: Fit | None
    p: float
    d: float
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


def eager_share(scene: Scene) -> Track:
    """Of the steps a captured graph could have run, the share that ran without one.

    A step nobody captures a graph for (a prompt in it) is not counted, nor is a batch too large for
    any graph, where the engine does not say how large that is. None where steps are not counted by
    how they ran.
    """

    def share(reference: bool) -> float | None:
        steps = scene.growth_by(GRAPH_STEPS, "mode", reference=reference)
        misses = scene.growth_by(GRAPH_MISSES, "reason", reference=reference)
        if scene.engine.graph_seqs_max is not None:
            misses.pop("shape", None)
        missed = sum(misses.values())
        eager, total = steps.get("eager", 0.0) - missed, sum(steps.values()) - missed
        return max(0.0, eager) / total if total > 0 else (0.0 if steps else None)

    return Track(share(True), share(False))


def graph_lost(scene: Scene) -> bool:
    """Whether steps that replayed a graph run without one now: their fixed part has grown."""
    share = eager_share(scene)
    return (share.value or 0.0) - (share.before or 0.0) > EAGER_GREW_MAX


def cpu_share(scene: Scene) -> Track:
    """CPU seconds the model gets in a second that it runs; None where that is not counted."""
    wall, cpu = scene.rate(FORWARD), scene.rate(FORWARD_CPU)

    def share(got: float | None, ran: float | None) -> float | None:
        return None if got is None or not ran else got / ran

    return Track(share(cpu.before, wall.before), share(cpu.value, wall.value))


def starved(scene: Scene) -> bool:
    """Whether others have taken the CPU from the model, which no batch does, however large.

    Not told where a GPU is read: the CPU may be waiting for that.
    """
    share = cpu_share(scene)
    if share.value is None or not share.before or scene.node_gauge(GPU_CLOCK).value is not None:
        return False
    return share.value < STARVED_MAX * share.before


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
    bar = _bar(1.0 if starved(scene) else _stretch(scene, old, new))
    fixed = slower = None
    if before is not None:
        fixed = float(new[:, 0].mean()) - before.b * p - before.c * d
        slower, doubt = _excess(before, old, new)
        if _in_doubt(slower, doubt, bar):
            slower = None
    return StepTime(fit=both, before=before, p=p, d=d, slower=slower, slower_max=bar, fixed=fixed)


def _comparable(scene: Scene, old: Matrix, new: Matrix) -> bool:
    """Whether steps far larger than those before may be held against a line through those.

    A line through small batches misses large ones where the cost of a request grows with them. Not
    so when no more work arrives: the batches are larger because the steps are slower. Nor when the
    line through the large ones, drawn back, lies above the small ones of before: costs that grow
    with the batch would have it below. Costs that grow with a request's length have it above, so
    that this tells nothing when they have become longer.
    """
    more = demand_grew(scene)
    if more is not None and more < GREW_MIN:
        return True
    if longer(scene) >= GREW_MIN:
        return False
    now = _fit(new, points_min=BACK_POINTS_MIN)
    if now is None:
        return False
    excess, doubt = _excess(now, new, old)
    return excess < -max(SLOWER_MAX, doubt)


def _bar(stretch: float) -> float:
    """The share of a step from which on it is slower, where it holds `stretch` times as much.

    A token costs more the more of them there are and the longer what it attends to, but no more
    than in proportion.
    """
    return 1 - (1 - SLOWER_MAX) / stretch


def _fit(rows: Matrix, *, points_min: int = POINTS_MIN) -> Fit | None:
    """None when there are too few points, or a column that never moves."""
    if len(rows) < points_min:
        return None
    design, times = _design(rows), rows[:, 0]
    coefficients = nonnegative_least_squares(design, times)
    error = times - design @ coefficients
    noise = float(error @ error) / (len(rows) - design.shape[1])
    try:
        variance = np.diag(np.linalg.inv(design.T @ design)) * noise
    except np.linalg.LinAlgError:
        return None
    if variance.min() < 0:  # so nearly singular that only rounding inverted it
        return None
    return Fit(
        a=float(coefficients[0]),
        b=float(coefficients[1]),
        c=float(coefficients[2]),
        a_error=float(np.sqrt(variance[0])),
        residual=float(np.sqrt(np.mean(error**2)) / times.mean()),
    )


def _design(rows: Matrix) -> Matrix:
    return np.column_stack([np.ones(len(rows)), rows[:, 1:]])


def _excess(fit: Fit, fitted: Matrix, rows: Matrix) -> tuple[float, float]:
    """How much more the steps of `rows` take than a fit of others lets expect, as a share of them.

    Beside it two standard errors: of that line, and of the mean of `rows`, which scatter about it
    as those others do.
    """
    design = _design(fitted)
    actual, mix = float(rows[:, 0].mean()), np.array([1.0, *rows[:, 1:].mean(axis=0)])
    expected = fit.step_s(float(mix[1]), float(mix[2]))
    error = fitted[:, 0] - design @ np.array([fit.a, fit.b, fit.c])
    spread = float(mix @ np.linalg.inv(design.T @ design) @ mix) + 1 / len(rows)
    noise = float(error @ error) / (len(fitted) - design.shape[1])
    return (actual - expected) / actual, T_MIN * math.sqrt(spread * noise) / actual


def _in_doubt(excess: float, doubt: float, bar: float) -> bool:
    """Whether steps may be no slower than `bar` though they look it, or the other way round where
    there are too few of them, or all too alike, to tell anything smaller."""
    if excess > bar:
        return excess - doubt <= bar
    return doubt > SLOWER_MAX and excess + doubt >= bar


def _stretch(scene: Scene, old: Matrix, new: Matrix) -> float:
    """How far beyond what was seen before the incident's steps and requests lie, 1 or more.

    However few longer requests run, each costs more.
    """
    length = longer(scene)
    if not len(old) or _comparable(scene, old, new):
        return length if length >= GREW_MIN else 1.0
    seen, now = old[:, 1:].max(axis=0), new[:, 1:].mean(axis=0)
    return float(max(1.0, length, *(now / np.maximum(seen, 1e-9))))


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
