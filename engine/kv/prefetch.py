"""Copies what the tier keeps of the sequence next in line back ahead of its turn, beside the steps.

A transaction with each step. One piece is copied while the step runs, on a thread of its own, and
only as much as its usual time allows, less SLACK_S. When the step ends the piece is there, or it is
rolled back to the last snapshot: what earlier pieces brought. Nothing of it is seen before the
sequence is admitted. Until then the tier keeps all of it, and the blocks it stands in are lent: to
everybody else they are as good as free, and the pool calls them back when it needs them, the last
one first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from engine.kv.allocator import PagedAllocator

if TYPE_CHECKING:
    from engine.kv.tier import HostTier

log = logging.getLogger("engine")

SLACK_S = 150e-6  # of a step that must be left when a piece has been copied, or it is not begun
NEWEST = 0.1  # what the newest step counts in the mean


@dataclass
class Piece:
    """Tokens on their way into `blocks`. `stop` set: no other layer of them is begun.

    `copying` tells what share came, and when that was (monotonic seconds, as `began`).
    """

    blocks: list[int]
    tokens: int
    began: float
    stop: Event
    copying: Future[tuple[float, float]]


class Prefetch:
    """`blocks` hold the tokens of `who` from `first` on: the snapshot; None: nothing is ahead.

    Counted in tokens: `begun` = `used` + `rolled_back` + those ahead now. `late`: pieces that were
    not there when their step ended. Of the step thread only.
    """

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self.who: Hashable | None = None
        self.first = 0
        self.blocks: list[int] = []
        self.piece: Piece | None = None
        self.begun = self.used = self.rolled_back = self.late = 0
        self.step_s = 0.0  # what a step of decodes takes, lately
        self._allocator = PagedAllocator(0)
        self._block_size = 1
        self._thread = ThreadPoolExecutor(1, "prefetch")  # starts with the first piece

    @property
    def tokens(self) -> int:
        """How many are there."""
        if self.who is None:
            return 0
        return min(len(self.blocks) * self._block_size, self.tier.tokens(self.who) - self.first)

    def told(self) -> dict[str, int]:
        """Tokens by what became of them; from any thread."""
        used, rolled_back = self.used, self.rolled_back
        return {"begun": self.begun, "used": used, "rolled_back": rolled_back}

    def begin(
        self, who: Hashable, first: int, allocator: PagedAllocator, *, depth: int, spare: int
    ) -> None:
        """A step begins: copies more of the tokens of `who` from `first` on, while there is room.

        Up to `depth` tokens ahead, into at most `spare` blocks that are free. `first` is the first
        of a block.
        """
        assert self.piece is None, "one step, one piece"
        if (who, first, allocator) != (self.who, self.first, self._allocator):
            self.roll_back()
        self._block_size = size = self.tier.pool().block_size
        there, left = len(self.blocks), self.tier.tokens(who) - first
        fits = int((self.step_s - SLACK_S) * self.tier.bytes_per_s / self.tier.token_bytes)
        count = min(depth // size - there, -(-left // size) - there, fits // size, spare)
        if count <= 0:
            return
        self.who, self.first, self._allocator = who, first, allocator
        blocks = allocator.lend(count, self._recalled)
        begin = first + there * size
        position = np.arange(min(count * size, left - there * size))
        slots = np.array(blocks)[position // size] * size + position % size
        stop, began = Event(), time.monotonic()
        try:
            copying = self._thread.submit(self._copy, who, begin, slots, stop)
        except RuntimeError:  # no thread can be started
            stop.set()  # for the next that can: the copy is in its queue already
            allocator.end_loan(reversed(blocks), own=False)
            return
        self.piece = Piece(blocks, len(position), began, stop, copying)
        self.begun += len(position)

    def timed(self, step_s: float) -> None:
        """What a step of decodes took."""
        self.step_s += (NEWEST if self.step_s else 1.0) * (step_s - self.step_s)

    def end(self) -> None:
        """The step has ended: its piece is there now, or rolled back."""
        if self.piece is None:
            return
        piece, self.piece = self.piece, None
        piece.stop.set()
        try:
            share, ended = piece.copying.result()
        except Exception:
            log.exception("nothing was copied ahead; it is copied when its turn comes")
            share, ended = 0.0, time.monotonic()
        self.tier.measured(share * piece.tokens, ended - piece.began)
        if share == 1.0:
            self.blocks += piece.blocks
        else:
            self.late += 1
            self.rolled_back += piece.tokens
            self._allocator.end_loan(reversed(piece.blocks), own=False)

    def take(self, who: Hashable, first: int) -> list[int]:
        """The blocks that hold its tokens from `first` on, its own from now on; it is admitted."""
        self.end()
        if who == self.who and first != self.first:
            self.roll_back()  # it begins with more or fewer blocks of others than was thought
        if who != self.who:
            return []
        self.used += self.tokens
        blocks = self.blocks
        self._allocator.end_loan(blocks, own=True)
        self.who, self.blocks = None, []
        return blocks

    def roll_back(self) -> None:
        """Nothing is ahead any more."""
        self.end()
        self.rolled_back += self.tokens
        self._allocator.end_loan(reversed(self.blocks), own=False)
        self.who, self.blocks = None, []

    def _copy(
        self, who: Hashable, first: int, slots: np.ndarray, stop: Event
    ) -> tuple[float, float]:
        return self.tier.copy_back(who, first, slots, stop.is_set), time.monotonic()

    def _recalled(self, block: int) -> None:
        assert self.piece is None, "blocks are taken between two steps"
        assert block == self.blocks[-1], "the last one goes first"
        before = self.tokens
        self.blocks.pop()
        self.rolled_back += before - self.tokens
