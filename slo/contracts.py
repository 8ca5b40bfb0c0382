"""Writes of contracts: as they are agreed, and what each period came to once it has ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from controlplane.accounts import audit
from controlplane.accounts.models import Tenant
from slo.accruals import accrual_between, current_period, settled_until
from slo.changes import Declared, changes_between
from slo.fields import FieldError, choice_of, field_error, keys_check, slug_of, text_of
from slo.indicator import SpecError
from slo.models import Contract, Objective, Settlement
from slo.penalty import PERIODS, terms_clean

CONTRACTS_PER_TENANT_MAX = 200
OBJECTIVES_PER_CONTRACT_MAX = 20
FEE_MAX = 10**9
# As far back as any reading reaches.
STARTS_BEFORE_DAYS_MAX = 90
STARTS_AFTER_DAYS_MAX = 3_650
# What a node's spool replays may still belong to the period before; spools hold 8 h.
SETTLE_AFTER = timedelta(hours=8)
PERIODS_PER_PASS_MAX = 100
FIELDS = (
    "slug",
    "name",
    "provider",
    "consumer",
    "objectives",
    "period",
    "fee",
    "currency",
    "terms",
    "starts_on",
)
_CURRENCY = re.compile(r"[A-Z]{3}")


def contract_declare(
    *, tenant: Tenant, spec: Mapping[str, Any], actor: str, now: datetime
) -> Declared[Contract]:
    """Creates the contract, or updates the tenant's one with the same slug; says what changed.

    `spec` has slug, provider, consumer, objectives (slugs) and terms (slo/penalty.py); name, period
    (month), fee with currency, and starts_on (the day it was created) may be left out. Changed
    terms hold for the whole of the period that runs; ended ones stay as they were settled. Raises
    FieldError naming the field, the value and what is allowed.
    """
    fields = _cleaned(spec)
    with transaction.atomic():
        Tenant.objects.select_for_update().get(pk=tenant.pk)
        contract = Contract.objects.filter(tenant=tenant, slug=fields["slug"]).first()
        before = contract_fields(contract) if contract else None
        started = contract.starts_on if contract else None
        fields["starts_on"] = _starts_on(spec, started, now.astimezone(UTC).date()).isoformat()
        objectives = _objectives(tenant, fields["objectives"])
        columns = {name: fields[name] for name in FIELDS if name != "objectives"}
        columns["fee"] = None if fields["fee"] is None else Decimal(f"{fields['fee']:.2f}")
        columns["starts_on"] = date.fromisoformat(fields["starts_on"])
        if contract is None:
            if Contract.objects.filter(tenant=tenant).count() >= CONTRACTS_PER_TENANT_MAX:
                words = _("%d contracts") % CONTRACTS_PER_TENANT_MAX
                raise field_error("slug", fields["slug"], words)
            contract = Contract(tenant=tenant)
        for name, value in columns.items():
            setattr(contract, name, value)
        contract.save()
        contract.objectives.set(objectives)
        changes = changes_between(before, fields)
        if changes:
            audit.record(
                tenant=tenant, actor=actor, verb="created" if before is None else "changed",
                noun="contract", subject=contract.slug,
                detail={change.field: [change.before, change.after] for change in changes},
            )  # fmt: skip
        return Declared(contract, created=before is None, changes=changes)


def contract_fields(contract: Contract) -> dict[str, Any]:
    """What was agreed, as `contract_declare` takes it."""
    return {
        **{name: getattr(contract, name) for name in FIELDS},
        "objectives": sorted(objective.slug for objective in contract.objectives.all()),
        "fee": None if contract.fee is None else float(contract.fee),
        "starts_on": contract.starts_on.isoformat(),
    }


def contract_delete(*, contract: Contract, actor: str) -> None:
    """Deletes it with its settlements, which stay in the audit log."""
    with transaction.atomic():
        settled = contract.settlements.order_by("period_start")
        detail = {
            **contract_fields(contract),
            "settled": [[s.period_start, s.percent, s.amount] for s in settled],
        }
        audit.record(
            tenant=contract.tenant, actor=actor, verb="deleted", noun="contract",
            subject=contract.slug, detail=detail,
        )  # fmt: skip
        contract.delete()


def contracts_settle(now: datetime) -> int:
    """Writes down what each period came to that ended 8 h ago or more; returns how many.

    To be called before readings are pruned. Again: changes nothing.
    """
    made = 0
    for contract in Contract.objects.prefetch_related("objectives").order_by("pk"):
        for _period in range(PERIODS_PER_PASS_MAX):
            start, end = current_period(contract, settled_until(contract))
            if end + SETTLE_AFTER > now:
                break
            made += _settle(contract, start, end, now)
    return made


def _settle(contract: Contract, start: datetime, end: datetime, now: datetime) -> int:
    found = accrual_between(contract, start, end)
    _row, made = Settlement.objects.get_or_create(
        contract=contract,
        period_start=start,
        defaults={
            "period_end": end,
            "percent": found.percent,
            "capped": found.capped,
            "amount": found.amount,
            "currency": contract.currency,
            "terms": contract.terms,
            "objectives": [asdict(one) for one in found.objectives],
            "settled_at": now,
        },
    )
    return int(made)


def _cleaned(given: Mapping[str, Any]) -> dict[str, Any]:
    keys_check(given, FIELDS)
    slug = slug_of(given)
    fee, currency = _fee(given)
    return {
        "slug": slug,
        "name": text_of({"name": slug, **given}, "name", 120),
        "provider": text_of(given, "provider", 120),
        "consumer": text_of(given, "consumer", 120),
        "objectives": _slugs(given),
        "period": choice_of({"period": "month", **given}, "period", PERIODS),
        "fee": fee,
        "currency": currency,
        "terms": _terms(given),
    }


def _terms(given: Mapping[str, Any]) -> dict[str, Any]:
    terms = given.get("terms")
    if not isinstance(terms, dict):
        raise field_error("terms", terms, _("an object with a basis"))
    try:
        return terms_clean(terms)
    except SpecError as error:
        raise FieldError(f"terms.{error.param}", f"terms.{error}") from None


def _fee(given: Mapping[str, Any]) -> tuple[float | None, str]:
    fee, currency = given.get("fee"), given.get("currency", "")
    if fee is None:
        if currency:
            raise field_error("currency", currency, _("only together with a fee"))
        return None, ""
    fits = isinstance(fee, int | float) and not isinstance(fee, bool)
    if not fits or not 0 <= fee <= FEE_MAX or round(fee, 2) != fee:
        raise field_error("fee", fee, _("0 to %d, in whole cents") % FEE_MAX)
    if not isinstance(currency, str) or not _CURRENCY.fullmatch(currency):
        raise field_error("currency", currency, _("three capital letters, as EUR"))
    return float(fee), currency


def _slugs(given: Mapping[str, Any]) -> list[str]:
    value = given.get("objectives")
    fits = (
        isinstance(value, list)
        and 1 <= len(value) <= OBJECTIVES_PER_CONTRACT_MAX
        and all(isinstance(slug, str) for slug in value)
    )
    if not fits or len(set(value)) < len(value):  # type: ignore[arg-type]
        words = _("a list of 1 to %d slugs, each once")
        raise field_error("objectives", value, words % OBJECTIVES_PER_CONTRACT_MAX)
    return sorted(value)  # type: ignore[arg-type]


def _objectives(tenant: Tenant, slugs: list[str]) -> list[Objective]:
    found = list(Objective.objects.filter(tenant=tenant, slug__in=slugs))
    known = {objective.slug for objective in found}
    for slug in slugs:
        if slug not in known:
            raise field_error("objectives", slug, _("the slug of an objective there is"))
    return found


def _starts_on(given: Mapping[str, Any], kept: date | None, today: date) -> date:
    text = given.get("starts_on")
    if text is None:
        return kept or today
    try:
        day = date.fromisoformat(text)
    except (TypeError, ValueError):
        day = None
    if day is not None and day == kept:
        return day
    first = today - timedelta(days=STARTS_BEFORE_DAYS_MAX)
    last = today + timedelta(days=STARTS_AFTER_DAYS_MAX)
    if day is None or not first <= day <= last:
        words = _("a day as 2026-01-31, from %(first)s to %(last)s")
        raise field_error("starts_on", text, words % {"first": first, "last": last})
    return day
