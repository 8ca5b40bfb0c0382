"""Allocation stalls: a request waits though blocks enough are free, since they lie apart."""

from __future__ import annotations

from engine.sched.request import Request


class Stalls:
    """How many requests were held up so, and for how many seconds, as of the last step.

    `held_up` is set while a step is planned; `stalled` is who it was in the last. Time counts from
    the step that found no place to the next one, whatever that one finds. Only a contiguous pool
    can stall.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.held_up: Request | None = None
        self.stalled: Request | None = None
        self._counted: Request | None = None
        self._since = 0.0

    def turn(self, now: float) -> None:
        """Once a step, when it is planned. `now`: monotonic seconds."""
        if self.stalled is not None:
            self.seconds += now - self._since
        self.stalled, self._since, self.held_up = self.held_up, now, None
        if self.stalled is not None and self.stalled is not self._counted:
            self.count += 1
            self._counted = self.stalled
