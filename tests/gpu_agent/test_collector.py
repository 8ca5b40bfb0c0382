from __future__ import annotations

import pytest

from gpu_agent.collector import EARLY_MAX, until_due_s
from slo.judging import LAST_OF_WINDOW

EDGE = 1_772_323_200.0  # a multiple of 5 s


@pytest.mark.parametrize(
    ("now_s", "wait_s"),
    [
        (EDGE + 1.0, 3.7),
        (EDGE + 4.71, 4.99),  # just read
        (EDGE + 4.69, 5.01),  # just read, the wait ended early
        (EDGE + 3.0, 1.7),
        (EDGE + 4.0, 5.7),  # a slow reading into the time of the next
    ],
)
def test_a_reading_is_taken_shortly_before_each_multiple_of_the_scrape(
    now_s: float, wait_s: float
) -> None:
    assert until_due_s(now_s, scrape_s=5, early_s=0.3) == pytest.approx(wait_s, abs=1e-6)


def test_what_is_read_at_the_earliest_is_known_as_the_last_of_its_window() -> None:
    assert EARLY_MAX < LAST_OF_WINDOW
