"""ClickHouse inside this process (chDB): the default store, owner of its directory.

One process may open a directory, and a process may open one directory; threads share the session.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chdb import ChdbError
from chdb import session as chdb_session

from tracing.store import schema
from tracing.store.lock import holder
from tracing.store.store import Parameter, StoreError, StoreLocked

# chDB ships no type hints.
_Session: Any = chdb_session.Session
MIB = 1024 * 1024

# Measured: without these a mixed load grows to 670-1,300 MiB, with them it stays near 400.
_MEMORY = {
    "max_server_memory_usage": 1024 * MIB,
    "mark_cache_size": 32 * MIB,
    "index_mark_cache_size": 8 * MIB,
    "uncompressed_cache_size": 0,
    "background_pool_size": 2,
}
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "'": "\\'"})


def _text(value: Parameter) -> str | int:
    """A parameter as ClickHouse reads it: escaped text, quoted where it stands in an array."""
    if isinstance(value, str):
        return value.translate(_ESCAPES)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    return "[" + ",".join(f"'{item.translate(_ESCAPES)}'" for item in value) + "]"


class ChdbStore:
    """See `Store`. Raises StoreLocked when another process has `path` open."""

    def __init__(self, path: Path, *, retention_days: int = 30) -> None:
        statements = schema.statements(retention_days)
        path.mkdir(parents=True, exist_ok=True)
        settings = "&".join(f"{name}={value}" for name, value in _MEMORY.items())
        try:
            self._session = _Session(f"{path}?{settings}")
        except RuntimeError as error:
            if owner := holder(path):
                raise StoreLocked(
                    f"The telemetry store {path} is open in another process ({owner}); "
                    "stop it, or ask the running control plane through its API"
                ) from error
            raise StoreError(f"Cannot open the telemetry store {path}: {error}") from error
        self._open = True
        # One statement at a time. Seen with chDB 4.4: a query that waits inside chDB holds the
        # GIL that an insert from Python(…) needs, and two queries at once mix their parameters.
        self._one_at_a_time = threading.Lock()
        for statement in statements:
            self._run(statement)

    def _run(self, sql: str, parameters: Mapping[str, Parameter] | None = None) -> Any:
        if not self._open:
            raise StoreError("The telemetry store is closed")
        texts = {name: _text(value) for name, value in (parameters or {}).items()}
        try:
            with self._one_at_a_time:
                return self._session.query(sql, "ArrowTable", params=texts)
        except (ChdbError, RuntimeError) as error:
            raise StoreError(str(error)) from error

    def insert(self, table: str, rows: Any) -> None:
        columns = ", ".join(rows.column_names)
        # chDB finds `rows` by its name in the frames that called it.
        # Duplicates are dropped when parts merge and when rows are read; not at insert as well.
        sql = (
            f"INSERT INTO {table} ({columns}) SETTINGS optimize_on_insert = 0 "  # noqa: S608
            f"SELECT {columns} FROM Python(rows)"
        )
        if not self._open:
            raise StoreError("The telemetry store is closed")
        try:
            with self._one_at_a_time:
                self._session.query(sql)
        except (ChdbError, RuntimeError) as error:
            raise StoreError(str(error)) from error

    def query(self, sql: str, parameters: Mapping[str, Parameter] | None = None) -> Any:
        return self._run(sql, parameters)

    def close(self) -> None:
        with self._one_at_a_time:
            if self._open:
                self._open = False
                self._session.close()
