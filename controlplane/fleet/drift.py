"""What was last commanded of an engine, and where it runs something else.

A change kept or on trial counts as commanded, one undone as the value it went back to. Knobs never
commanded have no drift: what a person chose stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from controlplane.fleet.models import Command, Engine
from gpu_agent.protocol import CommandKind, CommandState


@dataclass(frozen=True)
class Commanded:
    """The value a knob was last told, and when the agent said so."""

    value: Any
    at: datetime | None


@dataclass(frozen=True)
class Drift:
    """`by` and `at`: who made the running configuration and when; "" and None where unknown."""

    knob: str
    commanded: Commanded
    runs: Any
    by: str
    at: datetime | None


def commanded(commands: Iterable[Command]) -> dict[str, Commanded]:
    """The last word per knob; `commands` are of one engine, by generation, oldest first."""
    last: dict[str, Commanded] = {}
    trials: dict[Any, Command] = {}
    for command in commands:
        if command.kind == CommandKind.APPLY:
            trials[command.pk] = command
            values = _values_of(command)
        elif command.kind == CommandKind.REVERT and command.result_state == CommandState.REVERTED:
            trial = trials.get(command.target_command_id)
            values = trial.undo if trial else {}
        else:
            values = {}
        last |= {knob: Commanded(value, command.result_at) for knob, value in values.items()}
    return last


def _values_of(trial: Command) -> dict[str, Any]:
    if trial.result_state == CommandState.APPLIED:
        values: dict[str, Any] = trial.values
        return values
    if trial.result_state == CommandState.REVERTED:  # by the agent's own timer
        undo: dict[str, Any] = trial.undo
        return undo
    return {}


def drift(engine: Engine, commands: Iterable[Command]) -> list[Drift]:
    """Knobs that run another value than they were last told, by name; those the engine no longer
    has are left out."""
    found = []
    for knob, told in sorted(commanded(commands).items()):
        runs = engine.values.get(knob, told.value)
        if runs == told.value:
            continue
        noted = engine.set_by.get(knob, {})
        at = datetime.fromisoformat(noted["at"]) if noted.get("at") else None
        found.append(Drift(knob, told, runs, str(noted.get("by", "")), at))
    return found
