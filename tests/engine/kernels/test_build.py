"""Kernels compile for a GPU where there is none, and what they take is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.kernels.build import TARGETS, Cost, cases, table
from tests.engine.conftest import ROOT


def test_a_kernel_compiles_on_a_cpu_without_spills() -> None:
    command = [sys.executable, "-m", "engine.kernels.build", "--target", "90", "--only", "rope"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| op | variants | sm_90 (H100, H200) |" in done.stdout
    assert "3 compiled, 0 with spills" in done.stdout


def test_every_op_is_among_the_cases() -> None:
    ops = {case.op for case in cases()}
    assert ops == {"decode", "decode, split", "prefill", "store", "quantise", "rms_norm", "rope",
                   "swiglu", "sample"}  # fmt: skip


def test_a_spill_in_any_variant_fails_and_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"rope": {90: [Cost(20, 0, 0), Cost(18, 8, 64)]}, "store": {90: [Cost(9, 0, 0)]}}
    assert table(found, [90]) == 1
    said = capsys.readouterr().out
    assert "| rope | 2 | 20 / 8 / 64 |" in said
    assert "3 compiled, 1 with spills" in said
    assert table({"store": {90: [Cost(9, 0, 0)]}}, [90]) == 0
    assert table({}, list(TARGETS)) == 1
