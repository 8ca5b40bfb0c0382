"""Since when a thing is good or bad: what /healthz tells of each source and connection.

What the agent depends on is told in the log as well: a line when it is lost, one when it is back.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from gpu_agent.clock import utc_text

log = logging.getLogger(__name__)

TOLD_EVERY_S = 60.0  # what comes and goes is told of so often at most


class Standing:
    """Starts `waiting`; `since` moves only when good turns bad or back.

    `lost` and `back` begin the lines of the log; without them there are none.
    """

    def __init__(self, lost: str = "", back: str = "") -> None:
        self.state = "waiting"
        self.since = time.time()
        self.last_good: float | None = None
        self.error = ""
        self.errors_total = 0
        self._lost, self._back = lost, back
        self._told = False
        self._told_at = -TOLD_EVERY_S

    def good(self) -> None:
        self.last_good = time.time()
        self.error = ""
        self._turn("good")
        if self._told:
            self._told = False
            log.info("%s", self._back)

    def bad(self, reason: str) -> None:
        self.error = reason
        self.errors_total += 1
        self._turn("bad")
        if self._lost and not self._told and time.monotonic() - self._told_at >= TOLD_EVERY_S:
            self._told, self._told_at = True, time.monotonic()
            log.warning("%s: %s", self._lost, " ".join(reason.split()))

    def _turn(self, state: str) -> None:
        if self.state != state:
            self.state, self.since = state, time.time()

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "since": utc_text(self.since),
            "last_good": None if self.last_good is None else utc_text(self.last_good),
            "error": self.error,
            "errors_total": self.errors_total,
        }
