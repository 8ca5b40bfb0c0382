"""One forward over a mixed step: decodes first, then prompt chunks, in one batch of tokens.

Batch invariance. A row of a matrix product does not depend on how many rows there are, as long
as there are ROWS_MIN of them (fewer take another BLAS kernel), so short steps are padded. What is
left is rounding in attention, far below the model's tolerance. A greedy choice that such rounding
could flip (a rival within twice the tolerance) is decided by the dense reference over the sequence
alone: it depends on the tokens only, hence on no batch and on no chunking. That holds up all others
meanwhile, so it is not done where it takes more than SETTLED_FLOP_MAX, nor in bfloat16, where such
rivals are many, nor over KV that is kept rounded, where a number may fall to either side of a step:
there a batch may flip a choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from engine.exec.capture import Captured
from engine.exec.decode import Chosen, choose
from engine.exec.rows import Rows
from engine.exec.step import Step, padded
from engine.kv.pool import KVPool
from engine.models.llama import Llama
from engine.sched.request import Request
from engine.sched.scheduler import Plan

SETTLED_FLOP_MAX = 50_000_000_000  # 3,000 tokens of the 8m, 185 of a model of 135 million weights


class Runner:
    """Holds the model, its KV pool and what was captured; of the step thread only.

    `captured` None: every step runs op by op. Steps are counted by how they ran; those that ran op
    by op although something was captured also by why. `eager` runs one op by op: with torch, or
    through the kernels (kernel_step.py).
    """

    def __init__(self, model: Llama, pool: KVPool, rows: Rows) -> None:
        self.model = model
        self.pool = pool
        self.rows = rows
        self.captured: Captured | None = None
        self.eager: Callable[[Step], Chosen] = eager
        self.steps = {"compiled": 0, "graph": 0, "eager": 0}
        self.misses = {"prompt": 0, "shape": 0}
        self.near_ties = 0
        # Of the last step: when its arrays stood and when its logits did (monotonic), how it ran.
        self.prepared = self.forwarded = 0.0
        self.mode = "eager"
        exact = model.dtype == torch.float32
        self.settled_tokens_max = SETTLED_FLOP_MAX // (2 * model.parameters) if exact else 0

    @torch.inference_mode()
    def forward(self, plan: Plan) -> tuple[np.ndarray, torch.Tensor]:
        """Next tokens (int64) and logits (float32), one row per request of `plan.sampled`."""
        rows = self.rows
        step = Step(self.model, self.pool, rows, plan)
        wanted = len(step.sampled)
        self.prepared = time.monotonic()
        chosen = self._replay(step) or self._run(step)
        self.forwarded = time.monotonic()
        if wanted == 0:
            return np.empty(0, np.int64), chosen[0][:0]
        logits, best, close = (part[:wanted] for part in chosen)
        tokens, rivals = best.numpy(), close.numpy()
        for i, request in enumerate(plan.sampled) if not step.plain else ():
            if not request.plain:
                tokens[i], rivals[i] = apart(request, logits[i], self.model.tolerance)
        for i in np.flatnonzero(rivals > 1).tolist():
            request = plan.sampled[i]
            known = rows.known[request.row]
            if not self.pool.exact or known > self.settled_tokens_max:
                continue
            sequence = torch.from_numpy(rows.tokens[request.row, :known])
            tokens[i], _ = apart(request, self.model.dense(sequence)[-1], self.model.tolerance)
            self.near_ties += 1
        return tokens, logits

    def _replay(self, step: Step) -> Chosen | None:
        if self.captured is None:
            return None
        chosen = self.captured.run(step)
        if chosen is None:
            self.misses["prompt" if step.prefills else "shape"] += 1
            return None
        self.mode = self.captured.mode
        self.steps[self.mode] += 1
        return chosen

    def _run(self, step: Step) -> Chosen:
        self.mode = "eager"
        self.steps[self.mode] += 1
        return self.eager(step)


def eager(step: Step) -> Chosen:
    """A step op by op in torch."""
    hidden = step.model.hidden(step.tokens, step.positions, step.attention)
    sampled = torch.from_numpy(padded(step.sampled))
    return choose(step.model.logits(hidden.index_select(0, sampled)), step.model.tolerance)


def apart(request: Request, logits: torch.Tensor, tolerance: torch.Tensor) -> tuple[int, int]:
    """The next token of one request, and how many rounding could not tell from it.

    logits: (vocabulary,). Of `request.allowed` only, where that is set: from its first token, which
    a prompt's last chunk gives, on.
    """
    if request.allowed is not None:
        logits = logits[torch.from_numpy(request.allowed)]
    if request.temperature > 0:
        token, rivals = draw(logits, request.temperature, request.generator), 1
    else:
        token = int(logits.argmax())
        rivals = int((logits >= logits[token] - 2 * tolerance).sum())
    return token if request.allowed is None else int(request.allowed[token]), rivals


def draw(logits: torch.Tensor, temperature: float, generator: np.random.Generator | None) -> int:
    """One token by inverse transform sampling; the request's own generator, one draw a token."""
    assert generator is not None
    weights = torch.softmax(logits.double() / temperature, dim=0).cumsum(0).numpy()
    return min(int(np.searchsorted(weights, generator.random() * weights[-1])), len(weights) - 1)
