"""OpenTelemetry's own SDK as a sender: its exporters, and finished spans for them."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http import trace_exporter as by_http
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult


def over_http(url: str, token: str) -> SpanExporter:
    headers = {"Authorization": f"Bearer {token}"}
    return by_http.OTLPSpanExporter(
        f"{url}/v1/traces", headers=headers, compression=Compression.Gzip
    )


def over_grpc(address: str, token: str) -> SpanExporter:
    headers = (("authorization", f"Bearer {token}"),)
    return by_grpc.OTLPSpanExporter(address, insecure=True, headers=headers)


class _Recorder(SpanExporter):
    """Keeps finished spans, to be exported in batches of our choosing."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def batch(count: int) -> list[ReadableSpan]:
    """Spans that have ended, each a trace of its own."""
    recorder = _Recorder()
    provider = TracerProvider(resource=Resource({"service.name": "chat"}))
    provider.add_span_processor(SimpleSpanProcessor(recorder))
    tracer = provider.get_tracer("test")
    for _ in range(count):
        tracer.start_span("llm_request").end()
    return recorder.spans
