"""Real SDK exporters against a control plane that is stopped and started again under them."""

from __future__ import annotations

import threading
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tests.tracing.sdk import batch, over_grpc, over_http
from tests.tracing.test_durability import counted

from .houses import new_house, until

BATCH_SPANS = 20


def trace_ids(spans: list[ReadableSpan]) -> list[int]:
    return [span.context.trace_id for span in spans if span.context]


def test_what_exporters_were_acknowledged_is_there_across_a_restart(tmp_path: Path) -> None:
    house = new_house(tmp_path / "house")
    acknowledged: list[int] = []
    sent: list[int] = []
    enough = threading.Event()

    def send(exporter: SpanExporter) -> None:
        while not enough.is_set():
            spans = batch(BATCH_SPANS)
            sent.extend(trace_ids(spans))
            if exporter.export(spans) is SpanExportResult.SUCCESS:
                acknowledged.extend(trace_ids(spans))
        exporter.shutdown()

    def start() -> None:
        house.start_control_plane()
        house.wait(house.health_url("control-plane"), "control-plane")

    house.prepare()
    try:
        start()
        token = house.secrets["ingest"]
        exporters = [
            over_grpc(f"127.0.0.1:{house.ports.otlp_grpc}", token),
            over_http(house.otlp_url, token),
        ]
        senders = [threading.Thread(target=send, args=(exporter,)) for exporter in exporters]
        for sender in senders:
            sender.start()
        until(lambda: len(acknowledged) > 10 * BATCH_SPANS, 30, "acknowledged spans")
        house.processes.end("control-plane")
        before = len(acknowledged)
        start()
        until(lambda: len(acknowledged) > before + 4 * BATCH_SPANS, 60, "exporters to come back")
    finally:
        enough.set()
        for sender in senders:
            sender.join()
        house.stop()
    found = counted(tmp_path / "house" / "chdb")
    assert set(acknowledged) <= set(found) <= set(sent)
    assert set(found.values()) == {1}
