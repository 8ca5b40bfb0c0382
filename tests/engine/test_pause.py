"""POST /pause and /resume of a whole engine: who goes on, who stands still, who is told what."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from engine.config import EngineConfig
from engine.pause import Pause, stands, told
from engine.pause import pause as wait_for_pause
from engine.sched.request import Finish
from tests.engine.conftest import EngineProcess, request
from tests.engine.test_barrier import Served
from tests.engine.test_server import CLIENT, change, complete, conserved, eventually, samples

pytestmark = pytest.mark.processes

LONG = {"prompt": "once upon", "max_tokens": 500, "ignore_eos": True}


def pause(url: str, **query: Any) -> dict[str, Any]:
    answer = CLIENT.post(f"{url}/pause", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def resume(url: str) -> dict[str, Any]:
    return dict(CLIENT.post(f"{url}/resume").json())


@contextmanager
def running(url: str, *, stream: bool = False) -> Iterator[Future[httpx.Response]]:
    """A long request that has its first tokens."""
    before = samples(url)["vllm:generation_tokens_total"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, url, **LONG, stream=stream)
        eventually(lambda: samples(url)["vllm:generation_tokens_total"] > before)
        assert samples(url)["vllm:num_requests_running"] == 1
        yield answer


def stands_still(url: str) -> bool:
    """No token comes, though the step thread goes round: it takes a change of a knob meanwhile."""
    before = samples(url)
    for value in (4, 8):
        assert change(url, max_num_seqs=value).json()["values"]["max_num_seqs"] == value
    return samples(url)["engine:steps_total"] == before["engine:steps_total"]


def test_keep_stops_what_runs_where_it_is_and_resumed_it_ends_as_if_nothing_had_been(
    engine: EngineProcess,
) -> None:
    url = engine.url
    text = complete(url, **LONG).json()["choices"]
    with running(url) as answer:
        told = {"status": "paused", "is_paused": True, "mode": "keep", "running": 1, "waiting": 0}
        assert pause(url, mode="keep") == pause(url, mode="keep") == told
        assert CLIENT.get(f"{url}/is_paused").json() == told
        assert stands_still(url)
        assert samples(url)["vllm:kv_cache_usage_perc"] > 0
        assert not answer.done()
        assert resume(url)["status"] == "resumed"
        assert answer.result().json()["choices"] == text
    assert samples(url)["vllm:num_preemptions_total"] == 0


def test_wait_finishes_what_runs_and_starts_nothing_that_came_later(engine: EngineProcess) -> None:
    url = engine.url
    with running(url) as answer, ThreadPoolExecutor(1) as pool:
        assert pause(url, mode="wait")["running"] == 0
        assert answer.result().json()["usage"]["completion_tokens"] == 500
        later = pool.submit(complete, url, prompt="a", max_tokens=4)
        eventually(lambda: samples(url)["vllm:num_requests_waiting"] == 1)
        assert stands_still(url)
        assert pause(url, mode="wait")["waiting"] == 1
        resume(url)
        assert later.result().status_code == 200


def test_wait_also_finishes_what_was_sent_back_for_memory() -> None:
    subject = Served(EngineConfig(model_len_max=512, kv_pool_blocks=32))
    core = subject.core
    try:
        subject.stand_at = 250
        core.pause(Pause.KEEP)  # until all three are there: else how far each comes is chance
        subject.submit([request(str(i), [66 + i] * 100, 200) for i in range(3)])
        core.pause(Pause.NOT)
        subject.wait(tokens=250)
        eventually(lambda: stands(core))
        subject.stand_at = math.inf
        assert (told(core)["running"], told(core)["waiting"]) == (2, 1)
        asyncio.run(wait_for_pause(core, Pause.WAIT, math.inf))
        subject.wait(ended=3)
        assert subject.ended == dict.fromkeys("012", Finish.LENGTH)
        assert (told(core)["running"], told(core)["waiting"]) == (0, 0)
    finally:
        core.stop()


def test_at_its_deadline_a_pause_that_waits_keeps_what_still_runs(engine: EngineProcess) -> None:
    url = engine.url
    with running(url) as answer:
        told = pause(url, mode="wait", deadline_s=0)
        assert (told["mode"], told["running"]) == ("keep", 1)
        assert stands_still(url)
        resume(url)
        assert answer.result().json()["usage"]["completion_tokens"] == 500


@pytest.mark.parametrize("query", [{}, {"mode": "abort"}])
def test_abort_ends_what_runs_and_what_waits_with_an_error_that_says_so(
    engine: EngineProcess, query: dict[str, str]
) -> None:
    url = engine.url
    assert change(url, max_num_seqs=1).status_code == 200
    before = samples(url)["engine:requests_failed_total"]
    with running(url, stream=True) as streamed, ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(complete, url, prompt="a", max_tokens=4)
        eventually(lambda: samples(url)["vllm:num_requests_waiting"] == 1)
        told = pause(url, **query)
        assert (told["mode"], told["running"], told["waiting"]) == ("abort", 0, 0)
        error = {
            "code": "aborted",
            "message": "aborted: the engine was paused with mode=abort before this was finished",
            "param": None,
        }
        assert (waiting.result().status_code, waiting.result().json()["error"]) == (503, error)
        last = streamed.result().text.split("\n\n")[-2].removeprefix("data: ")
        assert json.loads(last)["error"] == error
        later = pool.submit(complete, url, prompt="a", max_tokens=4)
        eventually(lambda: samples(url)["vllm:num_requests_waiting"] == 1)
        # Told again, it ends nothing that came since.
        assert pause(url, **query)["waiting"] == 1
        resume(url)
        assert later.result().status_code == 200
    assert samples(url)["engine:requests_failed_total"] - before == 2
    assert samples(url)["vllm:kv_cache_usage_perc"] == 0
    assert conserved(url)


def test_a_client_that_goes_away_from_a_kept_request_gives_its_blocks_back(
    engine: EngineProcess,
) -> None:
    url = engine.url
    body = {**LONG, "stream": True}
    with CLIENT.stream("POST", f"{url}/v1/completions", json=body) as answer:
        parts = answer.iter_bytes()  # kept: with the iterator the connection would end
        next(parts)
        assert pause(url, mode="keep")["running"] == 1
    eventually(lambda: samples(url)["vllm:num_requests_running"] == 0)
    assert samples(url)["vllm:kv_cache_usage_perc"] == 0
    resume(url)


def test_a_pause_is_seen_in_metrics_and_health(engine: EngineProcess) -> None:
    def seen() -> tuple[str, Any, str]:
        health = CLIENT.get(f"{engine.url}/health")
        assert health.status_code == 200
        lines = CLIENT.get(f"{engine.url}/metrics").text.splitlines()
        on = [line for line in lines if line.startswith("engine:paused{") and line.endswith(" 1.0")]
        modes = "".join(line.split('mode="')[1].split('"')[0] for line in on)
        return health.json()["status"], health.json()["paused"], modes

    assert seen() == ("ok", None, "")
    for mode in ("wait", "keep", "abort"):
        pause(engine.url, mode=mode)
        assert seen() == ("paused", mode, mode)
    assert resume(engine.url) == resume(engine.url)
    assert seen() == ("ok", None, "")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("mode=sleep", "mode: got 'sleep', allowed: wait, keep, abort"),
        ("mode=keep&deadline_s=1", "deadline_s: got '1', allowed: with mode=wait, 0 to 3600"),
        ("mode=wait&deadline_s=nan", "deadline_s: got 'nan', allowed: with mode=wait, 0 to 3600"),
        ("mode=wait&deadline_s=-1", "deadline_s: got '-1', allowed: with mode=wait, 0 to 3600"),
        ("mode=wait&deadline_s=x", "deadline_s: got 'x', allowed: with mode=wait, 0 to 3600"),
    ],
)
def test_a_pause_that_is_none_is_refused_with_what_is_allowed(
    engine: EngineProcess, query: str, words: str
) -> None:
    answer = CLIENT.post(f"{engine.url}/pause?{query}")
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert CLIENT.get(f"{engine.url}/is_paused").json()["is_paused"] is False
