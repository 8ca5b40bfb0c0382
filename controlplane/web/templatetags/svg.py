"""How values are drawn: SVG with its geometry in attributes, as the content policy forbids inline
style. Each drawing says in words what it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from controlplane.web.knobs import KnobRow
from controlplane.web.templatetags.ui import number, percent, setting, state_class

register = template.Library()

BUDGET_ZERO = 33.3  # per cent of the rule's width: left of it is overspent


@register.simple_tag
def budget_rule(left: float | None, state: str) -> SafeString:
    """The budget rule: a bar from a zero mark; what is overspent grows to the left of it.

    `left` is the share of the budget that is left: 1 fills the right side. The left side never
    ends: −1 fills half of it, −3 three quarters, −9 nine tenths.
    """
    if left is None:
        said, bar = _("error budget unknown"), mark_safe("")
    else:
        said = _("%(share)s of the error budget left") % {"share": percent(left, 0)}
        if left >= 0:
            width = min(left, 1) * (100 - BUDGET_ZERO)
        else:
            width = -left / (1 - left) * BUDGET_ZERO
        width = max(width, 0.8)
        bar = format_html(
            '<rect class="{}" x="{}%" y="3" width="{}%" height="6"/>',
            state_class(state) if left >= 0 else "bad",
            f"{BUDGET_ZERO if left >= 0 else BUDGET_ZERO - width:.2f}",
            f"{width:.2f}",
        )
    return format_html(
        '<svg class="budget" role="img" aria-label="{}"><rect class="track" x="0" y="3.5" '
        'width="100%" height="5"/>{}<line class="zero" x1="{}%" x2="{}%" y1="0" y2="12"/></svg>',
        said,
        bar,
        BUDGET_ZERO,
        BUDGET_ZERO,
    )


SPARK_WIDTH, SPARK_HEIGHT = 160, 32


@register.simple_tag
def sparkline(
    points: Sequence[Sequence[float | None]],
    axis: tuple[float, float],
    bound: float | None,
    label: str,
    since: datetime | None = None,
) -> SafeString:
    """Values over time as one line, gaps kept; the threshold dashed, the time since `since` shaded.

    `points` are (unix seconds, value or None); `axis` is the first and last time of the page, so
    that all its sparklines line up. Empty when nothing was measured.
    """
    known = [value for _at, value in points if value is not None]
    if not known:
        return mark_safe("")
    low, high = min(0.0, *known), max(*known, bound or 0.0, 1e-12)

    def x(at: float) -> float:
        return (at - axis[0]) / max(axis[1] - axis[0], 1e-9) * SPARK_WIDTH

    def y(value: float) -> float:
        return SPARK_HEIGHT - 2 - (value - low) / (high - low) * (SPARK_HEIGHT - 4)

    steps, pen = [], "M"
    for at, value in points:
        if at is None or value is None:
            pen = "M"
            continue
        steps.append(f"{pen}{x(at):.1f} {y(value):.1f}")
        pen = "L"
    shade = limit = mark_safe("")
    if since is not None and axis[0] <= since.timestamp() <= axis[1]:
        start = x(since.timestamp())
        shade = format_html(
            '<rect class="since" x="{}" y="0" width="{}" height="{}"/>',
            f"{start:.1f}",
            f"{SPARK_WIDTH - start:.1f}",
            SPARK_HEIGHT,
        )
    if bound is not None:
        limit = format_html(
            '<line class="bound" x1="0" x2="{}" y1="{}" y2="{}"/>',
            SPARK_WIDTH,
            f"{y(bound):.1f}",
            f"{y(bound):.1f}",
        )
    return format_html(
        '<svg class="spark" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" '
        'aria-label="{}">{}{}<path d="{}"/></svg>',
        SPARK_WIDTH,
        SPARK_HEIGHT,
        label,
        shade,
        limit,
        "".join(steps),
    )


@register.simple_tag
def knob_rule(row: KnobRow) -> SafeString:
    """Where a value stands within its bounds: a dot on a line, its default a tick."""
    if row.at is None:
        return mark_safe("")
    said = _("%(value)s of %(low)s to %(high)s") % {
        "value": setting(row.value),
        "low": number(row.minimum),
        "high": number(row.maximum),
    }
    tick = mark_safe("")
    if row.default_at is not None:
        x = f"{100 * row.default_at:.2f}%"
        tick = format_html('<line class="usual" x1="{}" x2="{}" y1="2" y2="10"/>', x, x)
    return format_html(
        '<svg class="rule" role="img" aria-label="{}"><line class="track" x1="0" x2="100%" y1="6" '
        'y2="6"/>{}<circle class="{}" cx="{}" cy="6" r="4"/></svg>',
        said,
        tick,
        "warn" if row.drifted else "",
        f"{100 * row.at:.2f}%",
    )


@register.filter
def coordinate(value: float) -> str:
    """A number as drawings and addresses take it, whatever the language of the page."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


@register.filter
def share_of_width(share: float) -> str:
    """A share of the drawing's width as an SVG length."""
    return f"{100 * share:.3f}%"
