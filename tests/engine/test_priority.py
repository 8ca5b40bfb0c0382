"""Three queues share an engine by weight; nobody starves, whoever has to give way."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.knobs import RuntimeConfig
from engine.sched.priority import AGING_TOKENS_PER_S, QUEUES, Priority, queue_of
from engine.sched.request import PRIORITIES, Finish, Request
from engine.sched.scheduler import Scheduler
from tests.engine.conftest import conserved
from tests.engine.test_scheduler import ids, scheduler, step

LOW, NORMAL, HIGH, REALTIME = range(4)
ON = RuntimeConfig(priority_weights="on")


def asked(
    name: str, priority: int, length: int = 20, max_tokens: int = 5, arrived: float = 0.0
) -> Request:
    tokens = np.full(length, 66, np.int64)
    return Request(name, tokens, max_tokens, arrived, ignore_eos=True, priority=priority)


def policy() -> Priority:
    subject = Priority()
    subject.switch(True)
    return subject


requests = st.lists(
    st.builds(
        asked,
        name=st.just("r"),
        priority=st.integers(0, 3),
        length=st.integers(1, 300),
        max_tokens=st.integers(1, 40),
        arrived=st.floats(0, 60),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(requests, st.integers(1, 50))
def test_the_order_loses_nobody_and_nobody_is_overtaken_for_longer_than_lengths_explain(
    waiting: list[Request], count: int
) -> None:
    order = list(policy().ordered(deque(waiting), count))
    assert Counter(map(id, order)) == Counter(map(id, waiting))
    for i in range(len(QUEUES)):
        queue = [one for one in order[:count] if queue_of(one) == i]
        for at, behind in enumerate(queue):
            for ahead in queue[:at]:
                late = (len(ahead.tokens) - len(behind.tokens)) / AGING_TOKENS_PER_S
                assert ahead.arrived <= behind.arrived + late + 1e-9


def test_the_longer_sequence_goes_first_until_a_shorter_one_has_waited_longer() -> None:
    one, two = asked("short", NORMAL, 10, arrived=0.0), asked("long", NORMAL, 266, arrived=0.2)
    assert ids(list(policy().ordered(deque([one, two]), 9))) == ["long", "short"]
    two.arrived = 0.3
    assert ids(list(policy().ordered(deque([one, two]), 9))) == ["short", "long"]


def test_realtime_and_high_stand_in_one_queue() -> None:
    waiting = [asked("now", REALTIME, arrived=1.0), asked("high", HIGH, arrived=0.0)]
    assert ids(list(policy().ordered(deque(waiting), 9))) == ["high", "now"]


def test_of_those_that_wait_each_gets_its_share_of_the_tokens() -> None:
    subject = scheduler()
    config = RuntimeConfig(priority_weights="on", max_num_batched_tokens=128, max_num_seqs=16)
    served: Counter[str] = Counter()
    for turn in range(1500):
        waits = Counter(queue_of(one) for one in subject.waiting)
        for i, name in enumerate(QUEUES):
            while waits[i] < 4:
                waits[i] += 1
                subject.add(asked(name, i, 40, 10, arrived=float(turn)))
        done = step(subject, config, now=float(turn))
        assert done is not None
        served.update(one.id for one in done[0].decodes)
        for part in done[0].chunks:
            served[part.request.id] += part.count
    total = sum(served.values())
    shares = [served[name] / total for name in QUEUES]
    assert shares == pytest.approx([0.25 / 3.25, 1 / 3.25, 2 / 3.25], abs=0.01)


def test_what_one_queue_leaves_others_take() -> None:
    subject = scheduler()
    for i in range(8):
        subject.add(asked(str(i), LOW))
    done = step(subject, ON)
    assert done is not None
    assert len(done[0].chunks) == 8


def test_idling_earns_nothing_and_having_had_the_engine_alone_costs_nothing() -> None:
    subject = scheduler()
    one = RuntimeConfig(priority_weights="on", max_num_seqs=1)
    for i in range(30):  # normal is served for long, and always waits
        subject.add(asked(f"n{i}", NORMAL, 20, 1))
    for _ in range(10):
        step(subject, one)
    for i in range(4):
        subject.add(asked(f"h{i}", HIGH, 20, 1))
    order = []
    while (done := step(subject, one)) is not None:
        order += [part.request.id[0] for part in done[0].chunks]
    assert order[0] == "h"
    assert order.index("n") <= 3, "high would go first for long if it had saved up"
    assert order.count("h") == 4


def run_high_load(subject: Scheduler, config: RuntimeConfig, low: Request) -> int:
    """Steps until `low` has ended, with high requests always waiting."""
    subject.add(low)
    for turn in range(3000):
        while len(subject.waiting) < 6:
            subject.add(asked("high", HIGH, 60, 60, arrived=float(turn)))
        assert step(subject, config, now=float(turn)) is not None
        conserved(subject)
        if low.finish is not None:
            return turn
    raise AssertionError("the low request starved")


@pytest.mark.parametrize(("blocks", "sent_back"), [(512, False), (40, True)])
def test_a_low_request_ends_under_a_steady_load_of_high_ones(blocks: int, sent_back: bool) -> None:
    subject = scheduler(blocks)
    config = RuntimeConfig(priority_weights="on", max_num_batched_tokens=128, max_num_seqs=8)
    low = asked("low", LOW, 100, 150)
    run_high_load(subject, config, low)
    assert (low.finish, low.generated) == (Finish.LENGTH, 150)
    assert (subject.preemptions > 0) == sent_back


def test_who_gives_way_is_the_lowest_and_of_those_the_latest() -> None:
    subject = policy()
    low, lower = asked("low", LOW), asked("low too", LOW)
    running = [asked("first", NORMAL), low, lower, asked("high", HIGH), asked("last", NORMAL)]
    assert subject.victim(running) is lower
    lower.preemptions = 1  # it gave way once: as good as a normal one now
    assert subject.victim(running) is low
    low.preemptions = lower.preemptions = 3
    assert subject.victim(running).id == "last"
    subject.switch(False)
    assert subject.victim(running) is running[-1]


def test_a_short_pool_sends_the_low_one_back_not_the_latest() -> None:
    subject = scheduler(blocks=32)
    for name, priority in (("high", HIGH), ("low", LOW), ("normal", NORMAL)):
        subject.add(asked(name, priority, 100, 200))
    while not subject.preemptions:
        step(subject, ON)
    assert ids(list(subject.waiting)) == ["low"]
    while step(subject, ON) is not None:
        conserved(subject)
    assert not subject.waiting


@settings(max_examples=60, deadline=None)
@given(
    waiting=requests,
    switches=st.lists(st.booleans(), min_size=1, max_size=8),
    budget=st.integers(64, 600),
    seqs=st.integers(1, 40),
    blocks=st.sampled_from([32, 48, 512]),
    window=st.sampled_from([-1, 0, 64]),
)
def test_nothing_accepted_is_lost_however_the_policies_are_turned(
    waiting: list[Request],
    switches: list[bool],
    budget: int,
    seqs: int,
    blocks: int,
    window: int,
) -> None:
    subject = scheduler(blocks)
    for one in waiting:
        subject.add(one)
    for turn in range(100_000):
        config = RuntimeConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            priority_weights="on" if switches[turn // 5 % len(switches)] else "off",
            length_window_tokens=window if switches[turn // 7 % len(switches)] else 0,
        )
        if step(subject, config, now=float(turn + 1)) is None:
            break
        conserved(subject)
    assert all(one.finish is Finish.LENGTH for one in waiting)
    assert all(one.generated == one.max_tokens for one in waiting)
    assert subject.allocator.allocated_blocks == 0
    assert (subject.left_requests, len(subject.running), len(subject.waiting)) == (
        len(waiting), 0, 0,
    )  # fmt: skip


def test_budgets_are_the_shares_of_who_waits() -> None:
    subject = policy()
    subject.ordered(deque([asked("a", HIGH), asked("b", NORMAL), asked("c", LOW)]), 9)
    assert subject.budgets(1300) == {"low": 100.0, "normal": 400.0, "high": 800.0}
    subject.ordered(deque([asked("b", NORMAL)]), 9)
    assert subject.budgets(1300) == {"low": 0.0, "normal": 1300.0, "high": 0.0}
    subject.switch(False)
    assert set(subject.budgets(1300).values()) == {0.0}


def test_every_priority_has_a_queue() -> None:
    assert [QUEUES[queue_of(asked("r", i))] for i in range(len(PRIORITIES))] == [
        *("low", "normal", "high"),
        "high",
    ]
