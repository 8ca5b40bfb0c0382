"""The error budget: what share of events may be bad, how much of it is left, how fast it goes.

Pure arithmetic over counts of events, never over shares of minutes: an idle night weighs nothing
and a busy hour weighs what it served (OpenSLO's *Occurrences*). None means "no events, no answer";
it is never read as good or as bad.
"""

from __future__ import annotations

from dataclasses import dataclass

EVENTS_MIN = 20
# Counts are whole numbers, so only the division can be off; far below one event in 10⁹.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Counts:
    """Good and total events of any window. Late scrapes may make good a little larger than total
    for a moment; `bad` never goes below 0."""

    good: float
    total: float

    @property
    def bad(self) -> float:
        return max(self.total - self.good, 0.0)

    @property
    def bad_share(self) -> float | None:
        return self.bad / self.total if self.total > 0 else None

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.good + other.good, self.total + other.total)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.good - other.good, self.total - other.total)


def budget_of(target: float) -> float:
    """1 − target. Raises ValueError for a target outside (0, 1): 1 leaves nothing to divide by."""
    if not 0 < target < 1:
        raise ValueError(f"target={target:g}: allowed: more than 0, less than 1")
    return 1 - target


def attained(counts: Counts) -> float | None:
    """Share of good events, None without events."""
    share = counts.bad_share
    return None if share is None else 1 - share


def burn_rate(counts: Counts, target: float) -> float | None:
    """Bad share ÷ budget: 1 uses up the budget exactly at the window's end. None without events."""
    share = counts.bad_share
    return None if share is None else share / budget_of(target)


def budget_left(counts: Counts, target: float) -> float | None:
    """Share of the window's budget not yet used; below 0 when overdrawn, None without events."""
    burn = burn_rate(counts, target)
    if burn is None:
        return None
    left = 1 - burn
    return 0.0 if abs(left) < ROUNDING else left


def bad_share_bar(target: float, fast_burn: float) -> float:
    """The bad share above which one control window is bad: fast_burn × budget.

    14.4 × a budget of 10 % would be 144 %, which nothing exceeds, so the bar never stands higher
    than half-way between the budget and everything failing.
    """
    budget = budget_of(target)
    return min(fast_burn * budget, (1 + budget) / 2)


def window_is_bad(counts: Counts, target: float, fast_burn: float) -> bool:
    """Enough events to judge by (20), and more of them bad than the bar allows."""
    share = counts.bad_share
    if share is None or counts.total < EVENTS_MIN:
        return False
    return share > bad_share_bar(target, fast_burn)
