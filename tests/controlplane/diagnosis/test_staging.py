"""What changed on an engine meanwhile, and who did it, as the metrics show it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controlplane.accounts.models import Tenant
from controlplane.diagnosis.models import Incident
from controlplane.diagnosis.scene import EngineFacts
from controlplane.diagnosis.staging import before, changes_of
from slo.models import Objective, Reading
from tests.memory_reader import MemoryReader
from tracing.types import Grid, Signal

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


def test_a_gauge_shows_a_word_as_its_place_among_the_choices() -> None:
    reader: Any = MemoryReader()
    places = {"kv_allocator": (1.0, 0.0), "graph_capture": (1.0, 0.0), "kv_block_size": (16, 8)}
    for i in range(1, SCRAPES + 1):
        at = START + timedelta(seconds=5 * i)
        for knob, (first, then) in places.items():
            shown = then if i >= CHANGED_AT else first
            reader.add("engine:knob", at, shown, {**WHERE, "knob": knob})
    choices = {
        "kv_allocator": ["contiguous", "paged"],
        "graph_capture": ["on", "off"],
        "kv_block_size": [8, 16],
    }
    knobs = {knob: {"choices": words} for knob, words in choices.items()}
    engine = EngineFacts("engine-0", "chat", {}, knobs)
    grid = Grid(START, START + timedelta(seconds=5 * SCRAPES), 15.0)
    seen = {
        change.knob: (change.before, change.after) for change in changes_of(reader, engine, grid)
    }
    assert seen == {
        "kv_allocator": ("paged", "contiguous"),
        "graph_capture": ("on", "off"),
        "kv_block_size": (16, 8),
    }


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("good", "reference"),
    [
        pytest.param(6, (8, 13), id="the good windows since, but the onset"),
        pytest.param(3, (-18, 2), id="too few of them: those before it all"),
    ],
)
def test_what_went_bad_again_is_held_against(good: int, reference: tuple[int, int]) -> None:
    window = timedelta(seconds=15)
    tenant = Tenant.objects.create(slug="acme", name="Acme")
    objective = Objective.objects.create(
        tenant=tenant, slug="ttft", name="ttft", service="chat", indicator="success",
        target=0.99,
    )  # fmt: skip
    # Three good windows, five bad ones, the good ones in between, and bad again.
    for number, is_bad in enumerate([False] * 3 + [True] * 5 + [False] * good + [True] * 2):
        Reading.objects.create(
            objective=objective, scope="engine-0", window_end=START + (number + 1) * window,
            window_s=15, good=10 if is_bad else 40, total=40, signal=Signal.OK,
        )  # fmt: skip
    again = START + (8 + good) * window
    incident = Incident(
        tenant=tenant, objective=objective, scope="engine-0", trigger="fast burn",
        bad_since=START + 3 * window, bad_again_since=again, opened_at=again,
    )  # fmt: skip
    past, onset = before(incident, incident.run_since, window)
    assert ((past - START) / window, (onset - START) / window) == reference
