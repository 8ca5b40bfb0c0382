"""No bench is left behind when what it measures moves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.houses import ROOT

IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_every_bench_finds_what_it_imports(tmp_path: Path) -> None:
    names = sorted(path.stem for path in (ROOT / "bench").glob("*.py"))
    assert len(names) > 20
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *names],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'bench'}:{ROOT}", "TRIMTAB_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
