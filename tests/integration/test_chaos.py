"""The short form of `make chaos`: what a CI run can afford of it."""

from __future__ import annotations

import subprocess
import sys

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
