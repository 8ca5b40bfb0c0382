"""A whole engine process that serves a model from files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from engine.models.loader import find, load
from tests.engine.conftest import ROOT, EngineProcess
from tests.engine.models.files import state, write_folder, write_gguf

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["folder", "gguf"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    if request.param == "folder":
        return write_folder(folder / "tiny-llama", state())
    return write_gguf(folder / "tiny-llama.gguf", state())


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[EngineProcess]:
    process = EngineProcess("--model", str(path), "--dtype", "float32")
    yield process
    process.stop()


def greedy(path: Path, prompt: list[int], count: int) -> bytes:
    torch.set_num_threads(1)
    model, words = load(find(str(path)), torch.float32, 256, "")
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.dense(torch.tensor(tokens))[-1].argmax()))
    return b"".join(words.pieces[token] for token in tokens[len(prompt) :])


def complete(engine: EngineProcess, **body: Any) -> Any:
    url = f"{engine.url}/v1/completions"
    answer = httpx.post(url, json={"temperature": 0, "ignore_eos": True, **body}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def test_it_says_what_it_serves(engine: EngineProcess) -> None:
    models = httpx.get(f"{engine.url}/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in models] == [("tiny-llama", 256)]


def test_its_answer_is_the_references_whole_and_streamed(engine: EngineProcess, path: Path) -> None:
    prompt = find(str(path)).tokenizer().encode("hello world")
    expected = greedy(path, prompt, 40).decode(errors="replace")
    body = {"prompt": "hello world", "max_tokens": 40}
    whole = complete(engine, **body).json()
    assert whole["choices"][0]["text"] == expected
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    events = complete(engine, **body, stream=True).text.split("\n\n")
    parts = [json.loads(e.removeprefix("data: ")) for e in events if e and "[DONE]" not in e]
    assert "".join(part["choices"][0]["text"] for part in parts) == expected


def test_a_stop_text_ends_it(engine: EngineProcess) -> None:
    text = complete(engine, prompt="hello", max_tokens=40).json()["choices"][0]["text"]
    stop = next(c for c in text[6:] if c.isascii())
    choice = complete(engine, prompt="hello", max_tokens=40, stop=stop).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_a_chat_is_asked_through_the_models_template(engine: EngineProcess, path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{engine.url}/v1/chat/completions", json=body).json()
    prompt = find(str(path)).tokenizer().encode_chat([("user", "hello")])
    expected = greedy(path, prompt, 8).decode(errors="replace")
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_token_ids_go_up_to_the_models(engine: EngineProcess) -> None:
    answer = httpx.post(f"{engine.url}/v1/completions", json={"prompt": [300]})
    assert answer.status_code == 400
    assert "token ids must lie in 0 to 299" in answer.json()["error"]["message"]


def test_it_says_what_was_read_and_in_what_it_computes(path: Path) -> None:
    process = EngineProcess("--model", str(path), "--served-model-name", "mine")
    assert "mine on http" in process.ready
    assert process.stop() == 0
    assert "tiny-llama: 0.1 million weights" in process.errors
    assert "float32, " in process.errors or "bfloat16, " in process.errors
    assert "KV pool: 65536 tokens" in process.errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], "model: got 'nowhere', allowed: 1.3m, 8m, smollm2, or the path"),
        (["--model", "PATH", "--model-len-max", "999"], "got 999, allowed: 1 to 256, as far as"),
        (["--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
    ],
)
def test_a_wrong_start_says_why(path: Path, arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "engine", "--port", "0", *arguments]
    command = [str(path) if word == "PATH" else word for word in command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr
