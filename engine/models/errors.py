"""What is wrong with a model that was named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ModelError(ValueError):
    """A model cannot be served; names the file, the field, its value and what is allowed."""

    @classmethod
    def of(cls, file: object, field: str, value: Any, allowed: str | Iterable[Any]) -> ModelError:
        allowed = allowed if isinstance(allowed, str) else ", ".join(map(str, allowed))
        return cls(f"{file}: {field}: got {value!r}, allowed: {allowed}")
