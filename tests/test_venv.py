"""What `make` says where it cannot make a Python environment; a half-made one is made anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ANOTHER = "make setup PYTHON=python3.11\n"
S_MAX = 120  # of an environment being made, on a machine busy with other tests
NO_VENV = "the environment was not created because ensurepip is not\navailable."


def begun(folder: Path, python: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [ROOT / "venv.sh", python, "setup"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def refused(folder: Path, python: str) -> str:
    """What was said by a set-up that ended there."""
    ended = begun(folder, python)
    said = ended.communicate(timeout=S_MAX)[1]
    assert ended.returncode == 1
    return said


def python_that(folder: Path, does: str) -> str:
    path = folder / "python-of-sorts"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("exit 0", "it ends without a word"),
        ("exit 1", "it ends without a word"),
        ("echo 'no such library' >&2; exit 127", "no such library"),
        ("printf 'py: x: not found\\n\\nIt is in:\\n  3.10\\n'; exit 127", "py: x: not found"),
        ("printf 'Traceback (…):\\n  an error\\nOSError: no\\n'; exit 1", "OSError: no"),
    ],
)
def test_a_python_that_does_not_run_is_named_with_its_reason(
    tmp_path: Path, does: str, why: str
) -> None:
    python = python_that(tmp_path, does)
    told = f"{python} is no Python that runs: {why}. Try another: {ANOTHER}"
    assert refused(tmp_path, python) == told


def test_an_old_python_and_none_at_all_are_told_apart(tmp_path: Path) -> None:
    old = python_that(tmp_path, "echo runs 3 9 /usr/bin/python3.9")
    needed = "Trimtab needs Python 3.11 or newer; this is 3.9 (/usr/bin/python3.9)."
    assert refused(tmp_path, old) == f"{needed} Try: {ANOTHER}"
    assert refused(tmp_path, "no-such-python").startswith("No no-such-python. On Debian: apt-get")


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (f"echo '{NO_VENV}'; exit 1", "No venv module. On Debian: apt-get install python3-venv\n"),
        ("echo 'Error: no room' >&2; exit 1", "makes no environment in .venv: Error: no room\n"),
        ("exit 0", "makes no environment in .venv: it ends without a word\n"),
    ],
)
def test_why_no_environment_was_made_is_said_with_the_way_out(
    tmp_path: Path, does: str, told: str
) -> None:
    python = python_that(tmp_path, f'[ "$1" = -m ] || exec {sys.executable} "$@"\n{does}')
    said = refused(tmp_path, python)
    assert told in said
    assert said.endswith((ANOTHER, "python3-venv\n"))
    assert said.count("\n") <= 2


def test_what_was_interrupted_says_nothing_and_is_made_anew(tmp_path: Path) -> None:
    first = begun(tmp_path, sys.executable)
    until = time.monotonic() + S_MAX
    while not (tmp_path / ".venv/bin/python").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGINT)
    assert first.communicate(timeout=S_MAX)[1] == ""
    (tmp_path / ".venv/bin/pip").unlink(missing_ok=True)
    second = begun(tmp_path, sys.executable)
    assert second.communicate(timeout=S_MAX) == ("· Python environment in .venv\n", "")
    assert os.access(tmp_path / ".venv/bin/pip", os.X_OK)


@pytest.mark.parametrize("target", ["run", "test", "check"])
def test_an_environment_without_pip_is_made_before_anything_is_fetched(target: str) -> None:
    planned = subprocess.run(
        ["make", "-n", "-B", target, "BIN=none", "PYTHON=python3"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert 0 <= planned.index("./venv.sh python3") < planned.index("fetch.sh")


def test_set_up_goes_on_where_no_step_can_be_compiled_and_tries_again(tmp_path: Path) -> None:
    made = {name: tmp_path / name for name in ("runtime", "step", "pip", "python")}
    for name in ("pip", "runtime"):
        made[name].touch()
    made["python"].write_text("#!/bin/sh\nexit 1\n")
    made["python"].chmod(0o755)
    said = subprocess.run(
        ["make", f"BIN={tmp_path}", f"RUNTIME={made['runtime']}", f"STEP={made['step']}",
         str(made["step"])],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said.endswith("\nGoing on without it: decode steps take half as long again.\n")
    assert not made["step"].exists()
