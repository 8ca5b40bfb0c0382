"""What a page answered, as text."""

from __future__ import annotations

from typing import Any


def text(answer: Any, status: int = 200) -> str:
    assert answer.status_code == status, answer.content
    return str(answer.content.decode())
