"""How long to wait after a failure."""

from __future__ import annotations

import random

BACKOFF_BASE_S = 1.0
BACKOFF_CAP_S = 60.0
RETRY_AFTER_S_MAX = 3600.0


class Backoff:
    """Full jitter: each wait is uniform(0, min(cap, base · 2^failures)).

    Source: AWS Architecture Blog, "Exponential Backoff And Jitter". A Retry-After wins.
    """

    def __init__(self, *, base_s: float = BACKOFF_BASE_S, cap_s: float = BACKOFF_CAP_S) -> None:
        self.base_s = base_s
        self.cap_s = cap_s
        self.failures = 0
        self._random = random.Random()

    def succeed(self) -> None:
        self.failures = 0

    def fail(self, retry_after_s: float | None = None) -> float:
        """Seconds to wait before the next try."""
        self.failures += 1
        if retry_after_s is not None:
            return min(max(0.0, retry_after_s), RETRY_AFTER_S_MAX)
        exponent = min(self.failures - 1, 32)
        return self._random.uniform(0, min(self.cap_s, self.base_s * 2**exponent))
