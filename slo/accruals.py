"""Reads of contracts: what the period that runs has come to so far, and what earlier ones did."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Decimal

from django.db.models import Max

from controlplane.accounts.models import Tenant
from slo.budget import Counts, attained
from slo.models import Contract, Objective
from slo.penalty import (
    Terms,
    hours_missed,
    penalty_percent,
    penalty_total,
    period_of,
    terms_of,
)
from slo.readings import sums_at_each

CENT = Decimal("0.01")
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class ObjectiveAccrual:
    """How one objective stood; `attained` and `percent` are None while nothing was measured.

    `hours_missed` counts only under terms by the hour; None under others.
    """

    objective: str
    target: float
    attained: float | None
    good: float
    total: float
    hours_missed: int | None
    percent: float | None


@dataclass(frozen=True)
class Accrual:
    """What a contract came to between two moments, as if its period ended with the second.

    `percent` of the fee after the cap, None while no objective was measured; `amount` in the
    contract's currency, None without a fee too.
    """

    period_start: datetime
    period_end: datetime
    until: datetime
    percent: float | None
    capped: bool
    amount: Decimal | None
    objectives: tuple[ObjectiveAccrual, ...]


def contract_get(*, tenant: Tenant, slug: str) -> Contract | None:
    found = Contract.objects.filter(tenant=tenant, slug=slug)
    return found.prefetch_related("objectives").first()


def accrued(contract: Contract, now: datetime) -> Accrual | None:
    """The period that runs, so far; None before the contract starts."""
    if now < begins(contract):
        return None
    start, end = current_period(contract, now)
    return accrual_between(contract, start, end, now)


def accrual_between(
    contract: Contract, start: datetime, end: datetime, now: datetime | None = None
) -> Accrual:
    """From its objectives' readings in (start, min(now, end)]."""
    until = end if now is None else min(now, end)
    terms = terms_of(contract.terms)
    objectives = sorted(contract.objectives.all(), key=lambda objective: objective.slug)
    rows = tuple(_objective(objective, terms, start, until) for objective in objectives)
    percent, capped = penalty_total(terms, [row.percent for row in rows])
    amount = None
    if percent is not None and contract.fee is not None:
        amount = (contract.fee * Decimal(str(percent)) / 100).quantize(CENT, ROUND_HALF_UP)
    return Accrual(start, end, until, percent, capped, amount, rows)


def current_period(contract: Contract, at: datetime) -> tuple[datetime, datetime]:
    """The period `at` is in; cut at the front where the contract began, or was last settled under
    another length of period."""
    start, end = period_of(at, contract.period)
    settled = contract.settlements.filter(period_end__lte=at).aggregate(at=Max("period_end"))["at"]
    return max(start, begins(contract), settled or start), end


def begins(contract: Contract) -> datetime:
    return datetime.combine(contract.starts_on, time(), UTC)


def settled_until(contract: Contract) -> datetime:
    """The end of the last settled period, or the contract's beginning."""
    last: datetime | None = contract.settlements.aggregate(at=Max("period_end"))["at"]
    return max(last, begins(contract)) if last else begins(contract)


def _objective(
    objective: Objective, terms: Terms, start: datetime, until: datetime
) -> ObjectiveAccrual:
    by_hour = terms.basis == "hour"
    moments = [start, until]
    if by_hour:
        moments[1:1] = [start + HOUR * i for i in range(1, int((until - start) / HOUR) + 1)]
    sums = sums_at_each(objective, "", moments)
    counts = sums[until] - sums[start]
    hours: list[Counts] = []
    if by_hour:
        hours = [sums[b] - sums[a] for a, b in itertools.pairwise(moments)]
    return ObjectiveAccrual(
        objective=objective.slug,
        target=objective.target,
        attained=attained(counts),
        good=counts.good,
        total=counts.total,
        hours_missed=hours_missed(hours, objective.target) if by_hour else None,
        percent=penalty_percent(terms, objective.target, counts, hours),
    )
