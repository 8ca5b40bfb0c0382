from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from controlplane.web.templatetags import svg


def test_an_overdrawn_budget_grows_to_the_left() -> None:
    left, over, far = (svg.budget_rule(v, "met") for v in (0.5, -0.5, -7.0))
    assert 'x="33.30%"' in left
    assert 'class="ok"' in left
    assert 'x="22.20%" y="3" width="11.10%"' in over
    assert 'class="bad"' in over
    assert "−700\u00a0% of the error budget left" in far
    assert "unknown" in svg.budget_rule(None, "no_data")


def test_a_deeper_overdraft_is_always_seen_to_be_deeper() -> None:
    spent = [svg.budget_rule(left, "breached") for left in (-1.0, -3.0, -8.5, -100.0)]
    left_ends = [float(re.findall(r'class="bad" x="([\d.]+)%"', rule)[0]) for rule in spent]
    assert left_ends == sorted(left_ends, reverse=True)
    assert left_ends[:2] == [pytest.approx(33.3 / 2, abs=0.01), pytest.approx(33.3 / 4, abs=0.01)]
    assert left_ends[1] - left_ends[2] > 4
    assert left_ends[-1] > 0


def test_sparklines_keep_gaps_and_escape_labels() -> None:
    points = [(0.0, 1.0), (1.0, None), (2.0, 3.0), (3.0, 2.0)]
    drawn = svg.sparkline(points, (0.0, 3.0), 2.5, 'a "label"', datetime.fromtimestamp(2, UTC))
    assert drawn.count("M") == 2
    assert 'class="bound"' in drawn
    assert 'class="since" x="106.7"' in drawn
    assert "a &quot;label&quot;" in drawn
    assert svg.sparkline([(0.0, None)], (0.0, 1.0), None, "x") == ""


def test_coordinates_do_not_depend_on_the_language() -> None:
    assert [svg.coordinate(value) for value in (15.0, 0.333333, 1767225600.0)] == [
        "15", "0.33", "1767225600",
    ]  # fmt: skip
