"""A contract's penalty clause in words."""

from __future__ import annotations

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from controlplane.web.templatetags.ui import part
from slo.budget import EVENTS_MIN
from slo.penalty import CAP_PERCENT_DEFAULT, Terms


def clauses(terms: Terms) -> list[str]:
    """One sentence each: what a miss costs, and where it ends."""
    said = _by_tier(terms) if terms.basis == "tiers" else [_owed(terms)]
    if terms.cap_percent < CAP_PERCENT_DEFAULT:
        said.append(_("At most %(cap)s of the fee in all.") % {"cap": _percent(terms.cap_percent)})
    return said


def _owed(terms: Terms) -> str:
    percent = _percent(terms.percent)
    if terms.basis == "hour":
        words = ngettext(
            "%(percent)s of the fee for each clock hour that missed the target by itself, if it "
            "had at least %(n)d request.",
            "%(percent)s of the fee for each clock hour that missed the target by itself, if it "
            "had at least %(n)d requests.",
            EVENTS_MIN,
        )
        return words % {"percent": percent, "n": EVENTS_MIN}
    words = _("%(percent)s of the fee for each started step of %(step)s points below the target.")
    return words % {"percent": percent, "step": part(terms.step_percent / 100).split("\u00a0")[0]}


def _by_tier(terms: Terms) -> list[str]:
    words = _("%(percent)s of the fee below %(below)s.")
    return [
        words % {"percent": _percent(tier.percent), "below": part(tier.below)}
        for tier in terms.tiers
    ]


def _percent(percent: float) -> str:
    return part(percent / 100)
