"""What changed on an engine meanwhile, and who did it, as the metrics show it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from controlplane.diagnosis.scene import EngineFacts
from controlplane.diagnosis.staging import changes_of
from tests.memory_reader import MemoryReader
from tracing.types import Grid

START = datetime(2026, 3, 1, tzinfo=UTC)
WHERE = {"service": "chat", "instance": "engine-0"}
SCRAPES, CHANGED_AT = 16, 8


def test_who_changes_a_setting_for_the_first_time_is_known() -> None:
    reader: Any = MemoryReader()
    for i in range(1, SCRAPES + 1):
        at, later = START + timedelta(seconds=5 * i), i >= CHANGED_AT
        cap = 2.0 if later else 32.0
        reader.add("engine:knob", at, cap, {**WHERE, "knob": "max_num_seqs"})
        if later:
            reader.add("engine:config_changes_total", at, 1.0, {**WHERE, "by": "night-shift"})
    engine = EngineFacts("engine-0", "chat", {}, {})
    grid = Grid(START, START + timedelta(seconds=5 * SCRAPES), 15.0)
    [change] = changes_of(reader, engine, grid)
    assert (change.knob, change.before, change.after) == ("max_num_seqs", 32, 2)
    assert change.by == "night-shift"
    assert change.by_hand
