"""One step as arrays of indices: which tokens, where their KV goes, and what each may see.

What only one way of running needs is built when it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

from engine.exec.decode import Context, DecodeGroup, decode_attention
from engine.exec.rows import Rows
from engine.kv.pool import KVPool
from engine.models.llama import Llama
from engine.sched.scheduler import Chunk, Plan

ROWS_MIN = 4
GROUP_TOKENS_MAX = 6144  # of padded context: what one gather may take to stay in the L2 cache
SPLIT_BLOCKS_MIN = 24  # padding that must be saved for another attention group to pay off


@dataclass
class PrefillChunk:
    """Tokens `begin`:`end` of the step; `blocks` and `mask` where they read the pool.

    Without, they attend to themselves only, as a prompt's first chunk does. blocks: (1, kv_heads,
    blocks), as KVPool.gather takes them; mask: (tokens, context) bool, True where seen.
    """

    begin: int
    end: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


class Step:
    """The index arrays of one step over `rows` and `pool`, and its attention op by op."""

    def __init__(self, model: Llama, pool: KVPool, rows: Rows, plan: Plan) -> None:
        self.model, self.pool, self.rows, self.plan = model, pool, rows, plan
        counts = np.array([chunk.count for chunk in plan.chunks], np.int64)
        owner = plan.rows
        positions = rows.computed[plan.rows]
        if plan.chunks:
            owner = np.concatenate([owner, np.repeat([c.row for c in plan.chunks], counts)])
            parts = [np.arange(c.start, c.start + c.count) for c in plan.chunks]
            positions = np.concatenate([positions, *parts])
        self.owner, self.known = owner, positions + 1
        tokens = rows.tokens[owner, positions]
        block, offset = np.divmod(positions, pool.block_size)
        self.tokens = torch.from_numpy(padded(tokens))
        self.positions = torch.from_numpy(padded(positions))
        # Where each token's KV goes; that of padding to block 0, which is scratch.
        self.block = torch.from_numpy(padded(rows.tables[owner, block]))
        self.offset = torch.from_numpy(padded(offset))
        decodes = len(plan.rows)
        ends = decodes + np.cumsum(counts)
        self.prefills = [
            self._prefill(chunk, int(end)) for chunk, end in zip(plan.chunks, ends, strict=True)
        ]
        last = [int(e) - 1 for c, e in zip(plan.chunks, ends, strict=True) if c.last]
        self.sampled = np.concatenate([np.arange(decodes), np.array(last, np.int64)])
        self.plain = all(r.plain for r in plan.decodes) and all(
            c.request.plain for c in plan.chunks
        )

    @property
    def prompt_reads(self) -> int:
        """Keys that the tokens of prompts look at, taken together."""
        return int(self.known[len(self.plan.rows) :].sum())

    @cached_property
    def groups(self) -> list[DecodeGroup]:
        """The decodes (longest first), split so that neither padding nor a gather grows large."""
        rows = self.plan.rows
        if not len(rows):
            return []
        size = self.pool.block_size
        context = self.rows.computed[rows] + 1
        blocks = -(-context // size)
        groups = []
        for begin, end in splits(blocks, GROUP_TOKENS_MAX // size):
            width = int(blocks[begin])
            tables = self.rows.tables[rows[begin:end], None, :width] + self.head_blocks
            mask = np.zeros((end - begin, 1, width * size), np.float32)
            beyond = np.arange(width * size) >= context[begin:end, None]
            mask[:, 0][beyond] = -np.inf
            groups.append(DecodeGroup(torch.from_numpy(tables), torch.from_numpy(mask)))
        return groups

    @cached_property
    def context(self) -> Context:
        """The blocks that each token attends to, one after another, without padding."""
        rows, size = self.owner, self.pool.block_size
        known = np.concatenate([self.known, np.ones(len(self.tokens) - len(rows), np.int64)])
        counts = -(-known // size)
        width = int(counts.max())
        tables = np.zeros((len(known), width), np.int64)  # padding sees its own scratch token
        tables[: len(rows)] = self.rows.tables[rows, :width]
        own = np.arange(width) < counts[:, None]
        ends = np.cumsum(counts)
        at = np.full(own.shape, -1)
        at[own] = np.arange(ends[-1])
        blocks, last = tables[own], known - (counts - 1) * size
        seen = np.full(ends[-1], size)
        seen[ends - 1] = last
        owner = np.repeat(np.arange(len(known)), counts)
        arrays = (blocks[ends - 1], last - 1, blocks, owner, seen, at)
        return Context(*map(torch.from_numpy, arrays))

    def attention(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Stores this step's keys and values, then attends: decodes by group, chunks one by one."""
        shape, pool = self.model.shape, self.pool
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        key = qkv[:, heads : heads + kv_heads]
        value = qkv[:, heads + kv_heads :]
        pool.store(layer, self.block, self.offset, key, value)
        out = decode_attention(shape, pool, layer, qkv, self.groups)
        for chunk in self.prefills:
            span = slice(chunk.begin, chunk.end)
            q = qkv[span, :heads].transpose(0, 1)[None]
            if chunk.blocks is None:
                k, v = key[span].transpose(0, 1)[None], value[span].transpose(0, 1)[None]
            else:
                k, v = pool.gather(layer, chunk.blocks)
            o = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                scale=1.0,
                enable_gqa=True,
            )
            out[span].view(-1, heads, dim).copy_(o[0].transpose(0, 1))
        return out

    @property
    def head_blocks(self) -> np.ndarray:
        """What to add to a block's number for each head: (1, kv_heads, 1)."""
        pool = self.pool
        return (np.arange(pool.kv_heads) * pool.blocks)[None, :, None]

    def _prefill(self, chunk: Chunk, end: int) -> PrefillChunk:
        begin = end - chunk.count
        # What a pool rounds is read from it, so that chunks change the order of sums only.
        if chunk.start == 0 and self.pool.exact:
            return PrefillChunk(begin, end, None, None)
        size = self.pool.block_size
        width = -(-(chunk.start + chunk.count) // size)
        tables = self.rows.tables[chunk.row, None, None, :width] + self.head_blocks
        position = chunk.start + np.arange(chunk.count)
        seen = np.arange(width * size) <= position[:, None]
        return PrefillChunk(begin, end, torch.from_numpy(tables), torch.from_numpy(seen))


def splits(blocks: np.ndarray, blocks_max: int) -> list[tuple[int, int]]:
    """Cuts a descending array of block counts into runs, each padded to its first count.

    A run is cut where that saves the most padding, if it saves SPLIT_BLOCKS_MIN; and where its
    padded size passes `blocks_max`.
    """
    parts: list[tuple[int, int]] = []
    begin, total = 0, len(blocks)
    while begin < total:
        end = min(total, begin + max(1, blocks_max // int(blocks[begin])))
        saved = (blocks[begin] - blocks[begin:end]) * np.arange(end - begin, 0, -1)
        cut = int(saved.argmax())
        if saved[cut] >= SPLIT_BLOCKS_MIN:
            end = begin + cut
        parts.append((begin, end))
        begin = end
    return parts


def padded(values: np.ndarray) -> np.ndarray:
    """At least ROWS_MIN long, filled with zeros."""
    if len(values) >= ROWS_MIN:
        return values
    return np.concatenate([values, np.zeros(ROWS_MIN - len(values), values.dtype)])
