from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_agent.protocol import Command, CommandKind

from .servers import ControlPlane, EngineServer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    with EngineServer() as server:
        yield server


@pytest.fixture
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane() as server:
        yield server


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stub libnvidia-ml.so.1, compiled once."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc: the stub libnvidia-ml.so.1 cannot be compiled")
    folder = tmp_path_factory.mktemp("nvml")
    source = REPOSITORY / "tests/fixtures/fake_nvml.c"
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", target, source],
        check=True,
    )
    return folder


def apply_command(**changes: Any) -> Command:
    deadline = datetime.now(UTC) + timedelta(seconds=60)
    command = {
        "command_id": "apply-1",
        "kind": CommandKind.APPLY,
        "engine": "engine-0",
        "generation": 1,
        "deadline": deadline.isoformat(),
        "values": {"max_num_seqs": 64},
        "undo": {"max_num_seqs": 32},
        "expected_config_version": 7,
        "ttl_s": 60.0,
    }
    return Command(**{**command, **changes})


def follow_up(kind: CommandKind, command_id: str, target: str = "apply-1", **more: Any) -> Command:
    return apply_command(
        command_id=command_id,
        kind=kind,
        target_command_id=target,
        values={},
        undo={},
        expected_config_version=None,
        **more,
    )


def wait_for(condition: Callable[[], Any], *, timeout_s: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
    return found


class AgentProcess:
    """A real agent over a state folder that outlives it."""

    def __init__(self, state: Path, engine: EngineServer, control_plane: ControlPlane) -> None:
        self.state = state
        self.arguments = [
            *("--node", "node-1", "--state-dir", str(state), "--health-port", "0"),
            *("--scrape-s", "0.2", "--control-plane-url", control_plane.url),
            *("--otlp-url", control_plane.url, "--timeout-s", "2", "--gpu", "off"),
            *("--engine", f"name=engine-0,service=chat,url={engine.url}"),
        ]
        self.environment = {
            **os.environ,
            "TRIMTAB_AGENT_TOKEN": "agent-token",
            "TRIMTAB_INGEST_TOKEN": "ingest-token",
        }
        self.process: subprocess.Popen[str] | None = None

    def start(self, *more: str, **environment: str) -> str:
        """Starts it, once more perhaps, and answers its ready line."""
        self.close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpu_agent", *self.arguments, *more],
            cwd=REPOSITORY,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(20)

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture
def agent(
    tmp_path: Path, engine: EngineServer, control_plane: ControlPlane
) -> Iterator[AgentProcess]:
    process = AgentProcess(tmp_path / "state", engine, control_plane)
    yield process
    process.close()
