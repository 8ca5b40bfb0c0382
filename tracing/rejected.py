"""What was left out of a request, as its sender is told (OTLP, Partial Success)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

_NAME_CHARS_MAX = 60


@dataclass
class Rejected:
    """Spans or points that were not kept: how many for which reason, and the first in words."""

    reasons: Counter[str] = field(default_factory=Counter)
    first: str = ""

    def add(self, reason: str, words: Callable[[], str], count: int = 1) -> None:
        """`words` name the item, its value and what is allowed; only the first are asked for."""
        self.reasons[reason] += count
        self.first = self.first or words()

    def copy(self) -> Rejected:
        return Rejected(Counter(self.reasons), self.first)


def quoted(name: bytes | str) -> str:
    """A sender's name for something, fit for one line of a message."""
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
    return ascii(text[:_NAME_CHARS_MAX])
