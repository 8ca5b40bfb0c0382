"""The step thread, spoken to as the server does, without HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import warm
from engine.config import EngineConfig
from engine.core import Core, Rejected
from engine.exec.runner import Runner
from engine.knobs import RuntimeConfig
from engine.models.tokenizer import ByteTokenizer
from engine.pause import Pause
from engine.reconfig import RuntimeStore, Versioned
from engine.sched.request import Finish, Request
from engine.sched.scheduler import Outcome, Plan
from tests.engine.conftest import request

WAIT_S = 20


class Ends:
    """Collects finished requests, as the server's `hand_out` would."""

    def __init__(self) -> None:
        self.finished: list[Request] = []
        self.came = threading.Condition()

    def __call__(self, outcome: Outcome) -> None:
        with self.came:
            self.finished += outcome.finished
            self.came.notify_all()

    def wait(self, count: int) -> list[Request]:
        with self.came:
            assert self.came.wait_for(lambda: len(self.finished) >= count, WAIT_S)
        return self.finished


class BreaksOnce(Runner):
    """A runner whose first forward raises, as a kernel might."""

    broken = False

    def forward(self, plan: Plan) -> tuple[object, torch.Tensor]:  # type: ignore[override]
        if not self.broken:
            self.broken = True
            raise RuntimeError("the kernel broke")
        return super().forward(plan)


@pytest.fixture
def served() -> Iterator[tuple[Core, Ends]]:
    ends = Ends()
    core = Core(EngineConfig(queue_requests_max=3, queue_tokens_max=1000), ends)
    yield core, ends
    core.stop()


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(
    served: tuple[Core, Ends], caplog: pytest.LogCaptureFixture
) -> None:
    core, ends = served
    core.runner = BreaksOnce(core.runner.model, core.runner.pool, core.rows)
    core.start()
    core.submit(request("fails", [66] * 10, 3))
    assert ends.wait(1)[0].finish is Finish.ERROR
    assert ends.finished[0].error == "RuntimeError: the kernel broke"
    core.submit(request("works", [66] * 10, 3))
    assert ends.wait(2)[1].finish is Finish.LENGTH
    assert core.alive
    assert core.allocator.allocated_blocks == 0
    assert "the kernel broke" in caplog.text
    metrics = core.metrics
    assert (sum(metrics.received), metrics.failed, metrics.step_errors) == (2, 1, 1)
    assert metrics.succeeded[Finish.LENGTH] == 1


def test_the_queue_is_bounded_by_requests_and_by_tokens(served: tuple[Core, Ends]) -> None:
    core, _ = served
    core.submit(request("a", [66] * 500, 3))
    with pytest.raises(Rejected, match="1100 prompt tokens would wait, allowed: 1000"):
        core.submit(request("too long", [66] * 600, 3))
    for name in "bc":
        core.submit(request(name, [66] * 10, 3))
    with pytest.raises(Rejected, match="3 requests are waiting, allowed: 3") as caught:
        core.submit(request("too many", [66] * 10, 3))
    assert caught.value.retry_after_s >= 1
    assert core.metrics.rejected["max_num_queued_reqs"] == 1
    assert core.metrics.rejected["max_num_queued_tokens"] == 1
    core.start()


def test_those_being_tokenised_are_bounded_as_the_queue_is(served: tuple[Core, Ends]) -> None:
    core, _ = served
    core.check_room(2)
    with pytest.raises(Rejected, match="3 requests are being tokenised, allowed: 3"):
        core.check_room(3)
    assert (sum(core.metrics.received), core.metrics.rejected["max_num_queued_reqs"]) == (1, 1)
    core.start()


def test_stopped_it_answers_everyone_who_still_waits(served: tuple[Core, Ends]) -> None:
    core, ends = served
    core.pause(Pause.WAIT)
    core.start()
    for name in "ab":
        core.submit(request(name, [66] * 10, 3))
    core.stop()
    assert [one.finish for one in ends.wait(2)] == [Finish.ERROR, Finish.ERROR]
    with pytest.raises(Rejected, match="shutting down"):
        core.submit(request("late", [66] * 10, 3))


def test_a_request_cancelled_before_it_is_taken_in_is_aborted(served: tuple[Core, Ends]) -> None:
    core, ends = served
    gone = request("gone", [66] * 10, 3)
    core.submit(gone)
    core.cancel(gone)
    core.start()
    assert ends.wait(1)[0].finish is Finish.ABORT
    assert core.in_flight == 0
    assert core.metrics.succeeded[Finish.ABORT] == 1


def test_a_hot_list_is_computed_and_pinned_before_the_first_request(tmp_path: Path) -> None:
    hot = tmp_path / "hot.jsonl"
    body = {"prompt": [66] * 96, "cache_salt": "a", "max_tokens": 500}
    hot.write_text(json.dumps(body) + "\n\n" + json.dumps({"prompt": "another " * 9}) + "\n")
    ends = Ends()
    config = EngineConfig(prefix_cache="on", prefix_warm=hot, kv_pool_blocks=140)
    core = Core(config, ends)
    try:
        core.warm(warm.read(hot, config, core.tokenizer))
        assert (core.waiting, core.in_flight, len(core.allocator.pinned)) == (0, 0, 6 + 4)
        core.start()
        one = request("one", [66] * 96 + [67], 1)
        one.salt = "a"
        core.submit(one)
        assert ends.wait(1)[0].cached_tokens == 96
        assert core.reading().kv_cached_blocks >= 10
    finally:
        core.stop()


def test_a_hot_list_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    hot = tmp_path / "hot.jsonl"
    config = EngineConfig(prefix_cache="on", prefix_warm=hot, kv_pool_blocks=130)
    for text, words in (
        ("{", r"hot\.jsonl, prompt 1: Expecting"),
        ("[1]", r"hot\.jsonl, prompt 1: cannot convert"),
        ('{"prompt": ""}\n{"prompt": 7}', r"hot\.jsonl, prompt 2: prompt: want one text"),
        ('{"prompt": "a"}\n' * 257, r"hot\.jsonl: got 257 prompts, allowed: 256"),
    ):
        hot.write_text(text)
        with pytest.raises(ValueError, match=words):
            warm.read(hot, config, ByteTokenizer())
    core = Core(config, Ends())
    core.start()
    core.stop()
    hot.write_text(json.dumps({"prompt": [66] * 96}))
    with pytest.raises(ValueError, match=r"prefix_warm: .* take 6 blocks of the pool, allowed: 2"):
        core.warm(warm.read(hot, config, core.tokenizer))
    with pytest.raises(ValueError, match="allowed: with prefix_cache on"):
        EngineConfig(prefix_warm=hot)


def test_a_hot_list_that_a_kept_configuration_turns_off_is_told_and_pinned_once_it_is_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hot = tmp_path / "hot.jsonl"
    hot.write_text(json.dumps({"prompt": [66] * 96}))
    config = EngineConfig(prefix_cache="on", prefix_warm=hot, state=tmp_path, kv_pool_blocks=140)
    stored = RuntimeStore(tmp_path, lambda: None, RuntimeConfig(prefix_cache="on"))
    stored._save(Versioned(2, stored.current.config.replaced({"prefix_cache": "off"}), "a", "now"))
    ends = Ends()
    core = Core(config, ends)
    try:
        core.warm(warm.read(hot, config, core.tokenizer))
        assert (
            "prefix_warm: nothing is computed now: prefix_cache is off in the kept" in caplog.text
        )
        assert (core.in_flight, len(core.allocator.pinned)) == (0, 0)
        core.start()
        core.runtime.change({"prefix_cache": "on"}, 2, "test")
        core.submit(request("one", [66] * 96 + [67], 1))
        ends.wait(1)
        assert len(core.allocator.pinned) == 6
    finally:
        core.stop()


def test_who_waits_for_a_prefix_is_never_more_than_who_waits() -> None:
    core = Core(EngineConfig(), Ends())
    core.scheduler.deferred = 3  # as the last step left it
    assert (core.reading().waiting, core.reading().deferred) == (0, 0)


def test_the_shortest_engine_there_may_be_serves() -> None:
    with pytest.raises(ValueError, match="drain_s_max: got nan, allowed: 0 to 3600 seconds"):
        EngineConfig(drain_s_max=float("nan"))
    with pytest.raises(ValueError, match="model_len_max: got 31, allowed: 32 to 8192"):
        EngineConfig(model_len_max=31)
    core = Core(EngineConfig(model_len_max=32), Ends())
    core.barrier.canary.prove()
