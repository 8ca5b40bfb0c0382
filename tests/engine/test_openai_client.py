"""The public OpenAI client, and what `vllm bench serve` sends, against a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.engine.conftest import EngineProcess
from tests.engine.test_server import eventually, samples

pytestmark = pytest.mark.processes

MODEL = "llama-1.3m"
TALK: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
]


@pytest.fixture
def client(engine: EngineProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_it_finds_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_completion_whole_and_streamed_has_one_text_and_one_usage(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "once", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.object == "text_completion"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    parts = [
        *client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    ]
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (parts[-1].choices, parts[-1].usage) == ([], whole.usage)


def test_a_chat_whole_and_streamed_has_one_text_and_one_usage(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "messages": TALK, "max_completion_tokens": 20, "temperature": 0, "seed": 1,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    parts = [*stream]
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts[:-1])
    assert text == whole.choices[0].message.content
    assert parts[-1].usage == whole.usage


def test_a_stream_that_is_closed_ends_the_request(
    client: openai.OpenAI, engine: EngineProcess
) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    with stream:
        next(iter(stream))
    eventually(lambda: samples(engine.url)["vllm:num_requests_running"] == 0)


def test_many_at_once_are_answered_each_with_its_own(engine: EngineProcess) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none") as client:
            calls = [
                client.completions.create(model=MODEL, prompt=f"{i}", max_tokens=10, temperature=0)
                for i in [*range(8), *range(8)]
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    texts = asyncio.run(ask())
    assert texts[:8] == texts[8:]
    assert len(set(texts)) > 1


def test_its_errors_are_the_kinds_it_knows(client: openai.OpenAI, engine: EngineProcess) -> None:
    with pytest.raises(openai.NotFoundError, match="got 'gpt-9', served") as missing:
        client.completions.create(model="gpt-9", prompt="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="n: got 2, this engine supports only 1"):
        client.completions.create(model=MODEL, prompt="a", n=2)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="a" * 3000)
    assert long.value.code == "context_length_exceeded"
    headers = {"x-priority": "low"}
    url = f"{engine.url}/v1/runtime_config"
    for lowest in (1, 0):
        etag = httpx.get(url).headers["etag"]
        body = {"shed_below_priority": lowest}
        assert httpx.patch(url, json=body, headers={"If-Match": etag}).status_code == 200
        if lowest:
            with pytest.raises(openai.RateLimitError, match="turned away now") as shed:
                client.completions.create(model=MODEL, prompt="a", extra_headers=headers)
            assert int(shed.value.response.headers["retry-after"]) >= 1


def test_a_request_ended_by_a_pause_is_an_error_it_knows(
    client: openai.OpenAI, engine: EngineProcess
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            client.completions.create,
            model=MODEL, prompt="a", max_tokens=2000, extra_body={"ignore_eos": True},
        )  # fmt: skip
        eventually(lambda: samples(engine.url)["vllm:num_requests_running"] == 1)
        httpx.post(f"{engine.url}/pause?mode=abort")
        httpx.post(f"{engine.url}/resume")
        with pytest.raises(openai.InternalServerError, match="paused with mode=abort") as aborted:
            asked.result()
    assert (aborted.value.status_code, aborted.value.code) == (503, "aborted")


# What `vllm bench serve` sends (vllm/benchmarks/lib/endpoint_request_func.py, 0.32), with
# --ignore-eos --temperature 0, and how it reads the answer.
def bench_body(chat: bool) -> dict[str, Any]:
    common = {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    if chat:
        content = [{"type": "text", "text": "hello there"}]
        messages = [{"role": "user", "content": content}]
        return {**common, "messages": messages, "max_completion_tokens": 30}
    return {
        **common, "prompt": "hello there", "repetition_penalty": 1.0, "max_tokens": 30,
        "logprobs": None,
    }  # fmt: skip


@pytest.mark.parametrize("chat", [False, True])
def test_vllms_bench_is_answered_as_it_reads(engine: EngineProcess, chat: bool) -> None:
    path = "chat/completions" if chat else "completions"
    text, tokens, done = "", None, False
    url = f"{engine.url}/v1/{path}"
    with httpx.stream("POST", url, json=bench_body(chat), timeout=30) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line:
                continue
            assert line.startswith("data: ")
            chunk = line.removeprefix("data: ")
            if chunk == "[DONE]":
                done = True
                continue
            data = json.loads(chunk)
            if choices := data.get("choices"):
                part = choices[0]["delta"].get("content") if chat else choices[0].get("text")
                text += part or ""
            elif usage := data.get("usage"):
                tokens = usage.get("completion_tokens")
    assert (done, tokens) == (True, 30)
    assert text


@pytest.mark.parametrize("field", ["repetition_penalty", "min_p", "min_tokens"])
def test_what_vllm_can_and_this_engine_cannot_is_refused(engine: EngineProcess, field: str) -> None:
    body = {**bench_body(chat=False), field: 1.5 if field != "min_tokens" else 5}
    answer = httpx.post(f"{engine.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert f"{field}: got" in answer.json()["error"]["message"]
