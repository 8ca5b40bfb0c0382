from __future__ import annotations

import itertools
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_django import DjangoAssertNumQueries

from slo.budget import Counts
from slo.models import Objective, Reading
from slo.readings import (
    Booked,
    Measured,
    counts_between,
    readings_book,
    sums_at,
    sums_at_each,
)
from slo.services import readings_prune
from tests.slo.fleet_of_samples import START, WINDOW, a_tenant, an_objective
from tracing.types import Signal

pytestmark = pytest.mark.django_db
_numbers = itertools.count()


def fresh_objective() -> Objective:
    number = next(_numbers)
    return an_objective(a_tenant(f"tenant-{number}"))


def end(window: int) -> datetime:
    return START + (window + 1) * WINDOW


def book(objective: Objective, windows: dict[int, tuple[int, int] | None]) -> list[Booked]:
    measured = [
        Measured(end(w), Counts(*c), Signal.OK) if c else Measured(end(w), None, Signal.STALE)
        for w, c in sorted(windows.items())
    ]
    return readings_book(objective=objective, scope="", window_s=15, measured=measured)


def test_booking_the_same_again_changes_nothing() -> None:
    objective = fresh_objective()
    windows: dict[int, tuple[int, int] | None] = {0: (9, 10), 1: (5, 5), 2: None}
    assert [b.fresh for b in book(objective, windows)] == [True, True, True]
    before = list(Reading.objects.values())
    assert book(objective, windows) == []
    assert list(Reading.objects.values()) == before


def test_late_data_amend_a_window_and_every_sum_after_it() -> None:
    objective = fresh_objective()
    book(objective, {0: (9, 10), 1: None, 2: (5, 5)})
    (measured,) = book(objective, {1: (1, 4)})
    assert measured.fresh
    assert book(objective, {1: (1, 4)}) == []
    (amended,) = book(objective, {0: (10, 11)})
    assert not amended.fresh
    sums = [(r.good_sum, r.total_sum) for r in Reading.objects.order_by("window_end")]
    assert sums == [(10, 11), (11, 15), (16, 20)]
    assert Reading.objects.get(window_end=end(1)).signal == Signal.OK


def test_a_window_counted_while_stale_is_measured_once_its_samples_are_complete() -> None:
    objective = fresh_objective()
    counts = Counts(9, 10)
    for signal, fresh in ((Signal.STALE, True), (Signal.OK, True), (Signal.STALE, None)):
        one = Measured(end(0), counts, signal)
        booked = readings_book(objective=objective, scope="", window_s=15, measured=[one])
        assert [b.fresh for b in booked] == ([] if fresh is None else [fresh])
    assert Reading.objects.get().signal == Signal.OK


def test_many_moments_cost_two_look_ups(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    objective = fresh_objective()
    book(objective, dict.fromkeys(range(50), (9, 10)))
    inside = timedelta(seconds=7)
    moments = [START - WINDOW, *(end(w) + inside for w in range(0, 50, 7))]
    with django_assert_num_queries(2):
        sums = sums_at_each(objective, "", moments)
    assert sums == {at: sums_at(objective, "", at) for at in moments}


def test_moments_in_a_hole_get_the_sums_before_it() -> None:
    objective = fresh_objective()
    book(objective, {0: (9, 10), 9: (5, 5)})
    assert sums_at_each(objective, "", [end(4)]) == {end(4): Counts(9, 10)}
    assert sums_at_each(fresh_objective(), "", [end(4)]) == {end(4): Counts(0, 0)}


def test_what_was_measured_stays_when_it_can_no_longer_be_read() -> None:
    objective = fresh_objective()
    book(objective, {0: (9, 10)})
    assert book(objective, {0: None}) == []
    assert Reading.objects.get().signal == Signal.OK


def test_any_window_costs_two_look_ups(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    objective = fresh_objective()
    book(objective, dict.fromkeys(range(50), (9, 10)))
    with django_assert_num_queries(2):
        counts = counts_between(objective, "", end(0), end(49))
    assert counts == Counts(441, 490)


def test_pruned_rows_leave_the_rest_true() -> None:
    objective = fresh_objective()
    book(objective, dict.fromkeys(range(10), (9, 10)))
    now = end(4) + timedelta(days=31, seconds=1)
    assert readings_prune(now) == 5
    assert counts_between(objective, "", START, end(9)) == Counts(45, 50)
    assert counts_between(objective, "", end(6), end(8)) == Counts(18, 20)


windows_booked = st.dictionaries(
    st.integers(0, 15),
    st.none() | st.tuples(st.integers(0, 9), st.integers(9, 20)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    passes=st.lists(windows_booked, min_size=1, max_size=8),
    edges=st.lists(st.integers(-2, 17), min_size=2, max_size=2).map(sorted),
)
def test_any_window_equals_brute_force_after_any_amendments(
    passes: list[dict[int, tuple[int, int] | None]], edges: list[int]
) -> None:
    objective = fresh_objective()
    truth: dict[int, tuple[int, int]] = {}
    for windows in passes:
        book(objective, windows)
        truth.update({w: counts for w, counts in windows.items() if counts})
    for start, stop in (edges, (-2, 17)):
        inside = [counts for w, counts in truth.items() if start < w <= stop]
        brute = Counts(sum(g for g, _ in inside), sum(t for _, t in inside))
        assert counts_between(objective, "", end(start), end(stop)) == brute
