"""POST /v1/profile: steps of a real engine, phase by phase."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.steps import PHASES, SAMPLED_EVERY_S, Steps, StepTimes, Watch
from tests.engine.conftest import EngineProcess
from tests.engine.test_server import complete, eventually, samples

pytestmark = pytest.mark.processes


def profile(url: str, **query: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/profile", params=query, timeout=60)


def profiled(url: str, **query: Any) -> dict[str, Any]:
    """A profile taken while a prompt of 200 tokens and an answer of 60 are computed."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(profile, url, deadline_s=60, **query)
        while not answer.done():
            complete(url, prompt="a" * 199, max_tokens=60, ignore_eos=True)
    assert answer.result().status_code == 200
    return dict(answer.result().json())


def test_steps_are_told_with_their_phases_batch_and_tokens(engine: EngineProcess) -> None:
    told = profiled(engine.url, steps=130)
    assert told["complete"] is True
    steps = told["steps"]
    numbers = [step["number"] for step in steps]
    assert numbers == list(range(numbers[0], numbers[0] + 130))
    assert steps[0]["began_s"] == 0
    for step in steps:
        assert list(step["phases_s"]) == list(PHASES)
        assert all(seconds >= 0 for seconds in step["phases_s"].values())
        assert sum(step["phases_s"].values()) == pytest.approx(step["total_s"])
        assert (step["decode_requests"], step["prompt_tokens"]) in ((1, 0), (0, 200))
        assert step["prompt_chunks"] == (step["prompt_tokens"] > 0)
        assert step["mode"] in ("graph", "eager")
    assert sum(step["prompt_chunks"] for step in steps) in (2, 3)


def test_a_profile_opens_in_a_trace_viewer(engine: EngineProcess) -> None:
    events = profiled(engine.url, steps=5, format="chrome")["traceEvents"]
    assert [event["name"] for event in events] == ["step", *PHASES] * 5
    for i in range(0, len(events), 6):
        step, *phases = events[i : i + 6]
        assert {event["ph"] for event in events} == {"X"}
        assert step["args"]["mode"] in ("graph", "eager")
        assert sum(phase["dur"] for phase in phases) == pytest.approx(step["dur"])
        assert phases[0]["ts"] == step["ts"]


def test_an_idle_engine_answers_at_the_deadline_with_what_there_was(engine: EngineProcess) -> None:
    assert profile(engine.url, steps=5, deadline_s=0.05).json() == {"complete": False, "steps": []}


def test_one_profile_at_a_time_and_only_of_so_many_steps(engine: EngineProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(profile, engine.url, steps=1, deadline_s=60)
        while (second := profile(engine.url, steps=1, deadline_s=0)).status_code == 200:
            pass
        assert (second.status_code, second.json()["error"]["code"]) == (409, "busy")
        complete(engine.url, prompt="a", max_tokens=2)
        assert first.result().json()["complete"] is True
    for query, words in (
        ({"steps": 0}, "steps: got '0', allowed: integers 1 to 1000"),
        ({"steps": "1.5"}, "steps: got '1.5', allowed: integers 1 to 1000"),
        ({"steps": 1001}, "steps: got '1001', allowed: integers 1 to 1000"),
        ({"deadline_s": "nan"}, "deadline_s: got 'nan', allowed: 0 to 60"),
        ({"format": "svg"}, "format: got 'svg', allowed: json, chrome"),
    ):
        refused = profile(engine.url, **query)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, words)


def test_the_phases_of_all_steps_add_up_to_what_steps_took(engine: EngineProcess) -> None:
    def phases() -> dict[str, float]:
        lines = httpx.get(f"{engine.url}/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("engine:step_phase_seconds_total{")]
        return {line.split('phase="')[1].split('"')[0]: float(line.split()[-1]) for line in found}

    complete(engine.url, prompt="a" * 100, max_tokens=100, ignore_eos=True)
    assert set(phases()) == set(PHASES)
    assert all(seconds > 0 for seconds in phases().values())

    def adds_up() -> bool:
        # `busy` ends where the tokens are there, before they are handed out.
        busy = samples(engine.url)["engine:busy_seconds_total"]
        return sum(phases().values()) - phases()["hand_out"] == pytest.approx(busy)

    eventually(adds_up)


def test_the_first_step_after_a_rest_and_every_long_one_is_sampled() -> None:
    steps = Steps()
    ends = [10.0, 10.2, 10.4, 10.5, 10.7, 10.9 + SAMPLED_EVERY_S, 60.0]
    assert [steps.due(end) for end in ends] == [True, False, False, True, False, True, True]


def test_all_steps_are_added_up_and_a_complete_watch_gets_no_more() -> None:
    steps, watch = Steps(), Watch(2)
    steps.watch = watch
    for _ in range(3):
        steps.add(StepTimes(1, 0.0, 1.0, 2.0, 4.0, 5.0, 7.0, 3, 1, 40, 0, "graph", 1))
    assert steps.phase_s == [3.0, 3.0, 6.0, 3.0, 6.0]
    assert (len(watch.steps), steps.watch) == (2, None)
