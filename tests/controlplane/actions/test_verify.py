"""The verdict: what it may claim, how often it errs, and what it needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from controlplane.actions.verify import (
    Guard,
    Result,
    Sample,
    Verdict,
    climbing,
    looks_max,
    p_fell_but_one,
    t_tail,
    verdict,
)
from slo.budget import Counts
from slo.indicator import GAPS

RUNS = 200


def sample(*bad: float, total: float = 100, arrivals: float | None = None) -> Sample:
    return Sample(tuple(Counts(total - b, total) for b in bad), 15.0, arrivals)


def look(before: Sample, after: Sample, **more: object) -> Result:
    more = {"budget": 0.01, "looks": 3, "last": False, **more}
    return verdict(before, after, **more)  # type: ignore[arg-type]


def guard(old: Sample, new: Sample, target: float = 0.95, fast_burn: float = 14.4) -> Guard:
    return Guard("TPOT within 100 ms", target, fast_burn, old, new)


class Draws:
    """Windows of requests; `rho` is how much those of one window have in common."""

    def __init__(self, rho: float) -> None:
        self.rng, self.rho = np.random.default_rng(7), rho

    def windows(self, share: float, count: int) -> Sample:
        bad = []
        for _ in range(count):
            p = share
            if self.rho:
                weight = 1 / self.rho - 1
                p = self.rng.beta(share * weight, (1 - share) * weight)
            bad.append(float(self.rng.binomial(100, p)))
        return sample(*bad)

    def verdicts(self, before: float, after: float, *, windows_before: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for _ in range(RUNS):
            old, new = self.windows(before, windows_before), self.windows(after, 4)
            for count in (2, 3, 4):
                now = Sample(new.windows[:count], 15.0)
                result = look(old, now, last=count == 4)
                if result.verdict is not None:
                    found[result.verdict] += 1
                    break
        return found


@pytest.mark.parametrize("rho", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("windows_before", [2, 4])
def test_without_effect_better_is_claimed_in_at_most_five_percent(
    rho: float, share: float, windows_before: int
) -> None:
    found = Draws(rho).verdicts(share, share, windows_before=windows_before)
    assert found[Verdict.BETTER] <= 0.05 * RUNS


def test_a_plain_effect_is_seen_at_once_and_a_small_one_is_not_claimed() -> None:
    assert Draws(0.02).verdicts(0.6, 0.05, windows_before=2)[Verdict.BETTER] >= 0.9 * RUNS
    assert Draws(0.02).verdicts(0.1, 0.09, windows_before=2)[Verdict.BETTER] <= 0.1 * RUNS


def test_what_is_less_plain_is_left_to_the_last_look() -> None:
    before, after = sample(35, 100), sample(2, 3)
    assert look(before, after).verdict is None, "a change on trial helps already"
    assert look(before, after, last=True).verdict == Verdict.BETTER
    # Every look alike proved this in 76 % of the runs.
    assert Draws(0.02).verdicts(0.35, 0.1, windows_before=2)[Verdict.BETTER] >= 0.84 * RUNS


def test_a_look_more_than_fits_is_the_last_one() -> None:
    result = look(sample(50, 52), sample(9, 8, 10, 9, 9), looks=3, last=True)
    assert result.verdict == Verdict.BETTER
    assert "(look 4 of 4, p = " in result.sentence
    harmful = look(sample(1, 2), sample(60, 58, 60, 61, 59), looks=3, last=True)
    assert harmful.verdict == Verdict.WORSE


def test_one_disturbed_window_does_not_hide_what_all_others_show() -> None:
    before, after = sample(80, 82), sample(50, 2, 3, 1)
    assert look(before, after).verdict is None
    result = look(before, after, last=True)
    assert result.verdict == Verdict.BETTER
    assert "fell from 81% of 200 to 14% of 400 (look 3 of 3, p = " in result.sentence
    assert "; but for one window, with 50% of 100 requests bad)" in result.sentence


def test_two_disturbed_windows_are_no_disturbance() -> None:
    result = look(sample(80, 82), sample(50, 2, 60, 1), last=True)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "but for one window" not in result.sentence


def test_of_three_windows_two_are_left_and_of_two_none() -> None:
    assert look(sample(80, 82), sample(50, 2), last=True).verdict == Verdict.INCONCLUSIVE
    few = sample(10, 1, 1, total=20)
    assert p_fell_but_one(sample(80, 82), few) == (1.0, few), "40 requests are too few"


def test_better_says_so_with_numbers() -> None:
    result = look(sample(35, 100, 98), sample(2, 3))
    assert result.verdict == Verdict.BETTER
    assert "fell from 77.7% of 300 to 2.5% of 200 (look 1 of 3, p =" in result.sentence


def test_what_is_not_better_says_so_first() -> None:
    before = sample(75, 83, total=100)
    assert look(before, sample(100, 100)).sentence.startswith(
        "no better, the share of bad requests rose from 79% of 200 to 100% of 200"
    )
    result = look(sample(50, 52), sample(49, 50), last=True)
    assert result.sentence.startswith("not proved to be better, the share of bad requests fell")
    assert ", which 2 windows before and 2 after may do by chance (look 1 of" in result.sentence
    other = guard(sample(0, 0), sample(30, 32))
    assert "; “TPOT within 100 ms” got worse" in look(before, before, guards=[other]).sentence


def test_worse_is_said_before_the_time_is_up() -> None:
    assert look(sample(10, 12, 9, 11), sample(80, 85)).verdict == Verdict.WORSE


def test_no_difference_waits_and_then_is_inconclusive() -> None:
    assert look(sample(50, 52), sample(49, 50)).verdict is None
    assert look(sample(50, 52), sample(49, 50), last=True).verdict == Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sample(90, 90), sample(0)),
        (sample(90, 90), sample(0, 0, total=20)),
        (sample(90, 90), Sample((), 15.0)),
        (sample(90), sample(0, 0)),
    ],
)
def test_too_few_windows_or_requests_prove_nothing(before: Sample, after: Sample) -> None:
    assert look(before, after).verdict is None
    result = look(before, after, last=True)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "too few requests to judge by" in result.sentence
    assert " 1 windows" not in result.sentence


def test_better_needs_the_load_to_be_alike() -> None:
    before, after = sample(90, 95, arrivals=400), sample(1, 2, arrivals=290)
    assert look(before, after).verdict is None
    result = look(before, after, last=True)
    assert result.verdict == Verdict.INCONCLUSIVE
    assert "the load changed from 13.3 to 9.7 requests per second" in result.sentence
    assert look(before, sample(1, 2, arrivals=310)).verdict == Verdict.BETTER


def test_more_load_is_not_blamed_on_the_knob() -> None:
    before, after = sample(10, 12, 9, 11, arrivals=400), sample(80, 85, arrivals=400)
    assert look(before, after).verdict is None


NONE = sample(0, 0, total=1000)


def test_better_here_and_an_incident_there_is_worse() -> None:
    before, after = sample(90, 95), sample(1, 2)
    result = look(before, after, guards=[guard(sample(1, 2), sample(60, 70))])
    assert result.verdict == Verdict.WORSE
    assert "; “TPOT within 100 ms” got worse" in result.sentence


def test_a_price_below_what_was_saved_is_told_and_paid() -> None:
    before, after = sample(33, 35), sample(0, 0, 0)
    result = look(before, after, guards=[guard(NONE, sample(80, 90, total=1000))])
    assert result.verdict == Verdict.BETTER
    assert "“TPOT within 100 ms” got worse: the share of bad requests rose" in result.sentence
    assert result.sentence.endswith(" of 2,000, over its budget of 5%")


def test_what_is_counted_is_named_as_its_objective_counts_it() -> None:
    before, after = (replace(sample(*bad), unit=GAPS) for bad in ((80, 90), (0, 0, 0)))
    assert "the share of bad gaps between tokens fell" in look(before, after).sentence
    few = look(replace(before, windows=before.windows[:1]), after, last=True)
    assert few.sentence.startswith("too few gaps between tokens to judge by before the change")
    tokens = guard(replace(NONE, unit=GAPS), replace(sample(80, 90, total=1000), unit=GAPS))
    told = look(sample(33, 35), sample(0, 0, 0), guards=[tokens]).sentence
    assert told.startswith("the share of bad requests fell")
    assert "“TPOT within 100 ms” got worse: the share of bad gaps between tokens rose" in told


def test_a_price_of_all_that_was_saved_is_worse() -> None:
    before, after = sample(80, 90, total=1000), sample(40, 40, total=1000)
    price = guard(NONE, sample(240, 260, total=1000))  # 5 times its budget, for 4.5 times
    assert look(before, after, guards=[price]).verdict == Verdict.WORSE
    assert look(before, after, budget=0.005, guards=[price]).verdict != Verdict.WORSE


def test_a_promise_that_was_broken_before_is_not_broken_anew() -> None:
    """Shedding turns requests away, which counts against a promise that the overload broke."""
    before, after = sample(98, 100, 100), sample(0, 0, 0)
    turned_away = guard(sample(45, 46, 44), sample(68, 70, 69), target=0.9, fast_burn=3)
    result = look(before, after, budget=0.05, guards=[turned_away])
    assert result.verdict == Verdict.BETTER
    assert "“TPOT within 100 ms” got worse" in result.sentence


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (sample(1, 2), sample(2, 3)),  # no change to speak of
        (sample(1, 1, total=1000), sample(30, 32, total=1000)),  # worse, within its budget
        (sample(1, 2), Sample((), 15.0)),  # nothing measured
    ],
)
def test_a_guard_that_keeps_its_promise_does_not_object(old: Sample, new: Sample) -> None:
    result = look(sample(90, 95), sample(1, 2), guards=[guard(old, new)])
    assert result.verdict == Verdict.BETTER


def test_looks_fit_into_the_ttl() -> None:
    assert looks_max(ttl_s=90, window_s=15, settle_s=6.5) == 3
    assert looks_max(ttl_s=30, window_s=5, settle_s=2.5) == 3
    assert looks_max(ttl_s=20, window_s=15, settle_s=6.5) == 1


@pytest.mark.parametrize(
    ("t", "freedom", "tail"), [(0, 3, 0.5), (2.0, 3, 0.0697), (-1, 5, 0.8184), (6.314, 1, 0.05)]
)
def test_students_tail_as_the_tables_have_it(t: float, freedom: float, tail: float) -> None:
    assert t_tail(t, freedom) == pytest.approx(tail, abs=2e-4)


def test_a_climb_is_fitted_from_below() -> None:
    windows = [Counts(100 - bad, 100) for bad in (10, 50, 30, 80)]
    assert climbing(windows) == [0.1, 0.4, 0.4, 0.8]
