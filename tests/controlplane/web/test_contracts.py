"""Contracts: who owes whom what, in words and in figures."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from django.utils import timezone

from controlplane.web.terms import clauses
from slo.accruals import accrued, contract_get
from slo.contracts import contract_declare
from slo.indicator import indicators
from slo.models import Objective
from slo.penalty import terms_clean, terms_of
from tests.controlplane.web.furnished import CONTRACT, promise
from tests.controlplane.web.measured import judge, send
from tests.controlplane.web.story import incident
from tests.controlplane.web.world import World, world


@pytest.fixture
def full(db: None, monkeypatch: pytest.MonkeyPatch) -> World:
    """An hour of data and an incident late in an evening: in the month that runs, whatever day it
    is. In the first hour of a month nothing has been measured in it."""
    evening = datetime.combine(datetime.now(UTC), time(), UTC) - timedelta(hours=1)
    monkeypatch.setattr(timezone, "now", lambda: evening)
    made = world(now=evening)
    judge(made)
    send(made)
    incident(made)
    return made


def text(answer: Any, status: int = 200) -> str:
    assert answer.status_code == status, answer.content
    return str(answer.content.decode()).replace("\u00a0", " ").replace("\u202f", " ")


def owed(world: World) -> str:
    contract = contract_get(tenant=world.tenant, slug="chat-gold")
    assert contract is not None
    found = accrued(contract, world.now)
    assert found is not None
    assert found.amount
    return f"{found.amount:,.2f} EUR".replace(",", " ")


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (
            {"basis": "step", "percent": 5, "step_percent": 0.1, "cap_percent": 50},
            ["5 % of the fee for each started step of 0.1 points below the target.",
             "At most 50 % of the fee in all."],
        ),
        (
            {"basis": "hour", "percent": 0.5},
            ["0.5 % of the fee for each clock hour that missed the target by itself, if it had at "
             "least 20 requests or 20 gaps between tokens."],
        ),
        (
            {"basis": "tiers", "tiers": [{"below": 0.95, "percent": 25},
                                         {"below": 0.99, "percent": 10}]},
            ["10 % of the fee below 99 %.", "25 % of the fee below 95 %."],
        ),
    ],
)  # fmt: skip
def test_penalty_terms_are_said_in_words(terms: dict[str, Any], said: list[str]) -> None:
    latency = indicators()["latency"]
    metrics = (f"vllm:{name}_seconds" for name in ("time_to_first_token", "inter_token_latency"))
    specs = [latency.clean({"metric": metric, "threshold_ms": 50}) for metric in metrics]
    promised = [Objective(indicator="latency", spec=spec) for spec in (*specs, specs[0])]
    found = clauses(terms_of(terms_clean(terms)), promised)
    assert [clause.replace("\u00a0", " ") for clause in found] == said


def test_the_list_says_who_owes_whom_and_how_much(ada: Any, full: World) -> None:
    promise(full)
    said = text(ada(full).get("/contracts/"))
    for words in (
        "Chat, gold", "Platform team → Order centre", "First token within 500 ms", "breached",
        owed(full), "% of the fee", "nothing measured", "At most 50 % of the fee in all.",
    ):  # fmt: skip
        assert words in said, words
    assert 'data-page-state="bad"' in said


def test_a_contract_shows_its_facts_objectives_clauses_and_settlements(
    ada: Any, full: World
) -> None:
    promise(full)
    said = text(ada(full).get("/contracts/chat-gold/"))
    for words in (
        owed(full), "12 000.00 EUR", "a month", "Attained this period",
        "for each started step of 0.1 points", "1 200.00 EUR", "putContractBySlug",
        "running cap too small",
    ):  # fmt: skip
        assert words in said, words


def test_a_contract_that_has_not_begun_owes_nothing(ada: Any, empty: World) -> None:
    day = (empty.now + timedelta(days=9)).date().isoformat()
    later = {**CONTRACT, "starts_on": day}
    contract_declare(tenant=empty.tenant, spec=later, actor="ada", now=empty.now)
    client = ada(empty)
    assert "not begun" in text(client.get("/contracts/"))
    assert f"it begins {day}" in text(client.get("/contracts/chat-gold/"))


def test_terms_by_the_hour_count_the_hours_missed(ada: Any, full: World) -> None:
    hourly = {**CONTRACT, "terms": {"basis": "hour", "percent": 1}, "fee": None, "currency": ""}
    contract_declare(tenant=full.tenant, spec=hourly, actor="ada", now=full.now)
    said = text(ada(full).get("/contracts/chat-gold/"))
    assert "Hours missed" in said
    assert "known in percent only" in said


def test_no_contract_shows_what_to_type(ada: Any, empty: World) -> None:
    assert "trimtab objective apply -f" in text(ada(empty).get("/contracts/"))


def test_another_tenants_contract_does_not_exist(ada: Any, full: World) -> None:
    promise(full)
    client = ada(world("other"), "eve")
    assert client.get("/contracts/chat-gold/").status_code == 404
    assert "No contract so far." in text(client.get("/contracts/"))
    assert client.get("/contracts/?after=x").status_code == 400
