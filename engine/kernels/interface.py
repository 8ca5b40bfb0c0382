"""What attention is asked: one layer's paged cache, the sequences of a step, and a backend.

The cache is the engine's pool (kv/pool.py) or any other with its dimensions in this
order; strides are free, so keys and values may also stand block by block in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.kernels.lang import FLOATS, check

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)  # tokens
HEAD_DIM_MAX = 256


@dataclass(frozen=True)
class PagedKV:
    """One layer's cache. Raises ValueError for shapes and dtypes that do not fit together.

    keys: (kv_heads, blocks, block_size, head_dim), a float dtype; values: the same shape, a float
    dtype or int8. With int8, `scales` (kv_heads, blocks, block_size) float32 holds what each
    token's codes are multiplied by.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check("keys", self.keys, ("kv_heads", "blocks", "block_size", "head_dim"))
        shape = tuple(self.keys.shape)
        if self.scales is None:
            check("values", self.values, shape)
        else:
            check("values", self.values, shape, (torch.int8,))
            check("scales", self.scales, shape[:3], (torch.float32,))
        if self.block_size not in BLOCK_SIZES:
            allowed = ", ".join(map(str, BLOCK_SIZES))
            raise ValueError(f"block_size: got {self.block_size}, allowed: {allowed} tokens")
        if not 1 <= self.head_dim <= HEAD_DIM_MAX:
            raise ValueError(f"head_dim: got {self.head_dim}, allowed: 1 to {HEAD_DIM_MAX}")

    @property
    def kv_heads(self) -> int:
        return self.keys.size(0)

    @property
    def block_size(self) -> int:
        return self.keys.size(2)

    @property
    def head_dim(self) -> int:
        return self.keys.size(3)


@dataclass(frozen=True)
class Batch:
    """The sequences of a step: their new tokens stand one after another, as `starts` says.

    starts (sequences + 1,) int32: where each one's tokens begin; contexts (sequences,) int32: the
    tokens it has with the new ones, which are its last; tables (sequences, width) int32: its
    blocks; slots (tokens,) int64: block · block_size + offset where a new token's KV goes, -1 for
    nowhere. The two maxima are bounds on the host: they size launches (and captured graphs).
    """

    starts: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor
    queries_max: int
    context_max: int

    @classmethod
    def of(
        cls,
        queries: Sequence[int],
        contexts: Sequence[int],
        tables: np.ndarray,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """From the new tokens and all tokens of each sequence, and its row of `tables`.

        Raises ValueError naming the first sequence that cannot be so.
        """
        tables = np.asarray(tables)
        if tables.ndim != 2 or not len(queries) == len(contexts) == len(tables):
            raise ValueError(
                f"tables: got shape {tables.shape} for {len(queries)} queries and {len(contexts)} "
                "contexts, allowed: (sequences, blocks), one row for each"
            )
        width = tables.shape[1] * block_size
        for index, (some, every) in enumerate(zip(queries, contexts, strict=True)):
            if not 0 <= some <= every <= width:
                raise ValueError(
                    f"sequence {index}: got {some} new of {every} tokens in a table for {width}, "
                    "allowed: 0 <= new <= all <= the table's"
                )
        new, known = np.array(queries, np.int64), np.array(contexts, np.int64)
        owner = np.repeat(np.arange(len(new)), new)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(new)])
        position = np.arange(starts[-1]) + (known - new - starts[:-1])[owner]
        block, offset = np.divmod(position, block_size)
        slots = tables[owner, block].astype(np.int64) * block_size + offset
        arrays = {"starts": starts, "contexts": known, "tables": tables}
        narrow = {name: each.astype(np.int32) for name, each in arrays.items()}
        tensors = {
            name: torch.from_numpy(each).to(device)
            for name, each in {**narrow, "slots": slots}.items()
        }
        return cls(
            **tensors,
            queries_max=max(queries, default=0),
            context_max=max(contexts, default=0),
        )

    @property
    def sequences(self) -> int:
        return self.contexts.size(0)


class AttentionBackend(Protocol):
    """Attention over the paged cache. All three raise ValueError for what does not fit together.

    query, key, value: (tokens, heads or kv_heads, head_dim), a float dtype; views into a fused
    tensor will do. Consecutive heads // kv_heads query heads share a KV head (GQA, Ainslie et al.
    2023, arXiv:2305.13245). Answers are (tokens, heads, head_dim) in the query's dtype; zeros for
    tokens of no sequence and for sequences that know nothing.
    """

    @property
    def name(self) -> str: ...

    def store(self, kv: PagedKV, batch: Batch, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes the new tokens' keys and values to their slots; int8 values with their scales."""

    def decode(self, query: torch.Tensor, kv: PagedKV, batch: Batch, scale: float) -> torch.Tensor:
        """A step of at most one new token a sequence, each of which sees all of its context."""

    def prefill(self, query: torch.Tensor, kv: PagedKV, batch: Batch, scale: float) -> torch.Tensor:
        """A mixed step: a token sees those of its own sequence up to itself, and no others."""


def attention_shapes(query: torch.Tensor, kv: PagedKV, batch: Batch) -> tuple[int, int]:
    """(tokens, heads) of a question; raises ValueError where it does not fit the cache."""
    check("query", query, ("tokens", "heads", kv.head_dim), FLOATS)
    tokens, heads = query.shape[:2]
    if heads == 0 or heads % kv.kv_heads:
        raise ValueError(f"query: got {heads} heads, allowed: a multiple of {kv.kv_heads} KV heads")
    check("starts", batch.starts, (batch.sequences + 1,), (torch.int32,))
    check("contexts", batch.contexts, (batch.sequences,), (torch.int32,))
    check("tables", batch.tables, (batch.sequences, "width"), (torch.int32,))
    if batch.context_max > batch.tables.size(1) * kv.block_size:
        raise ValueError(
            f"context_max: got {batch.context_max}, allowed: up to the table's "
            f"{batch.tables.size(1) * kv.block_size} tokens"
        )
    return tokens, heads
