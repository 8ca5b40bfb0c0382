"""How fast control goes: the times of NORMS, or four times as fast for benches and short stories.

Requests and queues are as slow as they are at either pace, so the fast one is harder on the loop.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    window_s: float
    scrape_s: float
    ttl_s: float

    @property
    def settings(self) -> dict[str, str]:
        """For a House; its `scrape_s` is given apart."""
        return {
            "TRIMTAB_CONTROL_WINDOW_S": f"{self.window_s:g}",
            "TRIMTAB_ACTION_TTL_S": f"{self.ttl_s:g}",
        }


NORMAL = Pace(window_s=15, scrape_s=5, ttl_s=90)
FAST = Pace(window_s=3.75, scrape_s=1.25, ttl_s=30)  # not 22.5: what sending takes does not shrink
PACES = {"normal": NORMAL, "fast": FAST}
