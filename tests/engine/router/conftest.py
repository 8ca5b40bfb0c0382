"""A router process, and small servers that misbehave as engines do."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.engine.conftest import RouterProcess

CLIENT = httpx.Client(timeout=60)
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
FLOOD = b"x" * 65_536


@pytest.fixture(scope="session", autouse=True)
def client_closed() -> Iterator[None]:
    yield
    CLIENT.close()


class Rogue:
    """Answers /health, and everything else as `mode` says. `asked` counts the clients' requests:
    those with the router's own question for a token have no x-request-id. `probed` counts the
    router's looks at it: each ends with /metrics."""

    def __init__(self) -> None:
        self.url = ""
        self.reset()

    def reset(self) -> None:
        self.mode = "ok"
        self.asked = 0
        self.probed = 0
        self.flooded = 0
        self.health = 200
        self.metrics = ""
        self.headers: dict[str, str] = {}


def answer(rogue: Rogue, call: BaseHTTPRequestHandler) -> None:
    def say(status: int, body: bytes, **headers: str) -> None:
        call.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            call.send_header(name.replace("_", "-"), value)
        call.end_headers()
        call.wfile.write(body)

    def stream(body: bytes) -> None:
        call.send_response(200)
        call.send_header("content-type", "text/event-stream")
        call.send_header("transfer-encoding", "chunked")
        call.end_headers()
        call.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")

    def flood() -> None:
        stream(EVENT)
        while True:
            call.wfile.write(b"10000\r\n" + FLOOD + b"\r\n")
            rogue.flooded += len(FLOOD)

    def error(code: str) -> bytes:
        return json.dumps({"error": {"code": code, "message": "no"}}).encode()

    {
        "ok": lambda: say(200, b'{"choices": []}', content_type="application/json"),
        "empty": lambda: say(200, b""),
        "500": lambda: say(500, error("boom")),
        "again": lambda: say(503, error("shutting_down"), retry_after="7"),
        "full": lambda: say(429, error("max_num_queued_reqs"), retry_after="7"),
        "quota": lambda: say(503, error("tenant_quota")),
        "close": lambda: None,
        "cut": lambda: stream(EVENT),
        "cut inside": lambda: stream(EVENT[:-10]),
        "flood": flood,
    }[rogue.mode]()


@contextmanager
def rogue_server(mode: str = "ok") -> Iterator[Rogue]:
    rogue = Rogue()
    rogue.mode = mode

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def end_headers(self) -> None:
            # No connection is used again, so none is just being closed when it would be.
            self.send_header("connection", "close")
            super().end_headers()

        def do_HEAD(self) -> None:
            self.send_response(rogue.health)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            body = rogue.metrics.encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            rogue.probed += 1

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if "x-request-id" in self.headers:
                rogue.asked += 1
                rogue.headers = {name.lower(): value for name, value in self.headers.items()}
            with contextlib.suppress(OSError):  # its client may go away
                answer(rogue, self)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    rogue.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield rogue
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def patch(url: str, **values: Any) -> httpx.Response:
    """Sets knobs; `weight_a` stands for `weight.a`."""
    named = {name.replace("weight_", "weight."): value for name, value in values.items()}
    etag = httpx.get(f"{url}/v1/runtime_config").headers["etag"]
    return httpx.patch(f"{url}/v1/runtime_config", headers={"if-match": etag}, json=named)


@contextmanager
def router(*arguments: str, **knobs: Any) -> Iterator[RouterProcess]:
    process = RouterProcess(*arguments)
    try:
        if knobs:
            assert patch(process.url, **knobs).status_code == 200
        yield process
    finally:
        process.stop()
