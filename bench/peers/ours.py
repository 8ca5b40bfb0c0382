"""Trimtab's engine as it serves: continuous batches, paged KV, steps captured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rounds import Answer, Prompts, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from engine.config import EngineConfig
from engine.core import Core
from engine.exec.build import home, library
from engine.models.loader import find
from engine.sched.request import Request

BLOCK_TOKENS = 16


def load(asked: dict[str, Any]) -> tuple[str, Answer]:
    shape, cache = find(asked["gguf"]).shape, home()
    blocks = asked["batch_max"] * -(-asked["length_max"] // BLOCK_TOKENS)
    config = EngineConfig(
        model=asked["gguf"],
        dtype=asked["dtype"],
        model_len_max=asked["length_max"],
        kv_pool_blocks=blocks,
        block_size=BLOCK_TOKENS,
        # Not to be compiled beside the rounds.
        cache=cache if library(cache, shape, 1).exists() else None,
    )
    core = Core(config, lambda outcome: None)
    running = core.runtime.running.config

    def answer(how: str, prompts: Prompts, tokens: int) -> Prompts:
        scheduler = core.scheduler
        made: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            scheduler.add(Request(str(i), np.array(prompt), tokens, 0.0, ignore_eos=True))
        while (plan := scheduler.plan(running, 1.0)) is not None:
            chosen, _ = core.runner.forward(plan)
            outcome = scheduler.commit(plan, chosen, 1.0, 2.0)
            for request, token in zip(outcome.requests, outcome.tokens, strict=True):
                made[request.id].append(token)
        return list(made.values())

    captured = core.runner.captured
    return f"{core.runner.model.dtype}, {captured.mode if captured else 'eager'}", answer


if __name__ == "__main__":
    serve(load)
