"""Whether the engine says stop: many wait, and it has no time to spare.

Utilisation is the share of the time since the check before in which the step thread did not wait
for work: 1 means that a step follows a step. A long queue alone is no reason to turn anyone away (a
crowd that an idle engine is about to take in), nor is a busy engine (that is what it is for).
"""

from __future__ import annotations

QUEUE_REQUESTS_MAX = 50
UTILISATION_MAX = 0.85
CHECK_S = 0.2


class IdleClock:
    """How long the step thread has waited for work; it writes, anyone reads.

    Both numbers change in one assignment, so that nobody reads one without the other.
    """

    def __init__(self) -> None:
        self.state = (0.0, 0.0)  # seconds of waits that ended; when the present one began, or 0

    def begin(self, now: float) -> None:
        self.state = (self.state[0], now)

    def end(self, now: float) -> None:
        self.state = (self.seconds(now), 0.0)

    def seconds(self, now: float) -> float:
        waited, began = self.state
        return waited + max(0.0, now - began) if began else waited


class Backpressure:
    """Of one engine, asked by one thread. `holds` and `utilisation` are those of the last check."""

    def __init__(self, idle: IdleClock, now: float) -> None:
        self.idle = idle
        self.checked_at = now
        self.idle_s = 0.0
        self.utilisation = 0.0
        self.holds = False

    def check(self, waiting: int, now: float) -> bool:
        """Whether to turn requests away, with `waiting` in the queue; looked at every CHECK_S."""
        passed = now - self.checked_at
        if passed >= CHECK_S:
            idle_s = self.idle.seconds(now)
            self.utilisation = 1 - min(1.0, (idle_s - self.idle_s) / passed)
            self.checked_at, self.idle_s = now, idle_s
            self.holds = waiting > QUEUE_REQUESTS_MAX and self.utilisation > UTILISATION_MAX
        return self.holds
