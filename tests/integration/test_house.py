"""A house that serves, and whose processes are killed in the middle of a trial."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from controlplane import cli
from controlplane.demo.house import House
from engine.replay import Status
from gpu_agent.backoff import BACKOFF_CAP_S

from .houses import ROOT, WINDOW_S, Traffic, order, runs, state_of, trimtab, until

# Enough for a window to be judged (20 events), far below what any machine's engine sustains.
LIGHT_REQUESTS_PER_S = 9.0
WINDOWS_WATCHED = 6
TTL_S = 5.0
SLACK_S = 20.0  # of a shared machine, for an agent or a control plane to come back


def test_a_quiet_house_opens_no_incident_and_turns_no_knob(house: House) -> None:
    before = runs(house)
    with Traffic(house, LIGHT_REQUESTS_PER_S) as traffic:
        until(
            lambda: traffic.replayer.now() > WINDOWS_WATCHED * WINDOW_S, 60, "the windows to watch"
        )
        states = until(
            lambda: (found := objective_states(house)) and found["chat-ttft"] == "met" and found,
            30,
            "a judged objective",
        )
    assert states == {"chat-ttft": "met", "chat-tpot": "met", "chat-success": "met"}
    assert house.api("incidents/")["incidents"] == []
    assert house.api("actions/")["actions"] == []
    assert runs(house) == before
    assert {record.status for record in traffic.records} == {Status.OK}


def objective_states(house: House) -> dict[str, str]:
    rows = house.api("objectives/")["objectives"]
    return {row["slug"]: row["standing"]["state"] for row in rows}


def test_an_agent_killed_mid_trial_undoes_what_nobody_committed(house: House) -> None:
    before = runs(house)["max_wait_ms"]
    trial = order(house, values={"max_wait_ms": before + 5}, ttl_s=TTL_S)
    until(lambda: runs(house)["max_wait_ms"] == before + 5, SLACK_S, "the change")
    house.processes.kill("agent")
    house.start_one("agent")
    until(lambda: runs(house)["max_wait_ms"] == before, TTL_S + SLACK_S, "its undoing")
    until(lambda: state_of(house, trial) == "reverted", SLACK_S, "the agent's word on it")


def test_an_agent_killed_mid_trial_keeps_what_was_committed_meanwhile(house: House) -> None:
    before = runs(house)["max_wait_ms"]
    # Long enough for the commit to find it: this machine may be slow, and time is not the point.
    trial = order(house, values={"max_wait_ms": before + 5}, ttl_s=TTL_S + SLACK_S)
    until(lambda: runs(house)["max_wait_ms"] == before + 5, SLACK_S, "the change")
    house.processes.kill("agent")
    commit = order(house, kind="commit", target=trial)
    house.start_one("agent")
    until(lambda: state_of(house, commit) == "committed", SLACK_S, "the agent's word on it")
    assert runs(house)["max_wait_ms"] == before + 5
    assert state_of(house, trial) == "applied"


def test_a_control_plane_killed_mid_trial_strands_no_change(house: House) -> None:
    before = runs(house)["max_wait_ms"]
    trial = order(house, values={"max_wait_ms": before + 7}, ttl_s=TTL_S)
    until(lambda: runs(house)["max_wait_ms"] == before + 7, SLACK_S, "the change")
    house.processes.kill("control-plane")
    try:
        # Nobody is there to tell the agent: its own timer has to.
        until(lambda: runs(house)["max_wait_ms"] == before, TTL_S + SLACK_S, "its undoing")
        done = trimtab("status", env=house.env)
        assert done.returncode == 1
        assert f"no control plane at {house.web_url}" in done.stderr
    finally:
        house.start_one("control-plane")
    house.wait(house.health_url("control-plane"), "control-plane")
    # The agent was turned away some times meanwhile: its next try may be a full backoff away.
    heard_s = BACKOFF_CAP_S + SLACK_S
    until(lambda: state_of(house, trial) == "reverted", heard_s, "the agent's word on it")


def test_status_prints_what_runs_how_it_stands_and_what_it_costs(house: House) -> None:
    done = trimtab("status", env=house.env)
    assert done.returncode == 0, done.stderr
    rows = {line[:14].strip(): line[16:] for line in done.stdout.splitlines()}
    assert set(rows) >= {"control plane", "memory", "CPU", "ingest", "node", "engine", "objective"}
    assert house.web_url in rows["control plane"]
    assert 0 < int(rows["memory"].removesuffix(" MiB")) <= 600
    assert re.match(r"node-0: agent ok, heard \d+ s ago, ", rows["node"])
    assert re.match(r"engine-0 \(chat\): ok, read \d+ s ago, config version \d", rows["engine"])
    assert f"max_num_seqs={runs(house)['max_num_seqs']}" in rows["engine"]


def test_who_stops_reading_a_status_gets_no_traceback(house: House) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "controlplane.cli", "status"],
        cwd=ROOT, env={**os.environ, **house.env}, stdout=writer, stderr=subprocess.PIPE,
        check=False, timeout=60,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.UNREAD, b"")


def test_what_is_audited_stands_in_the_control_planes_log(house: House) -> None:
    trimtab("objective", "delete", "chat-success", env=house.env)
    newest = trimtab("audit", "verify", env=house.env).stdout.split()[-1]
    log = (house.processes.log / "control-plane.log").read_text()
    assert f"deleted objective chat-success {newest}" in log
