"""Writes of the slo room: objectives as they are promised, and the pruning of old readings.

Judging, the third write, has its own file (judging.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from controlplane.accounts.models import Tenant
from slo.indicator import SpecError, indicators
from slo.judging import Judgement, objectives_judge
from slo.models import Objective, Reading

__all__ = [
    "Judgement",
    "ObjectiveError",
    "objective_apply",
    "objectives_judge",
    "readings_prune",
]

OBJECTIVES_PER_TENANT_MAX = 200
FIELDS = (
    "slug",
    "name",
    "service",
    "indicator",
    "spec",
    "target",
    "window_days",
    "fast_burn",
    "enabled",
)
TARGET_MIN, TARGET_MAX = 0.5, 0.99999
WINDOW_DAYS_MAX = 90
FAST_BURN_MAX = 1_000.0
# The longest burn pair looks at the service as a whole; an engine's own rows serve charts,
# incidents and verification only.
ENGINE_READINGS_DAYS = 7
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SLUG = re.compile(r"[a-z0-9]+(?:[-_][a-z0-9]+)*")


class ObjectiveError(ValueError):
    """A field of an objective that does not fit; `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def objective_apply(*, tenant: Tenant, spec: Mapping[str, Any]) -> Objective:
    """Creates the objective, or updates the tenant's one with the same slug.

    `spec` has slug, service, indicator, target and the indicator's own `spec`; name, window_days,
    fast_burn and enabled may be left out. When what is counted changes (service, indicator, spec)
    the old readings are dropped: they count something else. Raises ObjectiveError naming the
    field, the value and what is allowed.
    """
    fields = _cleaned(spec)
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=tenant.pk)
        objective = Objective.objects.filter(tenant=tenant, slug=fields["slug"]).first()
        if objective is None:
            if Objective.objects.filter(tenant=tenant).count() >= OBJECTIVES_PER_TENANT_MAX:
                raise _error("slug", fields["slug"], _("%d objectives") % OBJECTIVES_PER_TENANT_MAX)
            return Objective.objects.create(tenant=tenant, **fields)
        counted = ("service", "indicator", "spec")
        if any(getattr(objective, name) != fields[name] for name in counted):
            Reading.objects.filter(objective=objective).delete()
        for name, value in fields.items():
            setattr(objective, name, value)
        objective.problem = ""
        objective.save()
        return objective


def readings_prune(now: datetime) -> int:
    """Deletes readings no window reaches any more; returns how many. Sums of the rest stay true."""
    deleted = 0
    engine_limit = now - timedelta(days=ENGINE_READINGS_DAYS)
    for objective in Objective.objects.order_by("pk"):
        # A day more, so that the window's own start always has a row before it.
        limit = now - timedelta(days=objective.window_days + 1)
        old = Reading.objects.filter(objective=objective, window_end__lt=limit)
        deleted += old.delete()[0]
        of_engines = Reading.objects.filter(objective=objective).exclude(scope="")
        deleted += of_engines.filter(window_end__lt=engine_limit).delete()[0]
    return deleted


def _error(param: str, value: object, allowed: str) -> ObjectiveError:
    words = _("%(param)s=%(value)r: allowed: %(allowed)s")
    return ObjectiveError(param, words % {"param": param, "value": value, "allowed": allowed})


def _cleaned(given: Mapping[str, Any]) -> dict[str, Any]:
    for key in given:
        if key not in FIELDS:
            raise _error(key, given[key], _("no such field, only %s") % ", ".join(FIELDS))
    slug = _text(given, "slug", 80)
    if not _SLUG.fullmatch(slug):
        raise _error("slug", slug, _("small letters, digits, single hyphens or underscores"))
    enabled = given.get("enabled", True)
    if not isinstance(enabled, bool):
        raise _error("enabled", enabled, "true, false")
    window_days = _number(given, "window_days", 1, WINDOW_DAYS_MAX, 30)
    if window_days != int(window_days):
        raise _error("window_days", given["window_days"], _("whole days"))
    indicator, spec = _indicator(given)
    return {
        "slug": slug,
        "name": _text({"name": slug, **given}, "name", 120),
        "service": _text(given, "service", 100),
        "indicator": indicator,
        "spec": spec,
        "target": _number(given, "target", TARGET_MIN, TARGET_MAX, None),
        "window_days": int(window_days),
        "fast_burn": _number(given, "fast_burn", 1, FAST_BURN_MAX, 14.4),
        "enabled": enabled,
    }


def _indicator(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    slug, spec = given.get("indicator"), given.get("spec", {})
    found = indicators()
    if not isinstance(slug, str) or slug not in found:
        raise _error("indicator", slug, ", ".join(found))
    if not isinstance(spec, dict):
        raise _error("spec", spec, _("an object"))
    try:
        return slug, found[slug].clean(spec)
    except SpecError as error:
        raise ObjectiveError(f"spec.{error.param}", f"spec.{error}") from None


def _text(given: Mapping[str, Any], key: str, chars_max: int) -> str:
    value = given.get(key)
    if isinstance(value, str) and not _CONTROL.search(value):
        text = value.strip()
        if 0 < len(text) <= chars_max:
            return text
    words = _("a text of 1 to %d characters, no control characters")
    raise _error(key, value, words % chars_max)


def _number(
    given: Mapping[str, Any], key: str, low: float, high: float, default: float | None
) -> float:
    value = given.get(key, default)
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        raise _error(key, value, _("%(low)g to %(high)s") % {"low": low, "high": f"{high:.10g}"})
    return float(value)
