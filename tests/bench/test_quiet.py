"""What counts as flapping."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def versions(*caps: int) -> list[Any]:
    made = import_module("plant").Version
    return [made(i, "autopilot", 0.0, {"cap": cap, "chunk": 512}) for i, cap in enumerate(caps)]


def test_a_knob_that_goes_one_way_does_not_flap() -> None:
    assert import_module("plant").turned_back(versions(32, 64, 64, 128)) == []


def test_a_knob_set_back_to_a_value_it_had_left_flaps_each_time() -> None:
    found = import_module("plant").turned_back(versions(32, 64, 32, 128, 64))
    assert found == ["cap back to 32 by autopilot", "cap back to 64 by autopilot"]


def incident(objective: str, scope: str, reopened: int = 0) -> dict[str, Any]:
    told = f"{objective} on {scope}"
    return {"objective": objective, "scope": scope, "reopened": reopened, "what": told}


def test_incidents_of_different_objectives_are_no_flapping() -> None:
    rows = [
        incident("ttft", "engine-0"),
        incident("tpot", "engine-0"),
        incident("ttft", "engine-1"),
    ]
    assert import_module("quiet").opened_twice(rows) == []


def test_an_incident_opened_again_or_reopened_is_flapping() -> None:
    rows = [incident("ttft", "engine-0", reopened=1), incident("ttft", "engine-0")]
    assert import_module("quiet").opened_twice(rows) == ["ttft on engine-0"] * 2
