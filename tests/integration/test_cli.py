"""`trimtab up` on a taken port, `status` of what runs, `stop` among processes not ours."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from controlplane import cli
from controlplane.demo.house import Ports
from controlplane.demo.processes import Processes, started_at

from .houses import ROOT, trimtab, until

SLEEP = [sys.executable, "-c", "import time; time.sleep(120)"]


@pytest.mark.parametrize(
    "setting", ["TRIMTAB_WEB_PORT", "TRIMTAB_OTLP_PORT", "TRIMTAB_OTLP_GRPC_PORT"]
)
def test_up_on_a_taken_port_names_it_and_the_setting_that_moves_it(
    tmp_path: Path, setting: str
) -> None:
    ports = Ports.free()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        env = {
            "TRIMTAB_HOME": str(tmp_path),
            "TRIMTAB_WEB_PORT": str(ports.web),
            "TRIMTAB_OTLP_PORT": str(ports.otlp),
            "TRIMTAB_OTLP_GRPC_PORT": str(ports.otlp_grpc),
            setting: str(taken),
        }
        done = trimtab("up", env=env)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{taken}" in done.stderr
    assert f"{setting}=PORT" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("TRIMTAB_HOME=/proc/x", "'/proc/x': No such file or directory. Allowed: a folder one"),
        ("TRIMTAB_HOME=/dev/null", "'/dev/null': File exists. Allowed: a folder one may write to"),
        ("TRIMTAB_WEB_PORT=abc", "'abc': not a number. Allowed: a port, 1 to 65535."),
        ("TRIMTAB_OTLP_PORT=1.5", "'1.5': not a whole number. Allowed: a port, 1 to 65535."),
        ("TRIMTAB_LOG_LEVEL=loud", "'loud': not a level. Allowed: DEBUG, INFO"),
    ],
)
@pytest.mark.parametrize("command", ["up", "status"])
def test_a_wrong_setting_is_told_in_one_line(
    tmp_path: Path, command: str, setting: str, said: str
) -> None:
    name, _, value = setting.partition("=")
    done = trimtab(command, env={"TRIMTAB_HOME": str(tmp_path), name: value})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"trimtab {command}: {name}={said}")
    assert done.stderr.count("\n") == 1


def test_a_demo_says_where_its_state_cannot_be_kept(tmp_path: Path) -> None:
    done = trimtab("demo", env={"TRIMTAB_HOME": "/proc/x"})
    assert (done.returncode, done.stderr) == (1, "")
    told = " ".join(done.stdout.split())
    assert told.startswith("· --home (or TRIMTAB_HOME) is '/proc/x': No such file or directory.")


def test_up_at_an_address_of_another_machine_names_the_setting(tmp_path: Path) -> None:
    done = trimtab("up", env={"TRIMTAB_HOME": str(tmp_path), "TRIMTAB_BIND": "192.0.2.1"})
    assert done.returncode == 1
    assert "TRIMTAB_BIND has to be an address of this machine." in done.stderr


def test_stop_ends_what_was_recorded_and_nothing_else(tmp_path: Path) -> None:
    ours = Processes(tmp_path)
    ours.start("engine", SLEEP, {})
    with subprocess.Popen(SLEEP) as bystander:
        # A record left by a process whose pid another one has now.
        recycled = {"pid": bystander.pid, "started": "1"}
        (tmp_path / "run" / "agent.json").write_text(json.dumps(recycled))
        try:
            done = trimtab("stop", env={"TRIMTAB_HOME": str(tmp_path)})
            assert done.stdout == "Stopped: engine.\n"
            assert ours.children["engine"].wait(5) < 0
            assert started_at(bystander.pid) is not None
        finally:
            bystander.kill()
    assert list((tmp_path / "run").iterdir()) == []


def test_stop_where_nothing_runs_says_so(tmp_path: Path) -> None:
    done = trimtab("stop", env={"TRIMTAB_HOME": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "Nothing of the demo was running.\n")


@pytest.mark.parametrize("command", [["status"], ["token", "list"], ["channel", "list"]])
def test_before_the_first_start_a_command_says_how_to_make_one(
    tmp_path: Path, command: list[str]
) -> None:
    done = trimtab(*command, env={"TRIMTAB_HOME": str(tmp_path)})
    assert done.returncode == 1
    assert f"no control plane has run in {tmp_path} yet. Start one: trimtab up" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("below", ["", "scenarios/burst"])
def test_status_finds_what_runs_over_the_home_wherever_it_listens(
    tmp_path: Path, below: str
) -> None:
    home, ports = tmp_path / below, Ports.free()
    at = f"http://127.0.0.1:{ports.web}"
    env = {
        "TRIMTAB_HOME": str(home),
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "TRIMTAB_PUBLIC_URL": at,
        "TRIMTAB_WEB_PORT": str(ports.web),
        "TRIMTAB_OTLP_PORT": str(ports.otlp),
        "TRIMTAB_OTLP_GRPC_PORT": "0",
    }
    started = Processes(home)
    started.start("control-plane", [sys.executable, "-m", "controlplane.cli", "up"], env)
    pid = started.children["control-plane"].pid
    try:
        until(lambda: httpx.get(f"{at}/health").is_success, 60, "a control plane")
        done = trimtab("status", env={"TRIMTAB_HOME": str(tmp_path)})
        second = trimtab("up", env={**env, "TRIMTAB_WEB_PORT": str(Ports.free().web)})
    finally:
        started.stop()
    assert (second.returncode, second.stdout) == (1, "")
    assert f"over {home} already (PID: {pid}), at {at}. Stop it, or give" in second.stderr
    assert second.stderr.count("\n") == 1
    assert (done.returncode, done.stderr) == (0, "")
    assert f"control plane  {at}, up" in done.stdout
    assert not (home / cli.ADDRESS).exists()  # the next one may listen elsewhere


def test_make_status_of_nothing_that_runs_is_one_sentence() -> None:
    done = subprocess.run(
        ["make", "status"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "TRIMTAB_PUBLIC_URL": "http://127.0.0.1:9", "TRIMTAB_API_TOKEN": "t"},
    )  # fmt: skip
    told = "no control plane at http://127.0.0.1:9: connection refused. Start one: trimtab up\n"
    assert (done.returncode, done.stderr) == (0, f"trimtab status: {told}")


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://a:b", "http:///x"])
def test_an_address_that_is_none_is_told_apart_from_one_that_does_not_answer(
    tmp_path: Path, url: str
) -> None:
    done = trimtab("status", "--url", url, env={"TRIMTAB_HOME": str(tmp_path)})
    assert done.returncode == 1
    assert f"--url (or TRIMTAB_PUBLIC_URL) is {url!r}, which is no address." in done.stderr
    assert "Start one" not in done.stderr
