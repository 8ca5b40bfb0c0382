"""What becomes of a request whose engine misbehaves: never two answers, and the truth is told."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.conftest import RouterProcess
from tests.engine.router.conftest import CLIENT, EVENT, FLOOD, Rogue, patch, rogue_server, router

pytestmark = pytest.mark.processes
QUICK = {"health_interval_ms": 100, "breaker_open_ms": 100}


def ask(url: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return CLIENT.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=named)


def engines(url: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = CLIENT.get(f"{url}/health").json()["engines"]
    return found


def counts(url: str, name: str) -> dict[tuple[str, ...], float]:
    """Of one family, those above 0, by the values of its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(CLIENT.get(f"{url}/metrics").text)
        for sample in family.samples
        if sample.name == name and sample.value
    }


def eventually(condition: Any, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@contextmanager
def nobody() -> Iterator[str]:
    """An address where nobody listens, nor can meanwhile."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{door.getsockname()[1]}"


Two = tuple[RouterProcess, Rogue, Rogue]


@pytest.fixture(scope="module")
def house() -> Iterator[Two]:
    """A router before two servers, a and b, that takes them by turns and bears with them."""
    with rogue_server() as a, rogue_server() as b:
        names = ("--engine", f"a@{a.url}", "--engine", f"b@{b.url}")
        with router(*names, breaker_requests_min=10_000, health_interval_ms=100) as process:
            yield process, a, b


@pytest.fixture
def two(house: Two) -> Two:
    process, *both = house
    for rogue in both:
        rogue.reset()
    calm = {"policy": "round_robin", "retries": "on", "max_in_flight": 100}
    assert patch(process.url, **calm).status_code == 200
    return house


class Meter:
    """What a router has counted since."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.before = {
            name: counts(url, f"router:{name}_total") for name in ("requests", "retries")
        }

    def gained(self, name: str) -> dict[tuple[str, ...], float]:
        now, before = counts(self.url, f"router:{name}_total"), self.before[name]
        return {k: v - before.get(k, 0) for k, v in now.items() if v != before.get(k)}


def test_an_engine_that_says_ask_again_is_not_asked_and_another_is_once(two: Two) -> None:
    process, a, b = two
    a.mode, meter = "again", Meter(process.url)
    answers = [ask(process.url) for _ in range(4)]
    assert [each.status_code for each in answers] == [200] * 4
    assert {each.headers["x-engine"] for each in answers} == {"b"}
    assert a.asked >= 3
    assert b.asked == 4
    assert meter.gained("retries") == {("a", "shutting_down"): a.asked}
    assert patch(process.url, retries="off").status_code == 200
    assert {ask(process.url).status_code for _ in range(2)} == {200, 503}


def test_where_both_say_ask_again_the_second_answer_is_the_clients(two: Two) -> None:
    process, a, b = two
    a.mode = b.mode = "again"
    answer = ask(process.url)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["code"] == "shutting_down"
    assert a.asked == b.asked == 1


@pytest.mark.parametrize(
    ("mode", "status", "after", "outcome"),
    [("full", 429, "7", "refused"), ("quota", 503, None, "refused"), ("500", 500, None, "error")],
)
def test_any_other_no_is_passed_on_as_it_is_and_nobody_else_is_asked(
    two: Two, mode: str, status: int, after: str | None, outcome: str
) -> None:
    process, a, b = two
    a.mode = b.mode = mode
    meter = Meter(process.url)
    answer = ask(process.url)
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == after
    assert a.asked + b.asked == 1
    assert meter.gained("requests") == {(answer.headers["x-engine"], outcome): 1}


def test_a_request_that_an_engine_may_have_begun_is_not_sent_again(two: Two) -> None:
    process, a, b = two
    a.mode = b.mode = "close"
    answer = ask(process.url)
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "broken"
    assert a.asked + b.asked == 1


def test_a_stream_that_breaks_between_two_events_ends_with_an_error_to_read(two: Two) -> None:
    process, a, b = two
    a.mode = b.mode = "cut"
    answer = ask(process.url)
    assert answer.content.startswith(EVENT)
    assert b'data: {"error": {"code": "broken"' in answer.content
    assert a.asked + b.asked == 1


def test_a_stream_that_breaks_inside_an_event_is_broken_off(two: Two) -> None:
    process, a, b = two
    a.mode = b.mode = "cut inside"
    with pytest.raises(httpx.RemoteProtocolError):
        ask(process.url)


def test_nobody_waits_for_a_dead_engine() -> None:
    with ExitStack() as alive, rogue_server() as a:
        b = alive.enter_context(rogue_server())
        names = ("--engine", f"a@{a.url}", "--engine", f"b@{b.url}")
        with router(*names, policy="round_robin", health_interval_ms=60_000) as process:
            assert {ask(process.url).headers["x-engine"] for _ in range(2)} == {"a", "b"}
            eventually(lambda: b.probed >= 2)  # the change of the knobs had each asked once more
            alive.close()
            # Not asked for a minute: the first request sent to it finds out.
            assert [ask(process.url).status_code for _ in range(4)] == [200] * 4
            assert "no connection" in engines(process.url)["b"]["out"]
            assert counts(process.url, "router:retries_total") == {("b", "unreached"): 1}


def test_errors_open_the_breaker_the_spare_engine_steps_in_and_the_first_comes_back() -> None:
    with rogue_server("500") as a, rogue_server() as c:
        names = ("--engine", f"a@{a.url}", "--spare", f"c@{c.url}")
        with router(*names, **QUICK, breaker_requests_min=5) as process:
            assert [ask(process.url).status_code for _ in range(6)] == [500] * 5 + [200]
            assert engines(process.url)["a"]["breaker"] != "closed"
            time.sleep(0.5)  # asked for a token, it fails again and again
            assert {ask(process.url).headers["x-engine"] for _ in range(5)} == {"c"}
            assert a.asked == 5
            a.mode = "ok"
            eventually(lambda: engines(process.url)["a"]["breaker"] == "closed")
            assert {ask(process.url).headers["x-engine"] for _ in range(5)} == {"a"}
            assert counts(process.url, "router:breaker_openings_total") == {("a",): 1}


def test_the_spare_engine_is_asked_where_the_only_other_says_ask_again() -> None:
    with (
        rogue_server("again") as a,
        rogue_server() as c,
        router("--engine", f"a@{a.url}", "--spare", f"c@{c.url}") as process,
    ):
        answer = ask(process.url)
        assert (answer.status_code, answer.headers["x-engine"]) == (200, "c")
        assert a.asked == c.asked == 1


def test_no_engine_is_thought_dead_where_the_router_has_no_file_left() -> None:
    with rogue_server() as a, router("--engine", f"a@{a.url}", **QUICK) as process:
        assert ask(process.url).status_code == 200  # by a connection that the client keeps
        pid, kind = process.process.pid, resource.RLIMIT_NOFILE
        soft, hard = resource.prlimit(pid, kind)
        assert soft == hard
        resource.prlimit(pid, kind, (3, hard))
        answer = ask(process.url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_files")
        time.sleep(0.5)  # it is asked whether it is well, in vain
        assert engines(process.url)["a"]["out"] is None
        resource.prlimit(pid, kind, (soft, hard))
        assert ask(process.url).status_code == 200


def test_with_no_other_engine_an_open_breaker_does_not_count() -> None:
    with rogue_server("500") as a, router("--engine", a.url, breaker_requests_min=1) as process:
        assert [ask(process.url).status_code for _ in range(3)] == [500] * 3


def test_where_no_engine_is_there_the_reason_is_told() -> None:
    with nobody() as url, router("--engine", f"a@{url}") as process:
        answer = ask(process.url)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_engine"
        assert "a: no connection" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "5"
        assert CLIENT.get(f"{process.url}/health").status_code == 503


def test_an_engine_that_says_it_is_not_well_gets_no_requests(two: Two) -> None:
    process, a, _ = two
    a.health = 503
    eventually(lambda: engines(process.url)["a"]["out"] == "/health answers 503")
    assert {ask(process.url).headers["x-engine"] for _ in range(4)} == {"b"}
    a.health = 200
    eventually(lambda: engines(process.url)["a"]["out"] is None)


def test_what_others_send_an_engine_counts_as_its_load(two: Two) -> None:
    process, a, _ = two
    a.metrics = (
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 4.0\n'
    )
    eventually(lambda: engines(process.url)["a"]["elsewhere"] == 7)
    patch(process.url, policy="least_loaded")
    assert {ask(process.url).headers["x-engine"] for _ in range(4)} == {"b"}


def test_headers_are_passed_on_but_for_those_of_the_connection(two: Two) -> None:
    process, a, b = two
    tenant, trace = "gölden".encode(), "00-1-2-01"
    headers = {
        "x-priority": "high", "x-tenant": tenant, "x-request-id": tenant, "traceparent": trace,
        "te": "trailers", "connection": "keep-alive, X-Hop", "x-hop": "1",
    }  # fmt: skip
    CLIENT.post(f"{process.url}/v1/completions", json={"prompt": "a"}, headers=headers)
    got = a.headers or b.headers
    assert got["x-priority"] == "high"
    assert got["x-tenant"].encode("latin-1") == tenant
    assert got["x-request-id"].encode("latin-1") == tenant
    assert got["traceparent"] == trace
    assert "te" not in got
    assert "x-hop" not in got
    assert got["host"] in a.url + b.url


def test_a_header_that_no_engine_could_be_sent_is_refused_and_held_against_none(two: Two) -> None:
    process, a, b = two
    meter = Meter(process.url)
    answer = CLIENT.post(
        f"{process.url}/v1/completions", json={"prompt": "a"}, headers={"x-tenant": b"a\x01"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "code": "invalid_value",
        "message": "x-tenant: has control characters, allowed: none",
        "param": "x-tenant",
    }
    assert a.asked + b.asked == 0
    assert meter.gained("requests") == {}


def test_an_answer_without_a_body_is_no_first_byte(two: Two) -> None:
    process, a, b = two
    a.mode = b.mode = "empty"
    name, meter = "router:time_to_first_byte_seconds_count", Meter(process.url)
    before = counts(process.url, name)
    answer = ask(process.url)
    assert (answer.status_code, answer.content) == (200, b"")
    eventually(lambda: meter.gained("requests") == {(answer.headers["x-engine"], "ok"): 1})
    assert counts(process.url, name) == before


def test_a_client_that_does_not_read_holds_its_engine_up_and_no_memory(two: Two) -> None:
    process, a, b = two
    a.mode = b.mode = "flood"
    meter = Meter(process.url)
    host, port = process.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n{"prompt": "a"}'
        )
        seen, deadline = -1, time.monotonic() + 30
        while (now := a.flooded + b.flooded) != seen or not now:
            assert time.monotonic() < deadline, "nothing comes, or no end of it"
            seen = now
            time.sleep(0.3)
    # What the sockets between them hold, and two buffers in the router.
    assert seen < 256 * len(FLOOD)
    eventually(lambda: [k[1] for k in meter.gained("requests")] == ["aborted"])
    assert counts(process.url, "router:in_flight") == {}


def test_requests_beyond_the_limit_are_turned_away(two: Two) -> None:
    process, a, b = two
    a.mode = b.mode = "flood"
    patch(process.url, max_in_flight=1)
    with CLIENT.stream("POST", f"{process.url}/v1/completions", json={"prompt": "a"}):
        answer = ask(process.url)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
    eventually(lambda: counts(process.url, "router:in_flight") == {})
