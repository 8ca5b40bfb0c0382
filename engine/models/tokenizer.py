"""Byte-level tokenizer: token 0-255 is that byte; the rest steer the conversation."""

from __future__ import annotations

import codecs

BOS, EOS, TURN_END, SYSTEM, USER, ASSISTANT = range(256, 262)
VOCABULARY = 262
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": USER}


def encode(text: str) -> list[int]:
    return [BOS, *text.encode()]


def encode_chat(messages: list[tuple[str, str]]) -> list[int]:
    """(role, content) turns, ended by the assistant's opening; raises KeyError on other roles."""
    ids = [BOS]
    for role, content in messages:
        ids += [ROLES[role], *content.encode(), TURN_END]
    return [*ids, ASSISTANT]


def to_bytes(ids: list[int]) -> bytes:
    """The text bytes of `ids`; steering tokens have none."""
    return bytes(i for i in ids if i < 256)


class Detokenizer:
    """Bytes to text, one stream; a character that is cut in two waits for its rest."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, part: bytes, final: bool = False) -> str:
        return self._decoder.decode(part, final)
