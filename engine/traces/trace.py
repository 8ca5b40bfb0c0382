"""A recorded trace as requests for engine/replay.py: scaled, made to fit, with made-up prompts.

No trace has its users' text. What has the same hash id becomes the same tokens, so that prompts
share the prefixes that the recorded ones shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.load import Request
from engine.traces.formats import FORMATS, Row, TraceError

BLOCK_TOKENS = 512  # of a hash id in Mooncake's traces
BLOCK_TOKENS_MIN = 8  # of a scaled block: with fewer, unlike blocks could become alike
# Printable ASCII: token ids that every vocabulary has, and that steer in none. In a vocabulary of
# bytes (the built-in models') they are their own text.
TOKEN_FIRST, TOKEN_COUNT = 32, 95
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True)
class TraceRequest(Request):
    """A request of a trace, scaled. `block_tokens`: what a block of its row has become."""

    row: Row
    block_tokens: int
    seed: int

    def prompt(self) -> list[int]:
        """`prompt_tokens` token ids, each a hash of seed, block and place in the block."""
        # A row without blocks is one, of its own.
        blocks = np.array(self.row.blocks or (self.row.number,), np.uint64)
        keys = _mixed(blocks + np.uint64((self.seed + 1) * GOLDEN % 2**64))
        block, place = np.divmod(np.arange(self.prompt_tokens), self.block_tokens)
        mixed = _mixed(keys[block] + (place + 1).astype(np.uint64) * np.uint64(GOLDEN))
        tokens: list[int] = (TOKEN_FIRST + mixed % np.uint64(TOKEN_COUNT)).tolist()
        return tokens


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, of each of uint64[n] (Steele et al., OOPSLA'14): wraps, as meant."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


@dataclass
class Plan:
    """What is sent of a trace.

    `left_out` counts rows without prompt or answer: requests that failed when they were recorded.
    Prompts and answers are cut to fit the model's context. `repeated_tokens` are those of blocks
    that an earlier prompt began with too: what a prefix cache that never forgets need not compute.
    """

    requests: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prompts_cut: int = 0
    answers_cut: int = 0
    left_out: int = 0
    repeated_tokens: int = 0


@dataclass(frozen=True)
class Trace:
    """A file and how it is sent; raises ValueError naming what is not allowed.

    Times between requests, and lengths, are multiplied by their scales (0.5: twice as fast, half as
    long). `block_tokens`: what a hash id stands for in the file. Where prompt and answer pass
    `context_tokens` together, the answer gets at most half of them, and the prompt loses its end.
    `requests_max` and `seconds_max`, of sending, end it early. Other seeds make other prompts.
    """

    path: Path
    format: str
    time_scale: float = 1.0
    length_scale: float = 1.0
    context_tokens: int | None = None
    block_tokens: int = BLOCK_TOKENS
    requests_max: int | None = None
    seconds_max: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format: got {self.format!r}, allowed: {', '.join(FORMATS)}")
        for field in ("time_scale", "length_scale"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"{field}: got {getattr(self, field)}, allowed: above 0")
        if self.context_tokens is not None and self.context_tokens < 2:
            raise ValueError(f"context_tokens: got {self.context_tokens}, allowed: 2 or more")
        if FORMATS[self.format].blocks and self.scaled_block_tokens < BLOCK_TOKENS_MIN:
            raise ValueError(
                f"length_scale: got {self.length_scale:g}, allowed: "
                f"{BLOCK_TOKENS_MIN / self.block_tokens:g} or more, as a block of "
                f"{self.block_tokens} tokens has to keep {BLOCK_TOKENS_MIN}"
            )

    @property
    def scaled_block_tokens(self) -> int:
        return round(self.block_tokens * self.length_scale)

    def plan(self) -> Plan:
        """Reads all that `requests` would give. Raises TraceError, OSError."""
        plan = Plan()
        for _ in self.requests(plan):
            pass
        return plan

    def requests(self, plan: Plan | None = None) -> Iterator[TraceRequest]:
        """In order of their times, the first at 0 s; `plan` counts them.

        Reads the file as it goes. Raises TraceError, OSError.
        """
        plan = Plan() if plan is None else plan
        seen: set[int] = set()
        for row, after_us in self._rows(plan):
            at_s = after_us / 1e6 * self.time_scale
            if self.seconds_max is not None and at_s >= self.seconds_max:
                return
            wanted = self._lengths(row)
            prompt, output = self._fitted(*wanted)
            block = self.scaled_block_tokens if row.blocks else prompt
            plan.requests += 1
            plan.seconds = at_s
            plan.prompt_tokens += prompt
            plan.output_tokens += output
            plan.prompts_cut += prompt < wanted[0]
            plan.answers_cut += output < wanted[1]
            plan.repeated_tokens += _repeated(row.blocks, block, prompt, seen)
            yield TraceRequest(
                at_s=at_s,
                prompt_tokens=prompt,
                output_tokens=output,
                id=f"{self.format}-{self.seed}-{row.number}",
                row=row,
                block_tokens=block,
                seed=self.seed,
            )
            if plan.requests == self.requests_max:
                return

    def _rows(self, plan: Plan) -> Iterator[tuple[Row, int]]:
        """What can be asked again, with its microseconds after the first of these."""
        kind = FORMATS[self.format]
        first: int | None = None
        before: Row | None = None
        for row in kind.read(self.path):
            if before is not None and row.at_us < before.at_us:
                raise TraceError(
                    f"{self.path}, {kind.counted} {row.number}, {kind.time}: got a time "
                    f"{(before.at_us - row.at_us) / 1e6:g} s before that of {kind.counted} "
                    f"{before.number}, allowed: times in order. Sort the file by {kind.time}"
                )
            before = row
            self._check_blocks(row)
            if not row.prompt_tokens or not row.output_tokens:
                plan.left_out += 1
                continue
            first = row.at_us if first is None else first
            yield row, row.at_us - first

    def _check_blocks(self, row: Row) -> None:
        blocks = math.ceil(row.prompt_tokens / self.block_tokens)
        if FORMATS[self.format].blocks and len(row.blocks) != blocks:
            raise TraceError(
                f"{self.path}, line {row.number}, hash_ids: got {len(row.blocks)} of them, "
                f"allowed: {blocks}, one for each {self.block_tokens} of the "
                f"{row.prompt_tokens} tokens. Are its blocks of another size?"
            )

    def _lengths(self, row: Row) -> tuple[int, int]:
        """Tokens of prompt and answer, scaled; all blocks but the last are whole ones."""
        prompt = max(1, round(row.prompt_tokens * self.length_scale))
        if row.blocks:
            block, whole = self.scaled_block_tokens, len(row.blocks) - 1
            rest = round((row.prompt_tokens - whole * self.block_tokens) * self.length_scale)
            prompt = whole * block + min(max(1, rest), block)
        return prompt, max(1, round(row.output_tokens * self.length_scale))

    def _fitted(self, prompt: int, output: int) -> tuple[int, int]:
        if self.context_tokens is None or prompt + output <= self.context_tokens:
            return prompt, output
        output = min(output, self.context_tokens // 2)
        return min(prompt, self.context_tokens - output), output


def _repeated(blocks: tuple[int, ...], block_tokens: int, prompt: int, seen: set[int]) -> int:
    """Tokens of the blocks it begins with that are in `seen`; puts all of its blocks there."""
    kept = blocks[: math.ceil(prompt / block_tokens)]
    known = next((i for i, block in enumerate(kept) if block not in seen), len(kept))
    seen.update(kept)
    return min(known * block_tokens, prompt)
