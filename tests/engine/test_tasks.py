"""Tasks of a real engine: accepted, ended once, whatever dies in between."""

from __future__ import annotations

import random
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.reconfig import StateError
from engine.tasks import DEATHS_MAX
from engine.taskstore import State, Task, TaskStore
from tests.engine.conftest import EngineProcess
from tests.engine.test_server import CLIENT, change, complete, eventually, samples

pytestmark = pytest.mark.processes

BODY = {"prompt": "once upon", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("queue")
    process = EngineProcess("--queue-state", str(folder / "of engine-0"))
    yield process
    process.stop()


def post(url: str, body: Any = BODY, **fields: Any) -> httpx.Response:
    return CLIENT.post(f"{url}/v1/tasks", json={"body": body, **fields})


def get(url: str, task_id: str) -> dict[str, Any]:
    answer = CLIENT.get(f"{url}/v1/tasks/{task_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ended(url: str, task_id: str) -> dict[str, Any]:
    eventually(lambda: "ended_at" in get(url, task_id), 60)
    return get(url, task_id)


@contextmanager
def kept(url: str) -> Iterator[None]:
    """No step runs: a task that was begun is running until the end of this."""
    CLIENT.post(f"{url}/pause?mode=keep")
    yield
    CLIENT.post(f"{url}/resume")


def begun(url: str, **fields: Any) -> str:
    """A task that runs, on an engine that is kept."""
    task_id = str(post(url, **fields).json()["id"])
    eventually(lambda: get(url, task_id)["state"] == "running")
    return task_id


def tasks(url: str) -> dict[str, float]:
    lines = CLIENT.get(f"{url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("engine:tasks{")]
    return {line.split('state="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def test_a_task_is_accepted_and_its_answer_is_that_of_a_request(queue: EngineProcess) -> None:
    url = queue.url
    accepted = post(url, priority="high", timeout_s=60)
    assert accepted.status_code == 202
    told = accepted.json()
    assert accepted.headers["location"] == f"/v1/tasks/{told['id']}"
    assert (told["state"], told["model"], told["priority"]) == ("queued", "llama-1.3m", 2)
    done = ended(url, told["id"])
    assert done["state"] == "succeeded"
    assert done["answer"]["choices"] == complete(url, **BODY).json()["choices"]
    assert done["answer"]["usage"]["completion_tokens"] == 8
    assert get(url, told["id"]) == done
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    done = ended(url, post(url, chat).json()["id"])
    assert done["answer"]["object"] == "chat.completion"


def test_the_same_id_is_the_same_task_and_another_body_is_refused(queue: EngineProcess) -> None:
    url, before = queue.url, sum(tasks(queue.url).values())
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda _: post(url, id="order-7"), range(4))]
    assert {answer.status_code for answer in answers} == {202}
    first = ended(url, "order-7")
    assert post(url, id="order-7").json()["ended_at"] == first["ended_at"]
    assert sum(tasks(url).values()) == before + 1
    other = post(url, {**BODY, "max_tokens": 9}, id="order-7")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "id_taken")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"body": 7}, "body: want what /v1/completions or /v1/chat/completions would get"),
        ({"body": {**BODY, "stream": True}}, "stream: got True, a task answers as a whole"),
        ({"body": {**BODY, "n": 2}}, "n: got 2, this engine supports only 1"),
        ({"id": "a b"}, "id: got 'a b', want 1 to 128 of A-Z a-z 0-9 . _ ~ -, not . or .."),
        ({"id": ".."}, "id: got '..', want 1 to 128 of A-Z a-z 0-9 . _ ~ -, not . or .."),
        ({"timeout_s": -1}, "timeout_s: got -1, allowed: 0 to 604800.0"),
        ({"priority": 4}, "priority: got '4', allowed: 0 to 3, low, normal, high, realtime"),
        ({"priority": True}, "priority: got 'True', allowed: 0 to 3, low, normal, high, realtime"),
        ({"model": "x"}, "model: no such field of a task, allowed: id, timeout_s, priority, body"),
    ],
)
def test_what_is_no_task_is_refused_and_not_kept(
    queue: EngineProcess, fields: dict[str, Any], words: str
) -> None:
    before = tasks(queue.url)
    answer = post(queue.url, **fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert tasks(queue.url) == before


def test_tasks_run_in_order_of_priority_then_of_acceptance(queue: EngineProcess) -> None:
    url = queue.url
    assert change(url, max_num_seqs=1).status_code == 200
    with kept(url):
        begun(url)
        ids = [
            post(url, priority=name, id=f"{i}-{name}").json()["id"]
            for i, name in enumerate(("low", "normal", "high", "realtime", "normal"))
        ]
        assert {get(url, one)["state"] for one in ids} == {"queued"}
    ends = sorted((ended(url, one)["ended_at"], one) for one in ids)
    assert [one for _, one in ends] == ["3-realtime", "2-high", "1-normal", "4-normal", "0-low"]
    assert change(url, max_num_seqs=32).status_code == 200


def test_at_its_deadline_a_task_expires_where_it_waits_and_where_it_runs(
    queue: EngineProcess,
) -> None:
    url = queue.url
    assert change(url, max_num_seqs=1).status_code == 200
    with kept(url):
        both = [post(url, timeout_s=0.3).json() for _ in "ab"]
        for one in both:
            done = ended(url, one["id"])
            assert done["state"] == "expired"
            assert done["error"]["message"] == f"not finished by its deadline, {one['deadline']}"
        eventually(lambda: samples(url)["vllm:num_requests_waiting"] == 0)
    assert change(url, max_num_seqs=32).status_code == 200


def test_a_deleted_task_is_gone_whatever_it_was_doing(queue: EngineProcess) -> None:
    url = queue.url
    done = post(url).json()["id"]
    assert ended(url, done)["state"] == "succeeded"
    with kept(url):
        for task_id in (begun(url), done):
            told = CLIENT.delete(f"{url}/v1/tasks/{task_id}")
            assert (told.status_code, told.json()["deleted"]) == (200, True)
            assert CLIENT.get(f"{url}/v1/tasks/{task_id}").status_code == 404
            assert CLIENT.delete(f"{url}/v1/tasks/{task_id}").status_code == 404
        eventually(lambda: samples(url)["vllm:num_requests_waiting"] == 0)


def test_a_task_outlives_a_pause_that_aborts(queue: EngineProcess) -> None:
    url = queue.url
    with kept(url):
        task_id = begun(url)
        CLIENT.post(f"{url}/pause?mode=abort")
    assert ended(url, task_id)["answer"]["usage"]["completion_tokens"] == 8


def test_without_a_place_to_keep_them_there_are_no_tasks(engine: EngineProcess) -> None:
    for answer in (post(engine.url), CLIENT.get(f"{engine.url}/v1/tasks/1")):
        assert answer.status_code == 404
        assert "--queue-state" in answer.json()["error"]["message"]


def test_killed_again_and_again_every_accepted_task_ends_exactly_once(tmp_path: Path) -> None:
    """What was acknowledged is there and ends; what has ended stays as it ended."""
    rng = random.Random(5)
    lengths = [rng.randint(1, 60) for _ in range(40)]
    engine = EngineProcess("--queue-state", str(tmp_path))
    url = [engine.url]
    acknowledged: set[str] = set()
    seen: dict[str, dict[str, Any]] = {}

    def body(number: int) -> dict[str, Any]:
        return {**BODY, "prompt": f"number {number}", "max_tokens": lengths[number]}

    def send(number: int) -> None:
        """As a client would: until it is acknowledged, with one id."""
        while f"task-{number}" not in acknowledged:
            try:
                if post(url[0], body(number), id=f"task-{number}").status_code == 202:
                    acknowledged.add(f"task-{number}")
            except httpx.HTTPError:
                time.sleep(0.05)

    def look() -> None:
        for task_id in sorted(acknowledged):
            told = get(url[0], task_id)
            if "ended_at" in told:
                assert seen.setdefault(task_id, told) == told

    with ThreadPoolExecutor(4) as pool:
        sent = []
        for kill in range(3):
            if kill != 1:  # so that what is accepted now has not ended when it dies
                CLIENT.post(f"{url[0]}/pause?mode=keep")
            before = len(acknowledged)
            sent += [pool.submit(send, number) for number in range(12 * kill, 12 * kill + 12)]
            eventually(lambda least=before + 6: len(acknowledged) >= least, 60)  # type: ignore[misc]
            look()
            assert kill == 1 or tasks(url[0])["succeeded"] < len(acknowledged)
            engine.process.send_signal(signal.SIGKILL)
            engine.process.communicate()
            engine = EngineProcess("--queue-state", str(tmp_path))
            url[0] = engine.url
            look()
        sent += [pool.submit(send, number) for number in range(36, 40)]
        for one in sent:
            one.result()
    try:
        eventually(lambda: tasks(url[0])["succeeded"] == len(lengths), 120)
        look()
        assert len(seen) == len(lengths)
        assert tasks(url[0]) == {
            "queued": 0, "running": 0, "succeeded": len(lengths), "failed": 0, "expired": 0,
        }  # fmt: skip
        for number, length in enumerate(lengths):
            answer = seen[f"task-{number}"]["answer"]
            assert answer["usage"]["completion_tokens"] == length
            if number % 10 == 0:
                whole = complete(url[0], **body(number)).json()
                assert answer["choices"] == whole["choices"]
    finally:
        engine.stop()


def test_stopped_it_ends_no_task_and_blames_none(tmp_path: Path) -> None:
    first = EngineProcess("--queue-state", str(tmp_path), "--drain-s-max", "1")
    CLIENT.post(f"{first.url}/pause?mode=keep")
    task_id = begun(first.url)
    with pytest.raises(AssertionError, match="one engine uses it at a time"):
        EngineProcess("--queue-state", str(tmp_path))
    assert first.stop() == 0
    store = TaskStore(tmp_path)
    store.close()
    assert [(task.id, task.state, task.deaths) for task in store.loaded] == [
        (task_id, State.QUEUED, 0)
    ]
    second = EngineProcess("--queue-state", str(tmp_path))
    try:
        assert ended(second.url, task_id)["answer"]["usage"]["completion_tokens"] == 8
    finally:
        second.stop()


def test_what_the_engine_dies_of_runs_alone_and_fails_in_the_end(tmp_path: Path) -> None:
    store = TaskStore(tmp_path)
    now = time.time()
    poison = Task(1, "poison", "llama-1.3m", False, 1, now, now + 3600)
    beside = Task(2, "beside", "llama-1.3m", False, 1, now, now + 3600)
    for task in (poison, beside):
        store.add(task, '{"prompt": "a", "max_tokens": 300, "ignore_eos": true}').result()
    store.close()
    base = sqlite3.connect(tmp_path / "tasks.sqlite")
    with base:
        base.execute(f"UPDATE tasks SET begun = 1, deaths = {DEATHS_MAX - 2}")
    base.close()
    engine = EngineProcess("--queue-state", str(tmp_path))
    running: list[float] = []
    eventually(lambda: running.append(tasks(engine.url)["running"]) or running[-1] == 1)
    engine.stop(signal.SIGKILL)
    engine = EngineProcess("--queue-state", str(tmp_path))
    try:
        assert max(running) == 1
        failed, succeeded = ended(engine.url, "poison"), ended(engine.url, "beside")
        assert failed["error"]["message"] == f"the engine died {DEATHS_MAX} times while this ran"
        assert (failed["state"], succeeded["state"]) == ("failed", "succeeded")
    finally:
        engine.stop()


def test_a_task_of_another_model_fails_and_says_so(tmp_path: Path) -> None:
    store = TaskStore(tmp_path)
    now = time.time()
    store.add(Task(1, "old", "gpt-9", False, 1, now, now + 3600), '{"prompt": "a"}').result()
    store.close()
    engine = EngineProcess("--queue-state", str(tmp_path))
    try:
        error = ended(engine.url, "old")["error"]
        assert error["message"] == "model: got 'gpt-9', served: llama-1.3m"
    finally:
        engine.stop()


def test_a_folder_that_holds_no_queue_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tasks.sqlite").write_text("no base at all " * 100)
    with pytest.raises(StateError, match=r"queue_state: .*tasks\.sqlite: not a queue"):
        TaskStore(tmp_path)


def test_what_is_ordered_during_a_commit_goes_into_one_and_a_failed_one_changes_nothing(
    tmp_path: Path,
) -> None:
    store = TaskStore(tmp_path)
    began, go = threading.Event(), threading.Event()
    commits: list[str] = []

    def hold(base: sqlite3.Connection) -> None:
        base.set_trace_callback(lambda text: commits.append(text) if text == "COMMIT" else None)
        began.set()
        go.wait(10)

    held = store._do(hold)
    assert began.wait(10)
    added = [
        store.add(Task(number, str(number), "m", False, 1, 1.0, 2.0), "{}") for number in range(50)
    ]
    go.set()
    for one in (held, *added):
        one.result(10)
    assert len(commits) == 2
    twice = store.add(Task(50, "7", "m", False, 1, 1.0, 2.0), "{}")
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        twice.result(10)
    store.close()
    again = TaskStore(tmp_path)
    assert [task.id for task in again.loaded] == [str(number) for number in range(50)]
    again.close()
