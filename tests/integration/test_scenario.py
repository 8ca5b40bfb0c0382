"""One scenario at the fast pace, as a person starts it."""

from __future__ import annotations

import re
from pathlib import Path

from controlplane.demo.house import Ports
from controlplane.screen import WIDTH

from .houses import trimtab


def test_an_engine_is_killed_and_the_story_ends_with_nothing_lost(tmp_path: Path) -> None:
    ports = [
        word
        for name, port in vars(Ports.free()).items()
        for word in (f"--{name.replace('_', '-')}-port", str(port))
    ]
    done = trimtab(
        "demo", "--scenario", "engine-killed", "--pace", "fast", "--quiet-min", "0.1",
        "--minutes", "0.4", "--calm", "0.2", "--load", "0.2", "--home", str(tmp_path), *ports,
        env={"COLUMNS": str(WIDTH)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    _, begun, story = done.stdout.partition("the story of engine-killed")
    assert begun
    assert "The engine is killed." in story
    assert re.search(r"back +engine, [0-9.]+ s later", story)
    assert "lost      0" in story
    assert done.stderr == ""
    assert {len(line) for line in done.stdout.splitlines() if line[0] in "┌│└"} == {WIDTH}
