"""OTLP over gRPC: TraceService/Export and MetricsService/Export, on the event loop of the door.

Export is unary, yet served as a stream of one request: so the token is checked, and a place to
read in waited for, before the first byte of a message is taken from the connection. HTTP/2's flow
control holds back the rest. Statuses follow the OTLP specification 1.11 (docs/specification.md,
OTLP/gRPC): the client comes back after RESOURCE_EXHAUSTED only because RetryInfo says when.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from tracing.ingest import Accepted, Door
from tracing.limits import Limits
from tracing.receivers import replies
from tracing.receivers.replies import Authenticate, Code, Refused

_SERVICES = "/opentelemetry.proto.collector."
TRACES = f"{_SERVICES}trace.v1.TraceService/Export"
METRICS = f"{_SERVICES}metrics.v1.MetricsService/Export"

READS_MAX = 4  # messages on their way in at a time, each up to body_bytes_max
READS_PER_TENANT_MAX = 3  # so that no tenant keeps all others waiting
WAITING_PER_TENANT_MAX = 64  # each holds up to WINDOW_BYTES of its message meanwhile
PLACE_S_MAX = 4.0  # for a place; what an exporter has left of its 10 s is enough to come back in
STREAMS_MAX = 100  # calls at a time on one connection; further ones wait at the client
WINDOW_BYTES = 256 * 1024
METADATA_BYTES_MAX = 16 * 1024
DRAIN_S_MAX = 3.0
# A status travels in one header line, percent-encoded; the whole of it is in the details.
_MESSAGE_CHARS_MAX = 300

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class OtlpGrpc:
    """The server. Use from the one event loop that feeds the door.

    `authenticate` maps a bearer token (metadata `authorization`) to a tenant id; `door` is called
    at every export.
    """

    def __init__(
        self,
        authenticate: Authenticate,
        door: Callable[[], Door],
        *,
        body_bytes_max: int = Limits.body_bytes_max,
    ) -> None:
        self._authenticate = authenticate
        self._door = door
        self._bytes_max = body_bytes_max
        self._places = _Places()
        self._storing: set[asyncio.Task[Accepted]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen, on a free port when `port` is 0; returns the port. Raises OSError when taken."""
        self._server = grpc.aio.server(
            handlers=[_Exports(self._export)],
            options=[
                # Also after decompression
                ("grpc.max_receive_message_length", self._bytes_max),
                ("grpc.max_concurrent_streams", STREAMS_MAX),
                ("grpc.max_metadata_size", METADATA_BYTES_MAX),
                # What a connection may send before it is read: less than the MiBs gRPC would find
                # useful, because senders choose how many wait.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
                # With it a second process would share the port silently.
                ("grpc.so_reuseport", 0),
            ],
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address} for OTLP/gRPC") from error
        await self._server.start()
        return bound

    async def stop(self) -> None:
        """Refuse new calls (UNAVAILABLE), answer those under way for up to DRAIN_S_MAX."""
        await self._server.stop(DRAIN_S_MAX)

    async def _export(self, method: str, context: Any) -> bytes:
        try:
            tenant = await self._tenant(context)
            door = self._door()
            async with self._places.one(tenant):
                message = await _read(context)
            return replies.success(await self._kept(_store(door, method, tenant, message)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the sender is answered
            refused = replies.refused(error, method)
        return await _abort(context, refused)

    async def _tenant(self, context: Any) -> str:
        metadata = dict(context.invocation_metadata() or ())
        token = replies.bearer(str(metadata.get("authorization", "")))
        tenant = await self._authenticate(token) if token else None
        if tenant is None:
            raise Refused(Code.UNAUTHENTICATED, replies.UNKNOWN_SENDER)
        return tenant

    async def _kept(self, storing: Coroutine[Any, Any, Accepted]) -> Accepted:
        """Stores also for a client that leaves meanwhile, so that the queue's books stay right."""
        task = asyncio.create_task(storing)
        self._storing.add(task)
        task.add_done_callback(self._stored)
        try:
            return await asyncio.shield(task)
        finally:
            # An error refers to this frame, the task to the error: a cycle, and the message in it.
            del task

    def _stored(self, task: asyncio.Task[Accepted]) -> None:
        self._storing.discard(task)
        if not task.cancelled():
            task.exception()  # seen: of a client that left nobody else will


class _Share:
    """One tenant's places, and how many of its calls wait for one."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(READS_PER_TENANT_MAX)
        self.waiting = 0


class _Places:
    """Where messages are read: READS_MAX at a time, READS_PER_TENANT_MAX for one tenant."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(READS_MAX)
        # A share lives as long as a call of its tenant holds it.
        self._shares: WeakValueDictionary[str, _Share] = WeakValueDictionary()

    @asynccontextmanager
    async def one(self, tenant: str) -> AsyncIterator[None]:
        """A place of the tenant's share. Raises Refused when none is free within PLACE_S_MAX, and
        when too many wait already."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share()
        if share.waiting >= WAITING_PER_TENANT_MAX:
            raise _busy()
        async with AsyncExitStack() as held:
            share.waiting += 1
            try:
                async with asyncio.timeout(PLACE_S_MAX):
                    await held.enter_async_context(share.places)
                    await held.enter_async_context(self._all)
            except TimeoutError:
                raise _busy() from None
            finally:
                share.waiting -= 1
            yield


def _busy() -> Refused:
    words = (
        f"Others are being read: {READS_MAX} messages at a time are allowed, "
        f"{READS_PER_TENANT_MAX} of one tenant"
    )
    return Refused(Code.RESOURCE_EXHAUSTED, words, replies.wait_s())


class _Exports(grpc.GenericRpcHandler):
    """The two methods; gRPC itself answers UNIMPLEMENTED for any other."""

    def __init__(self, export: Callable[..., Any]) -> None:
        self._export = export

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method not in (TRACES, METRICS):
            return None

        async def export(_: object, context: Any) -> bytes:
            # Not by iterating: that would hold the message until the next one, which never comes.
            answer: bytes = await self._export(method, context)
            return answer

        # Without serializers messages are bytes.
        return grpc.stream_unary_rpc_method_handler(export)


async def _read(context: Any) -> bytes:
    try:
        async with asyncio.timeout(replies.READ_S_MAX):
            message = await context.read()
    except TimeoutError:
        raise Refused(Code.DEADLINE_EXCEEDED, replies.too_slow()) from None
    if message is grpc.aio.EOF:
        raise Refused(Code.INVALID_ARGUMENT, "The call holds no message")
    body: bytes = message
    return body


async def _store(door: Door, method: str, tenant: str, message: bytes) -> Accepted:
    export = door.traces if method == TRACES else door.metrics
    with door.room(tenant) as room:
        room.take(size_bytes=len(message))
        return await export(tenant, lambda: message, room)


async def _abort(context: Any, refused: Refused) -> bytes:
    metadata: list[tuple[str, bytes]] = [("grpc-status-details-bin", refused.status())]
    if refused.retry_info is not None:
        # OpenTelemetry's Python exporter reads this one, not the details.
        metadata.append(("google.rpc.retryinfo-bin", refused.retry_info))
    message = refused.message[:_MESSAGE_CHARS_MAX]
    await context.abort(_STATUS_CODES[refused.code], message, tuple(metadata))
    raise AssertionError("abort returns never")
