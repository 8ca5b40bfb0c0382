"""The whole agent as a process: what it says, sends, and how it stops."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gpu_agent.engine_adapter import adapter_classes
from gpu_agent.source import source_classes

from .conftest import REPOSITORY, AgentProcess, apply_command, wait_for
from .servers import ControlPlane, EngineServer

pytestmark = pytest.mark.processes


def metrics(control_plane: ControlPlane) -> dict[str, tuple[str | None, dict[str, str]]]:
    """Metric name → its kind and its resource's attributes."""
    found: dict[str, tuple[str | None, dict[str, str]]] = {}
    for message in list(control_plane.metrics):
        for resource in message.resource_metrics:
            labels = {a.key: a.value.string_value for a in resource.resource.attributes}
            for metric in resource.scope_metrics[0].metrics:
                found[metric.name] = (metric.WhichOneof("data"), labels)
    return found


def test_it_says_ready_sends_what_it_reads_and_says_goodbye(
    agent: AgentProcess, engine: EngineServer, control_plane: ControlPlane
) -> None:
    line = agent.start()
    assert line.startswith("agent ready: node node-1, engine-0, health on http://127.0.0.1:")
    wait_for(
        lambda: (
            {"vllm:num_requests_running", "agent:cpu_seconds_total"} <= {*metrics(control_plane)}
        )
    )
    resource = {
        "service.name": "chat",
        "service.instance.id": "engine-0",
        "host.name": "node-1",
    }
    found = metrics(control_plane)
    assert found["vllm:request_success_total"] == ("sum", resource)
    assert found["vllm:time_to_first_token_seconds"] == ("histogram", resource)
    assert found["agent:resident_memory_bytes"][1]["service.name"] == "trimtab-agent"
    wait_for(lambda: control_plane.requests)
    assert control_plane.tokens == {"Bearer agent-token", "Bearer ingest-token"}
    report = wait_for(
        lambda: next((r for r in control_plane.requests if r.engines[0].reachable), None)
    )
    assert report.engines[0].values == engine.values
    assert report.engines[0].knobs["max_num_seqs"]["maximum"] == 256
    assert report.gpu_status == "off"
    assert report.rss_bytes > 0
    assert agent.terminate() == 0
    assert control_plane.requests[-1].stopping
    assert not control_plane.requests[-2].stopping


def test_health_tells_since_when_each_part_is_good_or_bad(
    agent: AgentProcess, engine: EngineServer, control_plane: ControlPlane
) -> None:
    url = agent.start().split()[-1]
    wait_for(
        lambda: control_plane.requests and "vllm:num_requests_running" in metrics(control_plane)
    )
    engine.down = True

    def health() -> Any:
        with urllib.request.urlopen(url) as answer:
            return json.load(answer)

    part = wait_for(lambda: (p := health()["parts"]["source engine-0"])["state"] == "bad" and p)
    assert part["error"].endswith("/metrics: HTTP 503, want 200")
    assert part["since"] > part["last_good"]
    assert health()["parts"]["sync"]["state"] == "good"
    with urllib.request.urlopen(url.replace("healthz", "metrics")) as answer:
        page = answer.read().decode()
    assert 'agent:scrape_success{kind="engine_metrics",source="engine-0"} 0.0' in page


def test_identity_outlives_a_restart(agent: AgentProcess, control_plane: ControlPlane) -> None:
    seen: set[str] = set()
    for _ in range(2):
        agent.start()
        control_plane.requests.clear()
        wait_for(lambda: control_plane.requests)
        seen.add(control_plane.requests[0].agent_id)
        agent.terminate()
    assert len(seen) == 1


def test_a_stop_file_is_told_at_the_next_heartbeat(
    agent: AgentProcess, control_plane: ControlPlane
) -> None:
    agent.start()
    wait_for(lambda: control_plane.requests)
    assert not control_plane.requests[-1].kill_switch
    stop = agent.state / "STOP"
    stop.touch()
    wait_for(lambda: control_plane.requests[-1].kill_switch)
    stop.unlink()
    wait_for(lambda: not control_plane.requests[-1].kill_switch)


def test_a_slow_receiver_does_not_delay_the_heartbeat(
    agent: AgentProcess, control_plane: ControlPlane
) -> None:
    control_plane.otlp_answer = (429, {"Retry_After": "60"})
    agent.start()
    report = wait_for(lambda: next((r for r in control_plane.requests if r.spool_bytes > 2000), 0))
    assert report.spool_dropped_total == 0
    assert control_plane.metrics == []


def test_a_command_for_an_engine_elsewhere_is_rejected(
    agent: AgentProcess, control_plane: ControlPlane
) -> None:
    agent.start()
    control_plane.commands.append(apply_command(engine="engine-9"))
    wait_for(lambda: control_plane.final("apply-1"))
    result = control_plane.last("apply-1")
    assert result is not None
    assert result.reason == "engine: 'engine-9' is not on this node, here: engine-0"


def refusal(agent: AgentProcess, *more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gpu_agent", *agent.arguments, *more],
        cwd=REPOSITORY,
        env=agent.environment,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 2
    return done.stderr


def test_a_port_in_use_is_named(agent: AgentProcess, engine: EngineServer) -> None:
    words = refusal(agent, "--health-port", str(engine.port))
    assert (
        f"health_port: 127.0.0.1:{engine.port}: Address already in use; want a free port" in words
    )


def test_a_second_agent_on_one_state_folder_is_refused(agent: AgentProcess) -> None:
    agent.start()
    assert "is in use by another agent, want one folder for each" in refusal(agent)


def test_a_wrong_bounds_file_fails_the_start(agent: AgentProcess, tmp_path: Path) -> None:
    bounds = tmp_path / "bounds.toml"
    bounds.write_text("max_num_seqs = 3\n")
    words = refusal(agent, "--bounds-file", str(bounds))
    assert "max_num_seqs: got 3, want a table with minimum, maximum" in words


def test_plug_ins_are_found_and_described() -> None:
    assert set(source_classes()) == {"nvml", "engine_metrics"}
    assert set(adapter_classes()) == {"reference"}
    plug_ins: list[Any] = [*source_classes().values(), *adapter_classes().values()]
    for found in plug_ins:
        assert found.label
        assert found.__doc__
