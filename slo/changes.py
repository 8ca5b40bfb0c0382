"""What a declaration changed, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
Outcome = Literal["created", "changed", "unchanged"]


@dataclass(frozen=True)
class Change:
    """One field, `spec.threshold_ms` for one inside another; None where it was or is absent."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Declared(Generic[T]):
    """A row after it was declared; `note` is a consequence people should know of."""

    row: T
    created: bool
    changes: tuple[Change, ...]
    note: str = ""

    @property
    def outcome(self) -> Outcome:
        if self.created:
            return "created"
        return "changed" if self.changes else "unchanged"


def changes_between(
    before: Mapping[str, Any] | None, after: Mapping[str, Any]
) -> tuple[Change, ...]:
    """Fields that differ, in the order of `after`, then those that went; objects field by field."""
    old, new = _flat(before or {}), _flat(after)
    return tuple(
        Change(name, old.get(name), new.get(name))
        for name in [*new, *(name for name in old if name not in new)]
        if old.get(name) != new.get(name)
    )


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
