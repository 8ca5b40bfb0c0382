"""Long prompts become tokens on a thread of their own, so that they hold up no other answer.

One thread, first come first served, so requests are queued in the order in which they arrived:
short ones too, as long as a long one is before them. Else these are not worth the way there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES_MAX = 2048  # of a request's body


class Tokenising:
    """Of the event loop. `waiting`: requests whose tokens are not there yet."""

    def __init__(self) -> None:
        self.waiting = 0
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    async def run(self, size: int, parse: Callable[[], T]) -> T:
        """What `parse` returns or raises; `size`: of the body, in bytes.

        Who awaits this goes on in the order of the calls, if it awaits nothing else before it.
        """
        if not self.waiting and size <= INLINE_BYTES_MAX:
            return parse()
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, parse)
        finally:
            self.waiting -= 1

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
