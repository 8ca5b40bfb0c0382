"""What the agent itself costs: CPU seconds and resident memory, its NVML worker included."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Footprint:
    """CPU of a worker that ended is kept in the sum, so the total never falls."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._worker: tuple[int, float] | None = None

    def read(self, worker_pid: int | None) -> tuple[float, int]:
        """CPU seconds since the start, and bytes resident now."""
        own_s, own_bytes = _process(os.getpid()) or (0.0, 0)
        worker = None if worker_pid is None else _process(worker_pid)
        if self._worker is not None and self._worker[0] != worker_pid:
            self._ended_s += self._worker[1]
            self._worker = None
        if worker is None or worker_pid is None:
            return own_s + self._ended_s + (self._worker or (0, 0.0))[1], own_bytes
        self._worker = (worker_pid, worker[0])
        return own_s + self._ended_s + worker[0], own_bytes + worker[1]


def _process(pid: int) -> tuple[float, int] | None:
    """CPU seconds and resident bytes of one process (proc(5)); None when it is gone."""
    try:
        # The name may hold spaces and brackets; the fields after the last ")" may not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES
