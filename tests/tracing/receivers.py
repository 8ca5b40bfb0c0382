"""Both receivers over a door, listening on an event loop of their own in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from tracing.ingest import Door
from tracing.receivers import otlp_grpc, otlp_http

TOKEN = "right"


@dataclass(frozen=True)
class Addresses:
    """Where to export to: an address for gRPC, a base URL for HTTP."""

    grpc: str
    http: str


@contextmanager
def listening(
    door: Door, tenant: str, others: Mapping[str, str] | None = None
) -> Iterator[Addresses]:
    """`TOKEN` writes for `tenant`, those in `others` for theirs; any other is no good."""
    tenants = {**(others or {}), TOKEN: tenant}

    async def authenticate(token: str) -> str | None:
        return tenants.get(token)

    app = otlp_http.application(authenticate, lambda: door)
    config = uvicorn.Config(app, lifespan="off", log_level="warning")
    web = uvicorn.Server(config)
    ports: list[int] = []
    ready = threading.Event()

    async def serve(sock: socket.socket) -> None:
        limit = door.limits.body_bytes_max
        grpc = otlp_grpc.OtlpGrpc(authenticate, lambda: door, body_bytes_max=limit)
        ports.append(await grpc.start("127.0.0.1", 0))
        ready.set()
        await web.serve(sockets=[sock])
        await grpc.stop()

    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(serve(sock)))
        thread.start()
        try:
            assert ready.wait(10)
            address = f"127.0.0.1:{ports[0]}"
            yield Addresses(address, f"http://127.0.0.1:{sock.getsockname()[1]}")
        finally:
            web.should_exit = True
            thread.join()
