"""The docs say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from engine import knobs as engine_knobs

ROOT = Path(__file__).resolve().parents[2]


def test_every_setting_is_documented_and_every_documented_one_exists() -> None:
    read = set(re.findall(r'"(TRIMTAB_[A-Z_]+)"', (ROOT / "controlplane/settings.py").read_text()))
    told = set(
        re.findall(r"^\| `(TRIMTAB_[A-Z_]+)`", (ROOT / "docs/settings.md").read_text(), re.M)
    )
    assert read == told


def knob_rows() -> dict[str, list[str]]:
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition("\n## Knobs\n")[2].partition("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in section.splitlines()
            if line.startswith("| `")]  # fmt: skip
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_table_of_knobs_is_the_engines_registry() -> None:
    told = knob_rows()
    registry = engine_knobs.KNOBS
    assert set(told) == set(registry)
    for name, (unit, bounds, ladder, apply_class, default) in told.items():
        knob = registry[name]
        assert unit == knob.unit, name
        assert bounds == f"{knob.minimum}–{knob.maximum}", name
        assert [int(step) for step in ladder.split()] == list(knob.ladder), name
        assert apply_class == knob.apply_class, name
        assert int(default) == knob.default, name


def test_the_ladders_are_those_the_control_plane_climbs() -> None:
    from controlplane.actions.knob import knobs

    for slug, knob in knobs().items():
        assert [int(step) for step in knob_rows()[slug][2].split()] == list(knob.ladder), slug


def test_every_cause_has_a_runbook() -> None:
    from controlplane.diagnosis.cause import causes

    for slug, cause in causes().items():
        page = ROOT / "docs" / "causes" / f"{slug}.md"
        assert page.exists(), f"docs/causes/{slug}.md"
        assert page.read_text().startswith("# "), slug
        assert cause.label
