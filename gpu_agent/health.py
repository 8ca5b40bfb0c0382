"""The agent's own little HTTP server: /healthz (JSON) and /metrics (Prometheus text)."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from gpu_agent.source import Family, Kind

CLIENT_S_MAX = 2.0


class HealthServer(HTTPServer):
    """One request at a time, each cut off after two seconds. Raises OSError when it cannot bind."""

    request_queue_size = 16

    def __init__(
        self,
        address: tuple[str, int],
        *,
        health: Callable[[], dict[str, Any]],
        families: Callable[[], Sequence[Family]],
    ) -> None:
        self.health = health
        self.families = families
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's: that asks the resolver for a name nobody needs. Reuse, because a killed
        # agent's connections hold the port for a minute, and its successor must not wait for that.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.serve_forever, name="health", daemon=True)
        thread.start()
        return thread


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_S_MAX
    server: HealthServer

    def do_GET(self) -> None:
        if self.path == "/healthz":
            # 200 says "alive": restarting the agent would not bring a lost control plane back.
            # How its parts stand is in the body.
            self._answer(200, "application/json", json.dumps(self.server.health(), indent=1))
        elif self.path == "/metrics":
            page = exposition(self.server.families())
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", page)
        else:
            message = f"{self.path[:200]}: no such page, allowed: /healthz, /metrics"
            error = {"error": {"code": "not_found", "message": message, "param": "path"}}
            self._answer(404, "application/json", json.dumps(error))

    def _answer(self, status: int, content_type: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds; they are not worth a line."""


def exposition(families: Sequence[Family]) -> str:
    """Families in the Prometheus text format; gauges and counters only."""
    lines: list[str] = []
    for family in families:
        kind = "counter" if family.kind is Kind.SUM else "gauge"
        lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {kind}"]
        for sample in family.samples:
            pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in sample.labels.items())
            labels = f"{{{pairs}}}" if pairs else ""
            lines.append(f"{family.name}{labels} {sample.value!r}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
