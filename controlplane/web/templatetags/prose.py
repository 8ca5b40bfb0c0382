"""How stored words are written on a page: with its numbers, as sentences, with their reason."""

from __future__ import annotations

import re

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from controlplane.alerts.message import sentences
from controlplane.diagnosis.cause import UNKNOWN
from controlplane.diagnosis.selectors import Story
from controlplane.web.templatetags.ui import SPACE, THIN

register = template.Library()


@register.filter
def prose(words: str) -> str:
    """Stored words with the numbers in them as the page writes its own. They are stored, and sent
    to chat, in plain characters: 2,225 requests, 1.3%."""
    return PERCENT.sub(f"{SPACE}%", THOUSANDS.sub(THIN, words))


THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
PERCENT = re.compile(r"(?<=\d) ?%")


@register.filter
def as_sentence(words: str) -> str:
    """With a capital letter and a full stop, for what stands alone or after a full stop."""
    return prose(sentences(words))


@register.filter
def reason(told: Story) -> SafeString:
    """What stands after “what”: the reason bold, the word *because* muted.

    A reason that holds the word itself, or says that there is none, is a sentence of its own; it
    is stored, so it is English whatever the page speaks.
    """
    because = prose(told.because)
    lead, found, rest = because.partition(" because ")
    if told.cause == UNKNOWN:
        return format_html(". {}", capfirst(because))
    if not found:
        return format_html(' <span class="k">{}</span> <b>{}</b>', _("because"), because)
    word = format_html('<span class="k">{}</span>', "because")
    return format_html(". <b>{}</b> {} <b>{}</b>", capfirst(lead), word, rest)
