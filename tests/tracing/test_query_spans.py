"""The Reader over spans: span_share, trace, spans."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.tracing.otlp import CHAT, ns, send_spans, span, trace_request
from tracing.ingest import Door
from tracing.query import StoreReader
from tracing.types import Grid

T0 = datetime.now(UTC) - timedelta(minutes=20)
TTFT = "gen_ai.latency.time_to_first_token"


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def ended(number: int, second: float, lasted_s: float = 1.0, **fields: Any) -> dict[str, Any]:
    end = ns(at(second))
    start = end - round(lasted_s * 1e9)
    return span(number, start_time_unix_nano=start, end_time_unix_nano=end, **fields)


def share(reader: StoreReader, measure: str, threshold_s: float | None = 0.5, **more: Any) -> Any:
    grid = Grid(at(0), at(45), 15)
    return reader.span_share(
        grid,
        service="chat",
        name="llm_request",
        measure=measure,
        threshold_s=threshold_s,
        **more,
    )


def without_nan(values: Any) -> list[float | None]:
    return [None if math.isnan(v) else v for v in values]


def test_spans_fall_into_the_window_they_end_in(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    spans = [ended(1, 0), ended(2, 0.001), ended(3, 15), ended(4, 15.001), ended(5, 45.001)]
    send_spans(door, tenant, trace_request(spans))
    (found,) = share(reader, "status", None)
    assert without_nan(found.total) == [2, 1, None]
    assert found.labels == {}


def test_good_is_at_most_the_threshold(door: Door, tenant: str, reader: StoreReader) -> None:
    spans = [ended(i, 1, lasted) for i, lasted in enumerate((0.1, 0.5, 0.500001, 2), start=1)]
    send_spans(door, tenant, trace_request(spans))
    (found,) = share(reader, "duration")
    assert (found.good[0], found.total[0]) == (2, 4)


def test_a_span_without_the_attribute_is_no_event(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    values: list[Any] = [0.25, 0.75, 1, "soon", None]
    spans = [ended(i, 1, attributes={TTFT: v}) for i, v in enumerate(values, start=1)]
    spans.append(ended(9, 20))
    send_spans(door, tenant, trace_request(spans))
    (found,) = share(reader, TTFT)
    assert (without_nan(found.good), without_nan(found.total)) == ([1, None, None], [3, None, None])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, "inf", "nan", "-1e999"])
def test_a_time_that_is_no_number_is_no_event(
    door: Door, tenant: str, reader: StoreReader, value: Any
) -> None:
    spans = [ended(i, 1, attributes={TTFT: v}) for i, v in enumerate((0.25, value), start=1)]
    send_spans(door, tenant, trace_request(spans))
    (found,) = share(reader, TTFT)
    assert (found.good[0], found.total[0]) == (1, 1)


def test_status_counts_everything_but_errors_as_good(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    spans = [ended(i, 1, status=status) for i, status in enumerate((0, 1, 2, None), start=1)]
    send_spans(door, tenant, trace_request(spans))
    (found,) = share(reader, "status", None)
    assert (found.good[0], found.total[0]) == (3, 4)


def test_shares_are_split_by_labels_and_attributes(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    second = {**CHAT, "service.instance.id": "engine-1"}
    attributes = {"tier": "gold"}
    send_spans(door, tenant, trace_request([ended(1, 1, attributes=attributes)]))
    send_spans(door, tenant, trace_request([ended(2, 1), ended(3, 1, name="queue")], second))
    found = share(reader, "duration", by=["instance", "tier", "host.name"])
    assert [s.labels for s in found] == [
        {"instance": "engine-0", "tier": "gold", "host.name": "node-0"},
        {"instance": "engine-1", "tier": "", "host.name": "node-0"},
    ]
    assert [s.total[0] for s in found] == [1, 1]


def test_a_threshold_is_needed_except_for_status(reader: StoreReader) -> None:
    with pytest.raises(ValueError, match="threshold_s=None"):
        share(reader, "duration", None)
    assert share(reader, "duration") == []


def test_a_trace_comes_back_by_start_whatever_its_services(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    send_spans(door, tenant, trace_request([ended(2, 5, 1), ended(3, 5, 0.5)]))
    send_spans(door, tenant, trace_request([ended(1, 5, 3)], {"service.name": "gateway"}))
    send_spans(door, tenant, trace_request([ended(4, 5, trace=2)]))
    found = reader.trace(f"{1:032x}")
    assert [int(s.span_id, 16) for s in found] == [1, 2, 3]
    assert [s.service for s in found] == ["gateway", "chat", "chat"]


@pytest.mark.parametrize("trace_id", [f"{99:032x}", "", "zz", "0" * 31, "' OR 1=1 --", "é" * 32])
def test_an_unknown_trace_is_empty(reader: StoreReader, trace_id: str) -> None:
    assert reader.trace(trace_id) == []


def test_spans_are_newest_or_slowest_first(door: Door, tenant: str, reader: StoreReader) -> None:
    spans = [
        ended(1, 1, 5.0, attributes={TTFT: 0.1}),
        ended(2, 2, 1.0, attributes={TTFT: 12.0}),
        ended(3, 3, 2.0, attributes={TTFT: 9.0}),
        ended(4, 4, 3.0),
    ]
    send_spans(door, tenant, trace_request(spans))

    def numbers(**more: Any) -> list[int]:
        return [int(s.span_id, 16) for s in reader.spans(at(0), at(10), **more)]

    assert numbers() == [4, 3, 2, 1]
    assert numbers(limit=2) == [4, 3]
    assert numbers(slowest=True) == [1, 4, 3, 2]
    assert numbers(slowest=True, measure=TTFT) == [2, 3, 1]
    assert numbers(slowest=True, measure=TTFT, limit=1) == [2]
    assert reader.spans(at(0), at(10), slowest=True, limit=1)[0].attributes[TTFT] == "0.1"


def test_spans_are_filtered(door: Door, tenant: str, reader: StoreReader) -> None:
    second = {**CHAT, "service.instance.id": "engine-1"}
    send_spans(door, tenant, trace_request([ended(1, 1), ended(2, 1, name="queue")]))
    send_spans(door, tenant, trace_request([ended(3, 1)], second))
    send_spans(door, tenant, trace_request([ended(4, 1)], {"service.name": "other"}))

    def numbers(**more: Any) -> list[int]:
        return sorted(int(s.span_id, 16) for s in reader.spans(at(0), at(10), **more))

    assert numbers() == [1, 2, 3, 4]
    assert numbers(service="chat") == [1, 2, 3]
    assert numbers(service="chat", name="llm_request", instance="engine-1") == [3]
    assert numbers(service="nobody") == []
    assert reader.spans(at(1), at(10)) == []
    assert len(reader.spans(at(0), at(1))) == 4


@pytest.mark.parametrize("limit", [0, 1001])
def test_the_number_of_spans_is_limited(reader: StoreReader, limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit={limit}, allowed: 1 to 1000"):
        reader.spans(at(0), at(1), limit=limit)


def test_the_newest_span_of_each_instance_of_a_service(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    ends = {"engine-0": 60, "engine-1": 0}
    for i, (instance, second) in enumerate(ends.items(), 1):
        resource = {**CHAT, "service.instance.id": instance}
        spans = [ended(i, second), ended(i + 2, second - 5), ended(i + 4, 90, name="queue")]
        send_spans(door, tenant, trace_request(spans, resource))

    second = timedelta(seconds=1)
    seen = reader.span_last_seen(service="chat", name="llm_request")
    assert at(60) - second < seen["engine-0"] <= at(60)
    assert at(0) - second < seen["engine-1"] <= at(0)
    assert len(seen) == 2
    assert reader.span_last_seen(service="chat", name="decode") == {}
