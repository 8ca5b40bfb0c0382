"""The door every process of the engine serves at."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engine.serve import listen


def test_what_is_written_to_a_client_does_not_wait_for_its_acknowledgements() -> None:
    async def nodelay() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted = transport.get_extra_info("socket")
                seen.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        door = listen("x", "127.0.0.1", 0)
        assert door is not None
        server = await asyncio.get_running_loop().create_server(Accepted, sock=door)
        async with server:
            _, writer = await asyncio.open_connection(*door.getsockname())
            found = await seen
            writer.close()
            await writer.wait_closed()
        return found

    assert asyncio.run(nodelay()) != 0


def test_an_address_that_is_taken_is_told_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert listen("router-0", *taken.getsockname()) is None
    assert "router-0: cannot listen on 127.0.0.1" in capsys.readouterr().err
