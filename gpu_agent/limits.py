"""What this node allows, whatever the server says: local bounds, and the checks of one change.

The bounds file is TOML on the node, one table per knob; the server has no way to write it:

    [max_num_seqs]
    minimum = 8
    maximum = 128
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_agent.clock import wall_of
from gpu_agent.engine_adapter import EngineState
from gpu_agent.protocol import Command

TTL_S_MAX = 3600.0
KNOBS_MAX = 64


class BoundsError(ValueError):
    """The bounds file cannot be used; says which line of it, and what is allowed."""


@dataclass(frozen=True)
class Bound:
    minimum: float | None = None
    maximum: float | None = None


def load_bounds(path: Path | None) -> dict[str, Bound]:
    """Knob → bound. No file named means no local bounds; a file named must be there and right."""
    if path is None:
        return {}
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BoundsError(f"bounds file {path}: {error}") from error
    return {knob: _bound(path, knob, table) for knob, table in tables.items()}


def _bound(path: Path, knob: str, table: object) -> Bound:
    where = f"bounds file {path}: {knob}"
    if not isinstance(table, dict):
        raise BoundsError(f"{where}: got {table!r}, want a table with minimum, maximum")
    for key, value in table.items():
        if key not in ("minimum", "maximum"):
            raise BoundsError(f"{where}.{key}: allowed: minimum, maximum")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BoundsError(f"{where}.{key}: got {value!r}, want a number")
    bound = Bound(table.get("minimum"), table.get("maximum"))
    if bound.minimum is not None and bound.maximum is not None and bound.minimum > bound.maximum:
        raise BoundsError(f"{where}: minimum {bound.minimum} is above maximum {bound.maximum}")
    return bound


def form_refusal(command: Command) -> str:
    """Why an apply command is not well-formed, or ''. Needs no engine."""
    if not command.values:
        return "values: got none, want at least one knob"
    if len(command.values) > KNOBS_MAX:
        return f"values: got {len(command.values)} knobs, allowed: {KNOBS_MAX}"
    if command.expected_config_version is None:
        return "expected_config_version: got none, want the version this change was made for"
    missing = sorted(set(command.values) - set(command.undo))
    if missing:
        return f"undo: no value for {', '.join(missing)}, want one for each knob changed"
    if not 0 < command.ttl_s <= TTL_S_MAX:
        return f"ttl_s: got {command.ttl_s}, allowed: above 0 to {TTL_S_MAX}"
    try:
        wall_of(command.deadline)
    except ValueError as error:
        return f"deadline: {error}"
    return ""


def change_refusal(command: Command, state: EngineState, bounds: Mapping[str, Bound]) -> str:
    """Why an apply command must not be carried out on an engine in this state, or ''."""
    if state.config_version != command.expected_config_version:
        return (
            f"conflict: {command.engine} stands at version {state.config_version}, "
            f"expected {command.expected_config_version}"
        )
    for name, value in command.values.items():
        reason = _knob_refusal(name, value, state) or _bound_refusal(name, value, bounds)
        if reason:
            return reason
    # The way back must be open too; local bounds do not apply to what already ran.
    for name, value in command.undo.items():
        if reason := _knob_refusal(name, value, state):
            return f"undo: {reason}"
    return ""


def _knob_refusal(name: str, value: object, state: EngineState) -> str:
    if name not in state.values:
        return f"{name}: unsupported by this engine, supported: {', '.join(sorted(state.values))}"
    running = state.values[name]
    if _kind(value) != _kind(running):
        return f"{name}: got {value!r}, want {_kind(running)}"
    knob = state.knobs.get(name, {})
    if knob.get("supported") is False:
        return f"{name}: not supported by this engine: {knob.get('reason', 'it does not say why')}"
    choices = knob.get("choices")
    if isinstance(choices, list) and value not in choices:
        return f"{name}: got {value!r}, the engine's choices: {', '.join(map(str, choices))}"
    return _range_refusal(name, value, knob.get("minimum"), knob.get("maximum"), "engine's bounds")


def _bound_refusal(name: str, value: object, bounds: Mapping[str, Bound]) -> str:
    bound = bounds.get(name, Bound())
    return _range_refusal(name, value, bound.minimum, bound.maximum, "this node's bounds")


def _range_refusal(name: str, value: Any, minimum: Any, maximum: Any, whose: str) -> str:
    if _kind(value) != "number":
        return ""
    below = bool(_kind(minimum) == "number" and value < minimum)
    above = bool(_kind(maximum) == "number" and value > maximum)
    if below or above or value != value:
        return f"{name}: got {value}, allowed by {whose}: {minimum} to {maximum}"
    return ""


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "number"
    for kind, word in ((str, "text"), (dict, "an object"), (list, "a list")):
        if isinstance(value, kind):
            return word
    return "nothing"
