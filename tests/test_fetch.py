"""What `make` says where a package manager cannot do its work: one line, with the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.demo.house import free_port

ROOT = Path(__file__).resolve().parents[1]
NPM = ["npm", "ci", "--loglevel", "error"]
TOOLS = ("bash", "basename", "grep", "head", "mkdir")


def fetch(command: list[str], tmp_path: Path, **env: str) -> str:
    """What was said. Nothing is to be had, and nothing below the repository is touched."""
    for name in ("package.json", "package-lock.json"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    nowhere = f"http://127.0.0.1:{free_port()}/"
    done = subprocess.run(
        [ROOT / "fetch.sh", *command],
        cwd=tmp_path,
        env={
            **os.environ,
            "npm_config_registry": nowhere, "npm_config_cache": str(tmp_path / "cache"),
            "npm_config_fetch_retries": "0", "no_proxy": "127.0.0.1", **env,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def only(tmp_path: Path, *names: str) -> str:
    """A PATH with the named commands and what the script itself needs."""
    found = tmp_path / "bin"
    found.mkdir()
    for name in (*TOOLS, *names):
        for folder in os.environ["PATH"].split(":"):
            if (Path(folder) / name).exists() and not (found / name).exists():
                (found / name).symlink_to(Path(folder) / name)
    return str(found)


def test_without_a_network_npm_ends_with_one_line(tmp_path: Path) -> None:
    said = fetch(NPM, tmp_path)
    assert said.startswith("npm reaches no package registry (ECONNREFUSED): no network, or a proxy")
    assert "Set HTTPS_PROXY=http://HOST:PORT, or npm_config_registry to a mirror.\n" in said
    assert said.count("\n") == 1


def test_without_a_network_pip_ends_with_one_line(tmp_path: Path) -> None:
    pip = tmp_path / "pip"  # an environment need not have the command
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    pip.chmod(0o755)
    said = fetch(
        [str(pip), "download", "--retries", "1", "--no-deps", "polib==0.0.1"], tmp_path,
        PIP_CONFIG_FILE="/dev/null", PIP_INDEX_URL=f"http://127.0.0.1:{free_port()}/simple",
    )  # fmt: skip
    assert said.startswith("pip reaches no package registry (Connection refused): no network, or a")
    assert said.endswith("or PIP_INDEX_URL to a mirror.\n")
    assert said.count("\n") == 1


def test_a_home_npm_cannot_write_to_is_named_before_npm_is_started(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = fetch(NPM, tmp_path, npm_config_cache="", HOME=str(tmp_path / "file"))
    assert said == (
        f"npm cannot write to {tmp_path}/file/.npm, its cache. "
        "Set HOME or npm_config_cache to a folder it may write to.\n"
    )


def test_no_npm_and_one_that_does_not_run_are_told_apart(tmp_path: Path) -> None:
    path = only(tmp_path)
    assert fetch(NPM, tmp_path, PATH=path).startswith("No npm: it fetches htmx, uPlot and Inter.")
    npm = tmp_path / "bin" / "npm"
    npm.write_text("#!/bin/bash\nexec node-of-another-time\n")
    npm.chmod(0o755)
    said = fetch(NPM, tmp_path, PATH=path)
    assert said.startswith("npm does not run: ")
    assert said.endswith("not found. On Debian: apt-get install nodejs npm\n")


def test_a_reason_nobody_foresaw_is_shown_in_the_tools_own_words(tmp_path: Path) -> None:
    said = fetch(["npm", "ci", "--loglevel", "error", "--prefix", str(tmp_path / "none")], tmp_path)
    assert said.startswith("npm failed:\nnpm error")
    assert said.count("\n") <= 9


@pytest.mark.parametrize("target", ["run", "test"])
def test_npm_is_asked_for_before_the_large_python_packages(tmp_path: Path, target: str) -> None:
    planned = subprocess.run(
        ["make", "-n", "-B", target, "BIN=none", f"NODE={tmp_path}/node"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert 0 < planned.index("fetch.sh npm") < planned.index("fetch.sh none/pip")
