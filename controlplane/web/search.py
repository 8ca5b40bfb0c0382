"""What the address of the trace list asks for; what cannot be read is named, never dropped."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.utils.translation import gettext as _

from controlplane.web.charts import MINUTES_DEFAULT, RANGES
from controlplane.web.filters import BadFilter, bad_filter, one_of, text_of
from tracing.types import Place, TraceSearch

TEXT_CHARS_MAX = 100
SERVICE_CHARS_MAX = 100
LATENCY_MS_MAX = 86_400_000
# The widest range, and the windows of the heat map that stick out of it.
LONGEST = timedelta(hours=25)
STATUSES = {"": None, "answered": False, "failed": True}
SORTS = {"": False, "slowest": True}
FILTERS = ("service", "min_ms", "max_ms", "status", "q")
_PLACE = re.compile(r"(\d{1,19})-([0-9a-f]{32})")
# Unix seconds that a datetime holds and a sender could mean: 2000 to 2100.
_SECONDS = (946_684_800, 4_102_444_800)


@dataclass(frozen=True)
class Asked:
    """`raw` holds the texts as given, for the form and for links."""

    search: TraceSearch
    slowest: bool
    after: Place | None
    minutes: int
    raw: Mapping[str, str]

    @property
    def filtered(self) -> bool:
        return any(self.raw.get(name) for name in FILTERS)

    @property
    def cut(self) -> bool:
        """A part of the heat map was chosen instead of a range that ends now."""
        return bool(self.raw.get("since"))


def asked(raw: Mapping[str, str], now: datetime) -> Asked:
    """Raises BadFilter."""
    minutes = one_of(raw, "minutes", {str(m): m for m in RANGES}, str(MINUTES_DEFAULT))
    start, end = now - timedelta(minutes=minutes), now
    if raw.get("since") or raw.get("until"):
        start, end = _time(raw, "since"), _time(raw, "until")
        if not timedelta(0) < end - start <= LONGEST:
            raise BadFilter(
                _("until=%(until)s: allowed: after since=%(since)s, by 25 h at most")
                % {"until": raw.get("until"), "since": raw.get("since")}
            )
    longer_ms, until_ms = _milliseconds(raw, "min_ms"), _milliseconds(raw, "max_ms")
    if longer_ms is not None and until_ms is not None and until_ms <= longer_ms:
        raise BadFilter(
            _("max_ms=%(max)s: allowed: more than min_ms=%(min)s")
            % {"max": raw["max_ms"], "min": raw["min_ms"]}
        )
    return Asked(
        search=TraceSearch(
            start,
            end,
            service=text_of(raw, "service", SERVICE_CHARS_MAX) or None,
            longer_s=(longer_ms or 0) / 1000,
            until_s=None if until_ms is None else until_ms / 1000,
            failed=one_of(raw, "status", STATUSES, ""),
            text=text_of(raw, "q", TEXT_CHARS_MAX),
        ),
        slowest=bool(one_of(raw, "sort", SORTS, "")),
        after=_place(raw),
        minutes=minutes,
        raw=raw,
    )


def _milliseconds(raw: Mapping[str, str], name: str) -> float | None:
    text = raw.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LATENCY_MS_MAX:
        raise bad_filter(name, text, _("0 to %(max)s ms") % {"max": LATENCY_MS_MAX})
    return value


def _time(raw: Mapping[str, str], name: str) -> datetime:
    text = raw.get(name, "")
    low, high = _SECONDS
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise bad_filter(name, text, _("Unix seconds, given together with the other end"))
    return datetime.fromtimestamp(int(text), UTC)


def _place(raw: Mapping[str, str]) -> Place | None:
    text = raw.get("after", "")
    if not text:
        return None
    found = _PLACE.fullmatch(text)
    if found is None:
        raise bad_filter("after", text[:60], _("what the link to the next page holds"))
    return Place(int(found[1]), found[2])
