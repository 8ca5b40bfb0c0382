"""docs/architecture.md lists the knobs as the engine and the control plane have them."""

from __future__ import annotations

import re
from pathlib import Path

from controlplane.actions.knob import knobs
from engine.knobs import KNOBS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
NONE = "–"
NEVER_TURNED = {"kv_dtype", "kv_layout"}  # docs/policies.md: what changes the answers


def rows() -> list[list[str]]:
    section = PAGE.read_text().partition("\n## Knobs\n")[2].partition("\n## ")[0]
    return [re.split(r"\s*\|\s*", row)[1:-1] for row in re.findall(r"^\| `.*", section, re.M)]


def test_the_table_is_the_engines_registry() -> None:
    assert rows() == [
        [
            f"`{name}`",
            knob.unit or NONE,
            NONE if knob.choices else f"{knob.minimum}{NONE}{knob.maximum}",
            " ".join(map(str, knob.ladder)),
            knob.apply_class,
            str(knob.default),
        ]
        for name, knob in KNOBS.items()
    ]


def test_the_control_plane_has_the_engines_knobs_within_their_bounds() -> None:
    assert set(knobs()) == set(KNOBS) - NEVER_TURNED
    for name, ours in knobs().items():
        theirs = KNOBS[name]
        assert ours.apply_class == theirs.apply_class
        assert set(ours.ladder or ours.choices) <= set(theirs.ladder)
        if theirs.minimum is not None and theirs.maximum is not None:
            assert (theirs.minimum, theirs.maximum) == (ours.minimum, ours.maximum)
