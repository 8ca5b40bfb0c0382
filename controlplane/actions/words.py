"""Sentences that are written down in English and shown in the reader's language.

A refusal may go into ledger, log and REST, which are English whoever asked, and on a page. So it is
English text that knows how it was made, and a page says it again.
"""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext, override

SHOWN_CHARS_MAX = 100


def shown(value: object) -> str:
    """A value somebody sent, in a refusal of it: as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


class Words(str):
    """`msgid` (marked with gettext_noop) with its `facts`, in English. Facts may be Words too."""

    __slots__ = ("facts", "msgid")
    msgid: str
    facts: dict[str, Any]

    def __new__(cls, msgid: str, **facts: Any) -> Words:
        with override("en"):  # for facts that are lazily translated, as the labels of choices
            self = super().__new__(cls, msgid % facts if facts else msgid)
        self.msgid, self.facts = msgid, facts
        return self


def translated(words: str) -> str:
    """In the language in force; text that is no Words stays as it is."""
    if not isinstance(words, Words):
        return words
    facts = {
        name: translated(fact) if isinstance(fact, str) else fact
        for name, fact in words.facts.items()
    }
    said = gettext(words.msgid)
    return said % facts if facts else said
