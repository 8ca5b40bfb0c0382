"""What each KV dtype saves, what it costs a step, and what it takes from the text.

    python bench/kv_dtype.py [--tokens 2048] [--model 1.3m] [--batch 16] [--repeat 200]

- Bytes of a token's KV against float16's, of SmolLM2's shape, scales included.
- Perplexity of real text (this project's pages) on SmolLM2's weights, in float32, against KV kept
  as computed: windows of 512 tokens through pool and attention as served, so that each token sees
  KV as it is kept. The same windows for all; the interval is a bootstrap's over them. Left out
  where the weights are not installed.
- CPU time of a decode step, the same step for all dtypes, ways to run and layouts by turns; medians
  of the ratio to a float32 graph with the 95 % interval of a bootstrap.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from capture import decodes
from plant import say, verdict
from prefix import told

from engine.barrier import new_pool
from engine.config import KV_DTYPES, KV_LAYOUTS, EngineConfig
from engine.core import Core
from engine.exec.build import COMPILER, build, home
from engine.exec.capture import Captured, capture
from engine.exec.step import Step
from engine.kv.formats import Format
from engine.kv.pool import KVPool
from engine.models.errors import ModelError
from engine.models.llama import SHAPES
from engine.models.loader import find
from engine.sched.request import Request
from engine.sched.scheduler import Chunk, Plan

ROOT = Path(__file__).resolve().parents[1]
WINDOW_TOKENS = 512
SMOLLM2 = 30, 3, 64  # layers, KV heads, head_dim
# Of float16: 25 and 37.5 %, less what scales take.
SAVED_MIN = {"float16_int8": 0.245, "float16_int4": 0.37}
PERPLEXITY_MAX = {"float16_int8": 1.01}
NAMES = tuple(name for name in KV_DTYPES if name != "auto")


def saved() -> bool:
    """The table of bytes; whether each saves what it should."""
    sizes = {name: Format.of(name, torch.float32).token_bytes(*SMOLLM2) for name in NAMES}
    for name, size in sizes.items():
        say(f"{name}: {size} bytes a token, {size / sizes['float16']:.4f} of float16")
    passed = []
    for name, target in SAVED_MIN.items():
        share = 1 - sizes[name] / sizes["float16"]
        passed.append(verdict(f"saved_{name}", share, f">={target}", share >= target))
    return all(passed)


def pool_of(core: Core, name: str, layout: str = "separate") -> KVPool:
    running = replace(core.runtime.running.config, kv_dtype=name, kv_layout=layout)
    return new_pool(core.config, core.runner.model, running)


@torch.inference_mode()
def surprise(core: Core, pool: KVPool, tokens: np.ndarray) -> float:
    """Mean negative log likelihood of each token after the first, by the KV of `pool`."""
    model, rows, count = core.runner.model, core.rows, len(tokens)
    request = Request("text", tokens, 1, 0.0)
    row = rows.open(tokens, request.limit, ignore_eos=True, has_stop=False, begun=False)
    rows.append_blocks(row, list(range(1, 1 + -(-count // pool.block_size))))
    try:
        chunk = Chunk(request, row, 0, count, last=True)
        step = Step(model, pool, rows, Plan([], np.empty(0, np.int64), [chunk]))
        logits = model.logits(model.hidden(step.tokens, step.positions, step.attention))
    finally:
        rows.close(row)
    said = torch.from_numpy(tokens[1:])
    return float(torch.nn.functional.cross_entropy(logits[: count - 1], said))


def perplexity(tokens_max: int) -> bool:
    """The table of perplexities; whether none is lost that should not be."""
    try:
        find("smollm2")
    except ModelError as error:
        say(f"perplexity left out: {error}")
        return True
    config = EngineConfig(
        model="smollm2", dtype="float32", kv_pool_blocks=128, threads=os.cpu_count() or 1
    )
    core = Core(replace(config, model_len_max=WINDOW_TOKENS), lambda _: None)
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    tokens = np.array(core.tokenizer.encode(text))
    count = min(tokens_max, len(tokens)) // WINDOW_TOKENS
    starts = np.linspace(0, len(tokens) - WINDOW_TOKENS, count).astype(int).tolist()
    nll: dict[str, list[float]] = {name: [] for name in NAMES}
    pools = {name: pool_of(core, name) for name in NAMES}
    for start in starts:
        for name, pool in pools.items():
            nll[name].append(surprise(core, pool, tokens[start : start + WINDOW_TOKENS]))
    ratios = {}
    for name, each in nll.items():
        differences = np.array(each) - np.array(nll["float32"])
        drawn = np.random.default_rng(0).choice(differences, (2000, len(differences)))
        low, high = np.exp(np.percentile(drawn.mean(axis=1), [2.5, 97.5]))
        ratio = ratios[name] = float(np.exp(differences.mean()))
        say(
            f"{name}: perplexity {np.exp(np.mean(each)):.4f}, x{ratio:.5f} of float32 "
            f"({low:.5f} to {high:.5f}), {len(each)} windows"
        )
    passed = [
        verdict(f"perplexity_{name}", ratios[name], f"<={target}", ratios[name] <= target)
        for name, target in PERPLEXITY_MAX.items()
    ]
    return all(passed)


@dataclass
class Arm:
    """One way to run a step over one pool, and its CPU seconds."""

    name: str
    pool: KVPool
    captured: Captured | None
    spent: list[float]


def steps(options: argparse.Namespace) -> None:
    """The table of step times."""
    if shutil.which(COMPILER):
        build(home(), SHAPES[options.model], 1)
    core = Core(EngineConfig(model=options.model, cache=home()), lambda _: None)
    model, size = core.runner.model, core.runner.pool.block_size
    arms = []
    compiled = core.barrier.workshop.find()
    for name in NAMES:
        graphs = capture(model, size, Format.of(name, model.dtype))
        for layout in KV_LAYOUTS:
            pool = pool_of(core, name, layout)
            ways: dict[str, Captured | None] = {"graph": graphs, "eager": None}
            if compiled is not None and pool.native:
                ways["compiled"] = compiled
            arms += [Arm(f"{way} {name} {layout}", pool, how, []) for way, how in ways.items()]
    plan = decodes(core, options.batch)
    for number in range(options.repeat):
        for arm in arms if number % 2 else reversed(arms):
            core.runner.pool, core.runner.captured = arm.pool, arm.captured
            began = time.thread_time()
            core.runner.forward(plan)
            arm.spent.append(time.thread_time() - began)
    (base,) = (arm for arm in arms if arm.name == "graph float32 separate")
    ms = 1000 * np.median(base.spent)
    say(f"{options.model}, {options.batch} sequences, one thread; {base.name}: {ms:.3f} ms")
    for arm in arms:
        ratios = np.array(arm.spent[5:]) / np.array(base.spent[5:])
        told(f"CPU of a step, {arm.name} ÷ {base.name}", ratios.tolist())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=2048, help="of text, at most")
    parser.add_argument("--model", choices=sorted(SHAPES), default="1.3m", help="of the steps")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--repeat", type=int, default=200, help="of each step")
    options = parser.parse_args()
    steps(options)
    passed = [perplexity(options.tokens), saved()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
