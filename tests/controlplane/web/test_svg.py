from __future__ import annotations

from datetime import UTC, datetime

from controlplane.web.templatetags import svg


def test_an_overdrawn_budget_grows_to_the_left() -> None:
    left, over, far = (svg.budget_rule(v, "met") for v in (0.5, -0.5, -7.0))
    assert 'x="33.30%"' in left
    assert 'class="ok"' in left
    assert 'x="16.65%" y="3" width="16.65%"' in over
    assert 'class="bad"' in over
    assert 'x="0.00%" y="3" width="33.30%"' in far
    assert "−700\u00a0% of the error budget left" in far
    assert "unknown" in svg.budget_rule(None, "no_data")


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
