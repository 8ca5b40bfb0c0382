"""Spans go to a real OTLP/HTTP server, and are read back from what it received."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from engine import spans
from engine.config import EngineConfig
from engine.sched.request import Finish, Request
from engine.spans import Tracing


class Collector:
    def __init__(self) -> None:
        self.status = 200
        self.exports: list[tuple[str, str, ExportTraceServiceRequest]] = []


@contextmanager
def collector() -> Iterator[tuple[str, Collector]]:
    received = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            message = ExportTraceServiceRequest.FromString(body)
            received.exports.append((self.path, self.headers["Authorization"], message))
            self.send_response(received.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def finished(finish: Finish) -> Request:
    return Request(
        id="req-1",
        tokens=np.arange(100),
        max_tokens=5,
        arrived=10.0,
        parent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        scheduled=10.5,
        chunks=[(10.5, 10.6, 64), (10.6, 10.75, 36)],
        first_token=10.75,
        finished=11.15,
        finish=finish,
        generated=5,
        config_version=7,
        error="boom" if finish is Finish.ERROR else "",
    )


def test_a_request_is_one_server_span_with_queue_prefill_and_decode_below_it() -> None:
    with collector() as (url, received):
        tracing = Tracing(EngineConfig(otlp_endpoint=url, ingest_token="secret", node="node-x"))
        tracing.record(finished(Finish.LENGTH))
        tracing.close()
    path, authorization, message = received.exports[0]
    assert (path, authorization) == ("/v1/traces", "Bearer secret")
    resource = {a.key: a.value.string_value for a in message.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "chat"
    assert resource["service.instance.id"] == "engine-0"
    assert resource["host.name"] == "node-x"
    sent = list(message.resource_spans[0].scope_spans[0].spans)
    root = next(span for span in sent if span.name == "llm_request")
    assert root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert root.end_time_unix_nano - root.start_time_unix_nano == pytest.approx(1.15e9, abs=1e3)
    attributes = {a.key: a.value for a in root.attributes}
    assert attributes["gen_ai.latency.time_to_first_token"].double_value == pytest.approx(0.75)
    assert attributes["gen_ai.latency.time_in_queue"].double_value == pytest.approx(0.5)
    assert attributes["gen_ai.latency.time_per_output_token"].double_value == pytest.approx(0.1)
    assert attributes["trimtab.config_version"].int_value == 7
    below = [span for span in sent if span.parent_span_id == root.span_id]
    assert sorted(span.name for span in below) == ["decode", "prefill", "prefill", "queue"]
    chunks = [span.attributes[0].value.int_value for span in below if span.name == "prefill"]
    assert sorted(chunks) == [36, 64]


def test_a_failed_request_has_an_error_status_with_its_reason() -> None:
    with collector() as (url, received):
        tracing = Tracing(EngineConfig(otlp_endpoint=url))
        tracing.record(finished(Finish.ERROR))
        tracing.close()
    sent = received.exports[0][2].resource_spans[0].scope_spans[0].spans
    root = next(span for span in sent if span.name == "llm_request")
    assert (root.status.code, root.status.message) == (2, "boom")


def test_what_the_receiver_does_not_take_is_counted() -> None:
    with collector() as (url, received):
        received.status = 400
        tracing = Tracing(EngineConfig(otlp_endpoint=url))
        for _ in range(3):
            tracing.record(finished(Finish.LENGTH))
        tracing.close()
    assert tracing.dropped == 3


def test_a_full_queue_counts_the_request_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spans, "QUEUE_REQUESTS_MAX", 2)
    monkeypatch.setattr(Tracing, "_run", lambda self: None)
    tracing = Tracing(EngineConfig(otlp_endpoint="http://127.0.0.1:1"))
    for _ in range(5):
        tracing.record(finished(Finish.LENGTH))
    assert tracing.dropped == 3
    tracing.exporter.shutdown()


def test_spans_follow_the_wall_clock_when_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (url, received):
        tracing = Tracing(EngineConfig(otlp_endpoint=url))
        real, ahead_ns = time.time_ns, 3_600 * 10**9
        monkeypatch.setattr(spans.time, "time_ns", lambda: real() + ahead_ns)
        request = finished(Finish.LENGTH)
        ago = time.monotonic() - request.finished
        tracing.record(request)
        tracing.close()
    sent = received.exports[0][2].resource_spans[0].scope_spans[0].spans
    ended = max(span.end_time_unix_nano for span in sent)
    assert ended == pytest.approx(real() + ahead_ns - ago * 1e9, abs=10e9)
