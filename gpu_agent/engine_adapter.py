"""The contract of an engine adapter; its implementations live in engines/, one file each.

An adapter reads an engine's live configuration and changes it by compare-and-set on its
`config_version`. It keeps no state and never retries: what a lost answer means is for the guard.

    AdapterError
    ├── Unreachable   no answer, or one that says "later": nothing is known, try again
    ├── Conflict      the engine stands at another version: nothing was changed
    └── Refused       the engine will not do it, now or later: nothing was changed
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, Any]


class AdapterError(Exception):
    """The message names the engine and what it answered."""


class Unreachable(AdapterError):
    """Passing. After `apply` the change may or may not have happened."""


class Conflict(AdapterError):
    """The engine stands at another version than the change expected."""


class Refused(AdapterError):
    """Permanent: unknown knob, wrong type, out of bounds, not allowed."""


@dataclass(frozen=True)
class EngineState:
    """A configuration as the engine itself tells it.

    `knobs`: name → {value, unit, minimum, maximum or choices, apply_class, supported, reason}, as
    far as the engine says. Values are numbers or words, handed on as they are.
    `changed_by` and `changed_at` (RFC 3339): who made this version and when, "" where unknown.
    """

    config_version: int
    values: Values
    model: str = ""
    knobs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    changed_by: str = ""
    changed_at: str = ""


class EngineAdapter(ABC):
    """One running engine. `slug` names the kind; `timeout_s` bounds every call."""

    slug: str
    label: str

    def __init__(self, *, url: str, timeout_s: float = 5.0) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s

    @abstractmethod
    def read(self) -> EngineState:
        """The configuration in effect now. Raises Unreachable or Refused."""

    @abstractmethod
    def apply(self, values: Values, *, expected_version: int, by: str) -> EngineState:
        """Sets absolute values if the engine stands at expected_version; answers the new state.

        The version of the answer is the one this change produced. Raises Conflict, Refused,
        Unreachable.
        """


def adapter_classes() -> dict[str, type[EngineAdapter]]:
    """The adapters found in engines/, by slug."""
    from gpu_agent import engines

    for module in pkgutil.iter_modules(engines.__path__):
        importlib.import_module(f"{engines.__name__}.{module.name}")
    here = f"{engines.__name__}."
    found = EngineAdapter.__subclasses__()
    return {each.slug: each for each in found if each.__module__.startswith(here)}
