"""Feishu's custom bots (open.feishu.cn), signed when the bot has a signing secret.

A refusal comes as HTTP 200 with a code. Feishu sends no Retry-After, so its rate limit (11232) is
met with our own backoff.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from typing import Any

from apprise.plugins.feishu import NotifyFeishu

from controlplane.alerts.chat import Chat

_ADDRESS = re.compile(r"https://open\.feishu\.cn/open-apis/bot/v2/hook/(?P<token>[\w-]{1,100})/?")


def parts(url: str) -> dict[str, Any] | None:
    match = _ADDRESS.fullmatch(url)
    return match.groupdict() if match else None


def sign(url: str, body: bytes, secret: str) -> tuple[str, bytes]:
    """timestamp and sign beside the message: HMAC-SHA256 of nothing, keyed by both lines."""
    at_s = str(int(time.time()))
    digest = hmac.new(f"{at_s}\n{secret}".encode(), digestmod=hashlib.sha256).digest()
    signed = {"timestamp": at_s, "sign": base64.b64encode(digest).decode(), **json.loads(body)}
    return url, json.dumps(signed, ensure_ascii=False).encode()


CHANNEL = Chat(
    slug="feishu",
    label="Feishu",
    address="https://open.feishu.cn/open-apis/bot/v2/hook/…",
    plugin=NotifyFeishu,
    parts=parts,
    bytes_max=15_000,
    code="code",
    final={
        9499: "the bot does not take such a message",
        19001: "the bot's address is unknown; was it removed from the chat?",
        19021: "the signature is wrong; check the channel's secret and this machine's clock",
        19022: "this machine's address is not on the bot's list",
        19024: "the bot wants a keyword the message lacks; add “Trimtab” to its keywords",
    },
    sign=sign,
)
