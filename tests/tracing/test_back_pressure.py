"""Real SDK exporters against a queue that is full: they wait as told, and nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from tests.tracing.receivers import TOKEN, listening
from tests.tracing.sdk import batch, over_grpc, over_http
from tests.tracing.test_ingest import SlowStore, value
from tracing.ingest import Door
from tracing.limits import Limits
from tracing.query import StoreReader
from tracing.store.store import Store
from tracing.types import Grid

BATCH_SPANS = 40


def stored(reader: StoreReader) -> float:
    now = datetime.now(UTC)
    grid = Grid(now - timedelta(minutes=5), now + timedelta(minutes=5), 600)
    shares = reader.span_share(
        grid, service="chat", name="llm_request", measure="status", threshold_s=None
    )
    return sum(share.total[0] for share in shares)


@pytest.mark.parametrize(("transport", "exporter_to"), [("http", over_http), ("grpc", over_grpc)])
def test_an_exporter_told_to_wait_comes_back_and_nothing_is_lost(
    store: Store,
    tenant: str,
    reader: StoreReader,
    transport: str,
    exporter_to: Callable[[str, str], SpanExporter],
) -> None:
    slow = SlowStore(store)
    # Room for one batch: while it waits for the store, the queue is full for the other.
    door = Door(slow, Limits(queue_spans_max=BATCH_SPANS), registry=CollectorRegistry())
    results: list[SpanExportResult] = []
    with listening(door, tenant) as at:

        def export() -> None:
            exporter = exporter_to(getattr(at, transport), TOKEN)
            results.append(exporter.export(batch(BATCH_SPANS)))
            exporter.shutdown()

        senders = [threading.Thread(target=export) for _ in range(2)]
        for sender in senders:
            sender.start()
        while not value(door, "trimtab_ingest_rejected_total", reason="queue_full"):
            assert all(sender.is_alive() for sender in senders)
            time.sleep(0.01)
        assert (results, stored(reader)) == ([], 0)
        slow.go.set()
        for sender in senders:
            sender.join()
    door.close()
    assert results == [SpanExportResult.SUCCESS] * 2
    assert stored(reader) == 2 * BATCH_SPANS
