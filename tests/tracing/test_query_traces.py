"""The Reader over requests: the list of traces, page by page, and the heat map of latencies."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.tracing.otlp import CHAT, ns, send_spans, span, trace_request
from tracing.ingest import Door
from tracing.query import StoreReader
from tracing.store.store import Store
from tracing.types import HeatCell, Place, TraceSearch

T0 = datetime.now(UTC) - timedelta(minutes=20)
SERVER, INTERNAL = 2, 1


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def request(trace: int, second: float, lasted_s: float = 1.0, **fields: Any) -> dict[str, Any]:
    end = ns(at(second))
    start = end - round(lasted_s * 1e9)
    number = fields.pop("number", trace)
    times = {"start_time_unix_nano": start, "end_time_unix_nano": end}
    return span(number, trace=trace, **times, **fields)


def everything(**more: Any) -> TraceSearch:
    return TraceSearch(at(0), at(60), **more)


def found(reader: StoreReader, search: TraceSearch | None = None, **more: Any) -> list[int]:
    spans = reader.traces(search or everything(), **more)
    return [int(one.trace_id, 16) for one in spans]


def test_a_request_is_its_entry_span_and_counts_once(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    parent = (9).to_bytes(8, "big")
    spans = [
        request(1, 10, 3.0),
        request(1, 9, 1.0, number=21, parent_span_id=(1).to_bytes(8, "big"), kind=SERVER),
        request(1, 9, 0.5, number=22, parent_span_id=(1).to_bytes(8, "big"), kind=INTERNAL),
        request(2, 20, 1.0, parent_span_id=parent, kind=SERVER),  # its caller traces elsewhere
        request(3, 30, 1.0, parent_span_id=parent, kind=INTERNAL),
    ]
    send_spans(door, tenant, trace_request(spans))
    send_spans(door, tenant, trace_request(spans))  # the same batch again
    assert found(reader) == [2, 1]
    assert reader.traces(everything())[1].duration_ns == 3_000_000_000


def test_newest_or_slowest_first_page_by_page(door: Door, tenant: str, reader: StoreReader) -> None:
    lasted = {1: 2.0, 2: 5.0, 3: 2.0, 4: 1.0, 5: 9.0}
    send_spans(
        door, tenant, trace_request([request(i, 10 if i < 4 else 20, s) for i, s in lasted.items()])
    )
    for slowest, wanted in ((False, [4, 5, 1, 2, 3]), (True, [5, 2, 1, 3, 4])):
        seen: list[int] = []
        after = None
        while page := reader.traces(everything(), slowest=slowest, after=after, limit=2):
            seen += [int(one.trace_id, 16) for one in page]
            last = page[-1]
            after = Place(last.duration_ns if slowest else last.end_ns, last.trace_id)
        assert seen == wanted


def test_requests_are_filtered(door: Door, tenant: str, reader: StoreReader) -> None:
    spans = [
        request(1, 10, 0.5, attributes={"gen_ai.request.id": "cmpl-Abc1"}),
        request(2, 20, 1.0, status=2, attributes={"gen_ai.request.id": "cmpl-xyz"}),
        request(3, 30, 2.0),
    ]
    send_spans(door, tenant, trace_request(spans))
    send_spans(door, tenant, trace_request([request(4, 40)], {**CHAT, "service.name": "code"}))
    for search, wanted in (
        ({}, [4, 3, 2, 1]),
        ({"service": "code"}, [4]),
        ({"longer_s": 0.5}, [4, 3, 2]),
        ({"longer_s": 0.5, "until_s": 1.0}, [4, 2]),
        ({"failed": True}, [2]),
        ({"failed": False}, [4, 3, 1]),
        ({"text": "aBC"}, [1]),
        ({"text": f"{3:032x}"}, [3]),
        ({"text": "0" * 31}, [4, 3, 2, 1]),
        ({"text": "' OR 1=1 --"}, []),
        ({"text": "%"}, []),
    ):
        assert found(reader, everything(**search)) == wanted, search  # type: ignore[arg-type]
    assert found(reader, TraceSearch(at(20), at(30))) == [3]


def test_the_heat_map_counts_every_request_where_it_belongs(
    door: Door, tenant: str, reader: StoreReader
) -> None:
    spans = [
        request(1, 15, 0.1), request(2, 15, 0.1), request(3, 15.001, 0.1, status=2),
        request(4, 59, 0.1001), request(5, 60, 7.0),
    ]  # fmt: skip
    send_spans(door, tenant, trace_request(spans))
    cells = reader.latency_heat(everything(), step_s=15, bounds_s=(0.1, 1.0, 5.0))
    assert cells == [
        HeatCell(0, 0, 2, 0),
        HeatCell(1, 0, 1, 1),
        HeatCell(3, 1, 1, 0),
        HeatCell(3, 3, 1, 0),
    ]
    assert reader.latency_heat(everything(failed=True), step_s=15, bounds_s=(1.0,)) == [
        HeatCell(1, 0, 1, 1)
    ]


def test_another_tenants_requests_do_not_exist(
    store: Store, door: Door, tenant: str, reader: StoreReader
) -> None:
    # Same trace, same span, same time: all but the tenant is equal.
    send_spans(door, tenant, trace_request([request(1, 10)]))
    other = StoreReader(store, uuid.uuid4().hex)
    assert found(reader) == [1]
    assert found(other) == []
    assert other.latency_heat(everything(), step_s=15, bounds_s=(1.0,)) == []


@pytest.mark.parametrize("limit", [0, 201])
def test_a_page_is_limited(reader: StoreReader, limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit={limit}, allowed: 1 to 200"):
        reader.traces(everything(), limit=limit)
