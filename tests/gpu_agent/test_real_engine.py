"""The agent's guard against the real engine process: the two rooms' one promise."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.demo.house import free_port
from gpu_agent.engine_adapter import Conflict, Refused, Unreachable
from gpu_agent.engines.reference import ReferenceEngine
from gpu_agent.protocol import CommandKind, CommandState
from gpu_agent.sources.engine_metrics import EngineMetrics

from .conftest import REPOSITORY, AgentProcess, apply_command, follow_up, wait_for
from .servers import ControlPlane, EngineServer

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="no torch: the engine cannot run"
    ),
]


class EngineProcess:
    """The engine on one port, over a state folder that outlives it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.adapter = ReferenceEngine(url=self.url)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine", "--port", str(self.port), "--state", self.folder],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
        )
        wait_for(self.answers, timeout_s=60)

    def answers(self) -> bool:
        try:
            return self.adapter.read().config_version > 0
        except Unreachable:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def test_an_engine_killed_in_a_trial_comes_back_and_ends_reverted(
    tmp_path: Path, control_plane: ControlPlane
) -> None:
    engine = EngineProcess(tmp_path / "engine")
    version = engine.adapter.read().config_version
    stand_in = EngineServer()  # only for its address
    stand_in.http.server_close()
    stand_in.url = engine.url
    agent = AgentProcess(tmp_path / "state", stand_in, control_plane)
    try:
        agent.start()
        command = apply_command(expected_config_version=version, ttl_s=3.0)
        control_plane.commands.append(command)
        wait_for(lambda: control_plane.final("apply-1"))
        assert engine.adapter.read().values["max_num_seqs"] == 64
        engine.kill()
        engine.start()
        assert engine.adapter.read().config_version >= version + 1
        wait_for(lambda: (last := control_plane.last("apply-1")) and last.state == "reverted")
        state = engine.adapter.read()
        assert (state.config_version, state.values["max_num_seqs"]) == (version + 2, 32)

        control_plane.commands.append(
            apply_command(command_id="apply-2", expected_config_version=version + 2)
        )
        wait_for(lambda: control_plane.final("apply-2"))
        control_plane.commands.append(follow_up(CommandKind.COMMIT, "commit-2", "apply-2"))
        wait_for(lambda: control_plane.final("commit-2"))
        last = control_plane.last("commit-2")
        assert last is not None
        assert (last.state, last.config_version) == (CommandState.COMMITTED, version + 3)

        with pytest.raises(Conflict, match=f"HTTP 412, .*{version + 3}"):
            engine.adapter.apply({"max_num_seqs": 8}, expected_version=version, by="test")
        with pytest.raises(Refused, match=r"HTTP 422, .*max_num_seqs"):
            engine.adapter.apply({"max_num_seqs": 999}, expected_version=version + 3, by="test")

        turned = engine.adapter.apply(
            {"graph_capture": "off", "kv_block_size": 64}, expected_version=version + 3, by="test"
        )
        assert turned.values["graph_capture"] == "off"
        assert turned.values["kv_block_size"] == 64
        assert turned.knobs["kv_block_size"]["choices"] == [8, 16, 32, 64, 128]
        assert engine.adapter.read() == turned

        page = EngineMetrics(engine="e", service="s", node="n", url=engine.url).collect()
        assert page.notes["lines_bad"] == 0
        assert "vllm:time_to_first_token_seconds" in {family.name for family in page.families}
    finally:
        agent.close()
        engine.kill()
