"""The docs say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine import knobs as engine_knobs
from tracing import samples, spans

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
        assert unit == (knob.unit or "–"), name
        assert bounds == ("–" if knob.choices else f"{knob.minimum}–{knob.maximum}"), name
        assert ladder.split() == [str(step) for step in knob.ladder], name
        assert apply_class == knob.apply_class, name
        assert default == str(knob.default), name


def test_the_ladders_are_those_the_control_plane_climbs() -> None:
    from controlplane.actions.knob import knobs

    for slug, knob in knobs().items():
        steps = [str(step) for step in knob.ladder or knob.choices]
        assert knob_rows()[slug][2].split() == steps, slug
        assert knob_rows()[slug][3] == knob.apply_class, slug


def test_every_reason_to_leave_telemetry_out_is_told() -> None:
    told = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs/telemetry.md").read_text()))
    unread = set(re.findall(r'"(unreadable_[a-z]+)"', (ROOT / "tracing/wire_json.py").read_text()))
    assert {*spans.WORDS, *samples.WORDS, *unread} <= told


def test_every_cause_has_a_runbook() -> None:
    from controlplane.diagnosis.cause import causes

    for slug, cause in causes().items():
        page = ROOT / "docs" / "causes" / f"{slug}.md"
        assert page.exists(), f"docs/causes/{slug}.md"
        assert page.read_text().startswith("# "), slug
        assert cause.label


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
OF_THE_SHELL = {"PATH", "PWD", "USER"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_command_on_a_page_stands_on_is_set_on_that_page(page: Path) -> None:
    blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", page.read_text(), re.S))
    used = set(re.findall(r"\$\{?([A-Z_]+)", blocks)) - OF_THE_SHELL
    assert used <= set(re.findall(r"^([A-Z_]+)=", blocks, re.M))
