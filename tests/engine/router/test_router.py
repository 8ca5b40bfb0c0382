"""A router before two real engines."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.engine.conftest import EngineProcess, RouterProcess
from tests.engine.router.conftest import CLIENT, patch, router
from tests.engine.router.test_forward import counts, engines, eventually
from tests.engine.test_spans import collector

pytestmark = pytest.mark.processes
DRAIN_S_MAX = 60
CLOCKS_APART_NS_MAX = 50_000_000
ASKED = {"prompt": "once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    both = EngineProcess("--name", "a"), EngineProcess("--name", "b")
    yield both
    for process in both:
        process.stop()


@pytest.fixture(scope="module")
def door(pair: tuple[EngineProcess, EngineProcess]) -> Iterator[RouterProcess]:
    with router(*before(pair)) as process:
        yield process


def before(pair: tuple[EngineProcess, EngineProcess], *weights: int) -> list[str]:
    weighed = zip(pair, "ab", weights or (100, 100), strict=True)
    return [w for each, name, n in weighed for w in ("--engine", f"{name}@{each.url}={n}")]


def complete(url: str, *, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
    return CLIENT.post(f"{url}/v1/completions", json={**ASKED, **body}, headers=headers)


def aborted(url: str) -> float:
    text = CLIENT.get(f"{url}/metrics").text
    line = next(
        line for line in text.splitlines()
        if line.startswith("vllm:request_success_total") and 'finished_reason="abort"' in line
    )  # fmt: skip
    return float(line.rsplit(" ", 1)[1])


def ended(process: RouterProcess) -> int:
    """By itself; a second signal would cut its drain short."""
    process.process.wait(DRAIN_S_MAX + 10)
    return process.stop()


def test_an_answer_is_the_engines_whole_or_streamed(
    pair: tuple[EngineProcess, EngineProcess], door: RouterProcess
) -> None:
    direct, through = complete(pair[0].url), complete(door.url)
    assert through.json()["choices"] == direct.json()["choices"]
    assert through.headers["x-engine"] in ("a", "b")
    assert through.headers["content-length"] == str(len(through.content))
    assert sorted(through.headers) == sorted([*direct.headers, "x-engine"])
    streamed = complete(door.url, stream=True)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == direct.json()["choices"][0]["text"]
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    assert CLIENT.post(f"{door.url}/v1/chat/completions", json=chat).status_code == 200
    assert CLIENT.get(f"{door.url}/v1/models").json()["data"][0]["id"] == "llama-1.3m"


def test_what_is_wrong_with_a_request_is_told_in_the_engines_words(
    pair: tuple[EngineProcess, EngineProcess], door: RouterProcess
) -> None:
    for body in ({"n": 2}, {"max_tokens": 0}, {"model": "other"}):
        direct, through = complete(pair[0].url, **body), complete(door.url, **body)
        assert (through.status_code, through.json()) == (direct.status_code, direct.json())
    for url in (pair[0].url, door.url):
        assert CLIENT.post(f"{url}/v1/completions", content=b"{").status_code == 400
        assert CLIENT.get(f"{url}/nothing").status_code == 404
        assert CLIENT.head(f"{url}/health").status_code == 200


def test_a_session_stays_on_one_engine_and_a_drained_engine_gets_none(door: RouterProcess) -> None:
    def served(session: str) -> str:
        return complete(door.url, max_tokens=1, headers={"x-session": session}).headers["x-engine"]

    homes = {session: served(session) for session in map(str, range(20))}
    assert set(homes.values()) == {"a", "b"}
    assert all(served(session) == home for session, home in homes.items())
    assert counts(door.url, "router:choices_total")["session", "a"] > 0
    assert patch(door.url, **{"weight.a": 0}).status_code == 200
    assert {served(session) for session in homes} == {"b"}
    assert engines(door.url)["a"]["out"] == "weight 0"
    assert patch(door.url, **{"weight.a": 100}).status_code == 200


def test_a_client_that_leaves_ends_its_request_in_the_engine(
    pair: tuple[EngineProcess, EngineProcess], door: RouterProcess
) -> None:
    was = aborted(pair[0].url) + aborted(pair[1].url)
    body = {**ASKED, "max_tokens": 2000, "stream": True}
    with CLIENT.stream("POST", f"{door.url}/v1/completions", json=body) as answer:
        next(answer.iter_raw())
    eventually(lambda: aborted(pair[0].url) + aborted(pair[1].url) == was + 1)
    eventually(lambda: counts(door.url, "router:in_flight") == {})


def test_knobs_are_changed_by_compare_and_set_and_kept(
    pair: tuple[EngineProcess, EngineProcess], tmp_path: Path
) -> None:
    arguments = [*before(pair, 80, 20), "--state", str(tmp_path)]
    with router(*arguments) as process:
        config = CLIENT.get(f"{process.url}/v1/runtime_config")
        assert config.headers["etag"] == '"1"'
        assert config.json()["values"]["weight.b"] == 20
        assert config.json()["knobs"]["policy"]["choices"] == [
            "least_loaded", "prefix", "round_robin", "session",
        ]  # fmt: skip
        url = f"{process.url}/v1/runtime_config"
        assert CLIENT.patch(url, json={"weight.b": 50}).status_code == 428
        told = CLIENT.patch(url, json={"weight.b": 50}, headers={"if-match": '"1"'}).json()
        assert (told["config_version"], told["values"]["weight.b"]) == (2, 50)
        assert CLIENT.patch(url, json={}, headers={"if-match": '"1"'}).status_code == 412
        assert patch(process.url, **{"weight.b": 101}).status_code == 422
        assert patch(process.url, **{"weight.c": 1}).status_code == 400
    with router(*arguments) as process:
        values = CLIENT.get(f"{process.url}/v1/runtime_config").json()["values"]
        assert values["weight.b"] == 50


def test_told_to_end_it_finishes_what_is_under_way_and_takes_nothing_new(
    pair: tuple[EngineProcess, EngineProcess],
) -> None:
    process = RouterProcess(*before(pair), "--drain-s-max", str(DRAIN_S_MAX))
    done: list[str] = []
    began = threading.Event()

    def long() -> None:
        body = {**ASKED, "max_tokens": 400, "stream": True}
        with CLIENT.stream("POST", f"{process.url}/v1/completions", json=body) as answer:
            for part in answer.iter_text():
                began.set()
                done.append(part)

    thread = threading.Thread(target=long)
    with httpx.Client() as other:
        other.get(f"{process.url}/health")
        thread.start()
        assert began.wait(30)
        process.process.send_signal(signal.SIGTERM)
        try:
            turned_away = other.post(f"{process.url}/v1/completions", json=ASKED)
            assert turned_away.status_code == 503
        except httpx.TransportError:
            pass  # the idle connection was closed before it was used
    assert ended(process) == 0
    thread.join()
    assert "".join(done).endswith("data: [DONE]\n\n")


def test_what_a_drain_does_not_finish_ends_with_an_error_to_read(
    pair: tuple[EngineProcess, EngineProcess],
) -> None:
    process = RouterProcess(*before(pair), "--drain-s-max", "0")
    body = {**ASKED, "max_tokens": 2000, "stream": True}
    with CLIENT.stream("POST", f"{process.url}/v1/completions", json=body) as answer:
        parts = answer.iter_text()
        next(parts)
        process.process.send_signal(signal.SIGTERM)
        rest = "".join(parts)
    assert '"code": "shutting_down"' in rest
    assert ended(process) == 0


def test_a_route_span_lies_between_the_clients_and_the_engines() -> None:
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with collector() as (otlp, received):

        def spans() -> dict[str, Span]:
            return {
                span.name: span
                for _, _, message in received.exports
                for resource in message.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            }

        engine = EngineProcess("--otlp", otlp)
        with router("--engine", f"a@{engine.url}", "--otlp", otlp) as process:
            headers = {"traceparent": f"00-{trace}-{caller}-01", "x-request-id": "r"}
            assert complete(process.url, headers=headers).status_code == 200
            # Not left to the end: what cannot be sent within a few seconds then is lost.
            eventually(lambda: {"route", "llm_request"} <= spans().keys(), within_s=30)
        engine.stop()
    route, request = spans()["route"], spans()["llm_request"]
    assert {route.trace_id.hex(), request.trace_id.hex()} == {trace}
    assert route.parent_span_id.hex() == caller
    assert request.parent_span_id == route.span_id
    # Each process tells wall time from a monotonic clock in its own way.
    assert route.start_time_unix_nano <= request.start_time_unix_nano + CLOCKS_APART_NS_MAX
    told = {each.key: each.value for each in route.attributes}
    assert told["trimtab.router.engine"].string_value == "a"
    assert told["http.response.status_code"].int_value == 200
    assert told["trimtab.router.first_byte_s"].double_value > 0


def test_every_request_is_counted_once(door: RouterProcess) -> None:
    was = sum(counts(door.url, "router:requests_total").values())
    for _ in range(10):
        complete(door.url, max_tokens=1)
    assert sum(counts(door.url, "router:requests_total").values()) == was + 10
    latency = counts(door.url, "router:e2e_request_latency_seconds_count")
    ok = {k: v for k, v in counts(door.url, "router:requests_total").items() if k[1] == "ok"}
    assert sum(latency.values()) == sum(ok.values())


def test_a_killed_engine_costs_only_what_it_was_answering() -> None:
    engines_here = [EngineProcess("--name", name) for name in "ab"]
    names = [w for each, n in zip(engines_here, "ab", strict=True)
             for w in ("--engine", f"{n}@{each.url}")]  # fmt: skip
    with router(*names, policy="round_robin") as process:
        assert {complete(process.url, max_tokens=1).headers["x-engine"] for _ in range(4)} == {
            "a", "b",
        }  # fmt: skip
        engines_here[1].stop(signal.SIGKILL)
        began = time.monotonic()
        assert [complete(process.url, max_tokens=1).status_code for _ in range(6)] == [200] * 6
        assert "no connection" in engines(process.url)["b"]["out"]
        assert time.monotonic() - began < 30  # nobody waited for it
    engines_here[0].stop()
