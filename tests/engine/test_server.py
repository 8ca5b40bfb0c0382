"""A whole engine process, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.load import Request, arrivals
from engine.replay import Replayer, Status, calibrate, summarise
from tests.engine.conftest import ROOT, EngineProcess

pytestmark = pytest.mark.processes
# Making one takes as long as some hundred tokens.
CLIENT = httpx.Client(timeout=60)


def samples(url: str) -> dict[str, float]:
    """Sums over all labels, by sample name."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(CLIENT.get(f"{url}/metrics").text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def conserved(url: str) -> bool:
    seen = samples(url)
    ended = (
        seen["vllm:request_success_total"]
        + seen["engine:requests_failed_total"]
        + seen["vllm:admission_rejections_total"]
    )
    flying = seen["vllm:num_requests_running"] + seen["vllm:num_requests_waiting"]
    return seen["engine:requests_received_total"] == ended + flying


def eventually(condition: Any, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def complete(url: str, **body: Any) -> httpx.Response:
    return CLIENT.post(f"{url}/v1/completions", json={"temperature": 0, **body})


def test_a_streamed_answer_has_the_text_and_the_usage_of_the_whole_one(
    engine: EngineProcess,
) -> None:
    body = {"prompt": "once upon a time", "max_tokens": 40, "ignore_eos": True}
    whole = complete(engine.url, **body).json()
    parts = events(
        complete(engine.url, **body, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(part["choices"][0]["text"] for part in parts[:-1])
    assert text == whole["choices"][0]["text"]
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert parts[-1]["choices"] == []
    usage = {"prompt_tokens": 17, "completion_tokens": 40, "total_tokens": 57}
    usage |= {"prompt_tokens_details": {"cached_tokens": 0}}
    assert parts[-1]["usage"] == whole["usage"] == usage


def test_text_and_its_token_ids_are_the_same_prompt(engine: EngineProcess) -> None:
    text = complete(engine.url, prompt="abc", max_tokens=8).json()
    ids = complete(engine.url, prompt=[256, 97, 98, 99], max_tokens=8).json()
    assert text["choices"] == ids["choices"]


def test_a_chat_streams_deltas_that_begin_with_the_role(engine: EngineProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 6,
        "temperature": 0,
        "stream": True,
    }
    parts = events(httpx.post(f"{engine.url}/v1/chat/completions", json=body))
    assert parts[0]["object"] == "chat.completion.chunk"
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    whole = httpx.post(f"{engine.url}/v1/chat/completions", json={**body, "stream": False}).json()
    text = "".join(part["choices"][0]["delta"]["content"] for part in parts)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}


def test_a_seeded_sample_repeats_and_another_seed_differs(engine: EngineProcess) -> None:
    def text(seed: int) -> str:
        body = {"prompt": "abc", "max_tokens": 30, "temperature": 1.0, "seed": seed}
        return str(complete(engine.url, **body).json()["choices"][0]["text"])

    assert text(1) == text(1) != text(2)


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(engine: EngineProcess) -> None:
    body: dict[str, Any] = {"prompt": "zebra", "max_tokens": 60, "ignore_eos": True}
    text = complete(engine.url, **body).json()["choices"][0]["text"]
    stop = next(c for c in text[4:] if c.isascii())
    for stream in (False, True):
        answer = complete(engine.url, **body, stop=[stop], stream=stream)
        if stream:
            parts = events(answer)
            got = "".join(part["choices"][0]["text"] for part in parts)
            reason = parts[-1]["choices"][0]["finish_reason"]
        else:
            choice = answer.json()["choices"][0]
            got, reason = choice["text"], choice["finish_reason"]
        assert reason == "stop"
        assert got == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "a" * 3000}, 400, "limit (max_model_len) of 2048 tokens"),
        ({"prompt": "a", "max_tokens": 2048}, 400, "limit (max_model_len) of 2048 tokens"),
        ({"prompt": []}, 400, "prompt: want one text, or one non-empty list of token ids"),
        ({"prompt": [9999]}, 400, "token ids must lie in 0 to 261"),
        ({"prompt": "a", "n": 2}, 400, "n: got 2, this engine supports only 1"),
        ({"prompt": "a", "temperature": 9}, 400, "temperature: got 9, allowed: 0.0 to 2.0"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens: got 0, allowed: integers from 1 on"),
        ({"prompt": "a", "model": "gpt-9"}, 404, "got 'gpt-9', served: llama-1.3m"),
    ],
)
def test_a_wrong_request_is_answered_with_the_field_and_what_is_allowed(
    engine: EngineProcess, body: dict[str, Any], status: int, words: str
) -> None:
    answer = complete(engine.url, **body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "param"}
    assert words in error["message"]


ROLE_LIST = {"role": ["user"], "content": "hello"}


def test_unknown_paths_methods_and_bodies_have_the_error_shape(engine: EngineProcess) -> None:
    for answer, status in (
        (httpx.get(f"{engine.url}/nowhere"), 404),
        (httpx.get(f"{engine.url}/v1/completions"), 405),
        (httpx.post(f"{engine.url}/v1/completions", content=b"not json"), 400),
        (httpx.post(f"{engine.url}/v1/completions", content=b"x" * 1_100_000), 413),
        (httpx.post(f"{engine.url}/v1/chat/completions", json={"messages": [ROLE_LIST]}), 400),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"code", "message", "param"}


@pytest.mark.parametrize(
    "body",
    [rb'{"prompt": "\ud800"}', rb'{"prompt": "a", "stop": "\udfff"}', b"[" * 200_000],
)
def test_json_no_text_can_hold_is_refused(engine: EngineProcess, body: bytes) -> None:
    answer = httpx.post(f"{engine.url}/v1/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_health_and_models_say_what_is_served(engine: EngineProcess) -> None:
    for path in ("/health", "/healthz"):
        assert httpx.get(engine.url + path).json()["status"] == "ok"
    models = httpx.get(f"{engine.url}/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in models] == [("llama-1.3m", 2048)]


def test_a_client_that_goes_away_cancels_its_request(engine: EngineProcess) -> None:
    body = {"prompt": "a", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    before = samples(engine.url)["vllm:generation_tokens_total"]
    with httpx.stream("POST", f"{engine.url}/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    eventually(lambda: samples(engine.url)["vllm:num_requests_running"] == 0)
    assert samples(engine.url)["vllm:generation_tokens_total"] - before < 2000
    assert conserved(engine.url)


def test_runtime_config_is_changed_by_compare_and_set(engine: EngineProcess) -> None:
    url = f"{engine.url}/v1/runtime_config"
    before = httpx.get(url)
    version = before.json()["config_version"]
    assert before.headers["etag"] == f'"{version}"'
    match = {"If-Match": before.headers["etag"], "X-Changed-By": "agent/test"}
    changed = httpx.patch(url, json={"max_num_seqs": 64}, headers=match)
    assert changed.status_code == 200
    assert changed.json()["config_version"] == version + 1
    assert changed.json()["values"]["max_num_seqs"] == 64
    assert changed.json()["changed_by"] == "agent/test"
    assert changed.json()["knobs"]["max_num_seqs"]["value"] == 64
    assert httpx.get(url).json() == changed.json()
    assert samples(engine.url)["engine:config_version"] == version + 1
    current = {"If-Match": changed.headers["etag"]}
    for headers, body, status, words in (
        (match, {"max_num_seqs": 8}, 412, f"current is {version + 1}"),
        ({}, {"max_num_seqs": 8}, 428, "If-Match"),
        ({"If-Match": "seven"}, {"max_num_seqs": 8}, 400, "If-Match: got seven"),
        ({"If-Match": "9" * 5000}, {"max_num_seqs": 8}, 400, "want one config_version"),
        (current, {"nonsense": 8}, 400, "no such knob"),
        (current, {"max_num_seqs": "8"}, 400, "want int"),
        (current, {"max_num_seqs": 257}, 422, "allowed: 1 to 256 requests"),
    ):
        answer = httpx.patch(url, json=body, headers=headers)
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]
    assert httpx.get(url).json()["config_version"] == version + 1


def change(url: str, **values: Any) -> httpx.Response:
    url = f"{url}/v1/runtime_config"
    etag = CLIENT.get(url).headers["etag"]
    return CLIENT.patch(url, json=values, headers={"If-Match": etag})


def test_a_cached_prefix_is_told_counted_kept_apart_by_salt_and_forgotten() -> None:
    engine = EngineProcess("--prefix-cache", "on")
    body = {"prompt": "you are a helpful assistant " * 4, "max_tokens": 4, "ignore_eos": True}
    try:
        told: list[int] = []
        texts = set()
        for salt in (None, None, "tenant 1", "tenant 1"):
            answer = complete(engine.url, **body, cache_salt=salt).json()
            told.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            texts.add(answer["choices"][0]["text"])
        assert told == [0, 112, 0, 112]
        assert len(texts) == 1
        seen = samples(engine.url)
        assert seen["vllm:prefix_cache_queries_total"] == 4 * 113
        assert (
            seen["vllm:prefix_cache_hits_total"] == seen["vllm:prompt_tokens_cached_total"] == 224
        )
        assert seen["engine:kv_cached_blocks"] == 14
        assert seen["vllm:kv_cache_usage_perc"] == 0
        reset = httpx.post(f"{engine.url}/reset_prefix_cache")
        assert (reset.status_code, reset.json()) == (200, {"forgotten_blocks": 14})
        assert samples(engine.url)["engine:kv_cached_blocks"] == 0
        again = complete(engine.url, **body).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        refused = complete(engine.url, **body, cache_salt="")
        assert refused.status_code == 400
        assert "cache_salt: want a text of 1 to 128 characters" in refused.text
    finally:
        assert engine.stop() == 0


def test_choices_and_barrier_knobs_are_told_and_changed(engine: EngineProcess) -> None:
    knobs = httpx.get(f"{engine.url}/v1/runtime_config").json()["knobs"]
    assert knobs["graph_capture"]["choices"] == ["off", "on"]
    assert knobs["kv_block_size"]["choices"] == [8, 16, 32, 64, 128]
    assert "minimum" not in knobs["kv_block_size"]
    assert knobs["kv_dtype"]["token_bytes"]["auto"] == 2 * 3 * 2 * 32 * 4
    assert {name: knob["apply_class"] for name, knob in knobs.items()} == {
        **dict.fromkeys(knobs, "hot"),
        "graph_capture": "barrier",
        "kv_block_size": "barrier",
        "kv_dtype": "barrier",
        "kv_layout": "barrier",
        "prefix_cache": "barrier",
        "kv_allocator": "barrier",
    }
    assert [name for name, knob in knobs.items() if not knob["supported"]] == ["tenant_quotas"]
    changed = change(engine.url, graph_capture="off", kv_block_size=64)
    assert changed.json()["values"]["graph_capture"] == "off"
    seen = samples(engine.url)
    assert seen["engine:graph_capture_ready"] == 0
    assert seen["engine:kv_blocks"] == 1024
    metrics = httpx.get(f"{engine.url}/metrics").text
    assert 'block_size="64"' in metrics
    assert 'knob="graph_capture",model_name="llama-1.3m"} 0.0' in metrics
    for values, status, words in (
        ({"graph_capture": "maybe"}, 422, "graph_capture: got maybe, allowed: off, on"),
        ({"graph_capture": True}, 400, "graph_capture: got True, want text"),
        ({"kv_block_size": 24}, 422, "kv_block_size: got 24 tokens, allowed: 8, 16, 32, 64, 128"),
    ):
        answer = change(engine.url, **values)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == words
    assert change(engine.url, kv_allocator="contiguous").status_code == 200
    excluded = change(engine.url, prefix_cache="on")
    assert excluded.status_code == 409
    assert excluded.json()["error"]["param"] == "prefix_cache"
    assert samples(engine.url)["engine:kv_fragmentation_entropy"] == 0
    values = {"graph_capture": "on", "kv_block_size": 16, "kv_allocator": "paged"}
    assert change(engine.url, **values).status_code == 200
    assert samples(engine.url)["engine:graph_capture_ready"] == 1
    assert "engine:kv_fragmentation_entropy" not in samples(engine.url)


def test_low_priorities_are_shed_and_told_when_to_come_back(engine: EngineProcess) -> None:
    def ask(priority: str) -> httpx.Response:
        headers = {"x-priority": priority} if priority else {}
        body = {"prompt": "a", "max_tokens": 2}
        return httpx.post(f"{engine.url}/v1/completions", json=body, headers=headers, timeout=30)

    before = samples(engine.url)
    assert change(engine.url, shed_below_priority=2).status_code == 200
    for priority, status in (
        *(("low", 429), ("0", 429), ("", 429), ("normal", 429)),
        *(("2", 200), ("High", 200), ("realtime", 200)),
        ("urgent", 400),
    ):
        assert ask(priority).status_code == status, priority
    refused = ask("low")
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"] == {
        "code": "shed",
        "message": "x-priority: low requests are turned away now, served: high, realtime",
        "param": None,
    }
    error = ask("4").json()["error"]
    assert error["param"] == "x-priority"
    assert error["message"] == ("x-priority: got '4', allowed: 0 to 3, low, normal, high, realtime")
    assert change(engine.url, shed_below_priority=0).status_code == 200
    after = samples(engine.url)
    assert after["engine:requests_shed_total"] - before["engine:requests_shed_total"] == 5
    assert conserved(engine.url)
    metrics = httpx.get(f"{engine.url}/metrics").text
    assert 'reason="shed"} 5.0' in metrics
    assert 'model_name="llama-1.3m",priority="low"} 3.0' in metrics


def test_the_map_of_the_pool_names_who_runs_and_is_read_page_by_page(
    engine: EngineProcess,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": [66] * 40, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
        running = pool.submit(
            httpx.post, f"{engine.url}/v1/completions", json=body, timeout=60,
            headers={"x-request-id": "the-long-one"},
        )  # fmt: skip
        eventually(lambda: samples(engine.url)["vllm:num_requests_running"] == 1)
        told = httpx.get(f"{engine.url}/v1/kv/map").json()
        running.result()
    assert {run["request"] for run in told["runs"]} == {None, "the-long-one"}
    assert sum(run["blocks"] for run in told["runs"]) == told["blocks"]
    assert sum(told["counts"].values()) == told["blocks"]
    assert list(told) == [
        *("engine", "config_version", "allocator", "block_size", "blocks", "counts", "runs"),
        "next",
    ]
    last = told["blocks"] - 1
    page = httpx.get(f"{engine.url}/v1/kv/map", params={"from": last}).json()
    assert [run["state"] for run in page["runs"]] == ["canary"]
    for wrong in (last + 1, -1, "x", "", "9" * 5000):
        answer = httpx.get(f"{engine.url}/v1/kv/map", params={"from": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "from")


def test_a_full_queue_says_429_and_when_to_come_back(tmp_path: Path) -> None:
    engine = EngineProcess("--queue-requests-max", "2")
    try:
        httpx.post(f"{engine.url}/pause")
        with ThreadPoolExecutor(2) as pool:
            queued = [pool.submit(complete, engine.url, prompt="a", max_tokens=2) for _ in "ab"]
            eventually(lambda: samples(engine.url)["vllm:num_requests_waiting"] == 2)
            refused = complete(engine.url, prompt="a", max_tokens=2)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "max_num_queued_reqs"
            assert "2 requests are waiting, allowed: 2" in refused.json()["error"]["message"]
            httpx.post(f"{engine.url}/resume")
            assert [one.result().status_code for one in queued] == [200, 200]
        assert conserved(engine.url)
    finally:
        engine.stop()


def test_changes_under_load_lose_no_request(engine: EngineProcess) -> None:
    url = f"{engine.url}/v1/runtime_config"
    load = arrivals(1, [(3.0, 50.0)])

    async def run() -> Replayer:
        replayer = Replayer(engine.url)
        running = asyncio.create_task(replayer.run(load))
        async with httpx.AsyncClient() as client:
            for value in (4, 128, 1, 64, 32):
                await asyncio.sleep(0.5)
                etag = (await client.get(url)).headers["etag"]
                body = {"max_num_seqs": value, "prefill_chunk_tokens": 32 * value}
                answer = await client.patch(url, json=body, headers={"If-Match": etag})
                assert answer.status_code == 200
        await running
        return replayer

    replayer = asyncio.run(run())
    summary = summarise(replayer.records, replayer.unsolicited)
    assert summary.counts[Status.OK] == summary.sent == len(load)
    assert summary.duplicated == 0
    for record in replayer.records:
        assert record.tokens == record.request.output_tokens
    assert conserved(engine.url)
    assert samples(engine.url)["vllm:num_preemptions_total"] == 0


def test_calibration_finds_what_the_engine_sustains(engine: EngineProcess) -> None:
    capacity = asyncio.run(calibrate(engine.url, seconds=2.0, concurrency=16))
    assert capacity.requests_per_s > 1
    assert capacity.tokens_per_s > capacity.requests_per_s


def test_calibration_asks_for_the_lengths_it_is_given(engine: EngineProcess) -> None:
    asked = (Request(0, 8, 4, f"short-{i}") for i in count())
    capacity = asyncio.run(calibrate(engine.url, seconds=1.0, concurrency=4, requests=asked))
    assert capacity.tokens_per_s == pytest.approx(4 * capacity.requests_per_s)


def test_a_killed_engine_interrupts_requests_and_comes_back_with_its_configuration(
    tmp_path: Path,
) -> None:
    first = EngineProcess("--state", str(tmp_path))
    url = f"{first.url}/v1/runtime_config"
    body = {"max_num_seqs": 8, "max_wait_ms": 10}
    assert httpx.patch(url, json=body, headers={"If-Match": '"1"'}).status_code == 200

    async def run() -> Replayer:
        replayer = Replayer(first.url, answer_s_max=10)
        running = asyncio.create_task(replayer.run(arrivals(2, [(2.0, 60.0)])))
        await asyncio.sleep(1.0)
        first.process.send_signal(signal.SIGKILL)
        await running
        return replayer

    summary = summarise(asyncio.run(run()).records)
    first.process.communicate(timeout=10)
    assert summary.counts[Status.INTERRUPTED] > 0
    assert summary.counts[Status.LOST] == 0
    assert summary.counts[Status.OK] + summary.counts[Status.INTERRUPTED] == summary.sent
    second = EngineProcess("--state", str(tmp_path))
    try:
        again = httpx.get(f"{second.url}/v1/runtime_config").json()
        assert again["config_version"] == 2
        assert again["values"]["max_num_seqs"] == 8
        assert again["values"]["max_wait_ms"] == 10
    finally:
        second.stop()


def test_on_sigterm_running_requests_are_finished_and_the_process_ends_cleanly() -> None:
    engine = EngineProcess()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, engine.url, prompt="a", max_tokens=400, ignore_eos=True)
        eventually(lambda: samples(engine.url)["vllm:num_requests_running"] == 1)
        assert engine.stop() == 0
        assert running.result().json()["usage"]["completion_tokens"] == 400


def test_what_the_drain_leaves_unfinished_is_told_so() -> None:
    engine = EngineProcess("--drain-s-max", "0.5")
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    CLIENT.post(f"{engine.url}/pause?mode=wait")
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(complete, engine.url, **body)
        streams = pool.submit(complete, engine.url, **body, stream=True)
        eventually(lambda: samples(engine.url)["vllm:num_requests_waiting"] == 2)
        assert engine.stop() == 0
    for answer in (waits.result(), streams.result()):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "shutting_down")
    assert "Traceback" not in engine.errors


def test_a_client_gone_before_its_body_was_read_leaves_no_trace() -> None:
    engine = EngineProcess()
    url = httpx.URL(engine.url)
    with socket.create_connection((url.host, url.port)) as gone:
        gone.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    assert complete(engine.url, prompt="a" * 3000, max_tokens=1).status_code == 400
    long = complete(engine.url, prompt="a" * 2000, max_tokens=1)
    assert long.json()["usage"]["prompt_tokens"] == 2001
    assert engine.stop() == 0
    assert "Traceback" not in engine.errors
    assert "CancelledError" not in engine.errors


def test_a_taken_port_is_an_error_with_its_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run(
            [sys.executable, "-m", "engine", "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "--port" in result.stderr
