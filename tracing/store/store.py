"""The contract of a store: ClickHouse SQL in, Arrow out. chdb.py implements it embedded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Parameter = str | int | float | Sequence[str]


class StoreError(RuntimeError):
    """The store refused or failed; what it said is in the message."""


class StoreLocked(StoreError):
    """Another process owns the data directory."""


class Store(Protocol):
    """Thread-safe. Values travel as parameters (`{name:Type}`), never inside the SQL text."""

    def insert(self, table: str, rows: Any) -> None:
        """Append a pyarrow.Table by column name; durable (fsynced) when it returns.

        Raises StoreError; then the rows may or may not be there, so readers deduplicate.
        """
        ...

    def query(self, sql: str, parameters: Mapping[str, Parameter] | None = None) -> Any:
        """The result as a pyarrow.Table. Raises StoreError."""
        ...

    def close(self) -> None:
        """Give the data directory or connection back; idempotent."""
        ...
