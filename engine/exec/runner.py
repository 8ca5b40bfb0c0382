"""One forward over a mixed step: decodes first, then prompt chunks, in one batch of tokens.

Batch invariance. A row of a matrix product does not depend on how many rows there are, as long
as there are ROWS_MIN of them (fewer take another BLAS kernel), so short steps are padded. What is
left is rounding in attention, far below LOGIT_TOLERANCE. A greedy choice that such rounding could
flip (a rival within twice the tolerance) is decided by the dense reference over the sequence
alone: it depends on the tokens only, hence on no batch and on no chunking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.exec.capture import Graphs
from engine.exec.decode import DecodeGroup, choose, decode_attention
from engine.exec.rows import Rows
from engine.kv.pool import KVPool
from engine.models.llama import Llama
from engine.sched.scheduler import Chunk, Plan

ROWS_MIN = 4
GROUP_TOKENS_MAX = 6144  # of padded context: what one gather may take to stay in the L2 cache
SPLIT_BLOCKS_MIN = 24  # padding that must be saved for another attention group to pay off


@dataclass
class PrefillChunk:
    """Tokens `begin`:`end` of the step; `blocks` and `mask` only where context precedes them."""

    begin: int
    end: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


class Runner:
    """Holds the model, its KV pool and what was captured; of the step thread only.

    `graphs` None: every step runs op by op. Steps are counted by how they ran; those that could
    not be replayed although there are graphs also by why.
    """

    def __init__(self, model: Llama, pool: KVPool, rows: Rows) -> None:
        self.model = model
        self.pool = pool
        self.rows = rows
        self.graphs: Graphs | None = None
        self.steps = {"graph": 0, "eager": 0}
        self.misses = {"prompt": 0, "shape": 0}
        self.near_ties = 0

    @torch.inference_mode()
    def forward(self, plan: Plan) -> tuple[np.ndarray, torch.Tensor]:
        """Next tokens (int64) and logits (float32), one row per request of `plan.sampled`."""
        rows = self.rows
        step = Step(self, plan)
        wanted = len(step.sampled)
        chosen = self._replay(step) or self._run(step)
        if wanted == 0:
            return np.empty(0, np.int64), chosen[0][:0]
        logits, best, close = (part[:wanted] for part in chosen)
        tokens, rivals = best.numpy(), close.numpy()
        for i, request in enumerate(plan.sampled) if step.sampling else ():
            if request.temperature > 0:
                tokens[i] = draw(logits[i], request.temperature, request.generator)
                rivals[i] = 1
        for i in np.flatnonzero(rivals > 1).tolist():
            row = plan.sampled[i].row
            sequence = torch.from_numpy(rows.tokens[row, : rows.known[row]])
            tokens[i] = int(self.model.dense(sequence)[-1].argmax())
            self.near_ties += 1
        return tokens, logits

    def _replay(self, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        if self.graphs is None:
            return None
        if step.prefills:
            self.misses["prompt"] += 1
            return None
        if (graph := self.graphs.get(len(step.groups))) is None:
            self.misses["shape"] += 1
            return None
        self.steps["graph"] += 1
        return graph(step.tokens, step.positions, step.slots, step.groups, self.pool)

    def _run(self, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.steps["eager"] += 1
        hidden = self.model.hidden(step.tokens, step.positions, step.attention)
        sampled = torch.from_numpy(padded(step.sampled))
        return choose(self.model.logits(hidden.index_select(0, sampled)))


class Step:
    """The index arrays of one step, and its attention."""

    def __init__(self, runner: Runner, plan: Plan) -> None:
        self.runner = runner
        rows, pool = runner.rows, runner.pool
        counts = np.array([chunk.count for chunk in plan.chunks], np.int64)
        owner = plan.rows
        positions = rows.computed[plan.rows]
        if plan.chunks:
            owner = np.concatenate([owner, np.repeat([c.row for c in plan.chunks], counts)])
            parts = [np.arange(c.start, c.start + c.count) for c in plan.chunks]
            positions = np.concatenate([positions, *parts])
        tokens = rows.tokens[owner, positions]
        block, offset = np.divmod(positions, pool.block_size)
        slots = rows.tables[owner, block] * pool.block_size + offset
        self.tokens = torch.from_numpy(padded(tokens))
        self.positions = torch.from_numpy(padded(positions))
        self.head_blocks = (np.arange(pool.kv_heads) * pool.blocks)[None, :, None]
        # Padding writes to slot 0, which belongs to the scratch block.
        heads = padded(slots)[:, None] + np.arange(pool.kv_heads) * pool.slots_per_head
        self.slots = torch.from_numpy(heads.reshape(-1))
        decodes = len(plan.rows)
        self.groups = self._groups(plan.rows) if decodes else []
        ends = decodes + np.cumsum(counts)
        self.prefills = [
            self._prefill(chunk, int(end)) for chunk, end in zip(plan.chunks, ends, strict=True)
        ]
        last = [int(e) - 1 for c, e in zip(plan.chunks, ends, strict=True) if c.last]
        self.sampled = np.concatenate([np.arange(decodes), np.array(last, np.int64)])
        self.sampling = any(r.temperature > 0 for r in plan.decodes) or any(
            c.request.temperature > 0 for c in plan.chunks
        )

    def attention(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Stores this step's keys and values, then attends: decodes by group, chunks one by one."""
        shape, pool = self.runner.model.shape, self.runner.pool
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        key = qkv[:, heads : heads + kv_heads]
        value = qkv[:, heads + kv_heads :]
        pool.store(layer, self.slots, key.reshape(-1, dim), value.reshape(-1, dim))
        out = decode_attention(shape, pool, layer, qkv, self.groups)
        for chunk in self.prefills:
            span = slice(chunk.begin, chunk.end)
            q = qkv[span, :heads].transpose(0, 1)[None]
            if chunk.blocks is None:
                k, v = key[span].transpose(0, 1)[None], value[span].transpose(0, 1)[None]
            else:
                keys, values = pool.gather(layer, chunk.blocks)
                k, v = (t.view(1, kv_heads, -1, dim) for t in (keys, values))
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

    def _groups(self, rows: np.ndarray) -> list[DecodeGroup]:
        """Splits the decodes (longest first) so that neither padding nor a gather grows large."""
        runner = self.runner
        size = runner.pool.block_size
        context = runner.rows.computed[rows] + 1
        blocks = -(-context // size)
        groups = []
        for begin, end in splits(blocks, GROUP_TOKENS_MAX // size):
            width = int(blocks[begin])
            tables = runner.rows.tables[rows[begin:end], None, :width] + self.head_blocks
            mask = np.zeros((end - begin, 1, width * size), np.float32)
            beyond = np.arange(width * size) >= context[begin:end, None]
            mask[:, 0][beyond] = -np.inf
            groups.append(DecodeGroup(torch.from_numpy(tables.reshape(-1)), torch.from_numpy(mask)))
        return groups

    def _prefill(self, chunk: Chunk, end: int) -> PrefillChunk:
        begin = end - chunk.count
        if chunk.start == 0:
            return PrefillChunk(begin, end, None, None)
        runner = self.runner
        size = runner.pool.block_size
        width = -(-(chunk.start + chunk.count) // size)
        tables = runner.rows.tables[chunk.row, None, None, :width] + self.head_blocks
        position = chunk.start + np.arange(chunk.count)
        seen = np.arange(width * size) <= position[:, None]
        return PrefillChunk(
            begin, end, torch.from_numpy(tables.reshape(-1)), torch.from_numpy(seen)
        )


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


def draw(logits: torch.Tensor, temperature: float, generator: np.random.Generator | None) -> int:
    """One token by inverse transform sampling; the request's own generator, one draw a token."""
    assert generator is not None
    weights = torch.softmax(logits.double() / temperature, dim=0).cumsum(0).numpy()
    return min(int(np.searchsorted(weights, generator.random() * weights[-1])), len(weights) - 1)
