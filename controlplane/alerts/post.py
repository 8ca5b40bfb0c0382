"""One HTTP POST with a deadline for the whole of it: what carries every channel's messages."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from controlplane.alerts.channel import SendError

TIMEOUT_S = 5.0  # for all of it: an answer that comes a byte a second does not come
MESSAGE_BYTES_MAX = 64 * 1024
ANSWER_BYTES_MAX = 4 * 1024
WORDS_MAX = 200
# 408 and 429 are the two 4xx that pass (RFC 9110 15.5.9, RFC 6585 4).
PASSING = frozenset({408, 429})


@dataclass(frozen=True)
class Answer:
    """What the receiver said: status, headers and the first ANSWER_BYTES_MAX bytes."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def words(self) -> str:
        """Its beginning as one line."""
        return " ".join(self.content.decode("utf-8", "replace").split())[:WORDS_MAX]

    def error(self, reason: str = "", *, permanent: bool | None = None) -> SendError:
        """This answer as a refusal, for `reason` or in its own words.

        By its status when `permanent` is not given: 4xx but 408 and 429 are for good.
        """
        if permanent is None:
            permanent = 400 <= self.status < 500 and self.status not in PASSING
        words = reason or self.words
        return SendError(
            f"HTTP {self.status}: {words}" if words else f"HTTP {self.status}",
            permanent=permanent,
            status=self.status,
            retry_after_s=retry_after_s(self.headers.get("Retry-After")),
        )


def post(url: str, *, body: bytes, headers: Mapping[str, str]) -> Answer:
    """The answer, whatever its status. Raises SendError where there is none.

    No answer in time and no connection pass; a wrong address and a message over MESSAGE_BYTES_MAX
    are for good, and so is a redirect: a person gave the address, no receiver changes it.
    """
    if len(body) > MESSAGE_BYTES_MAX:
        raise SendError(
            f"message has {len(body)} bytes, allowed: {MESSAGE_BYTES_MAX}", permanent=True
        )
    try:
        return _within(TIMEOUT_S, _post(url, body, headers))
    except (TimeoutError, httpx.TimeoutException):
        raise SendError(f"no answer within {TIMEOUT_S:g} s", permanent=False) from None
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise SendError(f"address {url!r}: {error}", permanent=True) from None
    except httpx.HTTPError as error:
        raise SendError(f"{type(error).__name__}: {error}", permanent=False) from None


def _within(seconds: float, posting: Coroutine[Any, Any, Answer]) -> Answer:
    """The answer, or TimeoutError. As asyncio.run, but it does not wait at the end for a name that
    is still being looked up: that is done in a thread, which takes as long as the resolver does."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(asyncio.wait_for(posting, seconds))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _post(url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
    # Asynchronous, because a deadline for the whole needs something that can be cancelled.
    # trust_env: a proxy or netrc of the environment has no say in where messages go.
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client,
        client.stream("POST", url, content=body, headers=dict(headers)) as response,
    ):
        if response.is_redirect:
            where = response.headers.get("Location", "elsewhere")
            raise SendError(
                f"redirected to {where}, not followed", permanent=True, status=response.status_code
            )
        content = b""
        async for chunk in response.aiter_bytes(ANSWER_BYTES_MAX):
            content += chunk
            if len(content) >= ANSWER_BYTES_MAX:
                break
        return Answer(response.status_code, response.headers, content[:ANSWER_BYTES_MAX])


def retry_after_s(header: str | None) -> float | None:
    """Seconds to wait: a number or an HTTP date (RFC 9110 10.2.3); None when there is neither."""
    if not header:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        at = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())
