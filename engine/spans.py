"""One `llm_request` span per request, as vLLM names it, with queue, prefill and decode below it.

The step thread only queues the ended request; a thread of its own makes the spans and sends them
(OTLP/HTTP). There is one queue, so there is one place where spans are lost, and they are counted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.config import EngineConfig
from engine.sched.request import Finish, Request

QUEUE_REQUESTS_MAX = 8192
EXPORT_REQUESTS_MAX = 128
EXPORT_EVERY_S = 1.0
EXPORT_S_MAX = 10.0  # with the exporter's own retries
FLUSH_S_MAX = 3.0


class Ended(SpanProcessor):
    """Keeps the spans that ended until they are sent; of one thread."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class Tracing:
    """`record` from any thread, never blocks; `close` sends what is left, within FLUSH_S_MAX.

    `dropped` counts requests whose spans found the queue full or were not taken by the receiver.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.model_name = config.model_name
        self.dropped = 0
        self.epoch_ns = 0
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self.provider = TracerProvider(
            resource=Resource.create(
                {
                    "service.name": config.service,
                    "service.instance.id": config.name,
                    "host.name": config.node,
                }
            ),
            shutdown_on_exit=False,
        )
        token = config.ingest_token
        self.exporter = OTLPSpanExporter(
            endpoint=config.otlp_endpoint.rstrip("/") + "/v1/traces",
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=EXPORT_S_MAX,
        )
        self.ended = Ended()
        self.provider.add_span_processor(self.ended)
        self.tracer = self.provider.get_tracer("engine")
        self.queue: queue.Queue[Request | None] = queue.Queue(QUEUE_REQUESTS_MAX)
        self.thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self.thread.start()

    def record(self, request: Request) -> None:
        try:
            self.queue.put_nowait(request)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put(None, timeout=FLUSH_S_MAX)
        self.thread.join(FLUSH_S_MAX)
        self.exporter.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        while (request := self.queue.get()) is not None:
            count, deadline = 0, time.monotonic() + EXPORT_EVERY_S
            while request is not None:
                self._request(request)
                count += 1
                if count == EXPORT_REQUESTS_MAX:
                    break
                try:
                    request = self.queue.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    break
            self._export(count)
            if request is None:
                return

    def _export(self, requests: int) -> None:
        spans, self.ended.spans = self.ended.spans, []
        if spans and self.exporter.export(spans) is not SpanExportResult.SUCCESS:
            self.dropped += requests

    def _ns(self, monotonic_s: float) -> int:
        return self.epoch_ns + int(monotonic_s * 1e9)

    def _request(self, request: Request) -> None:
        # Anew for each request: the wall clock may have been set since the last one.
        self.epoch_ns = time.time_ns() - time.monotonic_ns()
        parent = None
        if request.parent:
            parent = TraceContextTextMapPropagator().extract({"traceparent": request.parent})
        span = self.tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=self._ns(request.arrived),
            attributes={
                "gen_ai.request.id": request.id,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.response.model": self.model_name,
                "gen_ai.usage.prompt_tokens": request.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
                "gen_ai.usage.completion_tokens": request.generated,
                "gen_ai.response.finish_reasons": [str(request.finish)],
                "trimtab.config_version": request.config_version,
                **latencies(request),
            },
        )
        if request.finish is Finish.ERROR:
            span.set_status(Status(StatusCode.ERROR, request.error))
        below = set_span_in_context(span)
        self._child("queue", below, request.arrived, request.scheduled or request.finished)
        for began, ended, tokens in request.chunks:
            self._child("prefill", below, began, ended, tokens)
        if request.first_token:
            self._child("decode", below, request.first_token, request.finished)
        span.end(self._ns(request.finished))

    def _child(
        self, name: str, context: Context, began: float, ended: float, tokens: int = 0
    ) -> None:
        attributes = {"trimtab.chunk_tokens": tokens} if tokens else None
        span = self.tracer.start_span(
            name, context=context, start_time=self._ns(began), attributes=attributes
        )
        span.end(self._ns(ended))


def latencies(request: Request) -> dict[str, float]:
    """vLLM's gen_ai.latency attributes, in seconds; those that do not exist are left out."""
    values = {
        "e2e": request.finished - request.arrived,
        "time_in_queue": request.queue_s,
    }
    if request.scheduled:
        values["time_in_model_prefill"] = request.prefill_s
        values["time_in_model_inference"] = request.finished - request.scheduled
    if request.first_token:
        values["time_to_first_token"] = request.first_token - request.arrived
        values["time_in_model_decode"] = request.decode_s
    if request.generated > 1:
        values["time_per_output_token"] = request.time_per_output_token_s
    return {f"gen_ai.latency.{name}": value for name, value in values.items()}
