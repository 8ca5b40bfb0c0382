"""What is wrong with a model that was named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class ModelError(ValueError):
    """A model cannot be served; names the file, the field, its value and what is allowed."""

    @classmethod
    def of(cls, file: object, field: str, value: Any, allowed: str | Iterable[Any]) -> ModelError:
        allowed = allowed if isinstance(allowed, str) else ", ".join(map(str, allowed))
        return cls(f"{file}: {field}: got {value!r}, allowed: {allowed}")


@contextmanager
def reading(file: object) -> Iterator[None]:
    """What a list where a number should be, or the like, leads to is a ModelError too."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{file}: not as its format has it: {type(error).__name__}: {error}"
        ) from error
