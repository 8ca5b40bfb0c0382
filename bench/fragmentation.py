"""What fragmentation costs a contiguous KV pool under churn, and what either cure gives back.

    python bench/fragmentation.py [--rounds 6] [--seconds 30] [--load SHARE]

One engine, stepped by hand, serves the same requests under each of four arms, in an order left to
chance: those of the scenario `kv-fragmented` (controlplane/demo/scenarios.py), at its share of what
the engine was seen to sustain just before of those that come before the shift. The pool is paged,
or contiguous; or it is contiguous and cured a third of the way, live, as the control plane would:
`kv_compaction` on, or `kv_allocator` paged. Who comes in the last third is judged, for all arms
alike: by then a cured engine has served those who waited.

The clock is the CPU time of the engine's own steps, moves and swaps, which other work on the
machine does not lengthen much; between two requests it jumps. No HTTP. P99 is of the time to the
first token, for it is there that a request waits which finds no run, and over all rounds together;
the 95 % interval is a bootstrap's over the rounds. The whole answers' P99 stands beside it: a long
one takes its seconds in any pool.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from plant import say, verdict

from controlplane.demo.scenarios import POOL_OF_RUNS, RUNS, SCENARIOS
from engine.config import EngineConfig
from engine.core import Core
from engine.exec.build import COMPILER, build, home
from engine.exec.compact import compact
from engine.kv.contiguous import ContiguousAllocator
from engine.load import Request as Asked
from engine.models.llama import SHAPES
from engine.sched.request import Request

SCENARIO = SCENARIOS["kv-fragmented"]
QUIET_S = 3.0
SUSTAINED_OF = 150  # requests
ROSE_MIN, RECOVERED_MIN = 3.0, 0.6
BOOTSTRAPS = 2000
PAGED = {"kv_allocator": "paged"}


@dataclass
class Arm:
    """How the pool begins, and what is changed a third of the way.

    `ttft_s` and `e2e_s`: of those judged, a row a round. `stalled`: the share of the judged third
    in which someone found no run long enough though blocks enough were free, of each round.
    """

    begins: Mapping[str, str]
    cure: Mapping[str, str] = field(default_factory=dict)
    ttft_s: list[np.ndarray] = field(default_factory=list)
    e2e_s: list[np.ndarray] = field(default_factory=list)
    stalled: list[float] = field(default_factory=list)


class Engine:
    """One engine and its clock, `now`, in seconds."""

    def __init__(self) -> None:
        config = EngineConfig(cache=home(), kv_pool_blocks=int(POOL_OF_RUNS[1]))
        self.core = Core(config, lambda outcome: None)
        self.config = self.core.runtime.running.config
        self.now = 1.0

    def change(self, values: Mapping[str, str]) -> None:
        """Between two steps. What is prepared beside them takes nobody's time."""
        after = self.config.replaced(values)
        swap = self.core.barrier.prepare(self.config, after)
        began = time.thread_time()
        if swap is not None:
            swap()
        self.now += time.thread_time() - began
        self.config = after

    def serve(self, ahead: deque[Request], until: float = np.inf) -> None:
        """Those `ahead` that come until then, each from when it `arrived` on; all, to their end."""
        scheduler = self.core.scheduler
        while self.now < until and (ahead or scheduler.waiting or scheduler.running):
            while ahead and ahead[0].arrived <= self.now:
                scheduler.add(ahead.popleft())
            if not self._step():
                self.now = ahead[0].arrived

    def _step(self) -> bool:
        scheduler, allocator, began = self.core.scheduler, self.core.allocator, time.thread_time()
        moves = self.config.kv_compaction == "on" and scheduler.stalls.stalled is not None
        if moves and isinstance(allocator, ContiguousAllocator):
            compact(self.core.rows, self.core.runner.pool, allocator)
        plan = scheduler.plan(self.config, self.now)
        if plan is None:
            return False
        tokens, _ = self.core.runner.forward(plan)
        scheduler.commit(plan, tokens, self.now, self.now + time.thread_time() - began)
        self.now += time.thread_time() - began
        return True

    def sustained(self, asked: Sequence[Asked]) -> float:
        """Requests a second, of so many that are all there at once."""
        began = self.now
        self.serve(deque(drawn([*asked], at=began)))
        return len(asked) / (self.now - began)


def drawn(asked: Sequence[Asked], at: float | None = None, since: float = 0.0) -> list[Request]:
    """As the scheduler takes them, each at its own time after `since`, or all at `at`."""
    rng = np.random.default_rng(0)
    return [
        Request(
            id=each.id,
            tokens=rng.integers(0, 256, each.prompt_tokens),
            max_tokens=each.output_tokens,
            arrived=since + each.at_s if at is None else at,
            ignore_eos=True,
        )
        for each in asked
    ]


def play(engine: Engine, arm: Arm, asked: Sequence[Asked], seconds: float) -> None:
    """One round of an arm."""
    engine.change({"kv_compaction": "off", **arm.begins})
    shift, stalls = engine.now + QUIET_S, engine.core.scheduler.stalls
    requests = drawn(asked, since=engine.now)
    ahead = deque(requests)
    engine.serve(ahead, until=shift + seconds / 3)
    engine.change(arm.cure)
    engine.serve(ahead, until=shift + 2 * seconds / 3)
    judged, stalled_s = shift + 2 * seconds / 3, stalls.seconds
    engine.serve(ahead, until=shift + seconds)
    arm.stalled.append((stalls.seconds - stalled_s) / (seconds / 3))
    engine.serve(ahead)
    late = [request for request in requests if request.arrived >= judged]
    arm.ttft_s.append(np.array([request.first_token - request.arrived for request in late]))
    arm.e2e_s.append(np.array([request.finished - request.arrived for request in late]))


def p99(rounds: Sequence[np.ndarray], chosen: Sequence[int]) -> float:
    return float(np.quantile(np.concatenate([rounds[i] for i in chosen]), 0.99))


def given_back(
    plain: Sequence[np.ndarray],
    cured: Sequence[np.ndarray],
    paged: Sequence[np.ndarray],
    chosen: Sequence[int],
) -> float:
    risen = p99(plain, chosen) - p99(paged, chosen)
    return (p99(plain, chosen) - p99(cured, chosen)) / risen


def told(name: str, of: Callable[[Sequence[int]], float], rounds: int) -> float:
    """A figure over all rounds, with its interval."""
    rng, value = np.random.default_rng(0), of(range(rounds))
    figures = [of(rng.integers(0, rounds, rounds).tolist()) for _ in range(BOOTSTRAPS)]
    low, high = np.percentile(figures, [2.5, 97.5])
    say(f"{name}: {value:.3f} ({low:.3f} to {high:.3f}), {rounds} rounds")
    return value


def judge(arms: Mapping[str, Arm], rounds: int) -> bool:
    """Prints the figures; whether P99 rises as it should, and both cures give it back."""
    every = range(rounds)
    for name, arm in arms.items():
        told(f"P99 of the time to the first token, {name}, s", partial(p99, arm.ttft_s), rounds)
        say(f"  of the whole answer {p99(arm.e2e_s, every):.3f} s; someone stalled for "
            f"{np.mean(arm.stalled):.1%} of the time")  # fmt: skip
    plain, paged = arms["contiguous"].ttft_s, arms["paged"].ttft_s
    rose = told("contiguous ÷ paged", lambda i: p99(plain, i) / p99(paged, i), rounds)
    passed = [verdict("p99_contiguous_over_paged", rose, f">={ROSE_MIN}", rose >= ROSE_MIN)]
    for cure in ("compacted", "made paged"):
        back = told(
            f"of the rise, given back once {cure}",
            partial(given_back, plain, arms[cure].ttft_s, paged),
            rounds,
        )
        name, target = f"recovered_{cure.replace(' ', '_')}", f">={RECOVERED_MIN}"
        passed.append(verdict(name, back, target, back >= RECOVERED_MIN))
    return all(passed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=6, help="of each arm")
    parser.add_argument("--seconds", type=float, default=30, help="a round, after the shift")
    parser.add_argument("--load", type=float, default=SCENARIO.load, help="of what it sustains")
    parser.add_argument("--seed", type=int, default=3, help="of arrivals, lengths and order")
    options = parser.parse_args()
    if shutil.which(COMPILER):
        build(home(), SHAPES["1.3m"], 1)
    engine, rng = Engine(), np.random.default_rng(options.seed)
    scenario = replace(SCENARIO, load=options.load)
    supply = scenario.supply(1.0)[:SUSTAINED_OF]
    engine.change(RUNS)
    engine.sustained(supply)  # warm
    captured = engine.core.runner.captured
    say(f"steps: {captured.mode if captured else 'eager'}")
    arms = {
        "paged": Arm(PAGED),
        "contiguous": Arm(RUNS),
        "compacted": Arm(RUNS, {"kv_compaction": "on"}),
        "made paged": Arm(RUNS, PAGED),
    }
    for _ in range(options.rounds):
        engine.change({**RUNS, "kv_compaction": "off"})
        capacity = engine.sustained(supply)
        say(f"sustained: {capacity:.1f} requests/s of CPU")
        asked = scenario.requests(int(rng.integers(2**31)), capacity, QUIET_S, options.seconds)
        for name in rng.permutation(list(arms)).tolist():
            play(engine, arms[name], asked, options.seconds)
    return 0 if judge(arms, options.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
