"""The KV tensors: one flat pair per layer, never one stacked tensor.

A stacked tensor mutated through views makes graph capture copy the whole pool at every layer.
Rows are head-major, row = (head · blocks + block) · block_size + offset, so that gathering whole
blocks by index gives a dense (sequence, head, token) context without a transposing copy.
"""

from __future__ import annotations

import torch


class KVPool:
    """`keys[layer]`, `values[layer]`: float32 (kv_heads · blocks · block_size, head_dim)."""

    def __init__(
        self, *, layers: int, kv_heads: int, head_dim: int, blocks: int, block_size: int
    ) -> None:
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.blocks = blocks + 1  # and the scratch block
        self.block_size = block_size
        rows = kv_heads * self.blocks * block_size
        self.keys = [torch.zeros(rows, head_dim) for _ in range(layers)]
        self.values = [torch.zeros(rows, head_dim) for _ in range(layers)]

    @property
    def slots_per_head(self) -> int:
        return self.blocks * self.block_size

    def store(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes (tokens · kv_heads, head_dim) keys and values at `rows`."""
        self.keys[layer].index_copy_(0, rows, key)
        self.values[layer].index_copy_(0, rows, value)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole blocks by index: (blocks, block_size · head_dim) of keys and of values."""
        width = self.block_size * self.head_dim
        return (
            self.keys[layer].view(-1, width).index_select(0, blocks),
            self.values[layer].view(-1, width).index_select(0, blocks),
        )
