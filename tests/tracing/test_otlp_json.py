"""OTLP/JSON, rule by rule (opentelemetry-proto 1.11, docs/specification.md, JSON Protobuf)."""

from __future__ import annotations

import base64
import gzip
import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.tracing.otlp import ns
from tests.tracing.test_otlp_http import Post, limited, post, poster
from tracing.query import StoreReader
from tracing.store.store import Store
from tracing.types import Grid

__all__ = ["post"]  # a fixture

TRACE = f"{1:032x}"
CHAT = {
    "attributes": [
        {"key": "service.name", "value": {"stringValue": "chat"}},
        {"key": "service.instance.id", "value": {"stringValue": "engine-0"}},
    ]
}


def a_span(number: int, **fields: Any) -> dict[str, Any]:
    now = time.time_ns()
    return {
        "traceId": TRACE,
        "spanId": f"{number:016x}",
        "name": "llm_request",
        "kind": 2,
        "startTimeUnixNano": str(now - 10**9),
        "endTimeUnixNano": str(now),
        **fields,
    }


def traces(*spans: Any) -> bytes:
    scope = {"scope": {"name": "s"}, "spans": spans}
    return json.dumps({"resourceSpans": [{"resource": CHAT, "scopeSpans": [scope]}]}).encode()


def metrics(*items: Any) -> bytes:
    scope = {"metrics": items}
    return json.dumps({"resourceMetrics": [{"resource": CHAT, "scopeMetrics": [scope]}]}).encode()


def said(answer: tuple[int, dict[str, str], bytes], status: int = 200) -> Any:
    """The JSON of an answer that has that status and is JSON."""
    assert (answer[0], answer[1]["content-type"]) == (status, "application/json"), answer
    return json.loads(answer[2])


def send(post: Post, body: bytes, path: str = "/v1/traces", **headers: str) -> Any:
    return post(body, path, content_type="application/json; charset=utf-8", **headers)


def partial(post: Post, body: bytes, path: str = "/v1/traces") -> Any:
    return said(send(post, body, path))["partialSuccess"]


def test_a_span_comes_back_as_it_was_sent(post: Post, reader: StoreReader) -> None:
    start = 1_790_000_000_123_456_789
    attributes = {
        "text": {"stringValue": "é"},
        "yes": {"boolValue": True},
        "int": {"intValue": "-5"},
        "number": {"intValue": 7},
        "double": {"doubleValue": 0.1},
        "nan": {"doubleValue": "NaN"},
        "bytes": {"bytesValue": base64.b64encode(b"\x00\xff").decode()},
        "list": {"arrayValue": {"values": [{"stringValue": "a"}, {"intValue": "1"}]}},
        "map": {"kvlistValue": {"values": [{"key": "k", "value": {"stringValue": "v"}}]}},
        "empty": {},
    }
    sent = a_span(
        2,
        traceId=TRACE.upper(),
        parentSpanId=f"{1:016X}",
        startTimeUnixNano=start,
        endTimeUnixNano=str(start + 1_001),
        status={"code": 2, "message": "broken"},
        attributes=[{"key": key, "value": value} for key, value in attributes.items()],
    )
    assert said(send(post, traces(sent))) == {}
    (found,) = reader.trace(TRACE)
    assert (found.span_id, found.parent_span_id) == (f"{2:016x}", f"{1:016x}")
    assert (found.name, found.kind, found.service) == ("llm_request", 2, "chat")
    assert (found.start_ns, found.duration_ns) == (start, 1_001)
    assert (found.status_code, found.status_message) == (2, "broken")
    assert found.attributes == {
        "text": "é",
        "yes": "true",
        "int": "-5",
        "number": "7",
        "double": "0.1",
        "nan": "nan",
        "bytes": "AP8=",
        "list": '["a",1]',
        "map": '{"k":"v"}',
        "empty": "",
    }


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"kind": "SPAN_KIND_CLIENT"}, 3),
        ({"kind": None}, 0),
        ({"kind": 99}, 0),
        ({"unknown": {"a": [1]}, "events": [{"name": "e"}], "links": [{}]}, 2),
        ({"parentSpanId": "", "status": {}, "attributes": None}, 2),
    ],
)
def test_unknown_names_nulls_and_names_of_enums_are_no_fault(
    post: Post, reader: StoreReader, fields: dict[str, Any], kind: int
) -> None:
    assert said(send(post, traces(a_span(1, **fields)))) == {}
    assert [span.kind for span in reader.trace(TRACE)] == [kind]


def test_gzip_and_empty_requests(post: Post, reader: StoreReader) -> None:
    assert said(send(post, gzip.compress(traces(a_span(1))), content_encoding="gzip")) == {}
    assert len(reader.trace(TRACE)) == 1
    assert said(send(post, b"{}")) == {}
    # Names in snake_case are no OTLP/JSON names: unknown, so ignored.
    assert said(send(post, b'{"resource_spans": [{}]}')) == {}


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({"traceId": "AQIDBAUGBwgJCgsMDQ4PEA=="}, "unreadable_span", "traceId 'AQIDBAUG"),
        ({"traceId": TRACE[:16]}, "invalid_trace_id", "its trace_id is '0000000000000000' in hex"),
        ({"spanId": "0" * 16}, "invalid_span_id", "not 8 bytes"),
        ({"spanId": 7}, "unreadable_span", "Expected `str | null`, got `int` - at `$.spanId`"),
        ({"startTimeUnixNano": "soon"}, "unreadable_span", "at `$.startTimeUnixNano`"),
        ({"startTimeUnixNano": -1}, "unreadable_span", "out of range"),
        ({"endTimeUnixNano": str(2**64)}, "unreadable_span", "out of range"),
        ({"endTimeUnixNano": str(2**64 - 1)}, "invalid_time", "more than 600 s ahead"),
        ({"kind": "SPAN_KIND_X"}, "unreadable_span", "'SPAN_KIND_X' is none of SPAN_KIND_{UNSPE"),
        ({"attributes": [7]}, "unreadable_span", "at `$.attributes[0]`"),
    ],
)
def test_one_bad_span_is_rejected_alone(
    post: Post, reader: StoreReader, fields: dict[str, Any], reason: str, words: str
) -> None:
    body = traces(a_span(1), a_span(2, **fields), a_span(3))
    found = partial(post, body)
    assert found["rejectedSpans"] == "1"
    assert found["errorMessage"].startswith(f"{reason}: 1; first: span 1 ")
    assert words in found["errorMessage"]
    assert [span.span_id for span in reader.trace(TRACE)] == [f"{1:016x}", f"{3:016x}"]


def test_a_value_nested_too_deeply_costs_its_span_alone(post: Post, reader: StoreReader) -> None:
    deep = '{"arrayValue": {"values": [' * 60 + '{"intValue": 1}' + "]}}" * 60
    bad = a_span(2, attributes=[{"key": "deep", "value": "HERE"}])
    body = traces(a_span(1), bad).replace(b'"HERE"', deep.encode())
    assert partial(post, body)["errorMessage"] == (
        "undecodable_span: 1; first: span 1 ('llm_request'): its status or an attribute is "
        "malformed, or nested too deeply"
    )
    assert [span.span_id for span in reader.trace(TRACE)] == [f"{1:016x}"]


def test_something_that_is_no_span_is_rejected_alone(post: Post, reader: StoreReader) -> None:
    assert partial(post, traces(a_span(1), 7, None, "x"))["rejectedSpans"] == "3"
    assert len(reader.trace(TRACE)) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "0 bytes are no OTLP/JSON request"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"resourceSpans": 7}', "at `$.resourceSpans`"),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{]}]}]}', "malformed"),
        (b'{"x": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", "recursion"),
        (b'{"resourceSpans": [{"resource": {"attributes": [7]}}]}', "at `$.resourceSpans[0].res"),
    ],
)
def test_what_is_no_request_is_400_with_a_status_in_json(
    post: Post, body: bytes, words: str
) -> None:
    status = said(send(post, body), 400)
    assert status["code"] == 3
    assert words in status["message"]
    assert status["details"][0]["@type"] == "type.googleapis.com/google.rpc.BadRequest"
    assert words in status["details"][0]["fieldViolations"][0]["description"]


def test_refusals_are_json_too(post: Post) -> None:
    status = said(send(post, traces(a_span(1)), authorization="Bearer wrong"), 401)
    assert (status["code"], status["details"]) == (16, [])


def test_a_full_queue_says_when_to_come_back(store: Store, tenant: str) -> None:
    door = limited(store, queue_bytes_max=10)
    code, headers, answer = send(poster(door, tenant), traces(a_span(1)))
    (detail,) = json.loads(answer)["details"]
    assert code == 429
    assert detail["retryDelay"] == f"{headers['retry-after']}s"
    door.close()


def test_limits_hold_before_spans_are_read(store: Store, tenant: str, reader: StoreReader) -> None:
    door = limited(store, request_spans_max=2, request_samples_max=2)
    post = poster(door, tenant)
    found = partial(post, traces(*(a_span(i) for i in range(1, 6))))
    assert found == {
        "rejectedSpans": "3",
        "errorMessage": "too_many_spans: 3; first: a request may hold 2 spans",
    }
    assert len(reader.trace(TRACE)) == 2
    points = [{"timeUnixNano": time.time_ns(), "asInt": 1}] * 5
    found = partial(post, metrics({"name": "m", "gauge": {"dataPoints": points}}), "/v1/metrics")
    assert found["rejectedDataPoints"] == "3"
    door.close()


def test_gauges_counters_and_histograms_are_read(post: Post, reader: StoreReader) -> None:
    now = datetime.now(UTC)
    at = str(ns(now))
    body = metrics(
        {"name": "depth", "gauge": {"dataPoints": [{"timeUnixNano": at, "asInt": "3"}]}},
        {
            "name": "busy",
            "unit": "s",
            "sum": {
                "dataPoints": [{"timeUnixNano": int(at), "asDouble": 1.5}],
                "aggregationTemporality": 2,
                "isMonotonic": True,
            },
        },
        {
            "name": "wait",
            "histogram": {
                "dataPoints": [
                    {
                        "timeUnixNano": at,
                        "count": "3",
                        "sum": 4.5,
                        "bucketCounts": ["1", "2"],
                        "explicitBounds": [1],
                        "attributes": [{"key": "model", "value": {"stringValue": "m"}}],
                    }
                ],
                "aggregationTemporality": "AGGREGATION_TEMPORALITY_CUMULATIVE",
            },
        },
    )
    assert said(send(post, body, "/v1/metrics")) == {}
    end = datetime.fromtimestamp(now.timestamp() + 5, UTC)
    grid = Grid(datetime.fromtimestamp(now.timestamp() - 10, UTC), end, 15)
    assert reader.gauge("depth", grid)[0].values == [3]
    assert reader.gauge("busy", grid)[0].values == [1.5]
    assert reader.gauge("wait_count", grid, where={"model": "m"})[0].values == [3]
    assert reader.gauge("wait_bucket", grid, where={"le": "1.0"})[0].values == [1]


@pytest.mark.parametrize(
    ("metric", "reason", "words"),
    [
        (
            {"name": "m", "sum": {"dataPoints": [{}], "aggregationTemporality": 1}},
            "delta_temporality",
            "point 0 of metric 'm': its temporality is not cumulative",
        ),
        (
            {"name": "m", "sum": {"dataPoints": [{}], "aggregationTemporality": "SUM"}},
            "unreadable_metric",
            "metric 'm' cannot be read: 'SUM' is none of AGGREGATION_TEMPORALITY_{",
        ),
        ({"name": "m", "summary": {"dataPoints": [{}]}}, "unsupported_summary", "not supported"),
        (
            {"name": "m", "gauge": {"dataPoints": [{"asDouble": "high"}]}},
            "unreadable_point",
            "point 0 of metric 'm' cannot be read: Expected `float | null`",
        ),
        (
            {"name": "m", "gauge": {"dataPoints": [{"asInt": 2**63, "timeUnixNano": 1}]}},
            "unreadable_point",
            "out of range",
        ),
        ({"name": "m", "gauge": {"dataPoints": [{"asInt": 1}]}}, "invalid_time", "before 1970"),
    ],
)
def test_one_bad_point_is_rejected_alone(
    post: Post, reader: StoreReader, metric: Any, reason: str, words: str
) -> None:
    good = {"name": "good", "gauge": {"dataPoints": [{"timeUnixNano": time.time_ns(), "asInt": 1}]}}
    found = partial(post, metrics(metric, good), "/v1/metrics")
    assert found["rejectedDataPoints"] == "1"
    assert found["errorMessage"].startswith(f"{reason}: 1; first: ")
    assert words in found["errorMessage"]
    assert reader.last_seen(["good"])
