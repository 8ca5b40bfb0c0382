from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from pytest_django import DjangoAssertNumQueries

from controlplane.accounts.models import Tenant
from slo.selectors import State, budget_series, objectives_standing, standing
from slo.services import objectives_judge
from tests.memory_reader import MemoryReader
from tests.slo.fleet_of_samples import SETTLED, START, WINDOW, Engine, an_objective
from tracing.types import Signal

pytestmark = pytest.mark.django_db


@pytest.fixture
def engine() -> Engine:
    return Engine(MemoryReader())


def judged(tenant: Tenant, engine: Engine, end: datetime) -> datetime:
    objectives_judge(tenant=tenant, reader=engine.reader, now=end + SETTLED)
    return end + SETTLED


def test_nothing_read_is_no_data_and_not_met(tenant: Tenant) -> None:
    one = standing(an_objective(tenant), START)
    assert (one.state, one.signal) == (State.NO_DATA, Signal.MISSING)
    assert (one.attained, one.budget_left, one.burn_1h, one.stale_s) == (None, None, None, None)


def test_quiet_service_is_no_data_too(tenant: Tenant, engine: Engine) -> None:
    objective = an_objective(tenant)
    now = judged(tenant, engine, engine.serve(0, 0))
    assert (standing(objective, now).state, standing(objective, now).signal) == (
        State.NO_DATA, Signal.NO_TRAFFIC,
    )  # fmt: skip


def test_met_burning_breached(tenant: Tenant, engine: Engine) -> None:
    objective = an_objective(tenant)
    now = judged(tenant, engine, engine.serve(2_000, 2))
    met = standing(objective, now)
    assert met.state == State.MET
    assert met.attained == pytest.approx(2_000 / 2_002)
    assert met.budget_left == pytest.approx(1 - 2 / 20.02)
    now = judged(tenant, engine, engine.serve(20, 10))
    burning = standing(objective, now)
    assert (burning.state, burning.fast_burn_now) == (State.BURNING, True)
    assert burning.budget_left is not None
    assert burning.budget_left > 0
    now = judged(tenant, engine, engine.serve(20, 10))
    assert standing(objective, now).state == State.BREACHED


def test_a_silent_engine_leaves_the_state_with_its_age(tenant: Tenant, engine: Engine) -> None:
    objective = an_objective(tenant)
    judged(tenant, engine, engine.serve(100, 0))
    now = judged(tenant, engine, engine.silence(windows=2))
    stale = standing(objective, now)
    assert (stale.state, stale.signal) == (State.MET, Signal.STALE)
    assert stale.stale_s == pytest.approx(36.5)


def test_judging_that_stopped_is_stale_whatever_it_last_said(
    tenant: Tenant, engine: Engine
) -> None:
    objective = an_objective(tenant)
    now = judged(tenant, engine, engine.serve(0, 100))
    assert standing(objective, now).fast_burn_now
    later = standing(objective, now + timedelta(minutes=5))
    assert (later.signal, later.fast_burn_now) == (Signal.STALE, False)


def test_worst_budget_comes_first_and_no_data_last(tenant: Tenant, engine: Engine) -> None:
    an_objective(tenant, slug="strict", target=0.999)
    an_objective(tenant, slug="loose", target=0.9)
    an_objective(tenant, slug="elsewhere", service="nowhere")
    now = judged(tenant, engine, engine.serve(95, 5))
    found = objectives_standing(tenant=tenant, now=now)
    assert [s.objective.slug for s in found] == ["strict", "loose", "elsewhere"]


def test_the_budget_over_time_is_the_one_of_each_moment(tenant: Tenant, engine: Engine) -> None:
    objective = an_objective(tenant)
    judged(tenant, engine, engine.serve(1_000, 0))
    judged(tenant, engine, engine.serve(990, 10))
    series = budget_series(
        objective=objective, since=START - WINDOW, until=START + 2 * WINDOW, points=3
    )
    assert [p.at for p in series] == [START, START + WINDOW, START + 2 * WINDOW]
    assert [p.left for p in series] == [None, 1, pytest.approx(0.5)]


def test_standing_costs_a_handful_of_look_ups(
    tenant: Tenant, engine: Engine, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    objective = an_objective(tenant)
    now = judged(tenant, engine, engine.serve(100, 0, windows=8))
    with django_assert_max_num_queries(6):
        standing(objective, now)
    with django_assert_max_num_queries(2):
        budget_series(objective=objective, since=START, until=now)
