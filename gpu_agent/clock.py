"""The agent's clocks: the wall, and the time since boot that no clock change can move."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    """`boottime_s` runs on through suspend and means something only beside the same `boot_id`."""

    def __init__(self) -> None:
        self.boot_id = _BOOT_ID.read_text().strip()

    def wall_s(self) -> float:
        return time.time()

    def boottime_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def utc_text(wall_s: float) -> str:
    """RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds")


def wall_of(text: str) -> float:
    """Unix seconds of an RFC 3339 time. Raises ValueError naming what is wrong."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"time: got {text!r}, want RFC 3339 with a zone") from None
    if moment.tzinfo is None:
        raise ValueError(f"time: got {text!r} without a zone, want RFC 3339 with one")
    return moment.timestamp()
