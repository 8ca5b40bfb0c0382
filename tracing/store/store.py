"""The contract of a store: ClickHouse SQL in, Arrow out. chdb.py implements it embedded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tracing.types import StoreError, StoreLocked

__all__ = ["Parameter", "Store", "StoreError", "StoreLocked"]

Parameter = str | int | float | Sequence[str]


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
