"""A JSON POST to an address, as chat relays and scripts take it, signed when there is a secret.

The signature is that of Standard Webhooks 1.0.0 (standardwebhooks.com): HMAC-SHA256 over
`{id}.{timestamp}.{body}`, so that libraries for it in a dozen languages verify ours.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from urllib.parse import urlsplit

from django.utils.translation import gettext as _

from controlplane.alerts.channel import ChannelError, Message, Sent
from controlplane.alerts.post import post

SECRET_PREFIX = "whsec_"  # noqa: S105 -- marks a secret, is none
SECRET_BYTES = 32
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64


class Webhook:
    slug = "webhook"
    label = "Webhook"
    address = "https://relay.example/hook"
    signs = True

    def secret_new(self) -> str:
        return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()

    def check(self, *, url: str, secret: str) -> None:
        try:
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            fits = False
        if not fits:
            raise ChannelError("url", _("wanted: an http or https address"))
        if secret:
            secret_key(secret)

    def send(self, *, url: str, secret: str, message: Message, delivery_id: str) -> Sent:
        """2xx is taken. 5xx, 408, 429, timeouts and no connection pass; the rest is for good."""
        body = json.dumps(message, ensure_ascii=False).encode()
        headers = {
            "Content-Type": "application/json; charset=utf-8",
            "User-Agent": "trimtab",
            "Trimtab-Delivery-Id": delivery_id,
        }
        if secret:
            headers |= signature(secret, delivery_id, int(time.time()), body)
        answer = post(url, body=body, headers=headers)
        if not 200 <= answer.status < 300:
            raise answer.error()
        return Sent(answer.status)


def signature(secret: str, delivery_id: str, at_s: int, body: bytes) -> dict[str, str]:
    """The three headers a receiver verifies; `at_s` is Unix time, to refuse old ones."""
    signed = f"{delivery_id}.{at_s}.".encode() + body
    digest = hmac.new(secret_key(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def secret_key(secret: str) -> bytes:
    """The bytes to sign with. Raises ChannelError when it is not such a secret."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
        words = _("wanted: %(prefix)s and the base64 of %(low)d to %(high)d random bytes")
        given = {"prefix": SECRET_PREFIX, "low": SECRET_BYTES_MIN, "high": SECRET_BYTES_MAX}
        raise ChannelError("secret", words % given)
    return key


CHANNEL = Webhook()
