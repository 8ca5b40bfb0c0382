"""Since when a thing is good or bad: what /healthz tells of each source and connection."""

from __future__ import annotations

import time
from typing import Any

from gpu_agent.clock import utc_text


class Standing:
    """Starts `waiting`; `since` moves only when good turns bad or back."""

    def __init__(self) -> None:
        self.state = "waiting"
        self.since = time.time()
        self.last_good: float | None = None
        self.error = ""
        self.errors_total = 0

    def good(self) -> None:
        self.last_good = time.time()
        self.error = ""
        self._turn("good")

    def bad(self, reason: str) -> None:
        self.error = reason
        self.errors_total += 1
        self._turn("bad")

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
