"""More than 8 % of the requests of 30 s, of 20 at least; back by answering the router itself."""

from __future__ import annotations

import pytest

from engine.router.breaker import PROOFS, Breaker, State
from engine.router.config import Upstream
from engine.router.knobs import RouterSettings

SETTINGS = RouterSettings.of([Upstream("a", "http://a", 100)])


def ended(breaker: Breaker, outcomes: str, start: float, every_s: float = 0.1) -> float:
    """`.` well, `x` wrong; the time after the last."""
    for i, outcome in enumerate(outcomes):
        breaker.record(outcome == "x", start + i * every_s, SETTINGS)
    return start + len(outcomes) * every_s


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ("." * 92 + "x" * 8, State.CLOSED),  # 8 % is not more than 8 %
        ("." * 92 + "x" * 9, State.OPEN),
        ("x" * 19, State.CLOSED),  # 19 requests say nothing
        ("x" * 20, State.OPEN),
    ],
)
def test_it_opens_beyond_its_share_of_enough_requests(outcomes: str, state: State) -> None:
    breaker = Breaker()
    ended(breaker, outcomes, 1000.0)
    assert breaker.state is state


def test_what_is_older_than_the_window_neither_accuses_nor_excuses() -> None:
    breaker = Breaker()
    now = ended(breaker, "." * 92 + "x" * 8, 1000.0)
    ended(breaker, "x", now + 31.0)  # with those before, 9 of 101
    assert breaker.state is State.CLOSED
    now = ended(breaker, "." * 500, now + 100.0)
    ended(breaker, "xx" + "." * 18, now + 31.0)  # with those before, 2 of 520
    assert breaker.state is State.OPEN


def test_an_engine_that_answered_well_for_long_and_then_errs_is_out_within_the_window() -> None:
    breaker = Breaker()
    now = ended(breaker, "." * 1000, 1000.0)
    while breaker.state is State.CLOSED:
        now = ended(breaker, "x", now)
    assert now - 1100.0 <= 30.0 * 0.08 + 0.3


def test_it_comes_back_by_answers_in_a_row_and_forgets_what_was() -> None:
    breaker = Breaker()
    now = ended(breaker, "x" * 20, 1000.0)
    assert not breaker.due(now, SETTINGS)
    now += 10.0
    assert breaker.due(now, SETTINGS)
    breaker.proved(True, now)
    assert breaker.state is State.HALF_OPEN
    breaker.proved(False, now)
    assert breaker.state is State.OPEN
    assert not breaker.due(now + 1, SETTINGS)
    ended(breaker, "x" * 50, now)  # of requests that were under way: they say nothing new
    for _ in range(PROOFS):
        assert breaker.due(now + 10.0, SETTINGS)
        breaker.proved(True, now + 10.0)
    assert breaker.state is State.CLOSED
    ended(breaker, "x" * 19, now + 10.0)
    assert breaker.state is State.CLOSED
    assert breaker.openings == 1
