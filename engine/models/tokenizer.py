"""Between text and tokens: what an engine asks of a tokenizer, and that of the built-in models.

Every token stands for the same bytes wherever it comes, so a text is its tokens' bytes one after
another, and may be written out token by token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

BOS, EOS, TURN_END, SYSTEM, USER, ASSISTANT = range(256, 262)
VOCABULARY = 262
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": USER}


class ChatError(ValueError):
    """The model cannot be told such a conversation; says why."""


class Tokenizer(Protocol):
    @property
    def pieces(self) -> Sequence[bytes]:
        """What each token adds to a text, as many as the model has tokens; b"": it steers."""

    @property
    def eos(self) -> frozenset[int]:
        """The tokens that end an answer."""

    def encode(self, text: str) -> list[int]:
        """With what the model wants at the beginning of a text."""

    def encode_chat(self, messages: list[tuple[str, str]]) -> list[int]:
        """(role, content) turns, ended by the assistant's opening; raises ChatError."""


class ByteTokenizer:
    """Token 0-255 is that byte; the rest steer the conversation."""

    pieces: Sequence[bytes] = [*(bytes([i]) for i in range(256)), *([b""] * (VOCABULARY - 256))]
    eos = frozenset([EOS])

    def encode(self, text: str) -> list[int]:
        return [BOS, *text.encode()]

    def encode_chat(self, messages: list[tuple[str, str]]) -> list[int]:
        ids = [BOS]
        for role, content in messages:
            ids += [ROLES[role], *content.encode(), TURN_END]
        return [*ids, ASSISTANT]


class Detokenizer:
    """Bytes to text, one stream; a character that is cut in two waits for its rest."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, part: bytes, final: bool = False) -> str:
        return self._decoder.decode(part, final)
