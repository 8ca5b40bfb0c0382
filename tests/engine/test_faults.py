"""What goes wrong on purpose really happens, can be mended, and is closed without a token."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine import faults
from engine.knobs import NotPossible
from tests.engine.conftest import EngineProcess
from tests.engine.test_server import change, complete, eventually, samples

pytestmark = pytest.mark.processes

TOKEN = "let-it-break"


@pytest.fixture(scope="module")
def breakable() -> Iterator[EngineProcess]:
    os.environ["ENGINE_TEST_FAULTS"] = TOKEN
    process = EngineProcess("--faults-token-env", "ENGINE_TEST_FAULTS")
    yield process
    assert process.stop() == 0


def order(engine: EngineProcess, token: str = TOKEN, **body: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.post(f"{engine.url}/v1/faults", json=body, headers=headers, timeout=30)


def children(pid: int) -> list[int]:
    """Direct children, by the parent's number in /proc/<pid>/stat."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


def test_the_door_is_closed_without_a_token_and_to_a_wrong_one(
    engine: EngineProcess, breakable: EngineProcess
) -> None:
    assert order(engine, fault="none").status_code == 403
    assert order(breakable, token="guess", fault="none").status_code == 401
    assert httpx.post(f"{breakable.url}/v1/faults", json={}).status_code == 401
    for body, words in (
        ({"fault": "fire"}, "fault: got 'fire', allowed: slow_host, capture_lost, kv_pool_halved"),
        ({}, "fault: got None"),
        ({"fault": "slow_host", "processes": 0}, "processes: got 0, allowed: 1 to 16"),
    ):
        answer = order(breakable, **body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def test_a_token_named_but_not_set_is_an_error_at_the_start() -> None:
    with pytest.raises(AssertionError, match="'NO_SUCH_VARIABLE' is not set or empty"):
        EngineProcess("--faults-token-env", "NO_SUCH_VARIABLE")


def test_a_lost_graph_runs_op_by_op_until_it_is_mended(breakable: EngineProcess) -> None:
    assert order(breakable, fault="capture_lost").json() == {"active": ["capture_lost"]}
    before = samples(breakable.url)
    assert before["engine:graph_capture_ready"] == 0
    text = complete(breakable.url, prompt="abc", max_tokens=20).json()["choices"][0]["text"]
    metrics = httpx.get(f"{breakable.url}/metrics").text
    assert 'mode="graph",model_name="llama-1.3m"} 0.0' in metrics
    assert "capture_lost" not in metrics
    assert change(breakable.url, graph_capture="off").status_code == 200
    refused = change(breakable.url, graph_capture="on")
    assert refused.status_code == 409
    assert refused.json()["error"]["param"] == "graph_capture"
    assert order(breakable, fault="none").json() == {"active": []}
    assert change(breakable.url, graph_capture="on").status_code == 200
    assert samples(breakable.url)["engine:graph_capture_ready"] == 1
    again = complete(breakable.url, prompt="abc", max_tokens=20).json()["choices"][0]["text"]
    assert again == text


def test_failing_steps_fail_every_request_until_they_are_mended(breakable: EngineProcess) -> None:
    assert order(breakable, fault="steps_fail").json() == {"active": ["steps_fail"]}
    answer = complete(breakable.url, prompt="a", max_tokens=1)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"
    assert httpx.get(f"{breakable.url}/health").status_code == 200
    assert order(breakable, fault="none").json() == {"active": []}
    assert complete(breakable.url, prompt="a", max_tokens=1).status_code == 200


def test_a_slow_host_takes_the_cpu_and_gives_it_back(breakable: EngineProcess) -> None:
    engine = breakable.process.pid
    assert order(breakable, fault="slow_host", processes=3).json() == {"active": ["slow_host"]}
    busy = children(engine)
    assert len(busy) == 3
    spans = {frozenset(os.sched_getaffinity(pid)) for pid in busy}
    assert len(spans) == 1
    before = samples(breakable.url)
    # Long enough for the scheduler's turns, of some milliseconds each, to even out.
    complete(breakable.url, prompt="abc", max_tokens=300, ignore_eos=True)
    after = samples(breakable.url)
    grown = {name: after[name] - before[name] for name in after}
    share = grown["engine:forward_cpu_seconds_total"] / grown["engine:forward_seconds_total"]
    assert share < 0.7
    order(breakable, fault="none")
    eventually(lambda: not children(engine))


def test_the_busy_processes_end_with_the_engine_however_it_ends(breakable: EngineProcess) -> None:
    doomed = EngineProcess("--faults-token-env", "ENGINE_TEST_FAULTS")
    order(doomed, fault="slow_host", processes=2)
    busy = children(doomed.process.pid)
    assert len(busy) == 2
    doomed.process.kill()
    doomed.process.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/stat").exists() for pid in busy):
        assert time.monotonic() < deadline, "a busy process outlived its engine"
        time.sleep(0.05)


def test_a_busy_process_that_begins_after_the_engine_has_ended_ends_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(timeout=30)
    busy = [sys.executable, "-I", "-S", "-c", faults.BUSY, str(gone.pid)]
    assert subprocess.run(busy, timeout=30, check=False).returncode == 0


def test_a_slow_host_that_cannot_be_made_leaves_the_step_thread_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first busy process starts, the second does not."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert thread.native_id is not None
    before = os.sched_getaffinity(thread.native_id)
    nothing: Any = None
    runtime: Any = SimpleNamespace(changing=threading.Lock())
    broken = faults.Faults(runtime, nothing, nothing, thread)
    real = subprocess.Popen
    started: list[Any] = []

    def once(*arguments: Any, **options: Any) -> Any:
        if started:
            raise OSError("no more processes")
        started.append(real(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", once)
    try:
        with pytest.raises(NotPossible, match="slow_host: no more processes"):
            broken.inject({"fault": "slow_host"})
        assert os.sched_getaffinity(thread.native_id) == before
        assert (broken.active, broken.busy, broken.affinity) == (set(), [], set())
        assert started[0].returncode is not None
    finally:
        over.set()
        thread.join()
