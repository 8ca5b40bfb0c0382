"""Chaos, its short form (what a CI run can afford), and whether its checks would see a fault."""

from __future__ import annotations

import importlib
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpu_agent.journal import Journal
from gpu_agent.protocol import Command, CommandKind, CommandState

from .houses import ROOT


def test_six_kills_lose_nothing_and_leave_nothing_under_way() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "chaos.py", "--short"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chaos violations 0 target 0 PASS" in done.stdout


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("chaos_check")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """One change on trial: applied, neither committed nor undone."""
    journal = Journal(tmp_path / "journal.sqlite3")
    journal.receive(
        Command(
            command_id="a1",
            kind=CommandKind.APPLY,
            engine="engine-0",
            generation=1,
            deadline=(datetime.now(UTC) + timedelta(seconds=30)).isoformat(),
            values={"max_num_seqs": 64},
            undo={"max_num_seqs": 32},
            expected_config_version=1,
        )
    )
    journal.applying(
        "a1",
        before_version=1,
        before_values={"max_num_seqs": 32},
        revert_wall=0.0,
        boot_id="b",
        revert_boottime=0.0,
    )
    journal.applied("a1", after_version=2, read_version=2, values={"max_num_seqs": 64})
    return journal


def report(state: str, action: str = "verified") -> dict[str, Any]:
    return {
        "commands": [{"id": "a1", "kind": "apply", "state": state, "final": bool(state)}],
        "actions": [
            {"id": "1", "state": action, "ended": True, "apply": "a1", "what": "max_num_seqs"}
        ],
        "incidents": [],
    }


def test_a_change_without_an_end_is_seen(
    check: ModuleType, journal: Journal, tmp_path: Path
) -> None:
    path = tmp_path / "journal.sqlite3"
    assert check.stage(path) == "armed"
    left = check.left_in_flight(check.journal(path), report(""))
    assert left == ["journal: apply a1 is applied, trial armed", "fleet: apply a1 is unanswered"]
    journal.end_trial("a1", "abandoned")
    [abandoned] = check.left_in_flight(check.journal(path), report("applied"))
    assert abandoned == "journal: apply a1 is applied, trial abandoned"
    journal.end_trial("a1", "committed")
    assert check.left_in_flight(check.journal(path), report("applied")) == []


def test_an_end_told_otherwise_is_seen(check: ModuleType, journal: Journal, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite3"
    journal.end_trial("a1", "committed")
    assert check.told_otherwise(check.journal(path), report("applied")) == []
    assert check.told_otherwise(check.journal(path), report("reverted")) == [
        "apply a1: fleet reverted, journal applied"
    ]
    journal.end_trial("a1", "reverted")
    journal.finish("a1", CommandState.REVERTED, "no commit")
    assert check.told_otherwise(check.journal(path), report("reverted")) == [
        "max_num_seqs: verified, journal trial reverted"
    ]
