"""What cached prefixes save where requests begin alike, and what they cost where none do.

    python bench/prefix.py [--model 1.3m] [--rounds 20] [--begin 384]

Two engines in one process, one with `prefix_cache` on, each in a closed loop with the same
requests, by turns; which is first is left to chance. Whole steps: who runs, the forward, and what
came of it; no HTTP.

- Alike: a system prompt of --begin tokens, then 16 to 96 of one's own, 16 to answer; the cache is
  empty at the start of a round. TTFT is wall time, from the moment one is asked.
- Unlike: random prompts with the lengths of the demo's load (engine/load.py), in a pool that must
  evict. Both take the same steps, so they take them by turns; CPU time of the thread, summed.

Figures are medians over the rounds, with the 95 % interval of a bootstrap over them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from plant import say, verdict

from engine.config import EngineConfig
from engine.core import Core
from engine.exec.build import COMPILER, build, home
from engine.load import arrivals
from engine.models.llama import SHAPES
from engine.sched.request import Request

REQUESTS = 64
AT_ONCE = 8
SAVED_MIN = 0.7
TTFT_RATIO_MIN = 2.0
OVERHEAD_MAX = 0.02


@dataclass(frozen=True)
class Asked:
    """One request of a round: its prompt (int64) and how much it wants."""

    prompt: np.ndarray
    answer_tokens: int


class Arm:
    """One engine, stepped by hand."""

    def __init__(self, model: str, prefix_cache: str) -> None:
        config = EngineConfig(
            model=model, cache=home(), kv_pool_blocks=512, prefix_cache=prefix_cache
        )
        self.core = Core(config, lambda outcome: None)
        self.config = self.core.runtime.running.config

    def steps(self, asked: list[Asked]) -> Iterator[tuple[float, list[Request]]]:
        """Serves them all, AT_ONCE in flight: of each step its CPU seconds, and whom it ended."""
        scheduler, forward = self.core.scheduler, self.core.runner.forward
        scheduler.prefix_queries = scheduler.prefix_hits = 0
        ahead, flying = deque(asked), 0
        while ahead or flying:
            while ahead and flying < AT_ONCE:
                one, now = ahead.popleft(), time.monotonic()
                scheduler.add(Request("", one.prompt, one.answer_tokens, now, ignore_eos=True))
                flying += 1
            began, busy = time.monotonic(), time.thread_time()
            plan = scheduler.plan(self.config, began)
            assert plan is not None
            tokens, _ = forward(plan)
            finished = scheduler.commit(plan, tokens, began, time.monotonic()).finished
            flying -= len(finished)
            yield time.thread_time() - busy, finished

    def ttft_s(self, asked: list[Asked]) -> float:
        """The median over all of them."""
        ended = [request for _, finished in self.steps(asked) for request in finished]
        return float(np.median([request.first_token - request.arrived for request in ended]))


def alike(rng: np.random.Generator, begin_tokens: int) -> list[Asked]:
    begin = rng.integers(0, 256, begin_tokens)
    own = rng.integers(16, 97, REQUESTS).tolist()
    return [Asked(np.concatenate([begin, rng.integers(0, 256, n)]), 16) for n in own]


def unlike(rng: np.random.Generator) -> list[Asked]:
    load = arrivals(int(rng.integers(2**31)), [(1.0, 2 * REQUESTS)])[:REQUESTS]
    return [Asked(rng.integers(0, 256, r.prompt_tokens), r.output_tokens) for r in load]


def saving(off: Arm, on: Arm, asked: list[Asked]) -> tuple[float, float]:
    """The share of prompt tokens found, and the median TTFT off ÷ on."""
    on.core.scheduler.prefixes.flush()
    arms = (off, on) if len(asked[0].prompt) % 2 else (on, off)
    ttft_s = {arm: arm.ttft_s(asked) for arm in arms}
    scheduler = on.core.scheduler
    return scheduler.prefix_hits / scheduler.prefix_queries, ttft_s[off] / ttft_s[on]


def cost(off: Arm, on: Arm, asked: list[Asked]) -> float:
    """CPU of the same steps, on ÷ off − 1."""
    arms = (off, on) if len(asked[0].prompt) % 2 else (on, off)
    spent = dict.fromkeys(arms, 0.0)
    for pair in zip(*(arm.steps(asked) for arm in arms), strict=True):
        for arm, (cpu_s, _) in zip(arms, pair, strict=True):
            spent[arm] += cpu_s
    assert on.core.scheduler.prefix_hits == 0
    return spent[on] / spent[off] - 1


def interval(values: list[float]) -> tuple[float, float]:
    """Of the median, 95 %, by a bootstrap."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def told(name: str, values: list[float]) -> float:
    low, high = interval(values)
    middle = float(np.median(values))
    say(f"{name}: {middle:.3f} ({low:.3f} to {high:.3f}), {len(values)} rounds")
    return middle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=sorted(SHAPES), default="1.3m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--begin", type=int, default=384, help="tokens that all begin with")
    options = parser.parse_args()
    if shutil.which(COMPILER):
        build(home(), SHAPES[options.model], 1)
    off, on = Arm(options.model, "off"), Arm(options.model, "on")
    captured = on.core.runner.captured
    say(f"{options.model}, one thread, steps: {captured.mode if captured else 'eager'}")
    rng = np.random.default_rng(11)
    saving(off, on, alike(rng, options.begin))  # warm
    savings, costs = [], []
    for _ in range(options.rounds):
        savings.append(saving(off, on, alike(rng, options.begin)))
        costs.append(cost(off, on, unlike(rng)))
    evictions = on.core.allocator.evictions
    say(f"{evictions} blocks were evicted")
    saved_share = told("share of prompt tokens saved", [saved for saved, _ in savings])
    ratio = told("median TTFT off ÷ on", [ratio for _, ratio in savings])
    overhead = told("CPU of a step without shared prefixes, on ÷ off − 1", costs)
    passed = [
        verdict("saved_share", saved_share, f">={SAVED_MIN}", saved_share >= SAVED_MIN),
        verdict("ttft_off_over_on", ratio, f">={TTFT_RATIO_MIN}", ratio >= TTFT_RATIO_MIN),
        verdict("overhead", overhead, f"<={OVERHEAD_MAX}", overhead <= OVERHEAD_MAX),
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
