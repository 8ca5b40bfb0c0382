"""How numbers, times and states are written, the same on every page.

Thin spaces part thousands, a no-break space stands before the unit, the minus is a minus. A state
is a shape, a word and a colour, never a colour alone. What is drawn: svg.py.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal

from django import template
from django.utils import timezone
from django.utils.functional import Promise
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from controlplane.accounts.models import AuditEntry
from controlplane.actions.models import Action, State
from controlplane.actions.selectors import short_of
from controlplane.actions.standing import overridden_words
from controlplane.diagnosis.models import Severity
from controlplane.web.heat import Cell as HeatCell
from slo.indicator import Unit

register = template.Library()

THIN = "\u202f"  # narrow no-break space, between thousands
SPACE = "\u00a0"  # no-break space, before a unit
MINUS = "\u2212"
NOTHING = "–"

# state → (class, word); the class decides shape and colour in app.css.
STATES: dict[str, tuple[str, Promise]] = {
    "met": ("ok", gettext_lazy("met")),
    "burning": ("warn", gettext_lazy("burning")),
    "breached": ("bad", gettext_lazy("breached")),
    "acting": ("act", gettext_lazy("acting")),
    "no_data": ("none", gettext_lazy("no data")),
    "open": ("bad", gettext_lazy("open")),
    "closed": ("ok", gettext_lazy("closed")),
    "observe": ("none", gettext_lazy("observe")),
    "propose": ("none", gettext_lazy("propose")),
    "approve": ("act", gettext_lazy("approve")),
    "auto": ("ok", gettext_lazy("auto")),
    "pending": ("none", gettext_lazy("pending")),
    "sent": ("ok", gettext_lazy("sent")),
    "failed": ("bad", gettext_lazy("failed")),
    "silenced": ("none", gettext_lazy("silenced")),
    "answered": ("ok", gettext_lazy("answered")),
    "firing": ("bad", gettext_lazy("firing")),
    "near": ("warn", gettext_lazy("near")),
    "quiet": ("ok", gettext_lazy("quiet")),
    "ok": ("ok", gettext_lazy("ok")),
    "late": ("warn", gettext_lazy("late")),
    "lost": ("bad", gettext_lazy("lost")),
    "unreachable": ("bad", gettext_lazy("unreachable")),
    "stopped": ("none", gettext_lazy("stopped")),
    "error": ("bad", gettext_lazy("error")),
    "waiting": ("none", gettext_lazy("waiting")),
    "done": ("ok", gettext_lazy("done")),
    "better": ("ok", gettext_lazy("better")),
    "no_worse": ("ok", gettext_lazy("no worse")),
    "worse": ("bad", gettext_lazy("worse")),
    "inconclusive": ("warn", gettext_lazy("inconclusive")),
    "infeasible": ("none", gettext_lazy("infeasible")),
    "expired": ("none", gettext_lazy("expired")),
    "proposed": ("none", gettext_lazy("proposed")),
    "approved": ("act", gettext_lazy("approved")),
    "dispatched": ("act", gettext_lazy("dispatched")),
    "acknowledged": ("act", gettext_lazy("acknowledged")),
    "applied": ("act", gettext_lazy("applied")),
    "verifying": ("act", gettext_lazy("verifying")),
    "verified": ("ok", gettext_lazy("kept")),
    "rejected": ("none", gettext_lazy("rejected")),
    "rolling_back": ("act", gettext_lazy("rolling back")),
    "rolled_back": ("warn", gettext_lazy("rolled back")),
    "rollback_failed": ("bad", gettext_lazy("rollback failed")),
}

# Severity is no state: a word without a colour.
WANTED: dict[str, Promise] = {
    Severity.PAGE: gettext_lazy("A person is wanted now"),
    Severity.TICKET: gettext_lazy("A person is wanted within the day"),
}


def grouped(value: float, decimals: int) -> str:
    """`value` with thin spaces between thousands and a true minus; NaN and infinity are a dash."""
    if not math.isfinite(value):
        return NOTHING
    text = f"{value:,.{decimals}f}".replace(",", THIN)
    if text.startswith("-"):
        text = text[1:] if float(text.replace(THIN, "")) == 0 else MINUS + text[1:]
    return text


def significant(value: float, digits: int = 3) -> str:
    """`value` to about `digits` significant figures, whole numbers kept whole."""
    if not math.isfinite(value):
        return NOTHING
    if value == 0 or (value == round(value) and abs(value) >= 1):
        return grouped(value, 0)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = grouped(value, min(decimals, 6))
    return text.rstrip("0").rstrip(".") if "." in text else text


@register.filter
def short(action: Action) -> bool:
    """Whether more was missed after a change that was kept than was predicted of it."""
    return short_of(action) is not None


@register.filter
def overridden(action: Action) -> str:
    """What was set over a kept change, when and by whom; "" while it stands."""
    return overridden_words(action)


@register.filter
def number(value: float | None, decimals: int | None = None) -> str:
    if value is None:
        return NOTHING
    return significant(value) if decimals is None else grouped(value, decimals)


@register.filter
def percent(share: float | None, decimals: int = 2) -> str:
    """A share as per cent, cut, not rounded: 100 % means all of them, below budget means below."""
    if share is None or not math.isfinite(share):
        return NOTHING
    scale: float = 10.0**decimals
    # Cutting must not turn a share such as 0.99 (98.99999… in binary) into 98.99.
    return grouped(math.floor(round(share * 100 * scale, 6)) / scale, decimals) + SPACE + "%"


@register.filter
def part(share: float | None) -> str:
    """A share that promises nothing, rounded to three figures: 44.7 %, 0.58 %, 73 %."""
    return NOTHING if share is None else significant(share * 100) + SPACE + "%"


@register.filter
def chance(p_value: float) -> str:
    """How often chance alone does as much, to two figures: 11 %, 0.62 %, never 0."""
    if p_value < CHANCE_MIN:
        return _("under %s") % part(CHANCE_MIN)
    return significant(p_value * 100, 2) + SPACE + "%"


CHANCE_MIN = 0.0001


@register.filter
def target(share: float) -> str:
    """A target with as many digits as it was promised with: 0.999 → 99.9 %."""
    return f"{share * 100:.4f}".rstrip("0").rstrip(".") + SPACE + "%"


@register.filter
def money(amount: Decimal, currency: str) -> str:
    """12 000.00 EUR, to the cent: what is owed is not rounded further."""
    return grouped(float(amount), 2) + SPACE + currency


@register.filter
def of_fee(percent: float) -> str:
    """A penalty in percent of the fee: 7.5 % of the fee."""
    return _("%(percent)s of the fee") % {"percent": significant(percent) + SPACE + "%"}


@register.filter
def factor(value: float | None) -> str:
    """A burn rate: 14.4×, 0.62×, 113×."""
    if value is None:
        return NOTHING
    return grouped(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 1 else 2) + "×"


@register.filter
def duration(seconds: float | None) -> str:
    """Two units at most: 0.8 ms, 420 ms, 1.24 s, 42 s, 9 min 5 s, 4 h 12 min, 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0:
        return MINUS + duration(-seconds)
    if seconds < 0.9995:
        ms = seconds * 1000
        return grouped(ms, 0 if ms >= 10 or ms == 0 else 1 if ms >= 1 else 2) + SPACE + _("ms")
    if seconds < 59.95:
        return grouped(seconds, 2 if seconds < 10 else 1 if seconds % 1 else 0) + SPACE + _("s")
    whole = round(seconds)
    for size, part, unit, smaller in (
        (86_400, 3_600, _("d"), _("h")),
        (3_600, 60, _("h"), _("min")),
        (60, 1, _("min"), _("s")),
    ):
        if whole >= size:
            rest = whole % size // part
            head = f"{whole // size}{SPACE}{unit}"
            return f"{head} {rest}{SPACE}{smaller}" if rest else head
    return f"{whole}{SPACE}{_('s')}"


@register.filter
def size(count: float | None) -> str:
    """Bytes to three figures in units of 1,024: 0 B, 118 MiB, 79.6 GiB."""
    if count is None:
        return NOTHING
    power = min(int(math.log(max(count, 1), 1024)), len(SIZES) - 1)
    return significant(count / 1024**power) + SPACE + SIZES[power]


SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


@register.filter
def measure(value: float | None, unit: str = "") -> str:
    """A measured value in its own unit; seconds and shares ("share of time") as people say them."""
    if value is None:
        return NOTHING
    if unit in ("s", "seconds"):
        return duration(value)
    if unit.startswith(("share", "ratio", "relative")):
        return part(value)
    said = significant(value, 3 if abs(value) >= 1 else 2)
    if unit == "1/s":
        return said + "/s"
    if said == "1" and unit in PLURALS:
        unit = unit.removesuffix("s")
    return said + (SPACE + unit if unit else "")


@register.simple_tag
def change(before: float | None, value: float | None, unit: str = "") -> SafeString:
    """What was measured before and during, the unit once: 0.12 → 33 requests; 0/s, as before."""
    during = measure(value, unit)
    if before is None or value is None:
        return format_html("<b>{}</b>", during)
    was = measure(before, unit)
    if was == during:
        return format_html('<b>{}</b><span class="muted">, {}</span>', during, _("as before"))
    counted, _space, of = was.partition(SPACE)
    same = of.rstrip("s") == during.partition(SPACE)[2].rstrip("s") and SPACE not in of
    was = counted.removesuffix("/s") if same else was
    return format_html('<span class="muted">{} →</span> <b>{}</b>', was, during)


@register.filter
def limit(threshold: float | None, unit: str = "") -> str:
    """A threshold in its unit; one of zero is a thing that must not be at all."""
    return _("more than 0") if threshold == 0 else measure(threshold, unit)


# Units as evidence has them, in English like all that is stored.
PLURALS = ("requests", "tokens", "blocks", "changes")


@register.filter
def clock(at: datetime | None) -> SafeString:
    """The time of day in UTC, with the full instant for machines and on hover."""
    if at is None:
        return format_html("{}", NOTHING)
    at = at.astimezone(UTC)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        at.isoformat(timespec="seconds"),
        f"{at:%Y-%m-%d %H:%M:%S} UTC",
        f"{at:%H:%M:%S}",
    )


@register.filter
def moment(at: datetime | None) -> SafeString:
    """As `clock`, with the day in front of it unless that is today."""
    if at is None:
        return format_html("{}", NOTHING)
    at = at.astimezone(UTC)
    today = timezone.now().astimezone(UTC).date() == at.date()
    # A narrow column may break it between day and time, not within the day.
    day = format_html('<span class="nobr">{}</span> ', f"{at:%Y-%m-%d}") if not today else ""
    return format_html(
        '<time datetime="{}" title="{}">{}{}</time>',
        at.isoformat(timespec="seconds"),
        f"{at:%Y-%m-%d %H:%M:%S} UTC",
        day,
        f"{at:%H:%M}",
    )


@register.filter
def age(seconds: float | None) -> str:
    """A duration that is only roughly known, in whole seconds."""
    return NOTHING if seconds is None else duration(float(round(seconds)))


@register.filter
def since(at: datetime | None) -> str:
    """How long ago, in words of `duration`."""
    if at is None:
        return NOTHING
    return duration(float(max(0, round((timezone.now() - at).total_seconds()))))


@register.filter
def until(start: datetime, end: datetime) -> str:
    """How long from one time to the other, in words of `duration`."""
    return duration(float(round((end - start).total_seconds())))


@register.filter
def state_class(state: str) -> str:
    return STATES[state][0]


@register.filter
def state_word(state: str) -> str:
    return str(STATES[state][1])


@register.filter
def deed(entry: AuditEntry) -> str:
    """What was done, as an audit entry has it; a step of an action is called as on its page."""
    is_step = entry.noun == "action" and entry.verb in State.values
    return state_word(entry.verb) if is_step else entry.verb


@register.simple_tag
def chip(state: str, word: str = "") -> SafeString:
    """Shape, colour and word of a state; the word may be said more precisely."""
    kind, usual = STATES[state]
    return format_html('<span class="chip {}">{}</span>', kind, word or usual)


@register.simple_tag
def pill(severity: str) -> SafeString:
    """The word of a severity, and what it asks for."""
    return format_html(
        '<span class="pill {}" title="{}"><span class="sr">{}: </span>{}</span>',
        severity,
        WANTED[severity],
        _("Severity"),
        Severity(severity).label,
    )


@register.filter
def in_words(cell: HeatCell) -> str:
    """A cell of the heat map: when, how long, how many, how many of them failed."""
    took = _("%(over)s to %(upto)s") % {
        "over": duration(cell.over_s),
        "upto": duration(cell.upto_s),
    }
    if cell.upto_s is None:
        took = _("more than %(over)s") % {"over": duration(cell.over_s)}
    counted = ngettext("%(n)s request", "%(n)s requests", cell.count) % {"n": number(cell.count)}
    if cell.failures:
        counted = _("%(counted)s, %(failed)s failed") % {
            "counted": counted,
            "failed": number(cell.failures),
        }
    since, until = cell.since.astimezone(UTC), cell.until.astimezone(UTC)
    return f"{since:%H:%M:%S}–{until:%H:%M:%S}, {took}: {counted}"


@register.filter
def setting(value: object) -> str:
    """A knob's value: numbers as everywhere, switches as on and off, the rest as it is."""
    if isinstance(value, bool):
        return _("on") if value else _("off")
    if isinstance(value, (int, float)):
        return significant(value)
    return NOTHING if value is None else str(value)


@register.filter
def word(unit: Unit, count: float) -> str:
    """What was counted, after the count of it."""
    return _(unit.word(count))


@register.filter
def who(by: str) -> str:
    """Who set a knob; an agent of ours signs as “trimtab-agent revert” and the command's id."""
    program, _space, deed = by.partition(" ")
    if program != "trimtab-agent":
        return by
    return _("Trimtab, taking a change back") if deed.startswith("revert") else _("Trimtab")


@register.filter
def after_title(message: dict[str, str]) -> str:
    """A message's text without what its title has said already."""
    text = message.get("text", "")
    told = (said for said in (message.get("what"), message.get("title")) if said)
    said = next((said for said in told if text.startswith(said)), "")
    return text[len(said) :].lstrip(". ")


@register.filter
def absolute(value: float) -> float:
    return abs(value)


@register.filter
def gpu_status(status: str) -> str:
    """Why there is no reading of a GPU, as the agent said it; its usual words are translated."""
    lead, _colon, why = status.partition(": ")
    if lead != "no GPU":
        return status or _("no GPU reported")
    return _("no GPU: %(why)s") % {"why": why} if why else _("no GPU")


@register.filter
def gpu_rest(gpu: dict[str, object]) -> list[tuple[str, object]]:
    """What else is known of a GPU."""
    shown = ("index", "gpu", "name", "memory_total_bytes")
    return [(key, value) for key, value in sorted(gpu.items()) if key not in shown]


@register.simple_tag
def knob_changes(changes: dict[str, dict[str, object]]) -> SafeString:
    """Each knob with what it was and what it becomes: max_num_seqs 8 → 32."""
    return format_html_join(
        ", ",
        '<span class="nobr"><code>{}</code> {} → {}</span>',
        ((knob, change.get("from"), change.get("to")) for knob, change in changes.items()),
    )
