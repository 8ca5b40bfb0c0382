"""The real agent process against the real sync endpoint and a small real engine server."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rest_framework.test import APIClient

from controlplane.accounts.services import tenant_create, token_create
from controlplane.fleet.models import Command, Engine, Node
from controlplane.fleet.services import command_create
from gpu_agent.protocol import SYNC_PATH
from tests.gpu_agent.conftest import AgentProcess
from tests.gpu_agent.servers import EngineServer, Quiet, Server

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.urls("controlplane.fleet.api"),
    pytest.mark.processes,
]


class Bridge(Server):
    """Answers agents over HTTP with what the endpoint says in the test's own thread, which is the
    one that may use the test's database."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: queue.Queue[tuple[bytes, str, Future[tuple[int, Any]]]] = queue.Queue()

    def serve(self, request: Quiet, method: str) -> None:
        body = request.body()
        if request.path != SYNC_PATH:
            request.answer(200, b"")
            return
        answer: Future[tuple[int, Any]] = Future()
        self.waiting.put((body, request.headers["Authorization"], answer))
        request.answer_json(*answer.result(timeout=20))

    def until(self, condition: Callable[[], Any], *, timeout_s: float = 20.0) -> Any:
        """Serves syncs until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, "did not happen in time"
            try:
                body, authorization, answer = self.waiting.get(timeout=0.05)
            except queue.Empty:
                continue
            api = APIClient(headers={"Authorization": authorization})
            said = api.post("/agent/sync", body, content_type="application/json")
            answer.set_result((said.status_code, said.json()))
        return found


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    with EngineServer() as server:
        yield server


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    with Bridge() as server:
        yield server


@pytest.fixture
def agent(tmp_path: Path, engine: EngineServer, bridge: Bridge) -> Iterator[AgentProcess]:
    _, secret = token_create(
        tenant=tenant_create(slug="acme", name="Acme"), kind="agent", name="node-1"
    )
    process = AgentProcess(tmp_path / "state", engine, bridge)  # type: ignore[arg-type]
    process.environment["TRIMTAB_AGENT_TOKEN"] = secret
    yield process
    process.close()


def order(
    kind: str, action_id: uuid.UUID, target: Command | None = None, ttl_s: float = 60
) -> Command:
    engine = Engine.objects.get()
    return command_create(
        engine=engine,
        action_id=action_id,
        kind=kind,
        values={} if target else {"max_num_seqs": 64},
        undo={} if target else {"max_num_seqs": 32},
        expected_config_version=None if target else engine.config_version,
        ttl_s=ttl_s,
        deadline=datetime.now(UTC) + timedelta(seconds=30),
        target_command_id=target.pk if target else None,
    )


def told(command: Command, state: str) -> Callable[[], bool]:
    return lambda: Command.objects.get(pk=command.pk).result_state == state


def engine_at(version: int) -> Callable[[], bool]:
    return lambda: Engine.objects.filter(config_version=version).exists()


def test_a_change_is_applied_and_committed_once_though_the_agent_is_killed_between(
    agent: AgentProcess, engine: EngineServer, bridge: Bridge
) -> None:
    agent.start()
    bridge.until(engine_at(7))
    action_id = uuid.uuid4()
    apply = order("apply", action_id)
    bridge.until(told(apply, "applied"))
    agent.kill()
    commit = order("commit", action_id, target=apply)
    agent.start()
    bridge.until(told(commit, "committed"))
    bridge.until(engine_at(8))
    assert [values for _, values, _ in engine.changes] == [{"max_num_seqs": 64}]
    assert Engine.objects.get().values["max_num_seqs"] == 64
    assert Node.objects.count() == 1


def test_a_change_nobody_commits_comes_back_as_reverted_by_its_timer(
    agent: AgentProcess, engine: EngineServer, bridge: Bridge
) -> None:
    agent.start()
    bridge.until(engine_at(7))
    apply = order("apply", uuid.uuid4(), ttl_s=1)
    bridge.until(told(apply, "applied"))
    bridge.until(told(apply, "reverted"))
    assert "no commit before" in Command.objects.get().result["reason"]
    assert engine.values["max_num_seqs"] == 32
    bridge.until(engine_at(9))


def test_a_change_of_a_version_that_passed_is_rejected_and_touches_nothing(
    agent: AgentProcess, engine: EngineServer, bridge: Bridge
) -> None:
    agent.start()
    bridge.until(engine_at(7))
    engine.change({"max_wait_ms": 5}, "a person")
    apply = order("apply", uuid.uuid4())
    bridge.until(told(apply, "rejected"))
    assert engine.values["max_num_seqs"] == 32
