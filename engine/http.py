"""HTTP as every process of the engine speaks it: one exchange, one error shape, one way to PATCH.

Knows no model and no torch: the router's door is made of the same.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST

from engine.knobs import KnobError, NotPossible, OutOfBounds
from engine.reconfig import CHANGED_BY_CHARS_MAX, RuntimeStore, Settings, StaleVersion, Versioned

BODY_BYTES_MAX = 1_048_576
VERSION_DIGITS_MAX = 18  # of an If-Match
AGAIN = ("aborted", "shutting_down")  # error codes of what may well be asked again
REFUSED: dict[type[KnobError], int] = {OutOfBounds: 422, NotPossible: 409, KnobError: 400}

C = TypeVar("C", bound=Settings)
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ApiError(Exception):
    """An answer in the error shape; `headers` go with it (Retry-After, Allow)."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": str(self), "param": self.param}}


def bad(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, f"{param}: {message}", param=param)


class Gone(Exception):
    """The client went away before it had said what it wants."""


class Call:
    """One HTTP exchange: what came, and how to answer."""

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.started = False
        self.size = 0  # of the body, in bytes

    def header(self, name: bytes) -> str:
        for key, value in self.scope["headers"]:
            if key == name:
                return str(value.decode("latin-1"))
        return ""

    def query(self, name: str, default: str) -> str:
        for pair in self.scope["query_string"].decode("latin-1").split("&"):
            key, _, value = pair.partition("=")
            if key == name:
                return str(value)
        return default

    def number(
        self, name: str, default: str, low: float, high: float, *, whole: bool = False
    ) -> float:
        """Of the query; raises ApiError 400."""
        text = self.query(name, default)
        try:
            value = float(int(text) if whole else text)
        except (ValueError, OverflowError):
            value = math.nan
        if not low <= value <= high:
            kind = "integers " if whole else ""
            raise bad(name, f"got {text!r}, allowed: {kind}{low:g} to {high:g}")
        return value

    async def body(self) -> bytes:
        """All of it; raises ApiError 413, Gone."""
        parts = []
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            self.size += len(parts[-1])
            if self.size > BODY_BYTES_MAX:
                raise ApiError(
                    413, "body_too_large", f"the body passes the limit of {BODY_BYTES_MAX} bytes"
                )
            if not message.get("more_body", False):
                return b"".join(parts)

    async def json(self) -> dict[str, Any]:
        """The body as an object; raises ApiError 400 or 413, Gone."""
        return parsed(await self.body())

    async def start(self, status: int, content: str, headers: dict[str, str]) -> None:
        self.started = True
        lines = [(b"content-type", content.encode())]
        lines += [(k.lower().encode(), v.encode("latin-1")) for k, v in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": lines})

    async def part(self, body: str, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": body.encode(), "more_body": more})

    async def answer(self, body: dict[str, Any] | bytes, status: int = 200, **headers: str) -> None:
        content = CONTENT_TYPE_LATEST
        if isinstance(body, dict):
            body, content = json.dumps(body).encode(), "application/json"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.start(status, content, {"content-length": str(len(body)), **named})
        await self.send({"type": "http.response.body", "body": body})


def parsed(body: bytes) -> dict[str, Any]:
    """A JSON object; raises ApiError 400."""
    try:
        value = json.loads(body)
        # JSON can spell half a surrogate pair, which no tokenizer, log or answer can take.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    return value


Handler = Callable[[Call], Awaitable[None]]


class Door:
    """An ASGI application: a table of paths and methods, errors in one shape."""

    routes: dict[str, dict[str, Handler]]

    async def detach(self) -> None:
        """After the last request."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        call = Call(scope, receive, send)
        try:
            above = scope["path"].rpartition("/")[0]
            methods = self.routes.get(scope["path"]) or self.routes.get(f"{above}/*")
            if methods is None:
                raise ApiError(404, "not_found", f"{scope['path']}: no such path")
            handler = methods.get(scope["method"])
            if handler is None:
                allowed = ", ".join(methods)
                raise ApiError(
                    405,
                    "method_not_allowed",
                    f"{scope['method']}: allowed here: {allowed}",
                    headers={"allow": allowed},
                )
            await handler(call)
        except ApiError as error:
            headers = {name.replace("-", "_"): value for name, value in error.headers.items()}
            await call.answer(error.body(), error.status, **headers)
        except Gone:
            return


async def tell(
    call: Call, version: Versioned[C], knobs: dict[str, Any], *, engine: str, model: str
) -> None:
    """The answer of GET /v1/runtime_config; its ETag is the version."""
    body = {
        "config_version": version.config_version,
        "model": model,
        "engine": engine,
        "values": version.config.values(),
        "knobs": knobs,
        "changed_by": version.changed_by,
        "changed_at": version.changed_at,
    }
    await call.answer(body, etag=f'"{version.config_version}"')


async def change(call: Call, runtime: RuntimeStore[C]) -> None:
    """What PATCH /v1/runtime_config asks for; raises ApiError where it cannot be had."""
    condition = call.header(b"if-match").strip()
    if not condition:
        raise ApiError(
            428,
            "precondition_required",
            'If-Match: missing, want the ETag of GET, such as "7"',
            param="If-Match",
        )
    digits = condition.removeprefix('"').removesuffix('"')
    if not digits.isascii() or not digits.isdigit() or len(digits) > VERSION_DIGITS_MAX:
        raise ApiError(
            400,
            "invalid_value",
            f'If-Match: got {condition}, want one config_version, such as "7"',
            param="If-Match",
        )
    values = await call.json()
    changed_by = call.header(b"x-changed-by")[:CHANGED_BY_CHARS_MAX] or "unknown"
    try:
        await asyncio.to_thread(runtime.change, values, int(digits), changed_by)
    except StaleVersion as error:
        raise ApiError(412, "stale_version", str(error), param="If-Match") from None
    except KnobError as error:
        status = next(code for kind, code in REFUSED.items() if isinstance(error, kind))
        raise ApiError(status, error.code, str(error), param=error.knob or None) from None
    except TimeoutError as error:
        raise ApiError(500, "not_taken", str(error)) from None
