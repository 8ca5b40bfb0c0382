"""Long prompts off the event loop, and every request still in the order in which it came."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.http import ApiError, bad
from engine.tokenising import INLINE_BYTES_MAX, Tokenising


def test_short_ones_are_read_at_once_where_they_are_and_long_ones_elsewhere() -> None:
    async def run() -> tuple[int, int]:
        subject = Tokenising()
        ids = [await subject.run(size, threading.get_ident) for size in (10, INLINE_BYTES_MAX + 1)]
        subject.close()
        return ids[0], ids[1]

    short, long = asyncio.run(run())
    assert short == threading.get_ident() != long


def test_who_came_first_goes_on_first_and_the_loop_is_free_meanwhile() -> None:
    subject, cut = Tokenising(), threading.Event()
    order: list[str] = []

    async def ask(name: str, size: int) -> None:
        order.append(await subject.run(size, lambda: name if cut.wait(10) else "never"))

    async def run() -> None:
        asked = [asyncio.create_task(ask("long", 10**6))]
        await asyncio.sleep(0)
        asked += [asyncio.create_task(ask(name, 10)) for name in ("short 1", "short 2")]
        while subject.waiting < 3:
            await asyncio.sleep(0)
        assert order == []
        cut.set()
        await asyncio.gather(*asked)
        # Nothing is before it any more.
        await ask("last", 10)
        subject.close()

    asyncio.run(run())
    assert order == ["long", "short 1", "short 2", "last"]


def test_what_cannot_be_read_is_refused_from_there_too() -> None:
    def refuse() -> None:
        raise bad("prompt", "want one text")

    async def run() -> None:
        subject = Tokenising()
        with pytest.raises(ApiError, match="prompt: want one text"):
            await subject.run(10**6, refuse)
        assert subject.waiting == 0
        subject.close()

    asyncio.run(run())
