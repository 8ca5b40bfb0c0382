"""Every command and verb says in its help what it takes, and the docs ask for nothing else."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from controlplane.cli import DAEMONS, RUN, engine_status, node_status
from controlplane.columns import columns, table
from controlplane.command_line import ABOUT, parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "templates").rglob("*.html")]
WIDTH = 80


def below(command: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The command, its verbs."""
    yield command
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from below(verb)


def leaves() -> list[argparse.ArgumentParser]:
    return [one for one in below(parser()) if one.prog.split()[-1] not in DAEMONS]


@pytest.mark.parametrize("command", leaves(), ids=lambda command: command.prog)
def test_a_help_fits_the_terminal_and_explains_every_argument(
    command: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", f"{WIDTH}")
    assert command.description
    assert max(map(len, command.format_help().splitlines())) <= WIDTH
    for action in command._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action.dest


def test_the_help_of_all_names_every_command_once() -> None:
    told = re.findall(r"^  ([a-z]+)  ", parser().format_help(), re.M)
    assert sorted(told) == sorted(ABOUT) == sorted([*RUN, *DAEMONS])


def test_a_verb_tells_of_its_own_arguments_alone() -> None:
    made = {one.prog: one.format_help() for one in leaves()}
    assert "--scope" in made["trimtab token create"]
    assert "--scope" not in made["trimtab token list"]
    assert "--prefix" not in made["trimtab token create"]


def told() -> list[str]:
    """The commands in docs and pages, without their comments."""
    text = "\n".join(page.read_text() for page in DOCS)
    text = text.replace("\\\n", " ")
    said = re.findall(r"^(?:[A-Z_]+=\$\()?(trimtab [^\n#<)|]+)", text, re.M)
    return [one for one in said if one.split()[1] in RUN]


@pytest.mark.parametrize("command", told())
def test_the_commands_in_the_docs_are_understood(command: str) -> None:
    parser().parse_args(shlex.split(command)[1:])


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert list(columns([("a", "bb"), ("ccc", "d")])) == ["a    bb", "ccc  d"]
    assert list(table(("A", "B"), [("x", "")], none="none")) == ["A  B", "x"]
    assert list(table(("A", "B"), [], none="None.")) == ["None."]


def test_status_says_of_an_engine_only_what_is_known() -> None:
    engine = {"name": "engine-0", "service": "chat", "state": "unreachable", "last_seen_at": None}
    assert (
        engine_status({**engine, "config_version": None, "values": {}})
        == "engine-0 (chat): unreachable, never read"
    )


def test_status_tells_what_was_read_with_its_age_and_what_is_old_with_its_time() -> None:
    was = {"name": "engine-0", "service": "chat", "config_version": 2, "values": {"max_wait_ms": 5}}
    now = datetime.now(UTC)
    fresh = engine_status({**was, "state": "ok", "last_seen_at": now.isoformat()})
    assert fresh == "engine-0 (chat): ok, read 0 s ago, config version 2, max_wait_ms=5"
    old = {"state": "lost", "last_seen_at": "2026-01-02T03:04:05+01:00"}
    since = "not read since 2026-01-02 02:04:05 UTC"
    assert engine_status({**was, **old}).startswith(f"engine-0 (chat): lost, {since}, config")
    node = {"name": "node-0", "gpu_status": "no GPU", "gpus": [], "agent_rss_bytes": 2**20, **old}
    since = since.replace("read", "heard")
    assert node_status(node) == f"node-0: agent lost, {since}, no GPU, 1 MiB"
