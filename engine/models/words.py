"""The tokenizer of a file: Hugging Face's `tokenizers`, and what each of its tokens is in bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from engine.models.chat import ChatTemplate
from engine.models.errors import ModelError
from engine.models.tokenizer import ChatError

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
METASPACE = "▁"  # how SentencePiece spells a space


class FileTokenizer:
    """A model's own words. `vocabulary`: how many tokens the model knows, the tokenizer's at most.

    `decoder`: as in tokenizer.json. Raises ModelError where a token is not the same bytes wherever
    it comes, or the model does not know it.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        where: str,
        decoder: Mapping[str, Any] | None,
        vocabulary: int,
        eos: Iterable[int],
        chat: ChatTemplate | None,
    ) -> None:
        self.backend, self.where, self.chat = backend, where, chat
        known = backend.get_vocab(with_added_tokens=True).values()
        # What begins or ends every text need not be one of them.
        highest = max([*known, *backend.encode("").ids], default=-1)
        if highest >= vocabulary:
            raise ModelError.of(where, "token ids", highest, f"up to {vocabulary - 1}, the model's")
        self.pieces = pieces(backend, vocabulary, byte_level(decoder, where))
        self.eos = frozenset(eos)
        for token in self.eos:
            if not 0 <= token < vocabulary:
                raise ModelError.of(where, "eos_token_id", token, f"0 to {vocabulary - 1}")
            self.pieces[token] = b""  # it ends a text, also where the file does not call it special

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=True)

    def encode_chat(self, messages: list[tuple[str, str]]) -> list[int]:
        if self.chat is None:
            raise ChatError("this model comes without a chat template: use /v1/completions")
        # The template has written what the model wants at the beginning.
        return self._encode(self.chat.render(messages), special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # Of one text, `encode` keeps the interpreter to itself, from the steps too; this does not.
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=special)
        return encoded.ids


def byte_level(decoder: Mapping[str, Any] | None, where: str) -> bool:
    """Whether tokens spell bytes as GPT-2's do, else as SentencePiece's. Raises ModelError."""
    decoder = decoder or {}
    kind = decoder.get("type")
    parts = [part.get("type") for part in decoder["decoders"]] if kind == "Sequence" else [kind]
    if "ByteLevel" in parts:
        return True
    if set(parts) & {"Metaspace", "ByteFallback"}:
        return False
    raise ModelError.of(
        where, "decoder.type", kind, "ByteLevel, Metaspace, or a Sequence with ByteFallback"
    )


def pieces(backend: Backend, vocabulary: int, byte_level: bool) -> list[bytes]:
    """The bytes of every token; those that steer, or that nobody knows, have none."""
    added = backend.get_added_tokens_decoder()
    spelled = byte_alphabet()

    def piece(token: int) -> bytes:
        if token in added:
            return b"" if added[token].special else added[token].content.encode()
        word = backend.id_to_token(token) or ""
        if byte_level:
            return b"".join(spelled.get(each) or each.encode() for each in word)
        if match := BYTE.fullmatch(word):
            return bytes.fromhex(match[1])
        return word.replace(METASPACE, " ").encode()

    return [piece(token) for token in range(vocabulary)]


def byte_alphabet() -> dict[str, bytes]:
    """GPT-2's letter for every byte: itself where it can be printed, else from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    letters = {chr(byte): bytes([byte]) for byte in plain}
    return letters | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}
