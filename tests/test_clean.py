"""What `make clean` takes away, and what it leaves and says so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def clean(folder: Path, *there: str, **env: str) -> str:
    """What was said, in a copy with a state of its own in var/ and what else is to be `there`."""
    (folder / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    for name in ("var", *there):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return again(folder, **env)


def again(folder: Path, **env: str) -> str:
    without_home = {name: value for name, value in os.environ.items() if name != "TRIMTAB_HOME"}
    return subprocess.run(
        ["make", "clean"],
        cwd=folder,
        env={**without_home, "XDG_CACHE_HOME": str(folder / "cache"), **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def test_the_demos_own_state_is_forgotten(tmp_path: Path) -> None:
    assert clean(tmp_path).endswith("\nRemoved var/.\n")
    assert not (tmp_path / "var").exists()
    assert again(tmp_path).endswith("\nRemoved nothing.\n")


def test_what_is_left_is_named_where_it_is_there(tmp_path: Path) -> None:
    said = clean(tmp_path, ".venv", "node_modules", "cache/trimtab")
    assert f"Removed var/. Left: .venv, node_modules, {tmp_path}/cache/trimtab." in said


def test_a_home_that_is_var_by_name_is_the_demos_own_too(tmp_path: Path) -> None:
    clean(tmp_path, TRIMTAB_HOME=str(tmp_path / "var"))
    assert not (tmp_path / "var").exists()


def test_with_a_home_elsewhere_nothing_is_removed_and_that_is_said(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    said = clean(tmp_path, TRIMTAB_HOME=str(home))
    assert f"Removed nothing. Left: {home} (TRIMTAB_HOME), var/" in said
    assert (tmp_path / "var").exists()
    assert home.exists()
