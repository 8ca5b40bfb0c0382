"""OTLP/HTTP, rule by rule (opentelemetry-proto 1.11, docs/specification.md)."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from prometheus_client import CollectorRegistry

from tests.tracing.otlp import Metrics, span, trace_request
from tests.tracing.test_ingest import value
from tracing.ingest import Door
from tracing.limits import Limits
from tracing.query import StoreReader
from tracing.receivers import otlp_http, replies
from tracing.store.store import Store, StoreError, StoreLocked

Post = Callable[..., tuple[int, dict[str, str], bytes]]


def poster(door: Door, tenant: str) -> Post:
    """Sends a request through the ASGI app and returns status, headers and body."""

    async def authenticate(token: str) -> str | None:
        return tenant if token == "right" else None

    return poster_to(otlp_http.application(authenticate, lambda: door))


def poster_to(app: otlp_http.App) -> Post:

    def post(
        body: bytes,
        path: str = "/v1/traces",
        method: str = "POST",
        receive: otlp_http.Receive | None = None,
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        sent = {
            "authorization": "Bearer right",
            "content-type": "application/x-protobuf",
            "content-length": str(len(body)),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        scope = {
            "type": "http",
            "path": path,
            "method": method,
            "headers": [(k.encode(), v.encode()) for k, v in sent.items() if v],
        }
        half = len(body) // 2
        messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": body[:half], "more_body": True},
            {"type": "http.request", "body": body[half:], "more_body": False},
        ]
        answers: list[Any] = []

        async def whole() -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: Any) -> None:
            answers.append(message)

        asyncio.run(app(scope, receive or whole, send))
        start, content = answers
        received = {k.decode(): v.decode() for k, v in start["headers"]}
        assert received["content-length"] == str(len(content["body"]))
        return start["status"], received, content["body"]

    return post


@pytest.fixture
def post(door: Door, tenant: str) -> Post:
    return poster(door, tenant)


def two_spans() -> bytes:
    return trace_request([span(1), span(2)]).SerializeToString()


def test_accepted_spans_are_answered_with_an_empty_body_of_the_same_type(
    post: Post, reader: StoreReader
) -> None:
    status, headers, body = post(two_spans())
    assert (status, headers["content-type"], body) == (200, "application/x-protobuf", b"")
    assert len(reader.trace(f"{1:032x}")) == 2


@pytest.mark.parametrize("body", [b"", trace_request([]).SerializeToString()])
def test_a_request_without_spans_is_fine(post: Post, body: bytes) -> None:
    assert post(body)[0] == 200


def test_media_type_parameters_and_case_are_ignored(post: Post) -> None:
    assert post(two_spans(), content_type="Application/X-Protobuf; charset=utf-8")[0] == 200


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [
        ("gzip", gzip.compress),
        ("GZIP", lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:])),
        ("deflate", zlib.compress),
        ("identity", bytes),
    ],
)
def test_compressed_bodies_are_read(
    post: Post, reader: StoreReader, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    assert post(compress(two_spans()), content_encoding=encoding)[0] == 200
    assert len(reader.trace(f"{1:032x}")) == 2


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b"\x0a\xff", {}, "no protobuf TraceRequest"),
        (two_spans()[:-3], {}, "no protobuf TraceRequest"),
        (b"plain text, no gzip at all", {"content_encoding": "gzip"}, "no gzip"),
        (gzip.compress(b"x" * 999, mtime=0)[:-9], {"content_encoding": "gzip"}, "ends too early"),
        (b"", {"content_encoding": "br"}, "'br' is not supported; identity, gzip, deflate"),
    ],
)
def test_bad_data_is_400_with_a_status_that_says_why(
    post: Post, body: bytes, headers: dict[str, str], words: str
) -> None:
    code, answered, answer = post(body, **headers)
    status = Status.FromString(answer)
    assert (code, answered["content-type"]) == (400, "application/x-protobuf")
    assert words in status.message
    detail = BadRequest()
    assert status.details[0].Unpack(detail)
    assert words in detail.field_violations[0].description


@pytest.mark.parametrize(
    ("expected", "request_"),
    [
        (401, {"authorization": ""}),
        (401, {"authorization": "Bearer wrong"}),
        (401, {"authorization": "Basic right"}),
        (404, {"path": "/v1/logs"}),
        (405, {"method": "PUT"}),
        (415, {"content_type": "text/plain"}),
        (415, {"content_type": ""}),
    ],
)
def test_refusals_carry_a_protobuf_status(
    post: Post, reader: StoreReader, expected: int, request_: dict[str, str]
) -> None:
    code, headers, answer = post(two_spans(), **request_)
    assert code == expected
    assert Status.FromString(answer).message
    assert "retry-after" not in headers
    assert reader.trace(f"{1:032x}") == []


@pytest.mark.parametrize("broken", ["trace_id", "span_id"])
@pytest.mark.parametrize("value", [b"", bytes(8), bytes(16), b"1234", b"f" * 32])
def test_a_span_with_an_invalid_id_is_rejected_alone(
    post: Post, reader: StoreReader, broken: str, value: bytes
) -> None:
    request = trace_request([span(1), {**span(2), broken: value}, span(3)])
    code, _, answer = post(request.SerializeToString())
    partial = ExportTraceServiceResponse.FromString(answer).partial_success
    assert (code, partial.rejected_spans) == (200, 1)
    assert partial.error_message.startswith(f"invalid_{broken}: 1; first: span 1 ('llm_request'): ")
    assert repr(value.hex()) in partial.error_message
    assert [s.span_id for s in reader.trace(f"{1:032x}")] == [f"{1:016x}", f"{3:016x}"]


def limited(store: Store, **limits: Any) -> Door:
    return Door(store, Limits(**limits), registry=CollectorRegistry())


def test_too_large_is_413_whether_declared_streamed_or_decompressed(
    store: Store, tenant: str
) -> None:
    door = limited(store, body_bytes_max=1000)
    post = poster(door, tenant)
    assert post(b"x" * 1001)[0] == 413
    assert post(b"x" * 1001, content_length="")[0] == 413
    bomb = gzip.compress(bytes(10_000_000))
    code, _, answer = post(bomb[:900], content_encoding="gzip")
    assert code == 413
    assert "1000 bytes allowed" in Status.FromString(answer).message
    door.close()


def test_a_gzip_bomb_is_not_inflated_past_the_default_limit(post: Post) -> None:
    bomb = gzip.compress(bytes(70 * 1024 * 1024), 9)
    assert len(bomb) < 100_000
    assert post(bomb, content_encoding="gzip")[0] == 413


def test_a_body_that_does_not_come_to_its_end_is_504_and_gives_its_room_back(
    door: Door, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "READ_S_MAX", 0.05)
    first = True

    async def trickle() -> dict[str, Any]:
        nonlocal first
        if not first:
            await asyncio.sleep(60)
        first = False
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    code, _, answer = poster(door, tenant)(b"", receive=trickle)
    assert code == 504
    assert "not complete within 0.05 s" in Status.FromString(answer).message
    assert value(door, "trimtab_ingest_queue_bytes") == 0


def test_a_full_queue_is_429_with_a_short_retry_after(store: Store, tenant: str) -> None:
    door = limited(store, queue_bytes_max=10)
    code, headers, answer = poster(door, tenant)(two_spans())
    assert code == 429
    assert 1 <= int(headers["retry-after"]) <= 3
    assert "10 bytes" in Status.FromString(answer).message
    door.close()


class BrokenStore:
    """A store whose disk is full."""

    def insert(self, table: str, rows: Any) -> None:
        raise StoreError(f"No space left for {rows.num_rows} rows of {table}")

    def query(self, sql: str, parameters: Any = None) -> Any:
        raise StoreError("unreadable")

    def close(self) -> None:
        pass


def test_a_failing_store_is_503_with_retry_after_and_never_an_acknowledgement(
    tenant: str,
) -> None:
    door = limited(BrokenStore())
    code, headers, answer = poster(door, tenant)(two_spans())
    assert code == 503
    assert 1 <= int(headers["retry-after"]) <= 3
    assert "No space left" in Status.FromString(answer).message
    door.close()


def test_a_store_or_database_that_cannot_be_opened_now_is_503(tenant: str) -> None:
    async def authenticate(token: str) -> str | None:
        if token == "busy":
            raise OperationalError("database is locked")
        return tenant

    def open_door() -> Door:
        raise StoreLocked("The telemetry store is open in another process")

    post = poster_to(otlp_http.application(authenticate, open_door))
    for token, words in (("busy", "Tokens cannot be checked now"), ("right", "in another process")):
        code, headers, answer = post(two_spans(), authorization=f"Bearer {token}")
        assert (code, "retry-after" in headers) == (503, True)
        assert words in Status.FromString(answer).message


def test_an_unforeseen_error_is_a_500_in_protobuf_and_in_the_log(
    tenant: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def authenticate(token: str) -> str | None:
        raise ZeroDivisionError

    code, headers, answer = poster_to(otlp_http.application(authenticate, Door))(two_spans())
    assert (code, headers["content-type"]) == (500, "application/x-protobuf")
    assert "the log says more" in Status.FromString(answer).message
    assert "ZeroDivisionError" in caplog.text


def test_metrics_have_their_own_path(post: Post, reader: StoreReader) -> None:
    from datetime import UTC, datetime

    now = datetime.now(UTC)
    body = Metrics().gauge("depth", now, 3).request.SerializeToString()
    assert post(body, path="/v1/metrics")[0] == 200
    (seen,) = reader.last_seen(["depth"])["depth"].values()
    assert abs((seen - now).total_seconds()) < 0.01
