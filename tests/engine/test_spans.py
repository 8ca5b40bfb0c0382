"""Spans go to a real OTLP/HTTP server, and are read back from what it received."""

from __future__ import annotations

import gzip
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from engine import spans
from engine.config import EngineConfig
from engine.sched.request import Finish, Request
from engine.spans import CHUNKS_MAX, WINDOWS_MAX, Tracing
from engine.steps import StepTimes
from tests.engine.conftest import EngineProcess


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
        queued=10.1,
        scheduled=10.5,
        chunks=[(10.5, 10.6, 64), (10.6, 10.75, 36)],
        first_token=10.75,
        marks=[(10.85, 2), (11.05, 4)],
        finished=11.15,
        written=11.2,
        finish=finish,
        generated=5,
        config_version=7,
        error="boom" if finish is Finish.ERROR else "",
    )


def step(number: int, sampled: float) -> StepTimes:
    began = sampled - 0.02
    times = (began, began + 0.001, began + 0.002, sampled - 0.001, sampled, sampled + 0.003)
    return StepTimes(number, *times, 7, 1, 36, 3, "graph", 9)


def read(received: Collector) -> tuple[Span, dict[str, list[Span]]]:
    """The span of a request, and those below it by name, in order of time."""
    sent = [s for _, _, m in received.exports for s in m.resource_spans[0].scope_spans[0].spans]
    (root,) = (span for span in sent if span.name == "llm_request")
    below: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(sent, key=lambda span: span.start_time_unix_nano):
        if span.parent_span_id == root.span_id:
            below[span.name].append(span)
    assert sum(map(len, below.values())) == len(sent) - 1
    return root, below


def numbers(span: Span) -> dict[str, int]:
    return {a.key: a.value.int_value for a in span.attributes if a.value.HasField("int_value")}


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def test_a_request_is_one_server_span_and_below_it_where_its_time_went() -> None:
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
    root, below = read(received)
    assert root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert seconds(root) == pytest.approx(1.2, abs=1e-6)
    attributes = {a.key: a.value for a in root.attributes}
    assert attributes["gen_ai.latency.time_to_first_token"].double_value == pytest.approx(0.75)
    assert attributes["gen_ai.latency.time_in_queue"].double_value == pytest.approx(0.4)
    assert attributes["gen_ai.latency.time_per_output_token"].double_value == pytest.approx(0.1)
    assert attributes["trimtab.config_version"].int_value == 7
    took = {name: [round(seconds(span), 6) for span in spans] for name, spans in below.items()}
    assert took == {
        "tokenize": [0.1],
        "queue": [0.4],
        "prefill": [0.1, 0.15],
        "decode": [0.1, 0.2, 0.1],
        "detokenize": [0.05],
    }
    assert [numbers(s)["trimtab.chunk_tokens"] for s in below["prefill"]] == [64, 36]
    assert [numbers(s)["trimtab.window_tokens"] for s in below["decode"]] == [1, 2, 1]


def test_chunks_and_windows_link_to_the_sampled_steps_that_ended_them() -> None:
    with collector() as (url, received):
        tracing = Tracing(EngineConfig(otlp_endpoint=url))
        request = finished(Finish.LENGTH)
        # Queued after the request that it is of, as may happen.
        for item in (step(4, 10.75), step(5, 10.85), request, step(6, 11.05), step(7, 99.0)):
            tracing.record(item)
        tracing.close()
    _, below = read(received)
    assert [numbers(s)["trimtab.step"] for s in below["engine.step"]] == [4, 5, 6]
    ids = [s.span_id for s in below["engine.step"]]
    linked = {name: [[link.span_id for link in s.links] for s in below[name]] for name in below}
    assert linked["prefill"] == [[], ids[:1]]
    assert linked["decode"] == [ids[1:2], ids[2:3], []]
    first = below["engine.step"][0]
    assert numbers(first) == {
        "trimtab.step": 4,
        "trimtab.step.requests": 8,
        "trimtab.step.decode_tokens": 7,
        "trimtab.step.prompt_tokens": 36,
        "trimtab.step.waiting": 3,
        "trimtab.config_version": 9,
    }
    phases = {a.key: a.value.double_value for a in first.attributes if a.key.endswith("_s")}
    assert phases == pytest.approx({
        "trimtab.step.schedule_s": 0.001,
        "trimtab.step.prepare_s": 0.001,
        "trimtab.step.forward_s": 0.017,
        "trimtab.step.sample_s": 0.001,
        "trimtab.step.hand_out_s": 0.003,
    })  # fmt: skip


def test_a_step_has_one_span_that_others_link_to_from_their_own_traces() -> None:
    with collector() as (url, received):
        tracing = Tracing(EngineConfig(otlp_endpoint=url))
        tracing.record(step(4, 10.75))
        for name in ("unsampled", "first", "second"):
            request = finished(Finish.LENGTH)
            sampled = "00" if name == "unsampled" else "01"
            request.parent = f"00-{name.encode().hex():0>32}-b7ad6b7169203331-{sampled}"
            tracing.record(request)
        tracing.close()
    sent = received.exports[0][2].resource_spans[0].scope_spans[0].spans
    (one,) = (span for span in sent if span.name == "engine.step")
    assert one.trace_id.hex().endswith(b"first".hex())
    links = [(s.trace_id.hex()[-12:], s.links[0].span_id) for s in sent if s.links]
    names = (b"first", b"second")
    assert links == [(name.hex().zfill(12), one.span_id) for name in names]


def test_a_long_request_has_a_bounded_number_of_spans_that_leave_nothing_out() -> None:
    request = finished(Finish.LENGTH)
    request.chunks = [(10.5 + i / 1000, 10.501 + i / 1000, 32) for i in range(250)]
    request.marks = [(10.75 + i / 10_000, i) for i in range(1, 2000)]
    request.generated = 2000
    with collector() as (url, received):
        tracing = Tracing(EngineConfig(otlp_endpoint=url))
        tracing.record(request)
        tracing.close()
    _, below = read(received)
    for name, most, tokens, total in (
        ("prefill", CHUNKS_MAX, "trimtab.chunk_tokens", 250 * 32),
        ("decode", WINDOWS_MAX, "trimtab.window_tokens", 1999),
    ):
        assert most / 2 < len(below[name]) <= most
        assert sum(numbers(span)[tokens] for span in below[name]) == total
    assert sum(map(seconds, below["decode"])) == pytest.approx(0.4, abs=1e-6)
    for before, after in pairwise(below["decode"]):
        assert before.end_time_unix_nano == after.start_time_unix_nano


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
    monkeypatch.setattr(spans, "QUEUE_MAX", 2)
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


@pytest.mark.processes
def test_an_engine_sends_one_trace_a_request_however_its_client_took_it() -> None:
    body = {"prompt": "once upon", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
    with collector() as (url, received):
        engine = EngineProcess("--otlp", url)
        try:
            for name, stream in (("whole", False), ("streamed", True)):
                answer = httpx.post(
                    f"{engine.url}/v1/completions",
                    json={**body, "stream": stream},
                    headers={"x-request-id": name},
                    timeout=60,
                )
                assert answer.status_code == 200
            with httpx.stream(
                "POST",
                f"{engine.url}/v1/completions",
                json={**body, "stream": True},
                headers={"x-request-id": "left"},
            ) as answer:
                next(answer.iter_bytes())
        finally:
            assert engine.stop() == 0
    spans = [s for _, _, m in received.exports for s in m.resource_spans[0].scope_spans[0].spans]
    for name in ("whole", "streamed", "left"):
        ids = [{a.key: a.value.string_value for a in span.attributes} for span in spans]
        (root,) = (
            span for span, of in zip(spans, ids, strict=True) if of.get("gen_ai.request.id") == name
        )
        parts = Counter(span.name for span in spans if span.trace_id == root.trace_id)
        assert parts["llm_request"] == parts["tokenize"] == parts["queue"] == parts["prefill"] == 1
        assert parts["decode"] >= 1
        assert parts["detokenize"] == (name != "left")
    # The first step after a rest is a sampled one.
    assert any(span.name == "engine.step" for span in spans)
