"""From when on a trial's windows count, given the queue its change found."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.actions.models import Action
from controlplane.actions.trial import Queue, _queue
from controlplane.fleet.models import Engine
from tests.controlplane.plant import START
from tests.memory_reader import MemoryReader

AT = START + timedelta(minutes=5)
W = 15


def queue(before: list[float], after: list[float]) -> Queue:
    """One sample in each window before and after the change, seen one window at a time."""
    reader, where = MemoryReader(), {"service": "chat", "instance": "engine-0"}
    for n, waiting in enumerate(before):
        at = AT - timedelta(seconds=W * (len(before) - n) - 5)
        reader.add("vllm:num_requests_waiting", at, waiting, where)
    for n, waiting in enumerate(after):
        at = AT + timedelta(seconds=W * n + 5)
        reader.add("vllm:num_requests_waiting", at, waiting, where)
    action = Action(engine=Engine(name="engine-0", service="chat"), applied_at=AT, ttl_s=180)
    return _queue(action, reader, AT + timedelta(seconds=W * len(after) + 1))


def windows(found: Queue) -> float:
    """How many windows after the change are not counted."""
    return (found.gone_at - AT).total_seconds() / W


@pytest.mark.parametrize(
    ("before", "after", "skipped"),
    [
        ([0, 0, 0, 0], [0, 0, 0], 1),  # none
        ([0, 10, 20, 30], [40, 20, 8, 0, 0], 4),  # goes down
        ([0, 10, 20, 30], [40, 20, 5, 0, 0], 3),  # what is left is too short to speak of
        ([12, 15, 11, 14], [9, 12, 8.5, 10], 1),  # comes and goes: bursts
        ([0, 10, 20, 30], [30, 24, 23, 12, 12, 12], 4),  # slower for a moment
        ([0, 10, 20, 30], [20, 20, 20], 1),  # rests lower than it was
        ([30, 31, 30, 31], [30, 31, 30], 1),  # as steady as before: the setting's own
        ([0, 0, 0, 0], [20, 30, 40], 1),  # the change brought it
        ([0, 0, 1, 3], [3, 3, 3], 1),  # too short to speak of
        ([], [], 1),  # not measured
    ],
)
def test_windows_behind_the_queue_of_before_do_not_count(
    before: list[float], after: list[float], skipped: int
) -> None:
    found = queue(before, after)
    assert windows(found) == skipped
    assert not found.stays


@pytest.mark.parametrize("after", [[40, 50, 60], [64, 64, 64], [30, 29, 28]])
def test_a_queue_that_grew_and_does_not_go_down_ends_the_trial(after: list[float]) -> None:
    found = queue([0, 10, 20, 30], after)
    assert found.stays
    assert found.words == (
        "no better, as the queue, which was growing, has not gone down "
        f"(30 requests before the change, {after[-1]:.0f} in the last window)"
    )


def test_a_queue_that_was_empty_for_a_moment_is_gone_however_long_the_next() -> None:
    reader, where = MemoryReader(), {"service": "chat", "instance": "engine-0"}
    crowds = [(-10, 224), (-5, 300), (3, 300), (8, 150), (13, 40), (18, 90), (23, 0), (28, 60),
              (33, 40), (38, 0), (43, 55)]  # fmt: skip
    for second, waiting in crowds:
        reader.add("vllm:num_requests_waiting", AT + timedelta(seconds=second), waiting, where)
    action = Action(engine=Engine(name="engine-0", service="chat"), applied_at=AT, ttl_s=180)
    found = _queue(action, reader, AT + timedelta(seconds=3 * W + 1))
    assert windows(found) == 2
    assert not found.words


def test_while_it_goes_down_the_words_say_so() -> None:
    found = queue([0, 10, 20, 30], [40, 30, 20])
    assert not found.stays
    told = "still going down (30 requests before the change, 20 in the last window)"
    assert found.words.endswith(told)
