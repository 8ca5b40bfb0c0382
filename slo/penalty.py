"""What a missed objective costs its provider: pure arithmetic from events to percent of the fee.

Three bases, as contracts have them (a contract's cap stands above the sum of its objectives):

- step: `percent` of the fee for each started step of `step_percent` percentage points below the
  target. 99 % promised, 98.7 % kept, steps of 0.2: two started steps.
- hour: `percent` for each clock hour (UTC) of the period that missed the target by itself, if it
  had at least 20 requests: fewer judge nothing.
- tiers: the percent of the lowest tier the attained share is below.

No events, no answer (None): nothing was measured, which is neither kept nor missed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from slo.budget import EVENTS_MIN, ROUNDING, Counts, attained
from slo.indicator import SpecError, spec_choice, spec_keys_check

PERIODS = ("day", "week", "month")
TIERS_MAX = 10
CAP_PERCENT_DEFAULT = 100.0
STEP_PERCENT_MIN = 0.0001
PARAMETERS = {
    "step": ("basis", "percent", "step_percent", "cap_percent"),
    "hour": ("basis", "percent", "cap_percent"),
    "tiers": ("basis", "tiers", "cap_percent"),
}


@dataclass(frozen=True)
class Tier:
    """`percent` of the fee while the attained share is under `below`."""

    below: float
    percent: float


@dataclass(frozen=True)
class Terms:
    """The penalty clause; `percent`, `step_percent` and `tiers` as the basis has them, else 0."""

    basis: str
    cap_percent: float
    percent: float = 0.0
    step_percent: float = 0.0
    tiers: tuple[Tier, ...] = ()


def terms_clean(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The clause with its defaults filled in, tiers highest first. Raises SpecError."""
    basis = spec_choice(spec, "basis", PARAMETERS)
    spec_keys_check(spec, PARAMETERS[basis])
    cap = _percent(spec, "cap_percent", default=CAP_PERCENT_DEFAULT)
    clean: dict[str, Any] = {"basis": basis}
    if basis == "tiers":
        clean["tiers"] = _tiers(spec.get("tiers"))
    else:
        clean["percent"] = _percent(spec, "percent")
    if basis == "step":
        clean["step_percent"] = _percent(spec, "step_percent", low=STEP_PERCENT_MIN)
    return {**clean, "cap_percent": cap}


def terms_of(clean: Mapping[str, Any]) -> Terms:
    """The terms `terms_clean` let through."""
    tiers = tuple(Tier(**tier) for tier in clean.get("tiers", ()))
    return Terms(**{**clean, "tiers": tiers})


def penalty_percent(
    terms: Terms, target: float, counts: Counts, hours: Sequence[Counts] = ()
) -> float | None:
    """Percent of the fee one objective costs, before the cap; None without events.

    `hours` are the period's hours, needed by the basis *hour* alone.
    """
    share = attained(counts)
    if share is None:
        return None
    if terms.basis == "hour":
        return terms.percent * hours_missed(hours, target)
    if terms.basis == "step":
        return terms.percent * steps_missed(share, target, terms.step_percent)
    return next((t.percent for t in reversed(terms.tiers) if share < t.below - ROUNDING), 0.0)


def steps_missed(share: float, target: float, step_percent: float) -> int:
    """Started steps below the target; 0 when it is met."""
    return max(0, math.ceil((target - share) * 100 / step_percent - ROUNDING))


def hours_missed(hours: Iterable[Counts], target: float) -> int:
    """Hours with enough events to judge by and fewer good ones than promised."""
    shares = (attained(hour) for hour in hours if hour.total >= EVENTS_MIN)
    return sum(share is not None and share < target - ROUNDING for share in shares)


def penalty_total(terms: Terms, percents: Iterable[float | None]) -> tuple[float | None, bool]:
    """(percent of the fee, whether the cap cut it); None while no objective had an event."""
    known = [percent for percent in percents if percent is not None]
    if not known:
        return None, False
    owed = math.fsum(known)
    return min(owed, terms.cap_percent), owed > terms.cap_percent


def period_of(at: datetime, period: str) -> tuple[datetime, datetime]:
    """Start and end of the calendar day, week (from Monday) or month (UTC) that `at` is in."""
    day = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return day, day + timedelta(days=1)
    if period == "week":
        monday = day - timedelta(days=day.weekday())
        return monday, monday + timedelta(days=7)
    first = day.replace(day=1)
    return first, (first + timedelta(days=32)).replace(day=1)


def _percent(
    spec: Mapping[str, Any], key: str, *, low: float = 0.0, default: float | None = None
) -> float:
    value = spec.get(key, default)
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not low <= float(value) <= 100:
        raise SpecError(key, value, f"percent, {low:g} to 100")
    return float(value)


def _tiers(given: object) -> list[dict[str, float]]:
    if not isinstance(given, list) or not 1 <= len(given) <= TIERS_MAX:
        raise SpecError("tiers", given, f"a list of 1 to {TIERS_MAX} objects: below, percent")
    tiers = []
    for tier in given:
        if not isinstance(tier, dict) or set(tier) != {"below", "percent"}:
            raise SpecError("tiers", tier, "an object with below and percent")
        below = tier["below"]
        if not isinstance(below, float) or not 0 < below < 1:
            raise SpecError("tiers.below", below, "a share, more than 0, less than 1")
        tiers.append({"below": below, "percent": _percent(tier, "percent")})
    tiers.sort(key=lambda tier: -tier["below"])
    for higher, lower in itertools.pairwise(tiers):
        if higher["below"] == lower["below"] or higher["percent"] >= lower["percent"]:
            raise SpecError("tiers", given, "each once, and the lower a tier, the more it costs")
    return tiers
