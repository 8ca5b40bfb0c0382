"""A tiny webhook receiver: what a chat service would get, printed in the terminal."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BODY_BYTES_MAX = 256 * 1024
SEEN_MAX = 1_000


class Receiver:
    """Listens on 127.0.0.1:`port` (0 picks one) and calls `heard` once per delivery id.

    A sender that was killed after posting posts again, with the same Trimtab-Delivery-Id.
    """

    def __init__(self, port: int, heard: Callable[[dict[str, Any]], None]) -> None:
        seen: dict[str, None] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                if not 0 < length <= BODY_BYTES_MAX:
                    self.send_error(413)
                    return
                body = self.rfile.read(length)
                try:
                    message = json.loads(body)
                except ValueError:
                    self.send_error(400)
                    return
                self.send_response(204)
                self.end_headers()
                delivery = self.headers.get("Trimtab-Delivery-Id")
                if delivery is None or delivery not in seen:
                    heard(message)
                if delivery is not None:
                    seen[delivery] = None
                    while len(seen) > SEEN_MAX:
                        seen.pop(next(iter(seen)))

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the message itself is what the terminal shows."""

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, name="receiver", daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
