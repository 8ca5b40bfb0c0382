"""A contract's penalty clause in words."""

from __future__ import annotations

from collections.abc import Iterable

from django.utils.translation import gettext as _

from controlplane.web.templatetags.ui import part
from slo.budget import EVENTS_MIN
from slo.models import Objective
from slo.penalty import CAP_PERCENT_DEFAULT, Terms


def clauses(terms: Terms, objectives: Iterable[Objective]) -> list[str]:
    """One sentence each: what a miss of one of these costs, and where it ends."""
    said = _by_tier(terms) if terms.basis == "tiers" else [_owed(terms, objectives)]
    if terms.cap_percent < CAP_PERCENT_DEFAULT:
        said.append(_("At most %(cap)s of the fee in all.") % {"cap": _percent(terms.cap_percent)})
    return said


def _owed(terms: Terms, objectives: Iterable[Objective]) -> str:
    percent = _percent(terms.percent)
    if terms.basis == "hour":
        words = _(
            "%(percent)s of the fee for each clock hour that missed the target by itself, if it "
            "had at least %(enough)s."
        )
        return words % {"percent": percent, "enough": _enough(objectives)}
    words = _("%(percent)s of the fee for each started step of %(step)s points below the target.")
    return words % {"percent": percent, "step": part(terms.step_percent / 100).split("\u00a0")[0]}


def _enough(objectives: Iterable[Objective]) -> str:
    """“20 requests or 20 gaps between tokens”: as many as judge each of them."""
    units = dict.fromkeys(_(objective.unit.word(EVENTS_MIN)) for objective in objectives)
    return _(" or ").join(f"{EVENTS_MIN} {unit}" for unit in units)


def _by_tier(terms: Terms) -> list[str]:
    words = _("%(percent)s of the fee below %(below)s.")
    return [
        words % {"percent": _percent(tier.percent), "below": part(tier.below)}
        for tier in terms.tiers
    ]


def _percent(percent: float) -> str:
    return part(percent / 100)
