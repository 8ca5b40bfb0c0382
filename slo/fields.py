"""What a field of an objective or a contract may hold, and the words when it does not fit."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from django.utils.translation import gettext as _

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SLUG = re.compile(r"[a-z0-9]+(?:[-_][a-z0-9]+)*")
SLUG_CHARS_MAX = 80


class FieldError(ValueError):
    """A field that does not fit; `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def field_error(param: str, value: object, allowed: str) -> FieldError:
    words = _("%(param)s=%(value)r: allowed: %(allowed)s")
    return FieldError(param, words % {"param": param, "value": value, "allowed": allowed})


def keys_check(given: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Raises FieldError for a field that means nothing here, most likely a slip of the pen."""
    for key in given:
        if key not in allowed:
            raise field_error(key, given[key], _("no such field, only %s") % ", ".join(allowed))


def slug_of(given: Mapping[str, Any], key: str = "slug") -> str:
    slug = text_of(given, key, SLUG_CHARS_MAX)
    if not _SLUG.fullmatch(slug):
        raise field_error(key, slug, _("small letters, digits, single hyphens or underscores"))
    return slug


def text_of(given: Mapping[str, Any], key: str, chars_max: int) -> str:
    value = given.get(key)
    if isinstance(value, str) and not _CONTROL.search(value):
        text = value.strip()
        if 0 < len(text) <= chars_max:
            return text
    words = _("a text of 1 to %d characters, no control characters")
    raise field_error(key, value, words % chars_max)


def number_of(
    given: Mapping[str, Any], key: str, low: float, high: float, default: float | None
) -> float:
    value = given.get(key, default)
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        words = _("%(low)g to %(high)s") % {"low": low, "high": f"{high:.10g}"}
        raise field_error(key, value, words)
    return float(value)


def choice_of(given: Mapping[str, Any], key: str, allowed: Collection[str]) -> str:
    value = given.get(key)
    if not isinstance(value, str) or value not in allowed:
        raise field_error(key, value, ", ".join(allowed))
    return value
