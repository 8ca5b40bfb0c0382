"""The policy alone: tokens come from the test, no model runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.exec.rows import Rows
from engine.knobs import RuntimeConfig
from engine.kv.allocator import PagedAllocator
from engine.kv.prefix import Chain, PrefixCache
from engine.models.tokenizer import EOS
from engine.pause import Pause
from engine.sched.request import PRIORITIES, Finish, Request
from engine.sched.scheduler import PASSED_REQUESTS_MAX, Outcome, Plan, Scheduler
from tests.engine.conftest import request


def scheduler(blocks: int = 512, caching: bool = False) -> Scheduler:
    rows = Rows(rows=64, model_len_max=512, block_size=16)
    return Scheduler(rows, PrefixCache(PagedAllocator(blocks), 16, on=caching))


def step(
    subject: Scheduler, config: RuntimeConfig, token: int = 65, now: float = 1.0
) -> tuple[Plan, Outcome] | None:
    plan = subject.plan(config, now)
    if plan is None:
        return None
    tokens = np.full(len(plan.sampled), token, np.int64)
    return plan, subject.commit(plan, tokens, now, now + 0.01)


def size(plan: Plan) -> int:
    return len(plan.decodes) + plan.prefill_tokens


def ids(requests: list[Request]) -> list[str]:
    return [one.id for one in requests]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), max_size=30),
    budget=st.integers(64, 600),
    chunk=st.integers(32, 400),
    seqs=st.integers(1, 40),
    blocks=st.sampled_from([32, 48, 512]),
)
def test_every_step_keeps_its_bounds_and_every_request_ends_with_all_its_tokens(
    lengths: list[tuple[int, int]], budget: int, chunk: int, seqs: int, blocks: int
) -> None:
    subject = scheduler(blocks)
    config = RuntimeConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget, prefill_chunk_tokens=chunk
    )
    asked = [request(str(i), [66] * p, n) for i, (p, n) in enumerate(lengths)]
    for one in asked:
        subject.add(one)
    while (done := step(subject, config)) is not None:
        plan, _ = done
        assert 1 <= size(plan) <= budget
        assert all(part.count <= chunk for part in plan.chunks)
        assert len(subject.running) <= seqs
        held = int(subject.rows.owned.sum())
        assert held == subject.allocator.allocated_blocks
    assert all(one.finish is Finish.LENGTH for one in asked)
    assert all(one.generated == one.max_tokens for one in asked)
    assert subject.allocator.allocated_blocks == 0
    assert subject.rows.free_rows == 64


def test_requests_are_admitted_first_come_first_served() -> None:
    subject = scheduler()
    for i in range(6):
        subject.add(request(str(i), [66] * 20, 3 + i))
    config = RuntimeConfig(max_num_seqs=2)
    admitted: list[str] = []
    while (done := step(subject, config)) is not None:
        admitted += [part.request.id for part in done[0].chunks]
    assert admitted == ["0", "1", "2", "3", "4", "5"]


def test_decodes_come_before_prompts_in_the_budget() -> None:
    subject = scheduler()
    config = RuntimeConfig(max_num_batched_tokens=64)
    for i in range(4):
        subject.add(request(f"d{i}", [66] * 16, 30))
    step(subject, config)
    subject.add(request("late", [66] * 200, 4))
    done = step(subject, config)
    assert done is not None
    plan, _ = done
    assert sorted(ids(plan.decodes)) == ["d0", "d1", "d2", "d3"]
    assert plan.prefill_tokens == 60


def test_a_lower_running_cap_drains_down_and_never_preempts() -> None:
    subject = scheduler()
    for i in range(20):
        subject.add(request(str(i), [66] * 10, 5 + i))
    step(subject, RuntimeConfig(max_num_seqs=16))
    assert len(subject.running) == 16
    low = RuntimeConfig(max_num_seqs=4)
    sizes = []
    while len(subject.running) > 4:
        done = step(subject, low)
        assert done is not None
        assert not done[0].chunks, "admitted above the cap"
        sizes.append(len(subject.running))
    assert sizes == sorted(sizes, reverse=True)
    while step(subject, low) is not None:
        assert len(subject.running) <= 4
    assert subject.preemptions == 0


def test_a_higher_running_cap_admits_at_the_next_step() -> None:
    subject = scheduler()
    for i in range(8):
        subject.add(request(str(i), [66] * 10, 50))
    step(subject, RuntimeConfig(max_num_seqs=2))
    assert len(subject.running) == 2
    step(subject, RuntimeConfig(max_num_seqs=8))
    assert len(subject.running) == 8


def test_a_short_pool_preempts_the_latest_and_puts_it_at_the_head_of_the_queue() -> None:
    subject = scheduler(blocks=32)
    for i in range(3):
        subject.add(request(str(i), [66] * 100, 200))
    config = RuntimeConfig()
    step(subject, config)
    assert ids(subject.running) == ["0", "1", "2"]
    while not subject.preemptions:
        step(subject, config)
    assert ids(subject.running) == ["0", "1"]
    assert ids(list(subject.waiting)) == ["2"]
    assert len(subject.waiting[0].tokens) > 100


def test_a_paused_engine_finishes_what_runs_and_starts_nothing() -> None:
    subject = scheduler()
    subject.add(request("runs", [66] * 10, 3))
    step(subject, RuntimeConfig())
    subject.add(request("waits", [66] * 10, 3))
    subject.paused = Pause.WAIT
    while step(subject, RuntimeConfig()) is not None:
        pass
    assert not subject.running
    assert ids(list(subject.waiting)) == ["waits"]
    subject.paused = Pause.NOT
    assert step(subject, RuntimeConfig()) is not None


@pytest.mark.parametrize("weights", ["off", "on"])
def test_a_paused_engine_finishes_what_it_sent_back_however_many_wait(weights: str) -> None:
    subject, config = scheduler(blocks=32), RuntimeConfig(priority_weights=weights)
    begun = [request(str(i), [66] * 100, 200) for i in range(3)]
    for one in begun:
        subject.add(one)
    while not subject.preemptions:
        step(subject, config)
    waits = [request(f"waits {i}", [66] * 10, 3) for i in range(2 * PASSED_REQUESTS_MAX)]
    for one in waits:
        one.priority = len(PRIORITIES) - 1
        subject.add(one)
    subject.paused = Pause.WAIT
    while step(subject, config) is not None:
        assert subject.begun == len([one for one in begun if one.finish is None])
    assert [one.generated for one in begun] == [200] * 3
    assert set(subject.waiting) == set(waits)
    assert not any(one.scheduled for one in waits)
    subject.paused = Pause.NOT
    while step(subject, config) is not None:
        pass
    assert subject.begun == 0
    assert all(one.finish is Finish.LENGTH for one in waits)


class Failing(PrefixCache):
    """Fails where a request is admitted."""

    def take(self, chain: Chain | None, blocks: list[int]) -> None:
        raise RuntimeError("boom")


def test_a_request_whose_admission_fails_has_not_begun_when_it_has_ended() -> None:
    rows = Rows(rows=64, model_len_max=512, block_size=16)
    subject = Scheduler(rows, Failing(PagedAllocator(512), 16, on=False))
    subject.add(request("fails", [66] * 10, 3))
    with pytest.raises(RuntimeError, match="boom"):
        subject.plan(RuntimeConfig(), 1.0)
    (one,) = subject.running
    assert subject.begun == 1
    assert subject.abandon(one, Finish.ERROR, 2.0)
    assert subject.begun == 0


def test_an_idle_engine_holds_its_first_request_to_gather_a_batch() -> None:
    subject = scheduler()
    patient = RuntimeConfig(max_wait_ms=20, max_num_seqs=2)
    assert subject.hold_until(patient) == 0.0
    subject.add(request("first", [66] * 10, 3))
    assert subject.hold_until(patient) == pytest.approx(0.52)
    assert subject.hold_until(RuntimeConfig()) == 0.0
    subject.add(request("second", [66] * 10, 3))
    assert subject.hold_until(patient) == 0.0, "a full batch waits no longer"
    step(subject, patient)
    subject.add(request("third", [66] * 10, 3))
    assert subject.hold_until(patient) == 0.0, "an engine that runs holds nothing"


def test_the_end_token_ends_a_request_unless_it_is_to_be_ignored() -> None:
    subject = scheduler()
    ends, goes_on = request("ends", [66] * 4, 9), request("goes on", [66] * 4, 9)
    ends.ignore_eos = False
    for one in (ends, goes_on):
        subject.add(one)
    done = step(subject, RuntimeConfig(), token=EOS)
    assert done is not None
    assert ids(done[1].finished) == ["ends"]
    assert ends.finish is Finish.STOP
    assert goes_on.finish is None


def test_a_stop_string_ends_a_request_but_not_when_it_lies_in_the_prompt() -> None:
    subject = scheduler()
    one = request("stops", list(b"xAA"), 9)
    one.stop = (b"AAA",)
    subject.add(one)
    for _ in range(3):
        assert one.finish is None
        step(subject, RuntimeConfig(), token=65)
    assert one.finish is Finish.STOP
    assert one.generated == 3


def test_a_cancelled_request_gives_everything_back_wherever_it_stands() -> None:
    subject = scheduler()
    runs, waits = request("runs", [66] * 40, 9), request("waits", [66] * 40, 9)
    for one in (runs, waits):
        subject.add(one)
    step(subject, RuntimeConfig(max_num_seqs=1))
    assert subject.abandon(runs, Finish.ABORT, 2.0)
    assert subject.abandon(waits, Finish.ABORT, 2.0)
    assert not subject.abandon(runs, Finish.ABORT, 2.0), "it had ended already"
    assert subject.allocator.allocated_blocks == 0
    assert not subject.running
    assert not subject.waiting
    assert (subject.left_requests, subject.left_tokens) == (2, 80)
