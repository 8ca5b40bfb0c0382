"""The engine is a process of its own: it imports nothing of ours, and its load needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.engine.conftest import ROOT

OTHERS = {"controlplane", "tracing", "slo", "gpu_agent", "django"}


def test_no_module_of_the_engine_imports_another_room() -> None:
    for path in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & OTHERS, path


@pytest.mark.parametrize(
    "module",
    [
        *("engine", "engine.load", "engine.replay", "engine.knobs", "engine.config"),
        *("engine.http", "engine.serve", "engine.router.server", "engine.traces.trace"),
    ],
)
def test_what_the_control_plane_may_use_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
