"""Whether a decode step's jitter follows the published law, on this engine: a fit, its shares.

    python bench/jitter.py [--repeat 200]

The law under test (source: Nsight samples of a GPU, platform not named) says how much a token's
time varies because of launching:

    jitter = 0.82 × launch × (1 − utilisation)^1.35

and that launch latency has a share of 63 % in it, the bandwidth of reading KV 22 %, the length of
the context 15 %. A CPU launches no kernels, but the same thing is there: what a step costs before
it computes anything.

- jitter: the standard deviation of a step's time, µs. Of its middle 98 %, and only of steps in
  which nobody took the CPU away (time on the clock = time of the thread, within 2 %).
- launch: the time of the same step over a twin with as many layers and operations, but next to
  nothing to compute, µs; once op by op, once from its graph.
- utilisation: the rest of the step's time, as a share of it.

One cell is a model, a way to run, a batch and a context; steps of all cells take turns. Fitted by
least squares on logarithms; intervals are 95 %, of a bootstrap over cells. Shares are those of R²
in a regression on all three causes, averaged over the orders in which they may enter (Lindeman,
Merenda and Gold). It takes a minute, and wants the machine to itself: cells that other work
disturbs are left out, and with many of them gone the fit says little.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field, fields, replace
from itertools import permutations

import numpy as np
from capture import running
from plant import say, verdict

from engine.config import EngineConfig
from engine.core import Core
from engine.exec.capture import Captured, capture
from engine.exec.runner import Runner
from engine.kv.pool import KVPool
from engine.models.llama import SHAPES, Llama
from engine.sched.scheduler import Plan

ALPHA, BETA = 0.82, 1.35
SHARES = {"launch latency": 0.63, "KV bandwidth": 0.22, "context length": 0.15}
BATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (16, 64, 256, 512)
WARM = 5
DISTURBED = 0.02
KEPT = (0.01, 0.99)
SAMPLES_MIN = 50
DRAWS = 2000
CELLS_MIN = 0.8  # of all; with fewer the machine was not alone, and what is left is not a fair part
EXPLAINED_MIN = 0.5  # R² below which the law says nothing here, whatever its constants


@dataclass
class Cell:
    """One kind of step; `wall_s` and `cpu_s` of each that ran, `launch_s` its twin's time."""

    name: str
    core: Core
    runner: Runner
    way: Captured | None
    plan: Plan
    batch: int
    context: int
    launch_s: float
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def step(self) -> None:
        self.runner.captured = self.way
        began, busy = time.perf_counter(), time.thread_time()
        self.runner.forward(self.plan)
        self.cpu_s.append(time.thread_time() - busy)
        self.wall_s.append(time.perf_counter() - began)

    @property
    def undisturbed(self) -> np.ndarray:
        """Seconds of the steps that had the CPU to themselves, without their outermost."""
        wall, cpu = np.array(self.wall_s[WARM:]), np.array(self.cpu_s[WARM:])
        own = wall[wall - cpu <= DISTURBED * wall]
        if len(own) < SAMPLES_MIN:
            return own
        low, high = np.quantile(own, KEPT)
        return own[(own >= low) & (own <= high)]

    @property
    def kv_bytes(self) -> float:
        pool = self.runner.pool
        return self.batch * self.context * pool.bytes / (pool.blocks * pool.block_size)


def twin(core: Core) -> Runner:
    """As many operations over next to nothing: the model's layers and heads, tiny matrices."""
    shape = replace(core.runner.model.shape, hidden=8, feed_forward=8, head_dim=2)
    model = Llama(shape, seed=0, positions=64)
    pool = KVPool(
        layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        blocks=core.runner.pool.blocks, block_size=core.rows.block_size, dtype=model.dtype,
    )  # fmt: skip
    runner = Runner(model, pool, core.rows)
    runner.settled_tokens_max = 0
    return runner


def launches(core: Core, repeat: int) -> dict[str, float]:
    """Seconds of a twin's step, op by op and from its graph: medians of CPU time."""
    runner, plan = twin(core), running(core, [16], np.random.default_rng(0))
    ways = {"eager": None, "graph": capture(runner.model, core.rows.block_size)}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat + WARM):
        for name, way in ways.items():
            runner.captured = way
            began = time.thread_time()
            runner.forward(plan)
            spent[name].append(time.thread_time() - began)
    release(core, plan)
    return {name: float(np.median(times[WARM:])) for name, times in spent.items()}


def release(core: Core, plan: Plan) -> None:
    for one in plan.decodes:
        core.allocator.release(core.rows.close(one.row))


def cells(model: str, repeat: int) -> list[Cell]:
    core = Core(EngineConfig(model=model), lambda outcome: None)
    core.runner.settled_tokens_max = 0  # no step is computed anew for a near tie
    floor = launches(core, repeat)
    ways = {"eager": None, "graph": capture(core.runner.model, core.rows.block_size)}
    say(", ".join(f"{model} {name}: launch {1e6 * s:.0f} µs" for name, s in floor.items()))
    made = []
    for batch in BATCHES:
        for context in CONTEXTS:
            plan = running(core, [context] * batch, np.random.default_rng(batch))
            made += [
                Cell(f"{model} {name}", core, core.runner, way, plan, batch, context, floor[name])
                for name, way in ways.items()
            ]
    return made


@dataclass(frozen=True)
class Data:
    """Per cell, µs: jitter, launch; utilisation 0..1; KV bytes/s; context in tokens."""

    jitter: np.ndarray
    launch: np.ndarray
    idle: np.ndarray
    bandwidth: np.ndarray
    context: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> Data:
        return Data(*(column[chosen] for column in vars(self).values()))


def data(measured: list[Cell]) -> Data:
    columns = []
    for cell in measured:
        seconds = cell.undisturbed
        if len(seconds) < SAMPLES_MIN:
            continue
        step = float(np.median(seconds))
        columns.append((
            1e6 * float(seconds.std(ddof=1)), 1e6 * cell.launch_s,
            min(cell.launch_s / step, 1.0), cell.kv_bytes / step, cell.context,
        ))  # fmt: skip
    return Data(*np.array(columns).reshape(-1, len(fields(Data))).T)


def law(points: Data) -> tuple[float, float]:
    """Its two constants, α and β, by least squares on logarithms."""
    inputs = np.column_stack([np.ones(len(points.jitter)), np.log(points.idle)])
    (log_alpha, beta), *_ = np.linalg.lstsq(inputs, np.log(points.jitter / points.launch))
    return float(np.exp(log_alpha)), float(beta)


def explained(points: Data, alpha: float, beta: float) -> float:
    """R² of the law with these constants, on logarithms; below 0: worse than one number for all."""
    missed = np.log(points.jitter) - np.log(alpha * points.launch * points.idle**beta)
    return 1 - float((missed**2).sum()) / float(
        ((np.log(points.jitter) - np.log(points.jitter).mean()) ** 2).sum()
    )


def shares(points: Data) -> tuple[dict[str, float], float]:
    """Of the three causes in the R² of a regression on all of them, and that R²."""
    causes = np.log(np.column_stack([points.launch, points.bandwidth, points.context]))
    target = np.log(points.jitter)

    def r2(chosen: tuple[int, ...]) -> float:
        inputs = np.column_stack([np.ones(len(target)), causes[:, list(chosen)]])
        fitted = inputs @ np.linalg.lstsq(inputs, target)[0]
        return 1 - float(((target - fitted) ** 2).sum() / ((target - target.mean()) ** 2).sum())

    orders = list(permutations(range(3)))
    gained = np.zeros(3)
    for order in orders:
        for place, cause in enumerate(order):
            gained[cause] += r2(order[: place + 1]) - r2(order[:place])
    whole = r2((0, 1, 2))
    return dict(zip(SHARES, gained / len(orders) / whole, strict=True)), whole


def drawn(points: Data) -> list[tuple[float, ...]]:
    """Constants and shares of DRAWS samples of the cells, with replacement."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(DRAWS):
        sample = points[rng.integers(0, len(points.jitter), len(points.jitter))]
        found.append((*law(sample), *shares(sample)[0].values()))
    return found


def told(points: Data) -> bool:
    """Prints the fit; True if the law with constants of its own explains what was seen."""
    alpha, beta = law(points)
    own, theirs = explained(points, alpha, beta), explained(points, ALPHA, BETA)
    ratios = points.jitter / (alpha * points.launch * points.idle**beta)
    published = points.jitter / (ALPHA * points.launch * points.idle**BETA)
    for name, values in (("fitted", ratios), ("published", published)):
        low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
        say(f"residuals, seen ÷ {name}: P10 {low:.2f}, P50 {middle:.2f}, P90 {high:.2f}")
    causes, r2 = shares(points)
    say(f"regression on launch, bandwidth and context: R² {r2:.3f}")
    lows, highs = np.quantile(drawn(points), [0.025, 0.975], axis=0)
    here = {"alpha": alpha, "beta": beta, **causes}
    there = {"alpha": ALPHA, "beta": BETA, **SHARES}
    for (name, value), low, high in zip(here.items(), lows, highs, strict=True):
        word = "held" if low <= there[name] <= high else "refuted"
        say(f"{name}: {value:.3f} ({low:.3f} to {high:.3f}); published {there[name]:g}: {word}")
    say(f"R² of the published constants: {theirs:.3f}")
    return verdict("r2_of_the_law_fitted_here", own, f">={EXPLAINED_MIN}", own >= EXPLAINED_MIN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=200, help="of each step")
    options = parser.parse_args()
    measured = [cell for model in SHAPES for cell in cells(model, options.repeat)]
    for _ in range(options.repeat + WARM):
        for cell in measured:
            cell.step()
    counted = sum(len(cell.wall_s) - WARM for cell in measured)
    kept = sum(len(cell.undisturbed) for cell in measured)
    points = data(measured)
    share = len(points.jitter) / len(measured)
    alone = verdict("share_of_cells_undisturbed", share, f">={CELLS_MIN}", share >= CELLS_MIN)
    if not alone:
        return 1
    say(f"{len(points.jitter)} of {len(measured)} cells, {kept:,} of {counted:,} steps; "
        f"jitter {points.jitter.min():.1f} to {points.jitter.max():.0f} µs, "
        f"utilisation {1 - points.idle.max():.2f} to {1 - points.idle.min():.2f}")  # fmt: skip
    return 0 if told(points) else 1


if __name__ == "__main__":
    sys.exit(main())
