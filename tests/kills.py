"""A process killed before each of its statements to the database in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.db import connection

T = TypeVar("T")


class Killed(BaseException):
    """Not an Exception: nothing of ours may catch it, as nothing catches kill -9."""


def killed_at_every_statement(run: Callable[[], T], stored: Callable[[], Any]) -> tuple[T, int]:
    """What `run` returns when it is let live, and how many deaths it had before.

    None of them may have left anything: `stored` must be as it was."""
    before, deaths, left = stored(), 0, 0

    def count(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        nonlocal left
        if "SAVEPOINT" not in sql:  # commit and rollback are the database's own promise
            left -= 1
            if left == -1:
                raise Killed
        return execute(sql, *rest)

    while True:
        left = deaths
        try:
            with connection.execute_wrapper(count):
                return run(), deaths
        except Killed:
            assert stored() == before
            deaths += 1
