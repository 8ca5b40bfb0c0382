"""Two small real servers the agent talks to in tests: an engine and a control plane."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from gpu_agent.protocol import Command, CommandResult, SyncReply, SyncRequest


class Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer_json(self, status: int, message: object, **headers: str) -> None:
        self.answer(status, json.dumps(message).encode(), **headers)


class Server:
    """A ThreadingHTTPServer on a free port, in a thread, until the with block ends."""

    def __init__(self) -> None:
        owner = self

        class Handler(Quiet):
            def do_GET(self) -> None:
                owner.serve(self, "GET")

            def do_PATCH(self) -> None:
                owner.serve(self, "PATCH")

            def do_POST(self) -> None:
                owner.serve(self, "POST")

        class Threading(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that was killed is part of the test

        self.http = Threading(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def serve(self, request: Quiet, method: str) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


KNOBS = {
    "max_num_seqs": {"unit": "requests", "minimum": 1, "maximum": 256, "apply_class": "hot"},
    "max_wait_ms": {"unit": "ms", "minimum": 0, "maximum": 50, "apply_class": "hot"},
}
PAGE = b"""# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{finished_reason="stop",model_name="m"} 12.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 4.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 5.0
vllm:time_to_first_token_seconds_count{model_name="m"} 5.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 0.9
"""


class EngineServer(Server):
    """/v1/runtime_config with compare-and-set, and /metrics.

    `at` maps a moment ("get", "patch", "patched") to what happens then, once: "patch" is before
    the change takes effect, "patched" after it and before the answer. `changes` is each effect.
    """

    def __init__(self, *, version: int = 7) -> None:
        super().__init__()
        self.version = version
        self.values: dict[str, Any] = {"max_num_seqs": 32, "max_wait_ms": 0}
        self.changes: list[tuple[int, dict[str, Any], str]] = []
        self.at: dict[str, Callable[[], None]] = {}
        self.down = False
        self.clamp: dict[str, Any] = {}
        self.lock = threading.Lock()

    def change(self, values: dict[str, Any], by: str) -> None:
        self.values = {**self.values, **values, **self.clamp}
        self.version += 1
        self.changes.append((self.version, values, by))

    def moment(self, name: str) -> None:
        action = self.at.pop(name, None)
        if action is not None:
            action()

    def serve(self, request: Quiet, method: str) -> None:
        body = request.body()
        if self.down:
            request.answer_json(503, {"error": {"code": "down", "message": "down", "param": ""}})
        elif request.path == "/metrics":
            request.answer(200, PAGE, Content_Type="text/plain")
        elif method == "GET":
            self.moment("get")
            self.tell(request, 200)
        else:
            self.patch(request, json.loads(body))

    def patch(self, request: Quiet, values: dict[str, Any]) -> None:
        self.moment("patch")
        with self.lock:
            stale = request.headers["If-Match"] != f'"{self.version}"'
            if not stale:
                self.change(values, request.headers["X-Changed-By"])
        if stale:
            message = f"config_version is {self.version}"
            error = {"error": {"code": "stale", "message": message, "param": "If-Match"}}
            request.answer_json(412, error)
            return
        self.moment("patched")
        self.tell(request, 200)

    def tell(self, request: Quiet, status: int) -> None:
        knobs = {name: {**knob, "value": self.values[name]} for name, knob in KNOBS.items()}
        message = {
            "config_version": self.version,
            "model": "m",
            "engine": "engine-0",
            "values": self.values,
            "knobs": knobs,
        }
        request.answer_json(status, message, ETag=f'"{self.version}"')


class ControlPlane(Server):
    """Offers `commands` until each has a final result, and receives OTLP metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[Command] = []
        self.results: dict[str, list[CommandResult]] = {}
        self.requests: list[SyncRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.batch_ids: list[str] = []
        self.tokens: set[str] = set()
        self.otlp_answer: tuple[int, dict[str, str]] = (200, {})
        self.accepting = True
        self.down = False

    def serve(self, request: Quiet, method: str) -> None:
        body = request.body()
        self.tokens.add(request.headers["Authorization"])
        if self.down:
            # Some gateways answer with what they were sent.
            request.answer(503, f"no upstream for {request.headers['Authorization']}".encode())
            return
        if request.path == "/v1/metrics":
            status, headers = self.otlp_answer
            if status == 200:
                self.batch_ids.append(request.headers["X-Batch-Id"])
                message = ExportMetricsServiceRequest.FromString(gzip.decompress(body))
                self.metrics.append(message)
            request.answer(status, b"", **headers)
            return
        sync = SyncRequest.from_json(json.loads(body))
        self.requests.append(sync)
        for result in sync.results if self.accepting else []:
            self.results.setdefault(result.command_id, []).append(result)
        reply = SyncReply(
            server_time=datetime.now(UTC).isoformat(),
            commands=[c for c in self.commands if not self.final(c.command_id)],
            accepted_results=[r.command_id for r in sync.results] if self.accepting else [],
            poll_after_s=0.1,
        )
        request.answer_json(200, reply.to_json())

    def final(self, command_id: str) -> bool:
        return any(
            r.state not in ("received", "applying") for r in self.results.get(command_id, [])
        )

    def last(self, command_id: str) -> CommandResult | None:
        return next(iter(reversed(self.results.get(command_id, []))), None)
