"""What it is worth to copy swapped KV back ahead of its turn, beside the steps.

    python bench/prefetch.py [--model 1.3m] [--rounds 20] [--depth 512]

Two engines in one process whose pool is too small for what runs, so that requests are preempted
and swapped; one has `prefetch_depth_tokens`. Both are in a closed loop with the same requests. They
make the same plans (asserted), so they take their steps by turns; which is first is left to chance.
Whole steps: who runs, the forward, and what came of it; no HTTP.

- Of the steps that a swapped request comes back in: how long planning held up all others, and the
  whole step.
- Of all steps: CPU time of the step thread, and of the process with the thread that copies.

Figures are medians over the rounds, with the 95 % interval of a bootstrap over them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from plant import say, verdict
from prefix import told

from engine.config import EngineConfig
from engine.core import Core
from engine.exec.build import COMPILER, build, home
from engine.models.llama import SHAPES
from engine.sched.request import Request

REQUESTS = 32
AT_ONCE = 8
MODEL_LEN_MAX = 1024
POOL_BLOCKS = 128  # of 16 tokens; 8 requests want 300 at their longest
PROMPT_TOKENS = 64, 385  # from, to
ANSWER_TOKENS = 128, 257


class Step(NamedTuple):
    """Seconds of one step. `hits`: swapped requests that had come back by its end."""

    tokens: int
    hits: int
    plan_s: float
    whole_s: float
    thread_cpu_s: float
    process_cpu_s: float


class Arm:
    """One engine, stepped by hand."""

    def __init__(self, model: str, depth: int) -> None:
        config = EngineConfig(
            model=model, cache=home(), kv_pool_blocks=POOL_BLOCKS, model_len_max=MODEL_LEN_MAX
        )
        self.core = Core(config, lambda outcome: None)
        self.config = self.core.runtime.running.config.replaced(
            {"preemption": "swap", "prefetch_depth_tokens": depth}
        )

    def steps(self, asked: list[tuple[np.ndarray, int]]) -> Iterator[Step]:
        """Serves prompts and what they want, AT_ONCE in flight."""
        scheduler, tier = self.core.scheduler, self.core.tier
        ahead, flying, before = deque(asked), 0, tier.hits
        while ahead or flying:
            while ahead and flying < AT_ONCE:
                (prompt, answer_tokens), now = ahead.popleft(), time.monotonic()
                scheduler.add(Request("", prompt, answer_tokens, now, ignore_eos=True))
                flying += 1
            began, thread, process = time.monotonic(), time.thread_time(), time.process_time()
            plan = scheduler.plan(self.config, began)
            planned = time.monotonic()
            assert plan is not None
            tokens, _ = self.core.runner.forward(plan)
            finished = scheduler.commit(plan, tokens, began, time.monotonic()).finished
            flying -= len(finished)
            yield Step(
                len(plan.decodes) + plan.prefill_tokens,
                tier.hits - before,
                planned - began,
                time.monotonic() - began,
                time.thread_time() - thread,
                time.process_time() - process,
            )


def round_of(arms: list[Arm], asked: list[tuple[np.ndarray, int]]) -> list[list[Step]]:
    """The steps of each arm, taken by turns."""
    taken: list[list[Step]] = [[] for _ in arms]
    for pair in zip(*(arm.steps(asked) for arm in arms), strict=True):
        assert pair[0][:2] == pair[1][:2], "they make the same plans"
        for steps, step in zip(taken, pair, strict=True):
            steps.append(step)
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=sorted(SHAPES), default="1.3m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--depth", type=int, default=512, help="tokens copied ahead")
    options = parser.parse_args()
    if shutil.which(COMPILER):
        build(home(), SHAPES[options.model], 1)
    arms = [Arm(options.model, depth) for depth in (0, options.depth)]
    off, on = arms
    captured = on.core.runner.captured
    say(f"{options.model}, one thread, steps: {captured.mode if captured else 'eager'}")
    rng = np.random.default_rng(11)
    figures: dict[str, list[float]] = {}
    for number in range(-1, options.rounds):  # the first warms up
        asked = [
            (rng.integers(0, 256, rng.integers(*PROMPT_TOKENS)), int(rng.integers(*ANSWER_TOKENS)))
            for _ in range(REQUESTS)
        ]
        order = arms if rng.random() < 0.5 else arms[::-1]
        steps = dict(zip(order, round_of(order, asked), strict=True))
        if number < 0:
            continue
        for name, arm in (("off", off), ("on", on)):
            of = np.array(steps[arm])
            back = np.diff(of[:, 1], prepend=0) > 0
            figures.setdefault(f"planning where one came back, ms, {name}", []).append(
                1e3 * float(np.median(of[back, 2]))
            )
            figures.setdefault(f"that whole step, ms, {name}", []).append(
                1e3 * float(np.median(of[back, 3]))
            )
        cpu = {arm: np.array(steps[arm])[:, 4:].sum(axis=0) for arm in arms}
        for column, who in enumerate(("the step thread", "the process")):
            ratio = float(cpu[on][column] / cpu[off][column]) - 1
            figures.setdefault(f"CPU of {who}, on ÷ off − 1", []).append(ratio)
    middle = {name: told(name, values) for name, values in figures.items()}
    tier = on.core.tier
    ahead = tier.ahead
    say(f"{tier.hits} came back, {tier.bytes_per_s / 1e9:.2f} GB/s; tokens: {ahead.told()}")
    say(f"{ahead.late} pieces late")
    used = ahead.told()["used"]
    planning = (middle[f"planning where one came back, ms, {name}"] for name in ("on", "off"))
    ratio = next(planning) / next(planning)
    passed = [
        verdict("tokens_used", used, ">0", used > 0),
        verdict("planning_on_over_off", ratio, "<1", ratio < 1),
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
