"""A JSON POST to an address, as chat relays and scripts take it. Own sender: the status counts."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from controlplane.alerts.channel import Message, SendError, Sent

TIMEOUT_S = 5.0  # for all of it: an answer that comes a byte a second does not come
MESSAGE_BYTES_MAX = 64 * 1024
ANSWER_BYTES_MAX = 4 * 1024
# 408 and 429 are the two 4xx that pass (RFC 9110 15.5.9, RFC 6585 4).
PASSING = frozenset({408, 429})


class Webhook:
    slug = "webhook"
    label = "Webhook"

    def send(self, *, url: str, message: Message, delivery_id: str) -> Sent:
        """2xx is taken. 5xx, 408, 429, timeouts and no connection pass; other answers are for good.

        A redirect is refused: the address was given by a person and is not changed by a receiver.
        """
        body = json.dumps(message, ensure_ascii=False).encode()
        if len(body) > MESSAGE_BYTES_MAX:
            raise SendError(
                f"message has {len(body)} bytes, allowed: {MESSAGE_BYTES_MAX}", permanent=True
            )
        headers = {
            "Content-Type": "application/json; charset=utf-8",
            "User-Agent": "trimtab",
            "Trimtab-Delivery-Id": delivery_id,
        }
        try:
            return asyncio.run(asyncio.wait_for(_post(url, body, headers), TIMEOUT_S))
        except (TimeoutError, httpx.TimeoutException):
            raise SendError(f"no answer within {TIMEOUT_S:g} s", permanent=False) from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise SendError(f"address {url!r}: {error}", permanent=True) from None
        except httpx.HTTPError as error:
            raise SendError(f"{type(error).__name__}: {error}", permanent=False) from None


async def _post(url: str, body: bytes, headers: dict[str, str]) -> Sent:
    # Asynchronous, because a deadline for the whole needs something that can be cancelled.
    # trust_env: a proxy or netrc of the environment has no say in where messages go.
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client,
        client.stream("POST", url, content=body, headers=headers) as response,
    ):
        status = response.status_code
        if response.is_success:
            return Sent(status)
        if response.is_redirect:
            where = response.headers.get("Location", "elsewhere")
            raise SendError(f"redirected to {where}, not followed", permanent=True, status=status)
        words = await _beginning(response)
        raise SendError(
            f"HTTP {status}: {words}" if words else f"HTTP {status}",
            permanent=400 <= status < 500 and status not in PASSING,
            status=status,
            retry_after_s=retry_after_s(response.headers.get("Retry-After")),
        )


async def _beginning(response: httpx.Response) -> str:
    """The first words of an answer, without reading more than ANSWER_BYTES_MAX of it."""
    got = b""
    async for chunk in response.aiter_bytes(ANSWER_BYTES_MAX):
        got += chunk
        if len(got) >= ANSWER_BYTES_MAX:
            break
    return " ".join(got[:ANSWER_BYTES_MAX].decode("utf-8", "replace").split())[:200]


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


CHANNEL = Webhook()
