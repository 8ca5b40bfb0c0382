"""One `route` span per request, between its client's and the engine's `llm_request`."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine import otlp
from engine.router.config import RouterConfig

QUEUE_MAX = 8192
EXPORT_MAX = 512
EXPORT_EVERY_MS = 1000
TRACEPARENT = TraceContextTextMapPropagator()


class Counted(SpanExporter):
    """Counts what the receiver did not take."""

    def __init__(self, inner: SpanExporter) -> None:
        self.inner = inner
        self.dropped = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self.inner.export(spans)
        self.dropped += len(spans) * (result is not SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self.inner.shutdown()


class Tracing:
    """`begin` and `end` in the event loop; a thread of the SDK's sends the spans."""

    def __init__(self, config: RouterConfig) -> None:
        self.provider = otlp.provider(service=config.service, name=config.name, node=config.node)
        self.exporter = Counted(otlp.exporter(config.otlp_endpoint, config.ingest_token))
        self.provider.add_span_processor(
            BatchSpanProcessor(
                self.exporter,
                max_queue_size=QUEUE_MAX,
                schedule_delay_millis=EXPORT_EVERY_MS,
                max_export_batch_size=EXPORT_MAX,
            )
        )
        self.tracer = self.provider.get_tracer("router")

    def begin(self, traceparent: str, request_id: str) -> tuple[Span, str]:
        """The span, and the traceparent of what comes below it."""
        parent = TRACEPARENT.extract({"traceparent": traceparent}) if traceparent else None
        span = self.tracer.start_span(
            "route", parent, SpanKind.SERVER, {"gen_ai.request.id": request_id}
        )
        carrier: dict[str, str] = {}
        TRACEPARENT.inject(carrier, set_span_in_context(span))
        return span, carrier["traceparent"]

    def end(self, span: Span, attributes: dict[str, str | int | float], error: str) -> None:
        span.set_attributes(attributes)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def close(self) -> None:
        self.provider.shutdown()
