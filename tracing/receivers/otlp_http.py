"""OTLP over HTTP as a plain ASGI app: POST /v1/traces and /v1/metrics, protobuf and JSON.

Every rule is from the OTLP specification 1.11 (docs/specification.md, OTLP/HTTP): replies and
errors are written as the request was, 400 is final, 429 and 503 ask to be tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from isal import isal_zlib

from tracing.ingest import Accepted, Door, Room
from tracing.receivers import replies
from tracing.receivers.replies import Authenticate, Code, Refused
from tracing.wire import Encoding

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PATHS = ("/v1/traces", "/v1/metrics")

# zlib's window parameter of each Content-Encoding ("deflate" is the zlib format, RFC 9110 8.4.1.2)
_WINDOWS = {"gzip": 31, "deflate": 15}
# What HTTP answers where the code of the refusal does not say it better (see BadHttp)
_STATUSES = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
}
# The count of what was left out, by path, as OTLP/JSON names it
_REJECTED = {"/v1/traces": "rejectedSpans", "/v1/metrics": "rejectedDataPoints"}


@dataclass
class BadHttp(Refused):
    """A refusal that HTTP has its own status for: method, path, media type, size."""

    status_code: int = 400
    allow: str | None = None


def application(authenticate: Authenticate, door: Callable[[], Door]) -> App:
    """The ASGI app. `authenticate` maps a bearer token to a tenant id; `door` is called lazily."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", f"not an HTTP scope: {scope['type']}"
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        as_json = media_type == Encoding.JSON
        try:
            accepted = await _export(scope, headers, media_type, receive, authenticate, door)
        except Exception as error:  # noqa: BLE001 - whatever it is, the sender is answered
            await _refuse(send, replies.refused(error, scope["path"]), as_json)
        else:
            if as_json:
                body = replies.success_json(accepted, _REJECTED[scope["path"]])
            else:
                body = replies.success(accepted)
            await _reply(send, 200, body, Encoding.JSON if as_json else Encoding.PROTOBUF)

    return app


async def _export(
    scope: Scope,
    headers: dict[str, str],
    media_type: str,
    receive: Receive,
    authenticate: Authenticate,
    open_door: Callable[[], Door],
) -> Accepted:
    path, method = scope["path"], scope["method"]
    if path not in PATHS:
        words = f"{path} is not served here; paths: {', '.join(PATHS)}"
        raise BadHttp(Code.UNIMPLEMENTED, words, status_code=404)
    if method != "POST":
        words = f"Method {method} is not allowed; allowed: POST"
        raise BadHttp(Code.UNIMPLEMENTED, words, status_code=405, allow="POST")
    if media_type not in list(Encoding):
        words = f"Content-Type {media_type!r} is not supported; supported: {', '.join(Encoding)}"
        raise BadHttp(Code.INVALID_ARGUMENT, words, status_code=415)
    token = replies.bearer(headers.get("authorization", ""))
    tenant = await authenticate(token) if token else None
    if tenant is None:
        raise Refused(Code.UNAUTHENTICATED, replies.UNKNOWN_SENDER)
    encoding = headers.get("content-encoding", "identity").strip().lower() or "identity"
    if encoding != "identity" and encoding not in _WINDOWS:
        supported = ", ".join(["identity", *_WINDOWS])
        words = f"Content-Encoding {encoding!r} is not supported; {supported} are"
        raise Refused(Code.INVALID_ARGUMENT, words)
    door = open_door()
    with door.room(tenant) as room:
        try:
            async with asyncio.timeout(replies.READ_S_MAX):
                raw = await _body(headers, receive, room, door.limits.body_bytes_max)
        except TimeoutError:  # what came of it would keep its room in the queue for ever
            words = replies.too_slow()
            raise BadHttp(Code.DEADLINE_EXCEEDED, words, status_code=504) from None
        unpack = partial(_unpack, raw, encoding, room, door.limits.body_bytes_max)
        export = door.traces if path == "/v1/traces" else door.metrics
        return await export(tenant, unpack, room, Encoding(media_type))


async def _body(
    headers: dict[str, str], receive: Receive, room: Room, body_bytes_max: int
) -> list[bytes]:
    """The body in pieces, its bytes taken from the queue's room as they come."""
    too_large = _too_large(f"The body is larger than the {body_bytes_max} bytes allowed")
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > body_bytes_max:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(
                Code.INVALID_ARGUMENT, "The client went away before the body was complete"
            )
        piece = message.get("body", b"")
        size += len(piece)
        if size > body_bytes_max:
            raise too_large
        room.take(size_bytes=len(piece))
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces


def _unpack(pieces: list[bytes], encoding: str, room: Room, body_bytes_max: int) -> bytes:
    """The body decompressed, never more than the limit of it (a 64 KiB gzip may hold 64 MiB)."""
    body = b"".join(pieces)
    pieces.clear()
    if encoding == "identity" or not body:
        return body
    plain: list[bytes] = []
    size = 0
    while body:  # a gzip body may be several members one after the other (RFC 1952, 2.2)
        inflate = isal_zlib.decompressobj(wbits=_WINDOWS[encoding])
        try:
            piece = inflate.decompress(body, body_bytes_max - size + 1)
        except isal_zlib.error as error:  # type: ignore[misc]  # its stub says: an instance
            words = f"The body is no {encoding}: {error}"
            raise Refused(Code.INVALID_ARGUMENT, words) from error
        size += len(piece)
        if size > body_bytes_max:
            raise _too_large(f"Decompressed, the body exceeds the {body_bytes_max} bytes allowed")
        if not inflate.eof:
            raise Refused(Code.INVALID_ARGUMENT, f"The {encoding} body ends too early")
        plain.append(piece)
        body = inflate.unused_data
    room.take(size_bytes=size)
    return plain[0] if len(plain) == 1 else b"".join(plain)


def _too_large(words: str) -> BadHttp:
    return BadHttp(Code.RESOURCE_EXHAUSTED, words, status_code=413)


async def _refuse(send: Send, refused: Refused, as_json: bool) -> None:
    status = _STATUSES.get(refused.code, 500)
    extra = []
    if isinstance(refused, BadHttp):
        status = refused.status_code
        if refused.allow is not None:
            extra.append((b"allow", refused.allow.encode()))
    if refused.retry_after_s is not None:
        extra.append((b"retry-after", str(refused.retry_after_s).encode()))
    if status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if as_json:
        await _reply(send, status, refused.status_json(), Encoding.JSON, extra)
    else:
        await _reply(send, status, refused.status(), Encoding.PROTOBUF, extra)


async def _reply(
    send: Send,
    status: int,
    body: bytes,
    media_type: str,
    extra: list[tuple[bytes, bytes]] | None = None,
) -> None:
    headers = [
        (b"content-type", media_type.encode()),
        (b"content-length", str(len(body)).encode()),
        *(extra or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
