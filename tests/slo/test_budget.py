from __future__ import annotations

import pytest

from slo.budget import (
    EVENTS_MIN,
    Counts,
    attained,
    bad_share_bar,
    budget_left,
    budget_of,
    burn_rate,
    window_is_bad,
)


def test_zero_traffic_is_no_answer_rather_than_good_or_bad() -> None:
    nothing = Counts(0, 0)
    assert attained(nothing) is None
    assert burn_rate(nothing, 0.99) is None
    assert budget_left(nothing, 0.99) is None
    assert not window_is_bad(nothing, 0.99, 14.4)


@pytest.mark.parametrize("target", [0, 1, 1.5, -0.1])
def test_a_target_that_leaves_no_budget_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match=r"allowed: more than 0, less than 1"):
        budget_of(target)


def test_a_quiet_hour_of_failures_weighs_by_its_events() -> None:
    """SLO.md, case F: 0 % bad in a busy hour, 50 % in a quiet one, is 0.495 %, not 25 %."""
    busy, quiet = Counts(10_000, 10_000), Counts(50, 100)
    share = (busy + quiet).bad_share
    assert share == pytest.approx(0.00495, abs=1e-5)


def test_burn_one_spends_exactly_the_budget() -> None:
    assert burn_rate(Counts(990, 1_000), 0.99) == pytest.approx(1)
    assert budget_left(Counts(990, 1_000), 0.99) == 0
    assert budget_left(Counts(995, 1_000), 0.99) == pytest.approx(0.5)
    assert budget_left(Counts(980, 1_000), 0.99) == pytest.approx(-1)


def test_good_scraped_ahead_of_total_is_not_less_than_no_errors() -> None:
    assert burn_rate(Counts(101, 100), 0.99) == 0


def test_the_bar_stays_reachable_where_the_burn_factor_is_not() -> None:
    assert bad_share_bar(0.99, 14.4) == pytest.approx(0.144)
    assert bad_share_bar(0.90, 14.4) == pytest.approx(0.55)
    assert window_is_bad(Counts(40, 100), 0.90, 14.4)
    assert not window_is_bad(Counts(50, 100), 0.90, 14.4)


def test_few_events_are_not_judged() -> None:
    assert not window_is_bad(Counts(0, EVENTS_MIN - 1), 0.99, 14.4)
    assert window_is_bad(Counts(0, EVENTS_MIN), 0.99, 14.4)
