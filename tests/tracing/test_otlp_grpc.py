"""OTLP/gRPC, rule by rule (opentelemetry-proto 1.11, docs/specification.md)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from prometheus_client import CollectorRegistry

from tests.tracing.otlp import DELTA, Metrics, span, trace_request
from tests.tracing.receivers import TOKEN, listening
from tests.tracing.test_otlp_http import BrokenStore
from tracing.ingest import Door
from tracing.limits import Limits
from tracing.query import StoreReader
from tracing.receivers import otlp_grpc, replies
from tracing.store.store import Store

RIGHT = (("authorization", f"Bearer {TOKEN}"),)
TRACE = f"{1:032x}"


@pytest.fixture
def address(door: Door, tenant: str) -> Iterator[str]:
    with listening(door, tenant) as at:
        yield at.grpc


def export(address: str, request: Any, metadata: Any = RIGHT, **options: Any) -> Any:
    """The answer of TraceService/Export. Raises grpc.RpcError."""
    with grpc.insecure_channel(address) as channel:
        return TraceServiceStub(channel).Export(request, metadata=metadata, timeout=20, **options)


def refusal(address: str, request: Any, metadata: Any = RIGHT) -> tuple[Any, Status, bytes | None]:
    """Code, the Status in the details, and the RetryInfo on its own if there is one."""
    with pytest.raises(grpc.RpcError) as failed:
        export(address, request, metadata)
    error: Any = failed.value
    trailing = dict(error.trailing_metadata())
    status = Status.FromString(trailing["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    assert status.message.startswith(error.details())
    return error.code(), status, trailing.get("google.rpc.retryinfo-bin")


def test_spans_are_acknowledged_with_an_empty_response(address: str, reader: StoreReader) -> None:
    answer = export(address, trace_request([span(1), span(2)]))
    assert not answer.HasField("partial_success")
    assert len(reader.trace(TRACE)) == 2


def test_gzip_is_read(address: str, reader: StoreReader) -> None:
    spans = [span(i, attributes={"text": "x" * 500}) for i in range(1, 101)]
    export(address, trace_request(spans), compression=grpc.Compression.Gzip)
    assert len(reader.trace(TRACE)) == 100


def test_a_request_without_spans_is_fine(address: str) -> None:
    assert not export(address, ExportTraceServiceRequest()).HasField("partial_success")


def test_metrics_have_their_own_service(address: str, reader: StoreReader) -> None:
    now = datetime.now(UTC)
    metrics = Metrics().gauge("depth", now, 3).counter("c", now, 1, DELTA)
    with grpc.insecure_channel(address) as channel:
        stub = MetricsServiceStub(channel)
        partial = stub.Export(metrics.request, metadata=RIGHT).partial_success
    assert partial.rejected_data_points == 1
    assert partial.error_message == (
        "delta_temporality: 1; first: point 0 of metric 'c': its temporality is not cumulative "
        "(2), the only one supported"
    )
    assert reader.last_seen(["depth"])


def test_one_bad_span_is_rejected_alone(address: str, reader: StoreReader) -> None:
    request = trace_request([span(1), {**span(2), "trace_id": b"short"}, span(3)])
    partial = export(address, request).partial_success
    assert partial.rejected_spans == 1
    assert partial.error_message.startswith("invalid_trace_id: 1; first: span 1 ('llm_request')")
    assert [s.span_id for s in reader.trace(TRACE)] == [f"{1:016x}", f"{3:016x}"]


@pytest.mark.parametrize(
    "metadata",
    [(), (("authorization", "Bearer wrong"),), (("authorization", f"Basic {TOKEN}"),)],
)
def test_without_a_good_token_it_is_unauthenticated_and_final(
    address: str, metadata: Any, reader: StoreReader
) -> None:
    code, status, retry = refusal(address, trace_request([span(1)]), metadata)
    assert (code, retry) == (grpc.StatusCode.UNAUTHENTICATED, None)
    assert "Authorization: Bearer <token>" in status.message
    assert reader.trace(TRACE) == []


def test_undecodable_bytes_are_an_invalid_argument(address: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(otlp_grpc.TRACES)(b"\x0a\xff", metadata=RIGHT)
    error: Any = failed.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    detail = BadRequest()
    assert status.details[0].Unpack(detail)
    assert "no protobuf TraceRequest" in detail.field_violations[0].description


def test_a_call_without_a_message_is_an_invalid_argument(address: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as failed:
        channel.stream_unary(otlp_grpc.TRACES)(iter(()), metadata=RIGHT)
    error: Any = failed.value
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "The call holds no message",
    )


def test_what_is_not_served_is_unimplemented(address: str) -> None:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as failed:
        LogsServiceStub(channel).Export(ExportLogsServiceRequest(), metadata=RIGHT)
    error: Any = failed.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_too_large_is_exhausted_without_retry_info_also_decompressed(
    store: Store, tenant: str, reader: StoreReader, compression: grpc.Compression
) -> None:
    door = Door(store, Limits(body_bytes_max=20_000), registry=CollectorRegistry())
    large = trace_request([span(1, attributes={"text": "x" * 50_000})])
    with listening(door, tenant) as at, pytest.raises(grpc.RpcError) as failed:
        export(at.grpc, large, compression=compression)
    error: Any = failed.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "google.rpc.retryinfo-bin" not in dict(error.trailing_metadata())
    assert reader.trace(TRACE) == []
    door.close()


def retry_delay_s(status: Status, alone: bytes | None) -> int:
    """The wait asked for, which details and metadata must agree on."""
    assert alone is not None
    detail = RetryInfo()
    assert status.details[0].Unpack(detail)
    assert detail == RetryInfo.FromString(alone)
    return detail.retry_delay.seconds


def test_a_full_queue_is_exhausted_with_a_short_wait(store: Store, tenant: str) -> None:
    door = Door(store, Limits(queue_bytes_max=10), registry=CollectorRegistry())
    with listening(door, tenant) as at:
        code, status, retry = refusal(at.grpc, trace_request([span(1)]))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "10 bytes" in status.message
    assert 1 <= retry_delay_s(status, retry) <= 3
    door.close()


def test_a_door_that_is_closing_or_cannot_store_is_unavailable(store: Store, tenant: str) -> None:
    closed = Door(store, registry=CollectorRegistry())
    closed.close()
    broken = Door(BrokenStore(), registry=CollectorRegistry())
    for door, words in ((closed, "The door is closing"), (broken, "No space left")):
        with listening(door, tenant) as at:
            code, status, retry = refusal(at.grpc, trace_request([span(1)]))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert words in status.message
        assert 1 <= retry_delay_s(status, retry) <= 3
    broken.close()


def test_a_tenant_that_keeps_messages_back_does_not_keep_the_others_out(
    door: Door, tenant: str, reader: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp_grpc, "PLACE_S_MAX", 0.5)
    theirs = (("authorization", "Bearer theirs"),)
    over = threading.Event()

    def never() -> Iterator[bytes]:
        over.wait(20)
        yield b""

    with (
        listening(door, tenant, {"theirs": "somebody else"}) as at,
        grpc.insecure_channel(at.grpc) as channel,
    ):
        export_slowly = channel.stream_unary(otlp_grpc.TRACES)
        held = [export_slowly.future(never(), metadata=theirs) for _ in range(otlp_grpc.READS_MAX)]
        try:
            # One too many of theirs, told when to come back: the others have their places.
            refused = _done(held)
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            trailing = dict(refused.trailing_metadata())
            status = Status.FromString(trailing["grpc-status-details-bin"])
            assert "3 of one tenant" in status.message
            assert 1 <= retry_delay_s(status, trailing.get("google.rpc.retryinfo-bin")) <= 3
            export(at.grpc, trace_request([span(1)]))
            assert len(reader.trace(TRACE)) == 1
        finally:
            over.set()
        answers = [call.exception(timeout=10) for call in held if call is not refused]
        assert answers == [None] * otlp_grpc.READS_PER_TENANT_MAX
        # The places are free again.
        export(at.grpc, trace_request([span(2)]), theirs)


def _done(calls: list[Any]) -> Any:
    """The first that was answered within 10 s."""
    done = threading.Event()
    for call in calls:
        call.add_done_callback(lambda _: done.set())
    assert done.wait(10)
    return next(call for call in calls if call.done())


def test_a_taken_port_is_named(address: str, door: Door) -> None:
    host, _, port = address.rpartition(":")

    async def nobody(token: str) -> str | None:
        return None

    async def start() -> None:
        await otlp_grpc.OtlpGrpc(nobody, lambda: door).start(host, int(port))

    with pytest.raises(OSError, match=f"cannot listen on {address} for OTLP/gRPC"):
        asyncio.run(start())


def test_of_one_tenant_only_so_many_wait_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_grpc, "PLACE_S_MAX", 0.1)
    monkeypatch.setattr(otlp_grpc, "WAITING_PER_TENANT_MAX", 2)

    async def crowd() -> None:
        places = otlp_grpc._Places()
        go = asyncio.Event()

        async def read(tenant: str) -> str:
            try:
                async with places.one(tenant):
                    await go.wait()
            except replies.Refused:
                return "refused"
            return "read"

        reading = [asyncio.ensure_future(read("a")) for _ in range(6)]
        await asyncio.sleep(0)
        assert await reading[5] == "refused"  # at once: two wait already
        assert [await reading[n] for n in (3, 4)] == ["refused"] * 2  # after PLACE_S_MAX
        other = asyncio.ensure_future(read("b"))
        go.set()
        assert await asyncio.gather(*reading[:3], other) == ["read"] * 4
        assert not places._shares

    asyncio.run(crowd())
