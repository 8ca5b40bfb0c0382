"""Filters and pages of lists, as the address has them; what cannot be read is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from django.db.models import Model, QuerySet
from django.utils.translation import gettext as _

from controlplane.accounts.authentication import ApiError
from controlplane.accounts.rest import Page, page_of

T = TypeVar("T")
M = TypeVar("M", bound=Model)

ROWS = 50


class BadFilter(ValueError):
    """A filter nobody can follow; the message names it, its value and what is allowed."""


def one_of(raw: Mapping[str, str], name: str, allowed: Mapping[str, T], usual: str = "") -> T:
    """What the filter's word stands for. Raises BadFilter."""
    text = raw.get(name) or usual
    if text not in allowed:
        raise bad_filter(name, text[:60], ", ".join(filter(None, allowed)))
    return allowed[text]


def text_of(raw: Mapping[str, str], name: str, chars_max: int) -> str:
    """Raises BadFilter."""
    text = raw.get(name, "").strip()
    if len(text) > chars_max or not text.isprintable():
        allowed = _("%(max)s printable characters") % {"max": chars_max}
        raise bad_filter(name, text[:chars_max], allowed)
    return text


def rows_after(
    rows: QuerySet[M], raw: Mapping[str, str], *, by: Sequence[str], limit: int = ROWS
) -> Page[M]:
    """The rows after the place `?after=` names, by the key `by` (as rest.page_of). Raises
    BadFilter for a place that no link of ours led to."""
    asked = {"limit": limit} | ({"cursor": raw["after"]} if raw.get("after") else {})
    try:
        return page_of(rows, asked, by=by)
    except ApiError:
        allowed = _("what the link to the next page holds")
        raise bad_filter("after", raw["after"][:60], allowed) from None


def bad_filter(name: str, value: str, allowed: str) -> BadFilter:
    return BadFilter(
        _("%(name)s=%(value)s: allowed: %(allowed)s")
        % {"name": name, "value": value, "allowed": allowed}
    )
