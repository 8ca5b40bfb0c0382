"""Keeps addresses and secrets of channels out of pages, logs, answers and what is kept of errors.

A chat service's address is itself the secret: who has it can post.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

HIDDEN = "…"
PART_CHARS_MIN = 6


def masked(url: str) -> str:
    """Where it goes without what lets one post there: scheme, host and port."""
    try:
        parts = urlsplit(url)
        where = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    except ValueError:
        return HIDDEN
    more = parts.path.strip("/") or parts.query or parts.username
    return f"{parts.scheme}://{where}/{HIDDEN if more else ''}"


def scrubbed(text: str, *, url: str, secret: str) -> str:
    """`text` without the secret, the address, any long part of its path and query, or links that
    act.

    A receiver may say back what it was sent, and a library what it was given.
    """
    text = re.sub(r"/a/[^/\s]+", f"/a/{HIDDEN}", text.replace(url, masked(url)))
    try:
        parts = urlsplit(url)
    except ValueError:
        return HIDDEN
    said = [secret, *re.split(r"[/?&=#]", f"{parts.path}?{parts.query}")]
    said += [parts.username or "", parts.password or ""]
    for part in sorted({p for one in said for p in (one, unquote(one))}, key=len, reverse=True):
        if len(part) >= PART_CHARS_MIN:
            text = text.replace(part, HIDDEN)
    return text
