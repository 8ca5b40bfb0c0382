"""A real HTTP server that answers as it is told."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Receiver(ThreadingHTTPServer):
    """`answers` are (status, headers, body, delay in seconds), the last one for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, str], str, float]] = [(200, {}, "ok", 0)]
        self.got: list[tuple[str, dict[str, str], Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"

    def answer(self, status: int, body: str = "", delay_s: float = 0, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.insert(-1, (status, named, body, delay_s))

    def always(self, status: int, body: str = "", delay_s: float = 0, **headers: str) -> None:
        self.answer(status, body, delay_s, **headers)
        del self.answers[-1]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, dict(self.headers), json.loads(body)))
        answers = self.server.answers
        status, headers, text, delay_s = answers.pop(0) if len(answers) > 1 else answers[0]
        time.sleep(delay_s)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a sender that was killed hears no answer
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass
