"""The door in: limits, duplicates, group commit, back-pressure, tenants."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.tracing.otlp import DELTA, Metrics, ns, send_metrics, send_spans, span, trace_request
from tracing.attributes import AttributeDecoder
from tracing.ingest import Door, Draining, QueueFull
from tracing.limits import MIB, Limits
from tracing.memo import Memo
from tracing.query import StoreReader
from tracing.spans import SpanDecoder
from tracing.store.store import Store
from tracing.types import Grid
from tracing.wire import Undecodable, key_value

TRACE = f"{1:032x}"


def value(door: Door, name: str, **labels: str) -> float:
    """A sample of the door's own meters, 0 when it was never touched."""
    for metric in (
        door.meters.spans,
        door.meters.samples,
        door.meters.rejected,
        door.meters.trimmed,
        door.meters.commit_seconds,
        door.meters.queue_bytes,
        door.meters.queue_spans,
    ):
        for family in metric.collect():
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
    return 0.0


def test_attributes_become_text_in_shortest_form(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    attributes = {
        "text": "é",
        "empty": "",
        "none": None,
        "yes": True,
        "no": False,
        "int": 7,
        "negative": -(2**63),
        "big": 2**63 - 1,
        "float": 0.1,
        "whole": 3.0,
        "small": 1e-7,
        "bytes": b"\x00\xff",
        "list": ["a", 'b"'],
        "long": "x" * 1000,
        "k" * 200: "v",
    }
    send_spans(door, tenant, trace_request([span(1, attributes=attributes)]))
    stored = dict(reader.trace(TRACE)[0].attributes)
    assert stored == {
        "text": "é",
        "empty": "",
        "none": "",
        "yes": "true",
        "no": "false",
        "int": "7",
        "negative": str(-(2**63)),
        "big": str(2**63 - 1),
        "float": "0.1",
        "whole": "3",
        "small": "1e-7",
        "bytes": "AP8=",
        "list": '["a","b\\""]',
        "long": "x" * 1000,
        "k" * 200: "v",
    }


def test_a_span_comes_back_as_it_was_sent(door: Door, tenant: str, reader: StoreReader) -> None:
    start = 1_790_000_000_123_456_789
    sent = span(
        2,
        parent_span_id=(1).to_bytes(8, "big"),
        name="prefill",
        kind=1,
        start_time_unix_nano=start,
        end_time_unix_nano=start + 1_001,
        status=2,
        attributes={"tokens": 512},
    )
    send_spans(door, tenant, trace_request([sent]))
    (found,) = reader.trace(TRACE.upper())
    assert (found.span_id, found.parent_span_id) == (f"{2:016x}", f"{1:016x}")
    assert (found.name, found.kind, found.status_code) == ("prefill", 1, 2)
    assert (found.start_ns, found.duration_ns, found.end_ns) == (start, 1_001, start + 1_001)
    assert (found.service, found.instance) == ("chat", "engine-0")
    assert found.attributes == {"tokens": "512"}
    assert found.resource["host.name"] == "node-0"


def test_a_span_that_ends_before_it_starts_lasts_zero(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    send_spans(door, tenant, trace_request([span(1, end_time_unix_nano=5)]))
    assert reader.trace(TRACE)[0].duration_ns == 0
    assert value(door, "trimtab_ingest_trimmed_total", reason="end_before_start") == 1


def test_one_number_has_one_text_however_it_travels() -> None:
    numbers = [1e-7, -1e-7, 0.1, 3.0, 1e16, 1.5e300, 123456789012345680.0, math.inf, math.nan]
    request = trace_request([span(1, attributes={str(i): n for i, n in enumerate(numbers)})])
    sent_span = request.resource_spans[0].scope_spans[0].spans[0]
    sent = [attribute.SerializeToString() for attribute in sent_span.attributes]
    _, fast = AttributeDecoder(Limits()).decode(sent, Counter())
    assert fast.to_pylist() == [key_value(raw)[1] for raw in sent]


def test_a_time_far_ahead_or_that_fits_no_clock_costs_that_span_only(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    ahead = ns(datetime.now(UTC) + timedelta(minutes=11))
    spans = [span(1), span(2, end_time_unix_nano=2**64 - 1), span(3, end_time_unix_nano=ahead)]
    (accepted,) = send_spans(door, tenant, trace_request(spans))
    assert accepted.reasons == {"invalid_time": 2}
    assert len(reader.trace(TRACE)) == 1


def test_invalid_utf8_costs_a_replacement_character_only(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    raw = trace_request([span(1, attributes={"key": "QQ"}, name="ZZ")]).SerializeToString()
    raw = raw.replace(b"QQ", b"\xff\xfe").replace(b"ZZ", b"a\xff")

    async def send() -> None:
        with door.room(tenant) as room:
            await door.traces(tenant, lambda: raw, room)

    asyncio.run(send())
    (found,) = reader.trace(TRACE)
    assert (found.name, found.attributes) == ("a\ufffd", {"key": "\ufffd\ufffd"})


def test_limits_trim_and_count(store: Store, tenant: str, reader: StoreReader) -> None:
    limits = Limits(span_attributes_max=2, value_chars_max=5, request_spans_max=2)
    door = Door(store, limits, registry=CollectorRegistry())
    attributes = {"a": "123456789", "b": "2", "c": "3"}
    spans = [span(1, attributes=attributes), span(2), span(3)]
    (accepted,) = send_spans(door, tenant, trace_request(spans))
    assert accepted.reasons == {"too_many_spans": 1}
    assert reader.trace(TRACE)[0].attributes == {"a": "12345", "b": "2"}
    assert value(door, "trimtab_ingest_trimmed_total", reason="too_many_attributes") == 1
    assert value(door, "trimtab_ingest_trimmed_total", reason="value_too_long") == 1
    assert value(door, "trimtab_ingest_rejected_total", reason="too_many_spans") == 1
    assert value(door, "trimtab_ingest_spans_total") == 2
    door.close()


def test_samples_are_limited_within_one_metric(store: Store, tenant: str) -> None:
    door = Door(store, Limits(request_samples_max=5), registry=CollectorRegistry())
    metrics = Metrics()
    gauge = metrics._metrics.add(name="g").gauge
    for i in range(12):
        gauge.data_points.add(time_unix_nano=ns(datetime.now(UTC)), as_double=i)
    (accepted,) = send_metrics(door, tenant, metrics)
    assert accepted.reasons == {"too_many_samples": 7}
    assert value(door, "trimtab_ingest_samples_total") == 5
    door.close()


def test_what_decoders_remember_is_limited_in_bytes() -> None:
    memo: Memo[int, str] = Memo(bytes_max=100, item_bytes_max=40)
    memo.keep(1, "too large", 41)
    assert memo.get(1) is None
    for key in range(2, 5):
        memo.keep(key, "kept", 40)
        assert memo.bytes <= 100
    assert [memo.get(key) for key in (2, 3, 4)] == [None, None, "kept"]


def test_long_texts_are_not_remembered() -> None:
    decoder = SpanDecoder(Limits(memo_bytes_max=MIB))
    for i in range(20):
        prompt = {"prompt": f"{i}" + "x" * 70_000}
        decoder.decode("t", trace_request([span(1, attributes=prompt)]).SerializeToString())
    assert decoder._attributes._unusual.bytes == 0


def test_a_batch_sent_again_counts_once(door: Door, tenant: str, reader: StoreReader) -> None:
    now = datetime.now(UTC)
    spans = trace_request([span(i) for i in range(1, 11)])
    metrics = [Metrics().counter("c", now - timedelta(seconds=20 - i), i) for i in range(10)]
    for _ in range(2):
        send_spans(door, tenant, spans)
        send_metrics(door, tenant, *metrics)
    end = now + timedelta(seconds=5)
    grid = Grid(end - timedelta(seconds=60), end, 60)
    (share,) = reader.span_share(
        grid, service="chat", name="llm_request", measure="status", threshold_s=None
    )
    assert share.total == [10]
    assert len(reader.trace(TRACE)) == 10
    assert len(reader.spans(grid.start, end)) == 10
    assert len(reader.spans(grid.start, end, slowest=True)) == 10
    assert reader.increase("c", grid)[0].values == [9]
    assert reader.gauge("c", grid)[0].values == [4.5]


def test_concurrent_requests_share_commits(door: Door, tenant: str, reader: StoreReader) -> None:
    requests = [trace_request([span(i)]) for i in range(1, 51)]
    send_spans(door, tenant, *requests)
    assert len(reader.trace(TRACE)) == 50
    assert value(door, "trimtab_ingest_commit_seconds_count") < 25


class SlowStore:
    """A store whose inserts wait until they are let go."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.go = threading.Event()

    def insert(self, table: str, rows: Any) -> None:
        self.go.wait(10)
        self.store.insert(table, rows)

    def query(self, sql: str, parameters: Any = None) -> Any:
        return self.store.query(sql, parameters)

    def close(self) -> None:
        pass


def test_a_full_queue_refuses_and_then_recovers(
    store: Store, tenant: str, reader: StoreReader
) -> None:
    slow = SlowStore(store)
    door = Door(slow, Limits(queue_spans_max=5), registry=CollectorRegistry())

    async def one(first: int) -> None:
        body = trace_request([span(first + i) for i in range(3)]).SerializeToString()
        with door.room(tenant) as room:
            room.take(size_bytes=len(body))
            await door.traces(tenant, lambda: body, room)

    async def story() -> None:
        accepted = asyncio.create_task(one(1))
        while value(door, "trimtab_ingest_queue_spans") < 3:
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFull, match=r"3 rows of yours are .* free of [0-9]+ bytes, 5 rows"):
            await one(11)
        assert not accepted.done()
        slow.go.set()
        await accepted
        await one(21)

    asyncio.run(story())
    assert len(reader.trace(TRACE)) == 6
    assert value(door, "trimtab_ingest_queue_spans") == 0
    assert value(door, "trimtab_ingest_queue_bytes") == 0
    assert value(door, "trimtab_ingest_rejected_total", reason="queue_full") == 1
    door.close()


@pytest.mark.parametrize("kind", ["size_bytes", "rows"])
def test_one_tenant_never_fills_the_queue_for_the_others(store: Store, kind: str) -> None:
    limits = Limits(queue_bytes_max=1_000, queue_spans_max=1_000)
    door = Door(store, limits, registry=CollectorRegistry())

    def fill(tenant: str) -> int:
        """How much it may take, ten at a time, until it is refused."""
        room = door.room(tenant)
        for taken in range(0, 1_000, 10):
            try:
                room.take(**{kind: 10})
            except QueueFull:
                return taken
        return 1_000

    assert [fill(name) for name in ("first", "second", "third", "fourth")] == [750, 180, 50, 10]
    with door.room("fifth") as room:
        door.release("first", **{kind: 750, "rows" if kind == "size_bytes" else "size_bytes": 0})
        room.take(**{kind: 10})
    assert fill("first") > 300, "and what is given back is shared out anew"
    door.close()


def test_a_request_larger_than_the_queue_passes_alone(
    store: Store, tenant: str, reader: StoreReader
) -> None:
    door = Door(store, Limits(queue_spans_max=5), registry=CollectorRegistry())
    send_spans(door, tenant, trace_request([span(i) for i in range(1, 9)]))
    assert len(reader.trace(TRACE)) == 8
    door.close()


def test_closing_makes_durable_what_waits_and_refuses_the_rest(
    store: Store, tenant: str, reader: StoreReader
) -> None:
    door = Door(store, registry=CollectorRegistry())
    send_spans(door, tenant, trace_request([span(1)]))
    door.close()
    door.close()
    with pytest.raises(Draining):
        send_spans(door, tenant, trace_request([span(2)]))
    assert len(reader.trace(TRACE)) == 1


def test_tenants_never_see_each_other(door: Door, store: Store, tenant: str) -> None:
    now = datetime.now(UTC)
    other = f"{tenant}-other"
    for name, number in ((tenant, 1.0), (other, 100.0)):
        send_spans(door, name, trace_request([span(1, name=name)]))
        send_metrics(door, name, Metrics().gauge("depth", now, number))
    grid = Grid(now - timedelta(seconds=10), now + timedelta(seconds=5), 15)
    for name, number in ((tenant, 1.0), (other, 100.0)):
        reader = StoreReader(store, name)
        assert [s.name for s in reader.trace(TRACE)] == [name]
        assert [s.name for s in reader.spans(grid.start, grid.end)] == [name]
        assert [s.values for s in reader.gauge("depth", grid)] == [[number]]
    nobody = StoreReader(store, f"{tenant}' OR 1=1 --")
    assert nobody.trace(TRACE) == []
    assert nobody.last_seen(["depth"]) == {}


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (Metrics().counter("c", datetime.now(UTC), 1, DELTA), "delta_temporality"),
        (Metrics().gauge("g", datetime.fromtimestamp(0, UTC), 1), "invalid_time"),
        (Metrics().gauge("g", datetime.now(UTC) + timedelta(days=1), 1), "invalid_time"),
        (Metrics().gauge("g", datetime.now(UTC), math.inf), "value_too_large"),
        (Metrics().counter("c", datetime.now(UTC), -math.inf), "value_too_large"),
        (Metrics().gauge("g", datetime.now(UTC), 1.1e30), "value_too_large"),
        (Metrics().gauge("", datetime.now(UTC), 1), "invalid_metric_name"),
        (
            Metrics().gauge("g", datetime.now(UTC), 1, **{f"l{i}": "v" for i in range(40)}),
            "too_many_labels",
        ),
        (Metrics().histogram("h", datetime.now(UTC), [1, 2], [1, 1], 1), "invalid_buckets"),
        (Metrics().histogram("h", datetime.now(UTC), [2, 1], [1, 1, 1], 1), "invalid_buckets"),
        (Metrics().histogram("h", datetime.now(UTC), range(200), [1] * 201, 1), "too_many_buckets"),
    ],
)
def test_points_that_cannot_be_kept_are_rejected_with_the_reason(
    door: Door, tenant: str, metrics: Metrics, reason: str
) -> None:
    metrics.gauge("kept", datetime.now(UTC), 1)
    (accepted,) = send_metrics(door, tenant, metrics)
    assert accepted.reasons == {reason: 1}
    assert value(door, "trimtab_ingest_samples_total") == 1


def test_summaries_and_exponential_histograms_are_said_to_be_unsupported(
    door: Door, tenant: str
) -> None:
    metrics = Metrics()
    summary = metrics._metrics.add(name="s").summary
    summary.data_points.add(time_unix_nano=1)
    exponential = metrics._metrics.add(name="e").exponential_histogram
    exponential.data_points.add(time_unix_nano=1)
    (accepted,) = send_metrics(door, tenant, metrics)
    assert accepted.reasons == {
        "unsupported_summary": 1,
        "unsupported_exponential_histogram": 1,
    }


@pytest.mark.parametrize("total", [math.inf, -math.inf, math.nan, 1e308])
def test_one_infinite_observation_costs_a_histogram_its_sum_only(
    door: Door, tenant: str, reader: StoreReader, total: float
) -> None:
    now = datetime.now(UTC)
    for count in (1, 3):
        at = now - timedelta(seconds=20 - 5 * count)
        send_metrics(door, tenant, Metrics().histogram("h", at, [0.5], [count, count], total))
    (found,) = reader.histogram("h", Grid(now - timedelta(seconds=60), now, 60))
    assert found.counts == [[2.0, 2.0]]
    assert math.isnan(found.sums[0])


def test_points_without_a_value_are_skipped_not_rejected(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    now = datetime.now(UTC)
    metrics = Metrics().gauge("g", now, float("nan")).gauge("g", now, 1, flags=1)
    (accepted,) = send_metrics(door, tenant, metrics)
    assert accepted.rejected == 0
    assert reader.last_seen(["g"]) == {}


def test_undecodable_bytes_raise_and_leave_the_queue_empty(door: Door, tenant: str) -> None:
    async def send() -> None:
        with door.room(tenant) as room:
            room.take(size_bytes=2)
            await door.metrics(tenant, lambda: b"\x0a\xff", room)

    with pytest.raises(Undecodable, match="2 bytes are no protobuf MetricsRequest"):
        asyncio.run(send())
    assert value(door, "trimtab_ingest_queue_bytes") == 0
