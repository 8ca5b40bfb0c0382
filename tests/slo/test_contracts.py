from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from controlplane.accounts.models import AuditEntry, Tenant
from slo import services
from slo.accruals import accrued
from slo.budget import Counts
from slo.contracts import contract_declare, contract_delete, contract_fields, contracts_settle
from slo.fields import FieldError
from slo.models import Contract, Objective, Reading, Settlement
from slo.readings import Measured, readings_book
from slo.services import Promised, objective_delete
from tests.slo.fleet_of_samples import a_tenant, an_objective
from tracing.types import Signal

pytestmark = pytest.mark.django_db
START = datetime(2026, 3, 1, tzinfo=UTC)
STEP = {"basis": "step", "percent": 5, "step_percent": 0.1}
QUARTER = timedelta(minutes=15)


def a_contract(tenant: Tenant, now: datetime = START, **changes: Any) -> Contract:
    spec = {
        "slug": "gold",
        "provider": "Platform",
        "consumer": "Order centre",
        "objectives": ["chat-ttft"],
        "fee": 12_000,
        "currency": "EUR",
        "terms": STEP,
        **changes,
    }
    return contract_declare(tenant=tenant, spec=spec, actor="ada", now=now).row


def serve(objective: Objective, start: datetime, hours: int, *, good: int, bad: int) -> datetime:
    """So many events in each quarter of an hour."""
    ends = [start + QUARTER * (i + 1) for i in range(hours * 4)]
    counts = Counts(good, good + bad)
    measured = [Measured(end, counts, Signal.OK) for end in ends]
    readings_book(objective=objective, scope="", window_s=900, measured=measured)
    return ends[-1]


def test_the_running_period_accrues_as_if_it_ended_now(tenant: Tenant) -> None:
    objective = an_objective(tenant)
    contract = a_contract(tenant)
    now = serve(objective, START, 10, good=988, bad=12)
    found = accrued(contract, now)
    assert found is not None
    assert (found.period_start, found.period_end) == (START, datetime(2026, 4, 1, tzinfo=UTC))
    assert (found.percent, found.amount, found.capped) == (10.0, Decimal("1200.00"), False)
    (one,) = found.objectives
    assert (one.objective, one.good, one.total) == ("chat-ttft", 39_520, 40_000)
    assert one.attained == pytest.approx(0.988)


def test_good_hours_later_in_the_period_bring_it_down_again(tenant: Tenant) -> None:
    objective = an_objective(tenant)
    contract = a_contract(tenant)
    now = serve(objective, START, 10, good=988, bad=12)
    now = serve(objective, now, 90, good=1_000, bad=0)
    found = accrued(contract, now)
    assert found is not None
    assert found.percent == 0.0


def test_terms_by_the_hour_count_hours_that_missed(tenant: Tenant) -> None:
    objective = an_objective(tenant)
    terms = {"basis": "hour", "percent": 0.5, "cap_percent": 1}
    contract = a_contract(tenant, terms=terms)
    now = serve(objective, START, 20, good=1_000, bad=0)
    now = serve(objective, now, 3, good=900, bad=100)
    found = accrued(contract, now)
    assert found is not None
    assert found.objectives[0].hours_missed == 3
    assert (found.percent, found.capped, found.amount) == (1.0, True, Decimal("120.00"))


def test_nothing_measured_is_neither_kept_nor_missed(tenant: Tenant) -> None:
    an_objective(tenant)
    found = accrued(a_contract(tenant), START + timedelta(days=3))
    assert found is not None
    assert (found.percent, found.amount, found.objectives[0].attained) == (None, None, None)


def test_before_it_starts_nothing_accrues_and_earlier_events_do_not_count(tenant: Tenant) -> None:
    objective = an_objective(tenant)
    contract = a_contract(tenant, starts_on="2026-03-02")
    now = serve(objective, START, 24, good=0, bad=100)
    assert accrued(contract, START) is None
    assert now == datetime(2026, 3, 2, tzinfo=UTC)
    now = serve(objective, now, 1, good=100, bad=0)
    found = accrued(contract, now)
    assert found is not None
    assert (found.period_start, found.percent) == (datetime(2026, 3, 2, tzinfo=UTC), 0.0)


def test_without_a_fee_only_percent_is_known(tenant: Tenant) -> None:
    objective = an_objective(tenant)
    contract = a_contract(tenant, fee=None, currency="")
    found = accrued(contract, serve(objective, START, 1, good=0, bad=100))
    assert found is not None
    assert (found.percent, found.amount, found.capped) == (100.0, None, True)


def test_an_ended_period_is_settled_once_and_for_all(tenant: Tenant) -> None:
    objective = an_objective(tenant)
    contract = a_contract(tenant, period="day")
    end = serve(objective, START, 24, good=989, bad=11)
    assert contracts_settle(end + timedelta(hours=7)) == 0  # a spool may still replay
    assert contracts_settle(end + timedelta(hours=8)) == 1
    assert contracts_settle(end + timedelta(hours=8)) == 0
    row = Settlement.objects.get()
    assert (row.period_start, row.period_end, row.percent) == (START, end, 5.0)
    assert (row.amount, row.currency, row.objectives[0]["objective"]) == (
        Decimal("600.00"), "EUR", "chat-ttft",
    )  # fmt: skip
    Reading.objects.all().delete()
    a_contract(tenant, period="day", terms={**STEP, "percent": 50})
    assert contracts_settle(end + timedelta(hours=9)) == 0
    assert Settlement.objects.get().percent == 5.0
    assert contract.settlements.count() == 1


def test_after_a_long_stop_every_period_is_settled_even_those_not_measured(tenant: Tenant) -> None:
    objective = an_objective(tenant)
    a_contract(tenant, period="day")
    serve(objective, START, 24, good=1_000, bad=0)
    assert contracts_settle(START + timedelta(days=3, hours=9)) == 3
    assert [s.percent for s in Settlement.objects.order_by("period_start")] == [0.0, None, None]


def test_a_change_of_period_counts_no_day_twice(tenant: Tenant) -> None:
    objective = an_objective(tenant)
    contract = a_contract(tenant, period="day")
    now = serve(objective, START, 24, good=0, bad=100)
    contracts_settle(now + timedelta(hours=8))
    contract = a_contract(tenant, period="month")
    now = serve(objective, now, 12, good=100, bad=0)
    found = accrued(contract, now)
    assert found is not None
    assert (found.period_start, found.percent) == (datetime(2026, 3, 2, tzinfo=UTC), 0.0)


def test_readings_a_contract_still_needs_are_not_pruned(tenant: Tenant) -> None:
    objective = an_objective(tenant, window_days=1)
    serve(objective, START, 24, good=100, bad=0)
    month_end = datetime(2026, 4, 1, tzinfo=UTC)
    contract = a_contract(tenant)
    assert services.readings_prune(month_end + timedelta(hours=20)) == 0
    contract_delete(contract=contract, actor="ada")
    assert services.readings_prune(month_end + timedelta(hours=20)) == 96


def test_a_promised_objective_cannot_go(tenant: Tenant) -> None:
    objective = an_objective(tenant)
    contract = a_contract(tenant)
    with pytest.raises(Promised, match="Contracts promise chat-ttft: gold"):
        objective_delete(objective=objective, actor="ada")
    contract_delete(contract=contract, actor="ada")
    objective_delete(objective=objective, actor="ada")
    assert not Objective.objects.exists()


def test_who_changed_what_is_in_the_audit_log(tenant: Tenant) -> None:
    an_objective(tenant)
    a_contract(tenant)
    again = a_contract(tenant)
    a_contract(tenant, terms={**STEP, "percent": 7})
    contract_delete(contract=again, actor="bob")
    told = [
        (e.actor, e.verb, e.noun, e.subject) for e in AuditEntry.objects.filter(noun="contract")
    ]
    assert told == [
        ("ada", "created", "contract", "gold"),
        ("ada", "changed", "contract", "gold"),
        ("bob", "deleted", "contract", "gold"),
    ]
    change = AuditEntry.objects.get(noun="contract", verb="changed")
    assert change.detail == {"terms.percent": [5.0, 7.0]}


def test_what_is_left_out_takes_its_default(tenant: Tenant) -> None:
    an_objective(tenant)
    contract = a_contract(tenant, now=START + timedelta(days=9), fee=None, currency="")
    assert contract_fields(contract) == {
        "slug": "gold", "name": "gold", "provider": "Platform", "consumer": "Order centre",
        "objectives": ["chat-ttft"], "period": "month", "fee": None, "currency": "",
        "terms": {**STEP, "percent": 5.0, "cap_percent": 100.0}, "starts_on": "2026-03-10",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"provider": ""}, "provider", "provider='': allowed: a text of 1 to 120 characters"),
        ({"objectives": []}, "objectives", "a list of 1 to 20 slugs"),
        ({"objectives": ["chat-ttft"] * 2}, "objectives", "each once"),
        ({"objectives": ["theirs"]}, "objectives", "'theirs': allowed: the slug of an objective"),
        ({"period": "year"}, "period", "allowed: day, week, month"),
        ({"fee": -1}, "fee", "fee=-1: allowed: 0 to 1000000000, in whole cents"),
        ({"fee": 0.001}, "fee", "in whole cents"),
        ({"currency": "euro"}, "currency", "three capital letters"),
        ({"fee": None}, "currency", "only together with a fee"),
        ({"terms": 5}, "terms", "an object with a basis"),
        ({"terms": {**STEP, "percent": -1}}, "terms.percent", "terms.percent=-1: allowed"),
        ({"starts_on": "tomorrow"}, "starts_on", "a day as 2026-01-31, from 2025-12-01"),
        ({"starts_on": "2020-01-01"}, "starts_on", "from 2025-12-01 to 2036-02-27"),
        ({"penalty": 1}, "penalty", "no such field, only slug, name, provider"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(
    tenant: Tenant, changes: dict[str, Any], param: str, words: str
) -> None:
    an_objective(tenant)
    an_objective(a_tenant("other"), slug="theirs")
    with pytest.raises(FieldError, match=words) as caught:
        a_contract(tenant, **changes)
    assert caught.value.param == param
    assert not Contract.objects.exists()
