"""The tokens of one request on their way from the step thread to the task that answers it."""

from __future__ import annotations

import asyncio


class Stream:
    """Of the event loop. `left`: nobody takes them any more."""

    def __init__(self, eager: bool) -> None:
        self.eager = eager  # wake at every step, not only at the end
        self.tokens: list[int] = []
        self.done = False
        self.left = False
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def take(self) -> list[int]:
        """All tokens that are there, waiting for at least one or for the end."""
        if not self.done and not (self.eager and self.tokens):
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
            self.waiter = None
        tokens, self.tokens = self.tokens, []
        return tokens
