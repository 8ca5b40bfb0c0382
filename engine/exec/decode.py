"""What a decode step computes, in tensors only, so that it runs op by op and captured alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.kv.pool import KVPool
from engine.models.llama import Shape

LOGIT_TOLERANCE = 1e-5

Chosen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DecodeGroup(NamedTuple):
    """Consecutive decodes of a step, padded to one context length (a multiple of blocks)."""

    blocks: torch.Tensor  # (sequences · kv_heads · blocks,) rows of the pool's block view
    mask: torch.Tensor  # (sequences, 1, context): 0 where known, -inf beyond


class Context(NamedTuple):
    """The blocks that all sequences of a decode step attend to, one after another, unpadded."""

    blocks: torch.Tensor  # (blocks,) their numbers in the pool, in the order of the sequences
    owner: torch.Tensor  # (blocks,) the sequence each belongs to
    seen: torch.Tensor  # (blocks,) how many tokens of it are known
    at: torch.Tensor  # (sequences, most blocks of one): where in `blocks`; -1 beyond its own


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


def block_attention(
    shape: Shape, pool: KVPool, layer: int, qkv: torch.Tensor, context: Context
) -> torch.Tensor:
    """The same for a step of decodes only, block by block, so that nothing is padded.

    A softmax within each block, then one over a sequence's blocks, as in flash decoding (Dao et
    al., arXiv:2205.14135). Slow op by op; a compiler fuses the gathers into the sums, so that each
    key and value is read once from where it stands.
    """
    kv_heads, group, dim = shape.kv_heads, shape.group, shape.head_dim
    blocks, owner, seen, at = context
    query = qkv[:, : shape.heads].reshape(-1, kv_heads, group, 1, dim).index_select(0, owner)
    keys, values = (t.transpose(0, 1).unsqueeze(2) for t in pool.blocks_of(layer, blocks))
    scores = (query * keys).sum(-1)  # (blocks, kv_heads, group, block_size)
    known = torch.arange(pool.block_size) < seen[:, None]
    scores = scores.masked_fill(~known[:, None, None], -torch.inf)
    top = scores.amax(-1)
    weights = torch.exp(scores - top.unsqueeze(-1))
    mixed = (weights.unsqueeze(-1) * values).sum(-2)  # (blocks, kv_heads, group, head_dim)
    own, at = at >= 0, at.clamp(min=0)
    tops = top[at].masked_fill(~own[..., None, None], -torch.inf)
    share = torch.exp(tops - tops.amax(1, keepdim=True))  # (sequences, most, kv_heads, group)
    total = (share * weights.sum(-1)[at]).sum(1)
    out = (share.unsqueeze(-1) * mixed[at]).sum(1) / total.unsqueeze(-1)
    return out.reshape(-1, shape.heads * dim)


def choose(logits: torch.Tensor) -> Chosen:
    """The logits, the greedy token, and how many tokens rounding could not tell from it."""
    best = logits.max(dim=1)
    rivals = (logits >= (best.values - 2 * LOGIT_TOLERANCE).unsqueeze(1)).sum(dim=1)
    return logits, best.indices, rivals
