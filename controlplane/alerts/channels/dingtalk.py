"""DingTalk's custom robots, signed when the robot has a secret (加签).

A refusal comes as HTTP 200 with an errcode. DingTalk sends no Retry-After; its limit of 20
messages a minute (130101) is met with our own backoff.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from typing import Any
from urllib.parse import urlencode

from apprise.plugins.dingtalk import NotifyDingTalk

from controlplane.alerts.chat import Chat

_ADDRESS = re.compile(
    r"https://oapi\.dingtalk\.com/robot/send\?access_token=(?P<token>[A-Za-z0-9]{1,200})"
)


def parts(url: str) -> dict[str, Any] | None:
    match = _ADDRESS.fullmatch(url)
    return match.groupdict() if match else None


def sign(url: str, body: bytes, secret: str) -> tuple[str, bytes]:
    """timestamp and sign in the address. Apprise has this too, but escapes the signature twice."""
    at_ms = str(round(time.time() * 1000))
    digest = hmac.new(secret.encode(), f"{at_ms}\n{secret}".encode(), hashlib.sha256).digest()
    signed = urlencode({"timestamp": at_ms, "sign": base64.b64encode(digest).decode()})
    return f"{url}&{signed}", body


CHANNEL = Chat(
    slug="dingtalk",
    label="DingTalk",
    address="https://oapi.dingtalk.com/robot/send?access_token=…",
    plugin=NotifyDingTalk,
    parts=parts,
    bytes_max=15_000,
    code="errcode",
    final={
        300001: "the robot's token is unknown; was it removed from the chat?",
        300005: "the robot's token is unknown; was it removed from the chat?",
        310000: "the robot's security settings refuse it: keyword, signature or address list",
        400013: "the chat was closed",
        400101: "the robot's token is unknown; was it removed from the chat?",
        400102: "the robot is switched off",
        400106: "there is no such robot",
        430104: "the message was held to be improper",
    },
    sign=sign,
)
