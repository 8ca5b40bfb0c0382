"""OTLP over HTTP as a plain ASGI app: POST /v1/traces and /v1/metrics, binary protobuf.

Every rule is from the OTLP specification 1.11 (docs/specification.md, OTLP/HTTP): replies and
errors are protobuf, 400 is final, 429 and 503 ask to be tried again. JSON is answered with 415.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db import DatabaseError
from isal import isal_zlib

from tracing import wire
from tracing.ingest import Accepted, Door, NotStored, QueueFull, Room
from tracing.types import StoreError

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Authenticate = Callable[[str], Awaitable[str | None]]

PROTOBUF = "application/x-protobuf"
PATHS = ("/v1/traces", "/v1/metrics")

# zlib's window parameter of each Content-Encoding ("deflate" is the zlib format, RFC 9110 8.4.1.2)
_WINDOWS = {"gzip": 31, "deflate": 15}
# google.rpc.Code by HTTP status
_CODES = {400: 3, 401: 16, 404: 12, 405: 12, 413: 8, 415: 3, 429: 8, 500: 13, 503: 14}
_BAD_REQUEST = b"type.googleapis.com/google.rpc.BadRequest"
_MESSAGE_CHARS_MAX = 2_000


@dataclass
class Refused(Exception):
    """A reply that is no success: HTTP status, what to tell, when to come back."""

    status: int
    message: str
    retry_after_s: int | None = None
    allow: str | None = None


def application(authenticate: Authenticate, door: Callable[[], Door]) -> App:
    """The ASGI app. `authenticate` maps a bearer token to a tenant id; `door` is called lazily."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", f"not an HTTP scope: {scope['type']}"
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        try:
            accepted = await _export(scope, headers, receive, authenticate, door)
        except Refused as refused:
            await _refuse(send, refused, headers)
        except DatabaseError as error:
            logger.warning("a token could not be looked up: %s", error)
            await _refuse(send, Refused(503, "Tokens cannot be checked now", _wait_s()), headers)
        except (QueueFull, NotStored, StoreError) as error:
            status = 429 if isinstance(error, QueueFull) else 503
            await _refuse(send, Refused(status, str(error), _wait_s()), headers)
        except wire.Undecodable as error:
            await _refuse(send, Refused(400, str(error)), headers)
        except Exception:
            # Final for the sender: what fails here for no known reason would fail again.
            logger.exception("%s could not be answered", scope["path"])
            await _refuse(send, Refused(500, "Our mistake; the log says more"), headers)
        else:
            await _reply(send, 200, _success(accepted), PROTOBUF)

    return app


async def _export(
    scope: Scope,
    headers: dict[str, str],
    receive: Receive,
    authenticate: Authenticate,
    open_door: Callable[[], Door],
) -> Accepted:
    if scope["path"] not in PATHS:
        raise Refused(404, f"{scope['path']} is not served here; paths: {', '.join(PATHS)}")
    if scope["method"] != "POST":
        raise Refused(405, f"Method {scope['method']} is not allowed; allowed: POST", allow="POST")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != PROTOBUF:
        raise Refused(415, f"Content-Type {media_type!r} is not supported; supported: {PROTOBUF}")
    scheme, _, token = headers.get("authorization", "").partition(" ")
    tenant = await authenticate(token.strip()) if scheme.lower() == "bearer" else None
    if tenant is None:
        raise Refused(401, "A valid ingest token is needed: Authorization: Bearer <token>")
    encoding = headers.get("content-encoding", "identity").strip().lower() or "identity"
    if encoding != "identity" and encoding not in _WINDOWS:
        supported = ", ".join(["identity", *_WINDOWS])
        raise Refused(400, f"Content-Encoding {encoding!r} is not supported; {supported} are")
    door = open_door()
    with door.room() as room:
        raw = await _body(headers, receive, room, door.limits.body_bytes_max)
        unpack = partial(_unpack, raw, encoding, room, door.limits.body_bytes_max)
        export = door.traces if scope["path"] == "/v1/traces" else door.metrics
        return await export(tenant, unpack, room)


async def _body(
    headers: dict[str, str], receive: Receive, room: Room, body_bytes_max: int
) -> list[bytes]:
    """The body in pieces, its bytes taken from the queue's room as they come."""
    too_large = Refused(413, f"The body is larger than the {body_bytes_max} bytes allowed")
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > body_bytes_max:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "The client went away before the body was complete")
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
            raise Refused(400, f"The body is no {encoding}: {error}") from error
        size += len(piece)
        if size > body_bytes_max:
            raise Refused(413, f"Decompressed, the body exceeds the {body_bytes_max} bytes allowed")
        if not inflate.eof:
            raise Refused(400, f"The {encoding} body ends too early")
        plain.append(piece)
        body = inflate.unused_data
    room.take(size_bytes=size)
    return plain[0] if len(plain) == 1 else b"".join(plain)


def _success(accepted: Accepted) -> bytes:
    """ExportTraceServiceResponse, or its twin for metrics (same fields); empty when all is well."""
    response = wire.ExportResponse()
    if accepted.rejected:
        response.partial_success.rejected = accepted.rejected
        response.partial_success.error_message = accepted.message.encode()[:_MESSAGE_CHARS_MAX]
    body: bytes = response.SerializeToString()
    return body


def _wait_s() -> int:
    # Clients give up when the wait exceeds what is left of their 10 s deadline.
    return random.randint(1, 3)


async def _refuse(send: Send, refused: Refused, headers: dict[str, str]) -> None:
    message = refused.message[:_MESSAGE_CHARS_MAX]
    code = _CODES[refused.status]
    extra = []
    if refused.retry_after_s is not None:
        extra.append((b"retry-after", str(refused.retry_after_s).encode()))
    if refused.allow is not None:
        extra.append((b"allow", refused.allow.encode()))
    if refused.status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if headers.get("content-type", "").lower().startswith("application/json"):
        body = json.dumps({"code": code, "message": message}).encode()
        await _reply(send, refused.status, body, "application/json", extra)
        return
    status = wire.Status(code=code, message=message.encode())
    if refused.status == 400:
        detail = wire.BadRequest()
        detail.field_violations.add(field=b"body", description=message.encode())
        status.details.add(type_url=_BAD_REQUEST, value=detail.SerializeToString())
    await _reply(send, refused.status, status.SerializeToString(), PROTOBUF, extra)


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
