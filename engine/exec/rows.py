"""The running sequences as arrays, one row each, so that a step is built without token loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.kv.allocator import SCRATCH_BLOCK


@dataclass(frozen=True)
class Tables:
    """Which blocks each row owns: `tables` (rows, blocks) int64, `owned` (rows,) of them."""

    block_size: int
    tables: np.ndarray
    owned: np.ndarray

    @classmethod
    def empty(cls, *, rows: int, model_len_max: int, block_size: int) -> Tables:
        blocks = -(-model_len_max // block_size)
        tables = np.full((rows, blocks), SCRATCH_BLOCK, np.int64)
        return cls(block_size, tables, np.zeros(rows, np.int64))


class Rows:
    """Persistent per-sequence state of up to `rows` running sequences.

    tokens (rows, model_len_max) int64: prompt and what was generated; tables (rows, blocks) int64:
    block numbers, SCRATCH_BLOCK beyond `owned`; known: tokens in `tokens`; computed: tokens whose
    KV is in the pool; limit: `known` at which the request ends; begun: it has its first token;
    touched: when its last token came (monotonic seconds).
    """

    def __init__(self, *, rows: int, model_len_max: int, block_size: int) -> None:
        self.tokens = np.zeros((rows, model_len_max), np.int64)
        self.known = np.zeros(rows, np.int64)
        self.computed = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.ignore_eos = np.zeros(rows, bool)
        self.has_stop = np.zeros(rows, bool)
        self.begun = np.zeros(rows, bool)
        self.touched = np.zeros(rows, np.float64)
        self._free = list(range(rows - 1, -1, -1))
        self.use(Tables.empty(rows=rows, model_len_max=model_len_max, block_size=block_size))

    def use(self, layout: Tables) -> None:
        """From now on, sequences stand in these blocks."""
        self.layout = layout
        self.block_size, self.tables, self.owned = layout.block_size, layout.tables, layout.owned

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def open(
        self, tokens: np.ndarray, limit: int, *, ignore_eos: bool, has_stop: bool, begun: bool
    ) -> int:
        """A row for a sequence that starts with `tokens`, nothing of it computed yet."""
        row = self._free.pop()
        known = len(tokens)
        self.tokens[row, :known] = tokens
        self.known[row] = known
        self.limit[row] = limit
        self.ignore_eos[row] = ignore_eos
        self.has_stop[row] = has_stop
        self.begun[row] = begun
        assert self.owned[row] == 0
        assert self.computed[row] == 0
        return row

    def append_blocks(self, row: int, blocks: list[int]) -> None:
        owned = int(self.owned[row])
        self.tables[row, owned : owned + len(blocks)] = blocks
        self.owned[row] = owned + len(blocks)

    def close(self, row: int) -> list[int]:
        """Frees the row; returns the blocks it owned."""
        owned = int(self.owned[row])
        blocks: list[int] = self.tables[row, :owned].tolist()
        self.tables[row, :owned] = SCRATCH_BLOCK
        self.owned[row] = 0
        self.computed[row] = 0
        self._free.append(row)
        return blocks
