"""Writes of the slo room: objectives as they are promised, and the pruning of old readings.

Judging has its own file (judging.py), and so have contracts (contracts.py) and the declaration of
many of both at once (declarations.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from controlplane.accounts import audit
from controlplane.accounts.models import Tenant
from slo.changes import Declared, changes_between
from slo.fields import (
    FieldError,
    field_error,
    keys_check,
    number_of,
    slug_of,
    text_of,
)
from slo.indicator import SpecError, indicators
from slo.judging import Judgement, objectives_judge
from slo.models import Objective, Reading
from slo.penalty import period_of

__all__ = [
    "Judgement",
    "objective_apply",
    "objective_declare",
    "objective_delete",
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
# What decides which events are counted, and so what the readings are readings of.
COUNTED = ("service", "indicator", "spec")
TARGET_MIN, TARGET_MAX = 0.5, 0.99999
WINDOW_DAYS_MAX = 90
FAST_BURN_MAX = 1_000.0
# The longest burn pair looks at the service as a whole; an engine's own rows serve charts,
# incidents and verification only.
ENGINE_READINGS_DAYS = 7


class Promised(Exception):
    """An objective that a contract names cannot go."""


def objective_apply(
    *, tenant: Tenant, spec: Mapping[str, Any], actor: str = "trimtab"
) -> Objective:
    """`objective_declare`, when only the objective is of interest."""
    return objective_declare(tenant=tenant, spec=spec, actor=actor).row


def objective_declare(
    *, tenant: Tenant, spec: Mapping[str, Any], actor: str
) -> Declared[Objective]:
    """Creates the objective, or updates the tenant's one with the same slug; says what changed.

    `spec` has slug, service, indicator, target and the indicator's own `spec`; name, window_days,
    fast_burn and enabled may be left out. When what is counted changes (service, indicator, spec)
    the old readings are dropped: they count something else. Raises FieldError naming the field,
    the value and what is allowed.
    """
    fields = _cleaned(spec)
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=tenant.pk)
        objective = Objective.objects.filter(tenant=tenant, slug=fields["slug"]).first()
        before = objective_fields(objective) if objective else None
        changes, note = changes_between(before, fields), ""
        if objective is None:
            if Objective.objects.filter(tenant=tenant).count() >= OBJECTIVES_PER_TENANT_MAX:
                words = _("%d objectives") % OBJECTIVES_PER_TENANT_MAX
                raise field_error("slug", fields["slug"], words)
            objective = Objective.objects.create(tenant=tenant, **fields)
        else:
            if any(getattr(objective, name) != fields[name] for name in COUNTED):
                Reading.objects.filter(objective=objective).delete()
                note = _("What is counted changes: the readings so far are dropped.")
            for name, value in fields.items():
                setattr(objective, name, value)
            objective.problem = ""
            objective.save()
        declared = Declared(objective, created=before is None, changes=changes, note=note)
        if changes:
            audit.record(
                tenant=tenant,
                actor=actor,
                verb="created" if before is None else "changed",
                noun="objective",
                subject=objective.slug,
                detail={change.field: [change.before, change.after] for change in changes},
            )
        return declared


def objective_fields(objective: Objective) -> dict[str, Any]:
    """What was promised, as `objective_declare` takes it."""
    return {name: getattr(objective, name) for name in FIELDS}


def objective_delete(*, objective: Objective, actor: str) -> None:
    """Deletes it with its readings and incidents. Raises Promised while a contract names it."""
    with transaction.atomic():
        names = list(objective.contracts.order_by("slug").values_list("slug", flat=True))
        if names:
            words = _("Contracts promise %(slug)s: %(names)s. Take it out of them first.")
            raise Promised(words % {"slug": objective.slug, "names": ", ".join(names)})
        detail = objective_fields(objective)
        audit.record(
            tenant=objective.tenant, actor=actor, verb="deleted", noun="objective",
            subject=objective.slug, detail=detail,
        )  # fmt: skip
        objective.delete()


def readings_prune(now: datetime) -> int:
    """Deletes readings no window reaches any more; returns how many. Sums of the rest stay true."""
    deleted = 0
    engine_limit = now - timedelta(days=ENGINE_READINGS_DAYS)
    for objective in Objective.objects.order_by("pk"):
        limit = _reach(objective, now)
        old = Reading.objects.filter(objective=objective, window_end__lt=limit)
        deleted += old.delete()[0]
        of_engines = Reading.objects.filter(objective=objective).exclude(scope="")
        deleted += of_engines.filter(window_end__lt=engine_limit).delete()[0]
    return deleted


def _reach(objective: Objective, now: datetime) -> datetime:
    """How far back its window or the period of a contract goes, settled or about to be.

    A day more, so that the first moment asked for always has a row before it.
    """
    day = timedelta(days=1)
    periods = objective.contracts.values_list("period", flat=True).distinct()
    starts = [period_of(now - day, period)[0] for period in periods]
    return min([now - timedelta(days=objective.window_days), *starts]) - day


def _cleaned(given: Mapping[str, Any]) -> dict[str, Any]:
    keys_check(given, FIELDS)
    slug = slug_of(given)
    enabled = given.get("enabled", True)
    if not isinstance(enabled, bool):
        raise field_error("enabled", enabled, "true, false")
    window_days = number_of(given, "window_days", 1, WINDOW_DAYS_MAX, 30)
    if window_days != int(window_days):
        raise field_error("window_days", given["window_days"], _("whole days"))
    indicator, spec = _indicator(given)
    return {
        "slug": slug,
        "name": text_of({"name": slug, **given}, "name", 120),
        "service": text_of(given, "service", 100),
        "indicator": indicator,
        "spec": spec,
        "target": number_of(given, "target", TARGET_MIN, TARGET_MAX, None),
        "window_days": int(window_days),
        "fast_burn": number_of(given, "fast_burn", 1, FAST_BURN_MAX, 14.4),
        "enabled": enabled,
    }


def _indicator(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    slug, spec = given.get("indicator"), given.get("spec", {})
    found = indicators()
    if not isinstance(slug, str) or slug not in found:
        raise field_error("indicator", slug, ", ".join(found))
    if not isinstance(spec, dict):
        raise field_error("spec", spec, _("an object"))
    try:
        return slug, found[slug].clean(spec)
    except SpecError as error:
        raise FieldError(f"spec.{error.param}", f"spec.{error}") from None
