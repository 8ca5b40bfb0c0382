"""What a process has one of: the store and the door in, opened on first use.

Commands that run beside a live control plane import this without touching its data directory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tracing.ingest import Door
from tracing.store.lock import holder
from tracing.store.store import Store

_lock = threading.RLock()
_open_store: Callable[[], Store] | None = None
_path: Path | None = None
_store: Store | None = None
_door: Door | None = None


def configure(path: Path, *, retention_days: int) -> None:
    """Say where the telemetry lives; opens nothing."""
    global _open_store, _path

    def open_store() -> Store:
        # Here, not above: importing chDB takes 260 MiB, which commands have no use for.
        from tracing.store.chdb import ChdbStore

        return ChdbStore(path, retention_days=retention_days)

    _open_store, _path = open_store, path


def held_by() -> str | None:
    """The process that has the store open, as in “PID: 123”; None when nobody has."""
    return None if _path is None else holder(_path)


def store() -> Store:
    """This process's store. Raises StoreLocked when another process owns the directory."""
    global _store
    with _lock:
        if _store is None:
            if _open_store is None:
                raise RuntimeError("tracing is not configured: add 'tracing' to INSTALLED_APPS")
            _store = _open_store()
        return _store


def door() -> Door:
    """This process's door in."""
    global _door
    with _lock:
        if _door is None:
            _door = Door(store())
        return _door


def close() -> None:
    """Make durable what waits, then give the directory back; the next use opens it again."""
    global _store, _door
    with _lock:
        if _door is not None:
            _door.close()
        if _store is not None:
            _store.close()
        _door = _store = None
