"""What the journal keeps, forgets and tells."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gpu_agent.journal import Journal
from gpu_agent.protocol import CommandState

from .conftest import apply_command


def journal_at(tmp_path: Path, **limits: int) -> Journal:
    return Journal(tmp_path / "journal.sqlite3", **limits)


def test_every_write_is_fsynced(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    assert journal._db.execute("PRAGMA synchronous").fetchone()[0] == 2
    journal.close()


def test_a_command_survives_as_it_came(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    command = apply_command(values={"max_num_seqs": 64, "x": 1.5, "y": True})
    assert journal.receive(command)
    assert not journal.receive(command)
    journal.close()
    entry = journal_at(tmp_path).get("apply-1")
    assert entry is not None
    assert entry.command == command
    assert entry.state == CommandState.RECEIVED


def test_the_newest_are_kept_and_nothing_unreported_is_forgotten(tmp_path: Path) -> None:
    journal = journal_at(tmp_path, commands_kept_max=3)
    for number in range(6):
        journal.receive(apply_command(command_id=f"c{number}"))
        journal.finish(f"c{number}", CommandState.REJECTED, "")
    assert journal.get("c0") is not None
    journal.accepted(journal.results(10))
    journal.receive(apply_command(command_id="c6"))
    kept = [number for number in range(7) if journal.get(f"c{number}")]
    assert kept == [4, 5, 6]
    assert journal.history("c0") == []


def test_an_open_trial_is_never_forgotten(tmp_path: Path) -> None:
    journal = journal_at(tmp_path, commands_kept_max=1)
    journal.receive(apply_command(command_id="trial"))
    journal.applying(
        "trial",
        before_version=7,
        before_values={},
        revert_wall=0,
        boot_id="b",
        revert_boottime=0,
    )
    journal.applied("trial", after_version=8, read_version=8, values={})
    for number in range(3):
        journal.accepted(journal.results(10))
        journal.receive(apply_command(command_id=f"c{number}"))
        journal.finish(f"c{number}", CommandState.REJECTED, "")
    assert [entry.command.command_id for entry in journal.open_trials("engine-0")] == ["trial"]


def test_a_result_that_changed_since_it_was_sent_is_sent_again(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    journal.receive(apply_command())
    sent = journal.results(10)
    journal.finish("apply-1", CommandState.REJECTED, "late")
    journal.accepted(sent)
    assert [result.state for result in journal.results(10)] == [CommandState.REJECTED]
    journal.accepted(journal.results(10))
    assert journal.results(10) == []


def test_a_write_that_fails_leaves_the_journal_usable(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    journal._db.execute("PRAGMA max_page_count = 1")
    commands = [apply_command(command_id=f"c{number}") for number in range(1000)]
    with pytest.raises(sqlite3.OperationalError, match="full"):
        all(map(journal.receive, commands))
    journal._db.execute("PRAGMA max_page_count = 100000")
    assert journal.receive(apply_command(command_id="after"))
    assert journal.get("after") is not None
