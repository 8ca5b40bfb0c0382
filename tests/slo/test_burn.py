from __future__ import annotations

import pytest

from slo.budget import Counts
from slo.burn import DAY_S, HOUR_S, PAIRS, Pair, PairState, can_fire, pair_state, pairs_of

FAST = PAIRS[0]


def state(pair: Pair = FAST, **changes: object) -> PairState:
    arguments: dict[str, object] = {
        "target": 0.99,
        "window_days": 30,
        "long": Counts(8_000, 10_000),
        "short": Counts(800, 1_000),
        "history_s": 30 * DAY_S,
        **changes,
    }
    return pair_state(pair, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("days", "factors"),
    [
        (30, [14.4, 6, 3, 1]),
        (28, [13.44, 5.6, 2.8, 0.9333]),
        (90, [43.2, 18, 9, 3]),
        (7, [3.36, 1.4]),
        (1, []),
    ],
)
def test_factors_follow_the_objectives_window(days: int, factors: list[float]) -> None:
    assert [p.factor(days * DAY_S) for p in pairs_of(days)] == pytest.approx(factors, abs=1e-4)


def test_windows_and_severities_are_those_of_the_workbook() -> None:
    assert [(p.long_s / HOUR_S, p.short_s / 60, p.severity) for p in PAIRS] == [
        (1, 5, "page"),
        (6, 30, "page"),
        (24, 120, "ticket"),
        (72, 360, "ticket"),
    ]


def test_fires_only_while_it_is_still_going_on() -> None:
    assert state().firing
    assert not state(short=Counts(1_000, 1_000)).firing
    assert not state(long=Counts(9_900, 10_000)).firing


def test_exactly_the_factor_does_not_fire() -> None:
    at_the_factor = Counts(8_560, 10_000)  # 14.4 % bad of a budget of 1 %
    assert state(long=at_the_factor).burn_long == pytest.approx(14.4)
    assert not state(long=at_the_factor, short=at_the_factor).firing


def test_no_events_are_no_burn_rate_and_do_not_fire() -> None:
    quiet = state(long=Counts(0, 0), short=Counts(0, 0))
    assert (quiet.burn_long, quiet.burn_short, quiet.firing) == (None, None, False)


def test_one_failed_request_of_a_quiet_hour_does_not_page() -> None:
    assert not state(long=Counts(0, 19), short=Counts(0, 1)).firing
    assert state(long=Counts(0, 20), short=Counts(0, 1)).firing


def test_untrusted_data_do_not_fire() -> None:
    assert not state(trusted=False).firing


def test_a_young_objective_needs_the_budget_really_gone() -> None:
    """Five minutes of everything failing: 1.2 % of a 1 % budget, less than the pair's 2 %."""
    failing = Counts(0, 1_000)
    young = state(long=failing, short=failing, history_s=300)
    assert young.burn_long == pytest.approx(100)
    assert young.covered == pytest.approx(1 / 12)
    assert not young.firing
    assert state(long=failing, short=failing, history_s=9 * 60).firing
    assert state(long=failing, short=failing, history_s=300, target=0.999).firing


def test_a_factor_nothing_can_reach_says_so() -> None:
    assert can_fire(FAST, target=0.99, window_days=30)
    assert not can_fire(FAST, target=0.90, window_days=30)
    assert not state(target=0.90, long=Counts(0, 100), short=Counts(0, 100)).can_fire
