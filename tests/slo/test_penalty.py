from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slo.budget import Counts
from slo.indicator import SpecError
from slo.penalty import (
    PERIODS,
    hours_missed,
    penalty_percent,
    penalty_total,
    period_of,
    steps_missed,
    terms_clean,
    terms_of,
)

STEP = {"basis": "step", "percent": 5, "step_percent": 0.1}
HOUR = {"basis": "hour", "percent": 0.5}
TIERS = {
    "basis": "tiers",
    "tiers": [{"below": 0.95, "percent": 25}, {"below": 0.99, "percent": 10}],
}


def owed(terms: dict[str, Any], target: float, good: float, total: float, **more: Any) -> Any:
    return penalty_percent(terms_of(terms_clean(terms)), target, Counts(good, total), **more)


@pytest.mark.parametrize(
    ("good", "percent"),
    [
        (1_000, 0),
        (990, 0),  # exactly what was promised
        (989, 5),  # the first step, just started and just full
        (988, 10),
        (987, 15),
    ],
)
def test_every_started_step_below_the_target_costs(good: int, percent: float) -> None:
    assert owed(STEP, 0.99, good, 1_000) == percent


def test_a_step_is_started_by_the_first_event_too_many() -> None:
    assert owed(STEP, 0.99, 98_999, 100_000) == 5


@given(
    target_bad=st.integers(1, 500), steps=st.integers(0, 20), per=st.sampled_from([1, 2, 5, 10, 25])
)
def test_whole_steps_are_counted_exactly_whatever_floats_do(
    target_bad: int, steps: int, per: int
) -> None:
    """Shares in per mille: `steps` steps of `per` per mille below the target."""
    target, share = 1 - target_bad / 1_000, 1 - (target_bad + steps * per) / 1_000
    assert steps_missed(share, target, per / 10) == steps


def test_the_source_example_half_a_percent_an_hour() -> None:
    good, bad, quiet = Counts(100, 100), Counts(90, 100), Counts(0, 19)
    hours = [good, bad, quiet, bad, good]
    assert hours_missed(hours, 0.95) == 2  # 19 events judge nothing
    assert owed(HOUR, 0.95, 380, 419, hours=hours) == 1.0


@pytest.mark.parametrize(("good", "percent"), [(99, 0), (98, 10), (95, 10), (94, 25)])
def test_the_lowest_tier_that_was_missed_is_owed(good: int, percent: float) -> None:
    assert owed(TIERS, 0.99, good, 100) == percent


@pytest.mark.parametrize("terms", [STEP, HOUR, TIERS])
def test_without_events_nothing_is_known(terms: dict[str, Any]) -> None:
    assert owed(terms, 0.99, 0, 0) is None


def test_objectives_add_up_to_the_cap() -> None:
    terms = terms_of(terms_clean({**STEP, "cap_percent": 12}))
    assert penalty_total(terms, [5.0, None, 5.0]) == (10.0, False)
    assert penalty_total(terms, [5.0, 10.0]) == (12.0, True)
    assert penalty_total(terms, [None, None]) == (None, False)


@given(
    at=st.datetimes(datetime(1990, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
    period=st.sampled_from(PERIODS),
)
def test_periods_follow_each_other_without_gap(at: datetime, period: str) -> None:
    start, end = period_of(at, period)
    assert start <= at < end
    assert period_of(end, period)[0] == end
    assert period_of(end - timedelta(microseconds=1), period) == (start, end)


def test_periods_are_the_calendars() -> None:
    at = datetime(2026, 2, 28, 23, 30, tzinfo=UTC)
    assert period_of(at, "month") == (
        datetime(2026, 2, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC),
    )  # fmt: skip
    assert period_of(at, "week")[0] == datetime(2026, 2, 23, tzinfo=UTC)  # a Monday
    assert period_of(at, "day")[1] == datetime(2026, 3, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("terms", "param", "words"),
    [
        ({}, "basis", "basis=None: allowed: step, hour, tiers"),
        ({"basis": "month"}, "basis", "allowed: step, hour, tiers"),
        ({**STEP, "percent": 101}, "percent", "percent=101: allowed: percent, 0 to 100"),
        ({**STEP, "percent": True}, "percent", "percent=True"),
        ({**STEP, "step_percent": 0}, "step_percent", "0.0001 to 100"),
        ({**HOUR, "step_percent": 1}, "step_percent", "no such parameter, only basis"),
        ({**TIERS, "tiers": []}, "tiers", "a list of 1 to 10 objects"),
        ({**TIERS, "tiers": [{"below": 1, "percent": 1}]}, "tiers.below", "more than 0"),
        ({**TIERS, "tiers": [{"below": 0.9}]}, "tiers", "an object with below and percent"),
        (
            {**TIERS, "tiers": [{"below": 0.9, "percent": 1}, {"below": 0.8, "percent": 1}]},
            "tiers",
            "the lower a tier, the more it costs",
        ),
    ],
)
def test_terms_that_do_not_fit_name_the_field(
    terms: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        terms_clean(terms)
    assert caught.value.param == param


def test_terms_come_back_with_their_defaults_and_tiers_in_order() -> None:
    assert terms_clean(TIERS) == {
        "basis": "tiers",
        "tiers": [{"below": 0.99, "percent": 10.0}, {"below": 0.95, "percent": 25.0}],
        "cap_percent": 100.0,
    }
