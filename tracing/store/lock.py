"""Who has the directory of an embedded store open. Imports no chDB: asking costs nothing."""

from __future__ import annotations

import fcntl
from pathlib import Path


def holder(path: Path) -> str | None:
    """What the lock file says about the process that holds it, None when nobody does."""
    status = path / "status"
    if not status.exists():
        return None
    with status.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.readline().decode("ascii", "replace").strip() or "PID unknown"
    return None
