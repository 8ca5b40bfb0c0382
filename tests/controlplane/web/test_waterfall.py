from __future__ import annotations

import pytest

from controlplane.web.waterfall import DEPTH_MAX, ROWS_MAX, waterfall
from tracing.types import Span

MS = 1_000_000


def span(number: int, parent: int, start_ms: float, took_ms: float, name: str = "s") -> Span:
    return Span(
        trace_id="t", span_id=str(number), parent_span_id=str(parent) if parent else "",
        name=name, kind=2, service="chat", instance="engine-0", start_ns=int(start_ms * MS),
        duration_ns=int(took_ms * MS), status_code=0,
    )  # fmt: skip


def names(spans: list[Span]) -> list[tuple[str, int]]:
    return [(row.name or row.kind, row.depth) for row in waterfall(spans).rows]


def test_children_follow_their_parent_in_order_of_time() -> None:
    spans = [span(3, 1, 60, 40, "decode"), span(1, 0, 0, 100, "root"), span(2, 1, 0, 60, "queue")]
    assert names(spans) == [("root", 0), ("queue", 1), ("decode", 1)]


def test_gaps_between_and_after_siblings_are_named() -> None:
    spans = [span(1, 0, 0, 100, "root"), span(2, 1, 10, 40, "a"), span(3, 1, 60, 30, "b")]
    found = waterfall(spans)
    gaps = [(round(r.start_s, 3), round(r.duration_s, 3)) for r in found.rows if r.kind == "gap"]
    assert gaps == [(0.0, 0.01), (0.05, 0.01), (0.09, 0.01)]
    assert found.parts["gap"] == pytest.approx(0.03)


def test_overlapping_siblings_leave_no_gap() -> None:
    spans = [span(1, 0, 0, 100), span(2, 1, 0, 80, "a"), span(3, 1, 20, 80, "b")]
    assert all(row.kind != "gap" for row in waterfall(spans).rows)


def test_windows_of_a_decode_and_steps_drawn_over_them_add_up_to_the_decode() -> None:
    spans = [span(1, 0, 0, 130, "root"), span(2, 1, 0, 30, "queue"), span(3, 1, 30, 60, "decode"),
             span(4, 1, 80, 11, "engine.step"), span(5, 1, 90, 40, "decode")]  # fmt: skip
    found = waterfall(spans)
    assert [row.kind for row in found.rows] == ["root", "queue", "decode", "engine.step", "decode"]
    assert found.parts["decode"] == pytest.approx(0.1)
    assert "gap" not in found.parts


def test_a_span_without_its_parent_is_a_root() -> None:
    assert names([span(5, 4, 0, 10, "lost"), span(1, 0, 0, 100, "root")]) == [
        ("root", 0),
        ("lost", 0),
    ]


def test_a_span_that_is_its_own_parent_is_drawn_once() -> None:
    assert names([span(1, 1, 0, 10, "odd")]) == [("odd", 0)]


def test_spans_that_are_each_others_parents_are_drawn_once_each() -> None:
    ring = [span(1, 3, 0, 10, "a"), span(2, 1, 2, 5, "b"), span(3, 2, 3, 2, "c")]
    drawn = [row.name for row in waterfall(ring).rows if row.span]
    assert drawn == ["a", "b", "c"]
    beside = [row.name for row in waterfall([*ring, span(9, 0, 5, 50, "root")]).rows if row.span]
    assert beside == ["root", "a", "b", "c"]


def test_a_trace_may_be_as_deep_as_it_has_spans() -> None:
    found = waterfall([span(i, i - 1, 0, 10_000 - i) for i in range(1, 10_000)])
    assert len(found.rows) == ROWS_MAX
    assert found.rows[-1].depth == DEPTH_MAX


def test_bars_stay_inside_the_drawing() -> None:
    rows = waterfall([span(1, 0, 0, 100), span(2, 1, 100, 0, "end")]).rows
    assert all(row.left >= 0 and row.left + row.width <= 1 + 1e-9 for row in rows)


def test_rows_are_limited() -> None:
    spans = [span(1, 0, 0, 9_000)] + [span(i, 1, i, 1) for i in range(2, 2_000)]
    found = waterfall(spans)
    assert len(found.rows) == ROWS_MAX
    assert found.spans == 1_999


def test_no_spans_is_our_mistake_and_said_so() -> None:
    with pytest.raises(ValueError, match="at least one span"):
        waterfall([])
