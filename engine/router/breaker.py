"""When an engine whose requests go wrong is taken out, and how it comes back.

    closed --- share of errors over the window > bound, requests enough ---> open
    open --- breaker_open_ms later, asked for a token by the router itself ---> half_open
    half_open --- PROOFS answers in a row ---> closed;  --- an error ---> open

The router asks: no client's request is what a broken engine is tried with.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from engine.router.knobs import RouterSettings

PROOFS = 3


class State(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Breaker:
    """Of one engine; times are monotonic seconds, told by the caller."""

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.openings = 0
        self.opened = 0.0
        self.proofs = 0
        self.seconds: deque[list[int]] = deque()  # [second, ended, of these wrong], oldest first

    def record(self, wrong: bool, now: float, settings: RouterSettings) -> bool:
        """One request has ended; whether that opened it. While it is not closed none counts."""
        if self.state is not State.CLOSED:
            return False
        second = int(now)
        if not self.seconds or self.seconds[-1][0] != second:
            self.seconds.append([second, 0, 0])
        self.seconds[-1][1] += 1
        self.seconds[-1][2] += wrong
        while self.seconds[0][0] <= now - settings.number("breaker_window_s"):
            self.seconds.popleft()
        ended = sum(second[1] for second in self.seconds)
        errors = sum(second[2] for second in self.seconds)
        bound = settings.number("breaker_error_percent") / 100
        if ended < settings.number("breaker_requests_min") or errors <= bound * ended:
            return False
        self._open(now)
        return True

    def due(self, now: float, settings: RouterSettings) -> bool:
        """Whether it is time to ask the engine itself."""
        if self.state is State.OPEN:
            return now >= self.opened + settings.number("breaker_open_ms") / 1000
        return self.state is State.HALF_OPEN

    def proved(self, good: bool, now: float) -> None:
        """What came of asking."""
        assert self.state is not State.CLOSED
        if not good:
            self._open(now)
            return
        self.state = State.HALF_OPEN
        self.proofs += 1
        if self.proofs == PROOFS:
            self.state = State.CLOSED

    def _open(self, now: float) -> None:
        self.openings += self.state is State.CLOSED
        self.state, self.opened, self.proofs = State.OPEN, now, 0
        self.seconds.clear()
