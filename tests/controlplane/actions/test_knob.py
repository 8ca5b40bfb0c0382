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


def test_the_knobs_are_there_each_in_its_class() -> None:
    assert {slug: knob.apply_class for slug, knob in knobs().items()} == {
        "max_num_seqs": "hot",
        "max_num_batched_tokens": "hot",
        "max_wait_ms": "hot",
        "prefill_chunk_tokens": "hot",
        "shed_below_priority": "hot",
        "length_window_tokens": "hot",
        "priority_weights": "hot",
        "tenant_quotas": "hot",
        "backpressure": "hot",
        "kv_compaction": "hot",
        "preemption": "hot",
        "prefetch_depth_tokens": "hot",
        "graph_capture": "barrier",
        "kv_allocator": "barrier",
        "kv_block_size": "barrier",
        "prefix_cache": "barrier",
    }
    for knob in knobs().values():
        assert knob.label
        assert knob.unit or knob.choices
    assert [slug for slug, knob in knobs().items() if knob.sheds] == ["shed_below_priority"]


def test_block_sizes_double_and_capture_is_on_or_off() -> None:
    assert knobs()["kv_block_size"].step(16, 64) == 64
    assert knobs()["kv_block_size"].step(16, 128) == 64
    assert knobs()["graph_capture"].options(("off", "on")) == ("off", "on")
