"""The limit on bodies in front of Django, driven as an ASGI server would."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from controlplane.asgi import Bounded

KIB = b"x" * 1024


def post(chunks: int, *, told: int | None) -> tuple[int, dict[str, Any], int]:
    """Status, JSON and the chunks read of a POST to a page nobody is signed in for."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/octet-stream")]
    if told is not None:
        headers.append((b"content-length", str(told).encode()))
    scope = {
        "type": "http", "method": "POST", "path": "/health", "raw_path": b"/health",
        "query_string": b"", "headers": headers, "scheme": "http", "http_version": "1.1",
        "client": ("127.0.0.1", 1), "server": ("localhost", 80),
    }  # fmt: skip
    sent: list[dict[str, Any]] = []
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        if read >= chunks:
            await asyncio.sleep(3600)
        read += 1
        return {"type": "http.request", "body": KIB, "more_body": read < chunks}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Bounded(10 * 1024)(scope, receive, send))
    body = b"".join(m.get("body", b"") for m in sent[1:])
    return sent[0]["status"], json.loads(body), read


@pytest.mark.parametrize(("told", "read"), [(100 * 1024, 0), (None, 11)])
def test_a_body_over_the_limit_is_not_read_further(told: int | None, read: int) -> None:
    status, body, chunks = post(100, told=told)
    assert (status, chunks) == (413, read)
    assert body["error"]["code"] == "too_large"
    assert "10240 bytes" in body["error"]["message"]


def test_a_body_within_the_limit_reaches_the_page() -> None:
    status, body, _ = post(10, told=10 * 1024)
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")
