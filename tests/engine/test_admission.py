"""Who is turned away, over HTTP: the status, when to come back, and the count of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.conftest import EngineProcess
from tests.engine.test_server import change, conserved, eventually, samples

pytestmark = pytest.mark.processes

TENANTS = {
    "tenants": {"acme": "gold", "shop": "small", "lab": "test", "Zürich": "small"},
    "tiers": {"small": {"tokens_per_minute": 60, "burst_tokens": 100}},
}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine that knows its tenants."""
    tenants = tmp_path_factory.mktemp("door") / "tenants.json"
    tenants.write_text(json.dumps(TENANTS))
    process = EngineProcess("--tenants", str(tenants))
    yield process
    process.stop()


def ask(
    url: str, headers: dict[str, str | bytes], prompt: int = 10, wait_s: float = 60, **body: Any
) -> httpx.Response:
    body = {"prompt": [66] * prompt, "temperature": 0, "ignore_eos": True, **body}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=wait_s)


def labelled(url: str, name: str) -> dict[str, float]:
    """Of a metric with one label of its own: value by label."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                own = set(sample.labels) - {"model_name", "engine"}
                found[sample.labels[own.pop()]] = sample.value
    return found


def test_a_tenant_beyond_its_quota_is_told_by_its_tier_and_when_to_come_back(
    door: EngineProcess,
) -> None:
    assert change(door.url, tenant_quotas="on").status_code == 200
    assert ask(door.url, {"x-tenant": "shop"}, max_tokens=80).status_code == 200
    refused = ask(door.url, {"x-tenant": "shop"}, max_tokens=80)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 80
    error = refused.json()["error"]
    assert error["code"] == "tenant_quota"
    assert error["message"].startswith("x-tenant shop, tier small: 90 tokens asked for, left: ")
    assert error["message"].endswith("; allowed: 60 a minute")
    for who in ("lab", "nobody"):
        assert ask(door.url, {"x-tenant": who}, max_tokens=480).status_code == 200
        refused = ask(door.url, {"x-tenant": who}, max_tokens=480)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
    assert ask(door.url, {}, max_tokens=480).status_code == 503, "of the bucket nobody used up"
    never = ask(door.url, {"x-tenant": "Zürich".encode()}, max_tokens=91)
    assert (never.status_code, never.json()["error"]["code"]) == (400, "tenant_burst")
    assert "retry-after" not in never.headers
    for _ in range(3):
        assert ask(door.url, {"x-tenant": "acme"}, max_tokens=480).status_code == 200
    used = {"acme": 1470.0, "shop": 90.0, "lab": 490.0, "Zürich": 0.0, "other": 490.0}
    assert labelled(door.url, "engine:tenant_tokens_total") == used
    assert labelled(door.url, "engine:tenant_throttled_total") == {"quota": 4.0, "burst": 1.0}
    rejected = labelled(door.url, "vllm:admission_rejections_total")
    assert (rejected["tenant_quota"], rejected["tenant_burst"]) == (4.0, 1.0)
    assert change(door.url, tenant_quotas="off").status_code == 200
    assert ask(door.url, {"x-tenant": "shop"}, max_tokens=91).status_code == 200
    assert conserved(door.url)


def test_what_an_answer_did_not_use_can_be_asked_for_again(door: EngineProcess) -> None:
    """A stop text ends it early, 60 times; the burst holds nine such requests."""
    assert change(door.url, tenant_quotas="on").status_code == 200
    text = ask(door.url, {"x-tenant": "acme"}, max_tokens=40).json()["choices"][0]["text"]
    stop = next(c for c in text[1:] if c.isascii())
    before = labelled(door.url, "engine:tenant_tokens_total")["acme"]
    for _ in range(60):
        answer = ask(door.url, {"x-tenant": "acme"}, max_tokens=1900, stop=[stop])
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
    used = labelled(door.url, "engine:tenant_tokens_total")["acme"] - before
    assert used <= 60 * (10 + 40), "though 60 × 1,910 were charged"
    assert change(door.url, tenant_quotas="off").status_code == 200


def test_a_file_of_tenants_that_does_not_fit_stops_the_start(tmp_path: Path) -> None:
    bad = tmp_path / "tenants.json"
    bad.write_text('{"tenants": {"acme": "silver"}}')
    with pytest.raises(AssertionError, match=r"tenants\.acme: got 'silver', allowed: gold, saas"):
        EngineProcess("--tenants", str(bad))


def test_without_a_list_of_tenants_quotas_are_refused(engine: EngineProcess) -> None:
    knob = httpx.get(f"{engine.url}/v1/runtime_config").json()["knobs"]["tenant_quotas"]
    assert (knob["supported"], knob["choices"]) == (False, ["off", "on"])
    assert knob["reason"] == "no tenants are listed; start the engine with --tenants FILE"
    answer = change(engine.url, tenant_quotas="on")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_tenants")


def test_an_engine_that_cannot_keep_up_says_so_and_keeps_what_it_took(door: EngineProcess) -> None:
    """60 who stay, one at a time: more than 50 wait, and the step thread never does."""
    assert change(door.url, max_num_seqs=1).status_code == 200
    leave = threading.Event()

    def stay(_: int) -> int:
        body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{door.url}/v1/completions", json=body, timeout=60) as answer:
            for _part in answer.iter_bytes():
                if leave.is_set():
                    break
            return answer.status_code

    def refused() -> httpx.Response | None:
        """The first looks may be of the time before; who is let in then goes away again."""
        try:
            late = ask(door.url, {}, max_tokens=1, wait_s=0.5)
        except httpx.TimeoutException:
            return None
        return late if late.status_code == 429 else None

    with ThreadPoolExecutor(60) as crowd:
        stayed = [crowd.submit(stay, i) for i in range(60)]
        try:
            eventually(lambda: samples(door.url)["vllm:num_requests_waiting"] > 50)
            assert change(door.url, backpressure="on").status_code == 200
            told: list[httpx.Response] = []

            def was_refused() -> bool:
                late = refused()
                told.extend([late] if late else [])
                return bool(told)

            eventually(was_refused)
        finally:
            leave.set()
            change(door.url, max_num_seqs=64)
        assert told[0].json()["error"]["code"] == "backpressure"
        assert int(told[0].headers["retry-after"]) >= 1
        assert [one.result(60) for one in stayed] == [200] * 60
    assert labelled(door.url, "vllm:admission_rejections_total")["backpressure"] >= 1
    eventually(lambda: samples(door.url)["vllm:num_requests_running"] == 0)
    assert conserved(door.url)
    assert change(door.url, backpressure="off", max_num_seqs=32).status_code == 200


def test_budgets_and_windows_in_force_are_seen(door: EngineProcess) -> None:
    assert change(door.url, length_window_tokens=64, priority_weights="on").status_code == 200
    assert ask(door.url, {"x-priority": "realtime"}, max_tokens=2).status_code == 200
    seen = samples(door.url)
    assert seen["engine:length_window_tokens"] == 64
    assert seen["engine:prompt_slice_tokens"] == 512
    assert labelled(door.url, "engine:priority_budget_tokens") == dict.fromkeys(
        ("low", "normal", "high"), 0.0
    )
    assert change(door.url, length_window_tokens=-1).status_code == 200
    with ThreadPoolExecutor(8) as crowd:
        codes = crowd.map(
            lambda i: ask(door.url, {}, prompt=8 + i % 60, max_tokens=1).status_code, range(80)
        )
        assert set(codes) == {200}
    distances = labelled(door.url, "engine:prompt_length_fit_distance")
    assert set(distances) == {"weibull", "lognormal"}
    assert all(0 < distance < 1 for distance in distances.values())
    off = {"length_window_tokens": 0, "priority_weights": "off"}
    assert change(door.url, **off).json()["values"]["length_window_tokens"] == 0
    assert samples(door.url)["engine:length_window_tokens"] == 0


@pytest.mark.parametrize(
    ("values", "status", "words"),
    [
        ({"length_window_tokens": -2}, 422, "got -2 tokens, allowed: -1 to 8192 tokens"),
        ({"length_window_tokens": "64"}, 400, "got '64', want int"),
        ({"backpressure": "true"}, 422, "got true, allowed: off, on"),
        ({"priority_weights": 2}, 400, "got 2, want text"),
    ],
)
def test_values_that_are_none_are_refused(
    door: EngineProcess, values: dict[str, Any], status: int, words: str
) -> None:
    answer = change(door.url, **values)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
