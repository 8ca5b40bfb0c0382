from __future__ import annotations

from pathlib import Path

import pytest

from tests.controlplane.actions.test_interleavings import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Where a change helps, and what it does is measured."""
    made = World(tmp_path, 3)
    made.after_share, made.silent = 0.02, False
    return made
