"""Which prompts are computed together: those of like length, so that short ones are not held up.

A step takes as long as all its prompts together, and each of them waits for all of it. With a
window, the prompts of a step differ by at most so many tokens to compute. Whoever is first in the
queue is never passed over for another: it opens the next group as soon as what was begun before
and does not fit is done, so everyone's turn comes.

Adaptive, the window is wide while there is room and narrow when there is not (the share of the KV
pool that is free, times 1024 tokens), and a step takes slices of prompts that are the smaller the
shorter prompts are lately: a slice of a long one then takes about as long as a whole short one.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from engine.knobs import LENGTH_WINDOW_ADAPTIVE, RuntimeConfig
from engine.kv.allocator import Allocator
from engine.sched.length_fit import Fit, fit
from engine.sched.request import Request

WINDOW_TOKENS_MIN, WINDOW_TOKENS_MAX = 64, 8192
WINDOW_TOKENS_FREE = 1024  # when the whole KV pool is free
SLICE_TOKENS_MIN = 32
LENGTHS_MAX = 512  # prompts, the newest, to which distributions are fitted
LENGTHS_MIN = 64  # fewer say too little
LENGTHS_REFIT = 128  # new ones between two fits
FIT_DISTANCE_MAX = 0.2  # beyond, the better distribution is not believed either
DECAYED = math.exp(-1)  # the share of prompts that pass the length of one decay


def adaptive_window(free_share: float) -> int:
    """Tokens, for the share of the KV pool that is free (0 to 1)."""
    tokens = int(free_share * WINDOW_TOKENS_FREE)
    return min(max(tokens, WINDOW_TOKENS_MIN), WINDOW_TOKENS_MAX)


def slice_tokens(base: int, lengths: Fit | None) -> int:
    """base ÷ (1 + λ ÷ 2), where the share of prompts longer than x falls as exp(−λ · x ÷ base).

    λ is read where the fitted share is 1 ÷ e. `base` without a fit, or with one too far off.
    """
    if lengths is None or lengths.distance > FIT_DISTANCE_MAX:
        return base
    decay = base / lengths.best.quantile(1 - DECAYED)
    return min(base, max(SLICE_TOKENS_MIN, round(base / (1 + 0.5 * decay))))


class Group:
    """The prompts one step computes: those `begun` before it, and those it took in."""

    def __init__(self, window: int, begun: list[Request]) -> None:
        self.window = window
        self.tokens = [request.to_compute for request in begun]
        self.grown = False

    def takes(self, tokens: int) -> bool:
        """Whether a prompt with so many tokens to compute fits in."""
        return max([*self.tokens, tokens]) - min([*self.tokens, tokens]) <= self.window

    def add(self, tokens: int) -> None:
        self.tokens.append(tokens)
        self.grown = True


class LengthWindow:
    """`window` and `slice` are those of the newest step, in tokens; a window of 0 is none."""

    def __init__(self) -> None:
        self.window = 0
        self.slice = 0
        self.fit: Fit | None = None
        self.lengths: deque[int] = deque(maxlen=LENGTHS_MAX)
        self.unfitted = 0

    def chunk_tokens(self, config: RuntimeConfig) -> int:
        """Prompt tokens of one request that this step may compute."""
        self.slice = config.prefill_chunk_tokens
        if config.length_window_tokens == LENGTH_WINDOW_ADAPTIVE:
            self.slice = slice_tokens(self.slice, self.fit)
        return self.slice

    def group(
        self, config: RuntimeConfig, allocator: Allocator, begun: list[Request]
    ) -> Group | None:
        """Of a step that goes on with `begun`; None: prompts of any length may share it."""
        self.window = config.length_window_tokens
        if self.window == 0:
            return None
        if self.window == LENGTH_WINDOW_ADAPTIVE:
            self.window = adaptive_window(allocator.available_blocks / allocator.blocks)
        return Group(self.window, begun)

    def saw(self, tokens: int) -> None:
        """A prompt of so many tokens has come to its turn for the first time."""
        self.lengths.append(tokens)
        self.unfitted += 1
        if len(self.lengths) >= LENGTHS_MIN and (
            self.fit is None or self.unfitted >= LENGTHS_REFIT
        ):
            self.fit = fit(np.array(self.lengths))
            self.unfitted = 0
