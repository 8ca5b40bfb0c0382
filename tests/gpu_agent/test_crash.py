"""kill -9 of a real agent at every point between the journal and the engine."""

from __future__ import annotations

import threading

import pytest

from gpu_agent.journal import Journal
from gpu_agent.protocol import CommandKind, CommandState

from .conftest import AgentProcess, apply_command, follow_up, wait_for
from .servers import ControlPlane, EngineServer

pytestmark = pytest.mark.processes


def kill_at(moment: str, agent: AgentProcess, engine: EngineServer) -> threading.Event:
    """Kills the agent when the engine comes to `moment`; the engine itself goes on."""
    killed = threading.Event()

    def kill() -> None:
        agent.kill()
        killed.set()

    engine.at[moment] = kill
    return killed


def journal_agrees(agent: AgentProcess, engine: EngineServer, command_id: str) -> None:
    journal = Journal(agent.state / "journal.sqlite3")
    entry = journal.get(command_id)
    trials = journal.open_trials("engine-0")
    journal.close()
    assert entry is not None
    assert (entry.config_version, entry.values) == (engine.version, engine.values)
    assert trials == []


@pytest.mark.parametrize("moment", ["get", "patch", "patched"])
def test_killed_while_applying_the_change_takes_effect_exactly_once(
    moment: str, agent: AgentProcess, engine: EngineServer, control_plane: ControlPlane
) -> None:
    agent.start()
    wait_for(lambda: control_plane.requests)
    killed = kill_at(moment, agent, engine)
    control_plane.commands.append(apply_command())
    assert killed.wait(20)
    agent.start()
    result = wait_for(lambda: control_plane.final("apply-1") and control_plane.last("apply-1"))
    assert (result.state, result.config_version) == (CommandState.APPLIED, 8)
    control_plane.commands.append(follow_up(CommandKind.COMMIT, "commit-1"))
    wait_for(lambda: control_plane.final("commit-1"))
    assert agent.terminate() == 0
    assert [values for _, values, _ in engine.changes] == [{"max_num_seqs": 64}]
    journal_agrees(agent, engine, "commit-1")


@pytest.mark.parametrize("moment", ["patch", "patched"])
def test_killed_while_reverting_the_engine_ends_where_it_was(
    moment: str, agent: AgentProcess, engine: EngineServer, control_plane: ControlPlane
) -> None:
    agent.start()
    control_plane.commands.append(apply_command())
    wait_for(lambda: control_plane.final("apply-1"))
    killed = kill_at(moment, agent, engine)
    control_plane.commands.append(follow_up(CommandKind.REVERT, "revert-1"))
    assert killed.wait(20)
    agent.start()
    result = wait_for(lambda: control_plane.final("revert-1") and control_plane.last("revert-1"))
    assert result.state == CommandState.REVERTED
    assert agent.terminate() == 0
    assert [values["max_num_seqs"] for _, values, _ in engine.changes] == [64, 32]
    journal_agrees(agent, engine, "revert-1")


def test_killed_in_a_trial_the_change_is_undone_when_its_time_is_up(
    agent: AgentProcess, engine: EngineServer, control_plane: ControlPlane
) -> None:
    agent.start()
    control_plane.commands.append(apply_command(ttl_s=1.0))
    wait_for(lambda: engine.changes)
    agent.kill()
    agent.start()
    result = wait_for(
        lambda: (last := control_plane.last("apply-1")) and last.state == "reverted" and last
    )
    assert "no commit before" in result.reason
    assert engine.values["max_num_seqs"] == 32
    assert agent.terminate() == 0
    journal_agrees(agent, engine, "apply-1")


def test_an_engine_lost_in_a_trial_comes_back_reverted(
    agent: AgentProcess, engine: EngineServer, control_plane: ControlPlane
) -> None:
    agent.start()
    control_plane.commands.append(apply_command(ttl_s=0.5))
    wait_for(lambda: control_plane.final("apply-1"))
    engine.down = True
    wait_for(lambda: any(not r.engines[0].reachable for r in control_plane.requests))
    engine.down = False
    wait_for(lambda: engine.values["max_num_seqs"] == 32)
    wait_for(lambda: (last := control_plane.last("apply-1")) and last.state == "reverted")
    assert len(engine.changes) == 2


def test_results_wait_for_a_control_plane_that_is_away(
    agent: AgentProcess, engine: EngineServer, control_plane: ControlPlane
) -> None:
    control_plane.accepting = False
    agent.start()
    control_plane.commands.append(apply_command())
    wait_for(lambda: any(r.results for r in control_plane.requests))
    wait_for(lambda: any(r.state == "applied" for q in control_plane.requests for r in q.results))
    agent.kill()
    control_plane.accepting = True
    control_plane.commands.clear()
    agent.start()
    wait_for(lambda: control_plane.final("apply-1"))
    assert len(engine.changes) == 1
