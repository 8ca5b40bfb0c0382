"""What a decode step computes, in tensors only, so that it runs op by op and captured alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.kv.pool import KVPool
from engine.models.llama import Shape

Chosen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DecodeGroup(NamedTuple):
    """Consecutive decodes of a step, padded to one context length (a multiple of blocks)."""

    blocks: torch.Tensor  # (sequences, kv_heads, blocks) as KVPool.gather takes them
    mask: torch.Tensor  # (sequences, 1, context): 0 where known, -inf beyond


class Context(NamedTuple):
    """The blocks that the tokens of a step attend to, one after another, unpadded."""

    block: torch.Tensor  # (tokens,) the last block of each, where it goes itself
    offset: torch.Tensor  # (tokens,) and the place in it
    blocks: torch.Tensor  # (blocks,) all they attend to, by token and position
    owner: torch.Tensor  # (blocks,) the token that each is for
    seen: torch.Tensor  # (blocks,) how many keys of it that token may see
    at: torch.Tensor  # (tokens, most blocks of one): where in `blocks`; -1 beyond its own


def decode_attention(
    shape: Shape, pool: KVPool, layer: int, qkv: torch.Tensor, groups: Sequence[DecodeGroup]
) -> torch.Tensor:
    """(tokens, heads · head_dim): the decodes, which come first; zeros for the other tokens."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    query = qkv[:, :heads].reshape(-1, shape.group, dim)
    parts, at = [], 0
    for blocks, mask in groups:
        sequences, context = mask.size(0), mask.size(2)
        keys, values = (each.flatten(0, 1) for each in pool.gather(layer, blocks))
        q = query[at * kv_heads : (at + sequences) * kv_heads]
        scores = torch.bmm(q, keys.transpose(1, 2))
        scores.view(-1, heads, context).add_(mask)
        weights = torch.softmax(scores, dim=-1)
        parts.append(torch.bmm(weights, values).view(-1, heads * dim))
        at = at + sequences
    rest = qkv.new_zeros(qkv.size(0) - at, heads * dim)
    return torch.cat([*parts, rest])


def block_attention(
    shape: Shape, keys: torch.Tensor, values: torch.Tensor, qkv: torch.Tensor, context: Context
) -> torch.Tensor:
    """Stores all keys and values, then attends, every token for itself: (tokens, heads · head_dim).

    keys, values: (kv_heads, blocks, block_size, head_dim). A softmax within each block, then one
    over a token's blocks, as in flash decoding (Dao et al., arXiv:2205.14135). Slow op by op; a
    compiler fuses the gathers into the sums, and reads each block where it stands.
    """
    kv_heads, group, dim = shape.kv_heads, shape.group, shape.head_dim
    block, offset, blocks, owner, seen, at = context
    key, value = qkv[:, shape.heads :].chunk(2, dim=1)
    keys[:, block, offset] = key.transpose(0, 1)
    values[:, block, offset] = value.transpose(0, 1)
    query = qkv[:, : shape.heads].reshape(-1, kv_heads, group, 1, dim).index_select(0, owner)
    known_keys, known_values = (
        each.index_select(1, blocks).transpose(0, 1).unsqueeze(2) for each in (keys, values)
    )
    scores = (query * known_keys).sum(-1)  # (blocks, kv_heads, group, block_size)
    known = torch.arange(keys.size(2)) < seen[:, None]
    scores = scores.masked_fill(~known[:, None, None], -torch.inf)
    top = scores.amax(-1)
    weights = torch.exp(scores - top.unsqueeze(-1))
    mixed = (weights.unsqueeze(-1) * known_values).sum(-2)  # (blocks, kv_heads, group, head_dim)
    own, at = at >= 0, at.clamp(min=0)
    tops = top[at].masked_fill(~own[..., None, None], -torch.inf)
    share = torch.exp(tops - tops.amax(1, keepdim=True))  # (tokens, most, kv_heads, group)
    total = (share * weights.sum(-1)[at]).sum(1)
    out = (share.unsqueeze(-1) * mixed[at]).sum(1) / total.unsqueeze(-1)
    return out.reshape(-1, shape.heads * dim)


def choose(logits: torch.Tensor, tolerance: torch.Tensor) -> Chosen:
    """The logits, the greedy token, and how many tokens rounding could not tell from it.

    `tolerance`: Llama's.
    """
    best = logits.max(dim=1)
    rivals = (logits >= (best.values - 2 * tolerance).unsqueeze(1)).sum(dim=1)
    return logits, best.indices, rivals
