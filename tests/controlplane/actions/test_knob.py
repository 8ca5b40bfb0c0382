"""Knobs go along their ladder, within bounds, two rungs at most."""

from __future__ import annotations

import pytest

from controlplane.actions.knob import knobs

CAP = knobs()["max_num_seqs"]


@pytest.mark.parametrize(
    ("current", "want", "target"),
    [
        (8, 12, 16),
        (8, 16, 16),
        (8, 30, 32),
        (8, 500, 32),
        (10, 11, 16),
        (256, 300, None),
        (32, 20, 16),
        (32, 1, 8),
        (4, 1, None),
        (8, 8, None),
    ],
)
def test_the_first_rung_that_covers_the_wish_two_at_most(
    current: int, want: float, target: int | None
) -> None:
    assert CAP.step(current, want) == target


def test_bounds_are_the_narrower_of_ours_and_the_engines() -> None:
    assert CAP.bounds({"minimum": 2, "maximum": 24}) == (2, 24)
    assert CAP.bounds({"minimum": 0, "maximum": 1024}) == (1, 256)
    assert CAP.step(8, 30, bounds=(1, 24)) == 16
    assert CAP.step(16, 30, bounds=(1, 24)) is None


def test_the_four_hot_knobs_are_there() -> None:
    assert set(knobs()) == {
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_wait_ms",
        "prefill_chunk_tokens",
    }
    for knob in knobs().values():
        assert knob.label
        assert knob.unit
        assert knob.apply_class == "hot"
