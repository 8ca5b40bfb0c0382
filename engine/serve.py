"""A process that serves HTTP: from a bound port to the last request it answers after SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import math
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn

from engine.http import Message, Receive, Send

BACKLOG = 2048
# For what the drain did not finish: until its error is written.
LAST_WORDS_S = 2


class Served(Protocol):
    """What a process serves; all of it is called in the event loop, but for `drain`: a signal."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None: ...

    async def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before the first request."""

    def drain(self) -> None:
        """From now on new requests get 503."""

    def end_all(self) -> None:
        """What still runs ends now, with an error that can be read."""

    async def detach(self) -> None:
        """After the last request."""


class Server(uvicorn.Server):
    """Uvicorn that has its application close the door first: from the signal on."""

    def __init__(self, config: uvicorn.Config, app: Served, ready: str, drain_s_max: float) -> None:
        super().__init__(config)
        self.app = app
        self.ready = ready
        self.drain_s_max = drain_s_max

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not handed up: uvicorn would raise the signal again after a clean end.
        self.app.drain()
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Ended by its application they get an error they can read; uvicorn would cut them off
        # with 500.
        asyncio.get_running_loop().call_later(self.drain_s_max, self.app.end_all)
        await super().shutdown(sockets)
        await self.app.detach()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.app.attach(asyncio.get_running_loop())
        await super().startup(sockets)
        sys.stdout.write(self.ready + "\n")
        sys.stdout.flush()


def process_arguments(
    parser: argparse.ArgumentParser, *, node: str, host: str, port: int, drain_s_max: float
) -> None:
    """What any process takes, with its defaults; those not given that have none are not there."""
    add, absent = parser.add_argument, argparse.SUPPRESS
    add("--node", default=node, help="the host it runs on")
    add("--host", default=host, help="address to listen on")
    add("--port", type=int, default=port, help="port to listen on; 0 picks a free one")
    add(
        "--drain-s-max", type=float, default=drain_s_max, metavar="SECONDS",
        help="to finish in, after SIGTERM",
    )  # fmt: skip
    add(
        "--state", type=Path, default=absent, metavar="FOLDER",
        help="keeps the runtime configuration; without it a restart forgets it",
    )  # fmt: skip
    add(
        "--otlp", default=absent, metavar="URL",
        help="OTLP/HTTP endpoint for spans; without it there are none",
    )  # fmt: skip
    add(
        "--ingest-token-env", default="TRIMTAB_INGEST_TOKEN", metavar="NAME",
        help="environment variable that holds the bearer token for --otlp",
    )  # fmt: skip


def listen(name: str, host: str, port: int) -> socket.socket | None:
    """A bound socket; None, and what to do on stderr, when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP is named: else asyncio does not see it and leaves Nagle's algorithm on, and what follows
    # the head of an answer would wait for its client's delayed acknowledgement, 40 ms.
    door = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
    except OSError as error:
        door.close()
        sys.stderr.write(
            f"{name}: cannot listen on {host}:{port}: {error.strerror}. "
            "Stop what uses the port, or choose another with --port.\n"
        )
        return None
    return door


def serve(app: Served, door: socket.socket, *, ready: str, drain_s_max: float) -> None:
    """Until it is told to end and has drained, or could not within `drain_s_max` seconds."""
    server = Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=math.ceil(drain_s_max) + LAST_WORDS_S,
        ),
        app,
        ready,
        drain_s_max,
    )
    server.run(sockets=[door])
