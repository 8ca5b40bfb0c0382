"""/contracts/ and /contracts/<slug>/: who owes whom what, and what it has come to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.http import Http404, HttpResponse
from django.utils import timezone

from controlplane.diagnosis.selectors import incidents_open
from controlplane.web.access import TenantRequest, page, send
from controlplane.web.filters import BadFilter, rows_after
from controlplane.web.pages.objectives import PAGE_STATES, ObjectiveRow, page_state
from controlplane.web.story import StoryLine, lines_of
from controlplane.web.terms import clauses
from slo.accruals import Accrual, ObjectiveAccrual, accrued, begins, contract_get
from slo.contracts import contract_fields
from slo.models import Contract, Objective
from slo.penalty import terms_of
from slo.selectors import Standing, standing

# A contract costs its objectives' standings and the sums of its period.
ROWS = 20
SETTLEMENTS = 12


@dataclass(frozen=True)
class ContractRow:
    """`accrued` is None before the contract starts."""

    contract: Contract
    standings: tuple[Standing, ...]
    clauses: list[str]
    accrued: Accrual | None

    @property
    def state(self) -> str:
        states = {PAGE_STATES[each.state] for each in self.standings}
        return next((state for state in ("bad", "warn", "ok") if state in states), "none")


@dataclass(frozen=True)
class PromiseRow(ObjectiveRow):
    """An objective of a contract: how it stands, and what it came to in the running period."""

    owed: ObjectiveAccrual | None


@page
def contracts(request: TenantRequest) -> HttpResponse:
    """Answers 400 for a place in the list that no link of ours led to."""
    raw = {key: str(text) for key, text in request.GET.items() if key != "part"}
    rows = Contract.objects.filter(tenant=request.tenant).prefetch_related("objectives")
    try:
        found = rows_after(rows, raw, by=("slug",), limit=ROWS)
    except BadFilter as error:
        problem = {"problem": str(error), "page_state": "none"}
        return send(request, "contracts.html", problem, status=400)
    shown = contract_rows(found.rows, timezone.now())
    states = {row.state for row in shown}
    context = {
        "rows": shown,
        "next": found.next,
        "page_state": next((s for s in ("bad", "warn", "ok") if s in states), "none"),
    }
    return send(request, "contracts.html", context, parts=("list",))


def contract_rows(found: Any, now: datetime) -> list[ContractRow]:
    """Each objective's standing is read once, however many contracts name it."""
    known: dict[Any, Standing] = {}

    def stands(objective: Objective) -> Standing:
        if objective.pk not in known:
            known[objective.pk] = standing(objective, now)
        return known[objective.pk]

    return [
        ContractRow(
            contract,
            tuple(stands(each) for each in _objectives(contract)),
            clauses(terms_of(contract.terms), _objectives(contract)),
            accrued(contract, now),
        )
        for contract in found
    ]


@page
def contract(request: TenantRequest, slug: str) -> HttpResponse:
    """Raises Http404 for another tenant's contract as for one that never was."""
    found = contract_get(tenant=request.tenant, slug=slug)
    if found is None:
        raise Http404(f"contract {slug!r} is not one of {request.tenant}")
    now = timezone.now()
    lines = {line.incident.objective_id: line for line in lines_of(incidents_open(request.tenant))}
    owed = accrued(found, now)
    rows = promise_rows(found, owed, lines, now)
    context = {
        "contract": found,
        "accrued": owed,
        "passed": _passed(owed),
        "begins": begins(found),
        "rows": rows,
        "clauses": clauses(terms_of(found.terms), _objectives(found)),
        "settlements": found.settlements.order_by("-period_start")[:SETTLEMENTS],
        "spec": json.dumps(contract_fields(found), indent=2, default=str),
        "page_state": page_state(list(rows)),
    }
    return send(request, "contract.html", context, parts=("state",))


def promise_rows(
    found: Contract, owed: Accrual | None, lines: dict[Any, StoryLine], now: datetime
) -> list[PromiseRow]:
    by_slug = {each.objective: each for each in owed.objectives} if owed else {}
    return [
        PromiseRow(standing(each, now), lines.get(each.pk), by_slug.get(each.slug))
        for each in _objectives(found)
    ]


def _objectives(found: Contract) -> list[Objective]:
    return sorted(found.objectives.all(), key=lambda objective: objective.slug)


def _passed(owed: Accrual | None) -> float | None:
    """The share of the running period that is over."""
    if owed is None:
        return None
    return (owed.until - owed.period_start) / (owed.period_end - owed.period_start)
