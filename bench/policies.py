"""What the length window and the priority weights do to who waits how long, and what they cost.

    python bench/policies.py [--rounds 10] [--requests 300]

One engine (1.3m), stepped by hand, serves the same requests under each setting, by turns. Its clock
is the CPU time of its own steps, which other work on the machine does not lengthen much; between
two requests it jumps. Prompts and answers are those of the trace (engine/load.py), an eighth as
long, but not capped: up to 1,756 prompt tokens. They come as a Poisson process, at a multiple of
what the engine is measured to sustain just before.

Then all ask at once, as many of each priority, and while all three queues wait what they are served
is held against their weights.

Figures are medians over the rounds, with the 95 % interval of a bootstrap over them. What passes is
what docs/engine.md says of the knobs: with a window, fixed or adaptive, short prompts do not wait
longer than without; with weights, high requests wait less, and the queues share the tokens computed
as 1/4, 1 and 2.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from plant import say, verdict
from prefix import interval
from prefix import told as paired

from engine.config import EngineConfig
from engine.core import Core
from engine.exec.build import COMPILER, build, home
from engine.knobs import RuntimeConfig
from engine.load import LENGTH_DIVISOR, OUTPUT_TOKENS, PROMPT_TOKENS, QUANTILES
from engine.models.llama import SHAPES
from engine.sched.length_fit import fit
from engine.sched.priority import QUEUES, WEIGHTS, queue_of
from engine.sched.request import PRIORITIES, Request
from engine.sched.scheduler import Plan

SHORT_TOKENS = 64
LOADS = (0.8, 1.2)  # of what it sustains: for the window, and for the weights
PRIORITY_SHARES = (0.2, 0.6, 0.2)  # low, normal, high
SHARE_ERROR_MAX = 0.05  # of what is computed while all wait


class Served:
    """One engine and its clock."""

    def __init__(self) -> None:
        self.core = Core(EngineConfig(cache=home()), lambda outcome: None)
        self.config = self.core.runtime.running.config

    def serve(
        self,
        asked: list[Request],
        config: RuntimeConfig,
        see: Callable[[Plan], object] = lambda plan: None,
    ) -> float:
        """All of them, each from the moment it `arrived` on; seconds of steps, shown to `see`."""
        scheduler, forward = self.core.scheduler, self.core.runner.forward
        ahead, now, spent = deque(asked), 0.0, 0.0
        while ahead or scheduler.waiting or scheduler.running:
            while ahead and ahead[0].arrived <= now:
                scheduler.add(ahead.popleft())
            began = time.thread_time()
            plan = scheduler.plan(config, now)
            if plan is None:
                now = ahead[0].arrived
                continue
            see(plan)
            tokens, _ = forward(plan)
            scheduler.commit(plan, tokens, now, now + time.thread_time() - began)
            took = time.thread_time() - began
            now, spent = now + took, spent + took
        return spent


def drawn(
    rng: np.random.Generator,
    count: int,
    rate: float,
    shares: tuple[float, ...] = PRIORITY_SHARES,
) -> list[Request]:
    """`rate` 0: all at once."""
    gaps = rng.exponential(1 / rate, count) if rate else np.zeros(count)
    prompts, answers = (
        np.maximum(1, np.interp(rng.random(count), QUANTILES, table) // LENGTH_DIVISOR).astype(int)
        for table in (PROMPT_TOKENS, OUTPUT_TOKENS)
    )
    priorities = rng.choice(len(shares), count, p=shares)
    return [
        Request(
            id="",
            tokens=rng.integers(0, 256, prompts[i]),
            max_tokens=int(answers[i]),
            arrived=at,
            ignore_eos=True,
            priority=int(priorities[i]),
        )
        for i, at in enumerate(gaps.cumsum().tolist())
    ]


def ttft_ms(asked: list[Request], share: float) -> float:
    waits = [request.first_token - request.arrived for request in asked]
    return 1000 * float(np.quantile(waits, share)) if waits else 0.0


def by_length(asked: list[Request]) -> dict[str, float]:
    short = [one for one in asked if one.prompt_tokens <= SHORT_TOKENS]
    return {
        "short, median": ttft_ms(short, 0.5),
        "short, p99": ttft_ms(short, 0.99),
        "all, median": ttft_ms(asked, 0.5),
        "all, p99": ttft_ms(asked, 0.99),
    }


def by_priority(asked: list[Request]) -> dict[str, float]:
    return {
        f"{PRIORITIES[i]}, median": ttft_ms([one for one in asked if one.priority == i], 0.5)
        for i in range(len(PRIORITY_SHARES))
    }


def told(name: str, values: list[float]) -> str:
    low, high = interval(values)
    return f"{name} {np.median(values):.1f} ({low:.1f} to {high:.1f})"


def share_error(subject: Served, asked: list[Request], config: RuntimeConfig) -> float:
    """How far the queues are, at most, from their shares of the tokens while all of them wait."""
    tokens = np.zeros(len(QUEUES))

    def see(plan: Plan) -> None:
        waits = {queue_of(request) for request in subject.core.scheduler.waiting}
        if len(waits) == len(QUEUES):
            for request in plan.decodes:
                tokens[queue_of(request)] += 1
            for chunk in plan.chunks:
                tokens[queue_of(chunk.request)] += chunk.count

    subject.serve(asked, config, see)
    entitled = np.array([*WEIGHTS.values()]) / sum(WEIGHTS.values())
    return float(np.abs(tokens / tokens.sum() - entitled).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args()
    if shutil.which(COMPILER):
        build(home(), SHAPES["1.3m"], 1)
    subject, rng = Served(), np.random.default_rng(5)
    off = subject.config
    subject.serve(drawn(rng, options.requests, 0.0), off)  # warm
    lengths = fit(np.array([one.prompt_tokens for one in drawn(rng, 512, 0.0)]))
    assert lengths is not None
    say(f"prompts: {lengths}")
    windows = {
        f"length_window_tokens {value}": replace(off, length_window_tokens=value)
        for value in (0, 64, -1)
    }
    weights = {
        f"priority_weights {value}": replace(off, priority_weights=value) for value in ("off", "on")
    }
    found: dict[str, dict[str, list[float]]] = {}
    sustained: list[float] = []
    for load, arms, read in zip(LOADS, (windows, weights), (by_length, by_priority), strict=True):
        found |= {name: {} for name in arms}
        for _ in range(options.rounds):
            seed = int(rng.integers(2**31))
            # Anew each time: what else runs here changes what a second of CPU is worth.
            all_at_once = drawn(rng, options.requests, 0.0)
            sustained.append(options.requests / subject.serve(all_at_once, off))
            for name in rng.permutation(list(arms)).tolist():
                asked = drawn(np.random.default_rng(seed), options.requests, load * sustained[-1])
                spent = subject.serve(asked, arms[name])
                for key, value in {**read(asked), "CPU of all steps": 1000 * spent}.items():
                    found[name].setdefault(key, []).append(value)
        say(f"\nTTFT in ms, at {load} of what it sustains, {options.rounds} rounds:")
        for name in arms:
            say(f"{name}: " + "; ".join(told(key, value) for key, value in found[name].items()))
    say(f"\n{told('sustained, requests/s of CPU:', sustained)}")
    on = weights["priority_weights on"]
    errors = [
        share_error(subject, drawn(rng, options.requests, 0.0, (1 / 3,) * 3), on)
        for _ in range(options.rounds)
    ]
    return 0 if judged(found, errors) else 1


def judged(found: dict[str, dict[str, list[float]]], errors: list[float]) -> bool:
    """What docs/engine.md says of the knobs, round by round against those without."""
    say("")
    passed = []
    window, weights = "length_window_tokens", "priority_weights"
    for metric, knob, without, key in (
        ("short_ttft_64", f"{window} 64", f"{window} 0", "short, median"),
        ("short_ttft_adaptive", f"{window} -1", f"{window} 0", "short, median"),
        ("high_ttft", f"{weights} on", f"{weights} off", "high, median"),
    ):
        ratios = np.array(found[knob][key]) / np.array(found[without][key])
        ratio = paired(f"TTFT, {key}, {knob} ÷ {without}", ratios.tolist())
        passed.append(verdict(f"{metric}_over_off", ratio, "<=1", ratio <= 1))
    error = paired("tokens of a queue, most that its share is off by while all wait", errors)
    passed.append(verdict("share_error", error, f"<={SHARE_ERROR_MAX}", error <= SHARE_ERROR_MAX))
    return all(passed)


if __name__ == "__main__":
    sys.exit(main())
