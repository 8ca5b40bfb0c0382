"""What a decode step computes, in tensors only, so that it runs op by op and captured alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.kv.pool import KVPool
from engine.models.llama import Shape

LOGIT_TOLERANCE = 1e-5


class DecodeGroup(NamedTuple):
    """Consecutive decodes of a step, padded to one context length (a multiple of blocks)."""

    blocks: torch.Tensor  # (sequences · kv_heads · blocks,) rows of the pool's block view
    mask: torch.Tensor  # (sequences, 1, context): 0 where known, -inf beyond


def decode_attention(
    shape: Shape, pool: KVPool, layer: int, qkv: torch.Tensor, groups: Sequence[DecodeGroup]
) -> torch.Tensor:
    """(tokens, heads · head_dim): the decodes, which come first; zeros for the other tokens."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    query = qkv[:, :heads].reshape(-1, shape.group, dim)
    parts, at = [], 0
    for blocks, mask in groups:
        sequences, context = mask.size(0), mask.size(2)
        keys, values = pool.gather(layer, blocks)
        q = query[at * kv_heads : (at + sequences) * kv_heads]
        scores = torch.bmm(q, keys.view(-1, context, dim).transpose(1, 2))
        scores.view(-1, heads, context).add_(mask)
        weights = torch.softmax(scores, dim=-1)
        parts.append(torch.bmm(weights, values.view(-1, context, dim)).view(-1, heads * dim))
        at = at + sequences
    rest = qkv.new_zeros(qkv.size(0) - at, heads * dim)
    return torch.cat([*parts, rest])


def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits, the greedy token, and how many tokens rounding could not tell from it."""
    best = logits.max(dim=1)
    rivals = (logits >= (best.values - 2 * LOGIT_TOLERANCE).unsqueeze(1)).sum(dim=1)
    return logits, best.indices, rivals
