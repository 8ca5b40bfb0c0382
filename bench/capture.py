"""A decode step replayed from its graph against the same step op by op; prints the ratio.

    python -m bench.capture [--model 1.3m] [--repeat 200]

Whole steps (index arrays, forward, choice), interleaved in one process, CPU time of the one
thread, medians. Contexts are log-normal around 110 tokens, as the demo's load has them.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core import Core
from engine.models.llama import SHAPES
from engine.sched.request import Request
from engine.sched.scheduler import Plan

BATCHES = (1, 2, 4, 8, 16, 32, 64)


def decodes(core: Core, batch: int) -> Plan:
    """A step of `batch` running sequences, longest first, their KV as good as any."""
    rng = np.random.default_rng(batch)
    contexts = np.sort(np.clip(rng.lognormal(4.7, 0.6, batch), 10, 380).astype(int))[::-1]
    asked = []
    for context in contexts.tolist():
        tokens = rng.integers(0, 262, context + 1)
        one = Request(id=str(context), tokens=tokens, max_tokens=1, arrived=0.0)
        one.row = core.rows.open(tokens, one.limit, ignore_eos=True, has_stop=False, begun=True)
        blocks = core.allocator.allocate(-(-(context + 1) // core.rows.block_size))
        assert blocks is not None
        core.rows.append_blocks(one.row, blocks)
        core.rows.computed[one.row] = context
        asked.append(one)
    return Plan(asked, np.array([one.row for one in asked]), [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=sorted(SHAPES), default="1.3m")
    parser.add_argument("--repeat", type=int, default=200)
    options = parser.parse_args()
    core = Core(EngineConfig(model=options.model), lambda outcome: None)
    runner, graphs = core.runner, core.runner.graphs
    assert graphs is not None
    print(f"{options.model}: captured in {graphs.seconds:.2f} s; one thread; ms CPU per step")
    print("batch   eager   graph   ratio   equal")
    for batch in BATCHES:
        plan = decodes(core, batch)
        spent: dict[bool, list[float]] = {False: [], True: []}
        logits: dict[bool, torch.Tensor] = {}
        for i in range(2 * options.repeat):
            use = bool(i % 2)
            runner.graphs = graphs if use else None
            began = time.thread_time()
            _, logits[use] = runner.forward(plan)
            spent[use].append(time.thread_time() - began)
        eager, graph = (1000 * float(np.median(spent[use][5:])) for use in (False, True))
        equal = torch.equal(logits[False], logits[True])
        print(f"{batch:5}  {eager:6.3f}  {graph:6.3f}  {eager / graph:6.2f}   {equal}")
        for one in plan.decodes:
            core.allocator.release(core.rows.close(one.row))


if __name__ == "__main__":
    main()
