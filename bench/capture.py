"""A decode step op by op, replayed from its graph, and compiled; and what that is worth in serving.

    python bench/capture.py [--model 1.3m] [--repeat 200] [--rounds 3] [--seconds 6]

Whole steps (index arrays, forward, choice), interleaved in one process, CPU time of the one
thread, medians. Contexts are log-normal around 110 tokens, as the demo's load has them. The step is
compiled first where that was not done; without a C++ compiler that column is left out.

Then engines of their own serve under a load bound by decode, the scenario `capture-lost`'s: with
what they captured and without, by turns, in a closed loop. The figures hold when nothing else runs.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import torch
from plant import say, verdict

from controlplane.demo.house import House, Ports
from controlplane.demo.scenarios import ASKED_TOKENS, TOLD_TOKENS
from engine.config import EngineConfig
from engine.core import Core
from engine.exec.build import COMPILER, build, home
from engine.exec.capture import Captured, capture
from engine.load import Request as Asked
from engine.models.llama import SHAPES
from engine.sched.request import Request
from engine.sched.scheduler import Plan

BATCHES = (1, 2, 4, 8, 16, 32, 64)
# Of compiled steps, which are a part of serving and gain more by themselves; a graph gains less.
SERVED_OVER_EAGER_MIN = 1.2


def decodes(core: Core, batch: int) -> Plan:
    """A step of `batch` running sequences, longest first, their KV as good as any."""
    rng = np.random.default_rng(batch)
    contexts = np.sort(np.clip(rng.lognormal(4.7, 0.6, batch), 10, 380).astype(int))[::-1]
    return running(core, contexts.tolist(), rng)


def running(core: Core, contexts: Sequence[int], rng: np.random.Generator) -> Plan:
    """A step of sequences with these contexts, longest first."""
    asked = []
    for context in contexts:
        tokens = rng.integers(0, 262, context + 1)
        one = Request(id=str(context), tokens=tokens, max_tokens=1, arrived=0.0)
        one.row = core.rows.open(tokens, one.limit, ignore_eos=True, has_stop=False, begun=True)
        blocks = core.allocator.allocate(-(-(context + 1) // core.rows.block_size))
        assert blocks is not None
        core.rows.append_blocks(one.row, blocks)
        core.rows.computed[one.row] = context
        asked.append(one)
    return Plan(asked, np.array([one.row for one in asked]), [])


def arms(core: Core) -> dict[str, Captured | None]:
    """The ways to run a step, plain first, and what having each took."""
    model, size = core.runner.model, core.runner.pool.block_size
    ways: dict[str, Captured | None] = {"eager": None, "graph": capture(model, size)}
    if (compiled := core.barrier.workshop.find()) is not None:
        ways["compiled"] = compiled
    for name, way in ways.items():
        if way is not None:
            print(f"{name}: ready in {way.seconds:.3f} s")
    return ways


def measure(core: Core, ways: dict[str, Captured | None], batch: int, repeat: int) -> str:
    """One line of the table."""
    plan = decodes(core, batch)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    logits: dict[str, torch.Tensor] = {}
    for _ in range(repeat):
        for name, way in ways.items():
            core.runner.captured = way
            began = time.thread_time()
            _, logits[name] = core.runner.forward(plan)
            spent[name].append(time.thread_time() - began)
    context = core.rows.computed[plan.rows].mean()
    for one in plan.decodes:
        core.allocator.release(core.rows.close(one.row))
    ms = {name: 1000 * float(np.median(times[5:])) for name, times in spent.items()}
    cells = [f"{batch:5} {context:8.0f}", *(f"{ms[name]:9.3f}" for name in ways)]
    cells += [f"{ms['eager'] / ms[name]:9.2f}" for name in list(ways)[1:]]
    errors = [float((logits[name] - logits["eager"]).abs().max()) for name in list(ways)[1:]]
    return " ".join([*cells, f"{max(errors):9.0e}"])


def steps(options: argparse.Namespace) -> None:
    """The table of whole steps."""
    config = EngineConfig(model=options.model, cache=home())
    if shutil.which(COMPILER):
        seconds = build(home(), SHAPES[config.model], config.threads)
        print(f"compiled in {seconds:.0f} s" if seconds else "compiled before")
    core = Core(config, lambda outcome: None)
    ways = arms(core)
    print(f"{options.model}, one thread; ms of CPU per step, eager ÷ each other, largest error")
    heads = ["batch  context", *(f"{name:>9}" for name in ways)]
    print(" ".join([*heads, *(f"{'÷ ' + name:>9}" for name in list(ways)[1:]), f"{'error':>9}"]))
    for batch in BATCHES:
        print(measure(core, ways, batch, options.repeat))


def served_over_eager(options: argparse.Namespace) -> float:
    """Requests a second with what was captured ÷ without: the median of rounds of two engines.

    Which of the two comes first changes from round to round.
    """
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        house = House(Path(scratch), Ports.free(), model=options.model)
        for number in range(options.rounds):
            served = {}
            for way in ("on", "off") if number % 2 == 0 else ("off", "on"):
                asked = (Asked(0, ASKED_TOKENS, TOLD_TOKENS, f"decode-{i}") for i in count())
                values = {"graph_capture": way}
                served[way] = house.capacity(options.seconds, values, asked).requests_per_s
            ratios.append(served["on"] / served["off"])
            say(f"{ASKED_TOKENS} and {TOLD_TOKENS} tokens: {served['on']:.1f} requests/s captured, "
                f"{served['off']:.1f} eager")  # fmt: skip
    return median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=sorted(SHAPES), default="1.3m")
    parser.add_argument("--repeat", type=int, default=200, help="of each step")
    parser.add_argument("--rounds", type=int, default=3, help="of serving, two engines each")
    parser.add_argument("--seconds", type=float, default=6, help="an engine serves")
    options = parser.parse_args()
    # A bench that is told to stop ends the processes it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    steps(options)
    ratio = served_over_eager(options)
    passed = ratio >= SERVED_OVER_EAGER_MIN
    verdict("served_over_eager", ratio, f">={SERVED_OVER_EAGER_MIN}", passed)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
