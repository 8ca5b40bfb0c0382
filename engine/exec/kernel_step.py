"""A step through the kernels: decodes, prompts, or both, by an attention backend of kernels/."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.exec.decode import Chosen, choose
from engine.exec.step import Step, padded
from engine.kernels.backends import backend
from engine.kernels.interface import Batch, PagedKV
from engine.kernels.rms_norm import rms_norm
from engine.kernels.rope import rope
from engine.kernels.sampler import sample
from engine.kernels.swiglu import swiglu
from engine.models.llama import TORCH, Llama, Ops


class KernelStep:
    """What `Runner.eager` may be: matrix products are torch's, all else is the backend's.

    name: "torch" or "triton". Raises ValueError for another, and for a pool with values as codes,
    ImportError without Triton.
    """

    def __init__(self, name: str) -> None:
        self.attention = backend(name)
        self.ops, self.choose = (TRITON, choose_triton) if name == "triton" else (TORCH, choose)

    def __call__(self, step: Step) -> Chosen:
        layers = [PagedKV(*pair) for pair in zip(step.pool.keys, step.pool.values, strict=True)]
        hidden = self.hidden(step.model, layers, batch_of(step), step.tokens, step.positions)
        sampled = torch.from_numpy(padded(step.sampled))
        logits = step.model.logits(hidden.index_select(0, sampled), self.ops)
        return self.choose(logits, step.model.tolerance)

    def hidden(
        self,
        model: Llama,
        layers: Sequence[PagedKV],
        batch: Batch,
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """(tokens,) int64 and their positions → (tokens, hidden), before the final norm.

        Stores the batch's keys and values in `layers`; tokens beyond the batch's are padding.
        """
        shape, new = model.shape, batch.slots.size(0)
        heads = [shape.heads, shape.kv_heads, shape.kv_heads]
        answer = self.attention.prefill if batch.queries_max > 1 else self.attention.decode

        def attention(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            query, key, value = torch.split(qkv, heads, dim=1)
            self.attention.store(layers[layer], batch, key[:new], value[:new])
            # The softmax scale is in the query's weights.
            return answer(query, layers[layer], batch, 1.0).flatten(1)

        return model.hidden(tokens, positions, attention, self.ops)


def batch_of(step: Step) -> Batch:
    """The step's sequences: decodes first, each of one token, then the chunks."""
    plan, rows, size = step.plan, step.rows, step.pool.block_size
    owner = np.concatenate([plan.rows, np.array([chunk.row for chunk in plan.chunks], np.int64)])
    queries = [1] * len(plan.rows) + [chunk.count for chunk in plan.chunks]
    contexts = (rows.computed[plan.rows] + 1).tolist()
    contexts += [chunk.start + chunk.count for chunk in plan.chunks]
    width = -(-max(contexts) // size)
    return Batch.of(queries, contexts, rows.tables[owner, :width], size)


def choose_triton(logits: torch.Tensor, tolerance: torch.Tensor) -> Chosen:
    """`choose` by the sampler kernel."""
    cold = logits.new_zeros(logits.size(0))
    return logits, *sample(logits, cold, cold, 2 * float(tolerance))


def _turned(qkv: torch.Tensor, heads: int, rotation: torch.Tensor) -> torch.Tensor:
    if rotation.is_complex():
        rotation = torch.view_as_real(rotation)
    return rope(qkv, heads, rotation.squeeze(1))


TRITON = Ops(lambda x, _, weight, eps: rms_norm(x, weight, eps), _turned, swiglu)
