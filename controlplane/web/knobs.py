"""The knobs of an engine as rows: the value, where it stands within its bounds, who set it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from controlplane.fleet.drift import Commanded, Drift, commanded, drift
from controlplane.fleet.models import Command, Engine

# From here on equal factors, not equal steps, are equally far apart.
LOG_FROM = 16.0


@dataclass(frozen=True)
class KnobRow:
    """`at` and `default_at` are places within the bounds, 0 to 1, None where there are none.
    `by` is empty when nobody was seen to turn the knob; `unsure` when it may have been another.
    `action_id` is that of the action by which an agent turned it."""

    name: str
    value: Any
    unit: str
    minimum: float | None
    maximum: float | None
    choices: tuple[Any, ...]
    default: Any
    apply_class: str
    help: str
    supported: bool
    at: float | None
    default_at: float | None
    by: str
    since: datetime | None
    was: Any
    unsure: bool
    action_id: UUID | None
    commanded: Commanded | None
    drifted: bool


@dataclass(frozen=True)
class Configuration:
    """What an engine runs, knob by knob, and where that is not what it was told."""

    rows: tuple[KnobRow, ...]
    drifts: Sequence[Drift]
    told: int


def configuration(engine: Engine, commands: Sequence[Command]) -> Configuration:
    """`commands` are the answered ones, oldest first. Values without a description come last."""
    told, drifts = commanded(commands), drift(engine, commands)
    off = {each.knob for each in drifts}
    names = [*engine.knobs, *sorted(set(engine.values) - set(engine.knobs))]
    acted = {str(command.pk): command.action_id for command in commands}
    rows = tuple(_row(engine, name, told.get(name), name in off, acted) for name in names)
    return Configuration(rows, drifts, len(told))


def _row(
    engine: Engine,
    name: str,
    told: Commanded | None,
    drifted: bool,
    acted: Mapping[str, UUID],
) -> KnobRow:
    described = engine.knobs.get(name)
    knob: dict[str, Any] = described if isinstance(described, dict) else {}
    value = engine.values.get(name, knob.get("value"))
    low, high = _number(knob.get("minimum")), _number(knob.get("maximum"))
    choices = knob.get("choices")
    noted = engine.set_by.get(name, {})
    by = str(noted.get("by", ""))
    return KnobRow(
        name=name,
        value=value,
        unit=str(knob.get("unit") or ""),
        minimum=low,
        maximum=high,
        choices=tuple(choices) if isinstance(choices, list) else (),
        default=knob.get("default"),
        apply_class=str(knob.get("apply_class") or ""),
        help=str(knob.get("help") or ""),
        supported=knob.get("supported", True) is not False,
        at=_place(value, low, high),
        default_at=_place(knob.get("default"), low, high),
        by=by,
        since=datetime.fromisoformat(noted["at"]) if noted.get("at") else None,
        was=noted.get("from"),
        unsure=noted.get("versions", 1) > 1,
        # An agent signs with the command it carries out or takes back.
        action_id=acted.get(by.rpartition(" ")[2]),
        commanded=told,
        drifted=drifted,
    )


def _number(value: object) -> float | None:
    """What an engine calls a number, if it is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _place(value: object, low: float | None, high: float | None) -> float | None:
    number = _number(value)
    if number is None or low is None or high is None or high <= low:
        return None
    if low > 0 and high / low >= LOG_FROM:
        share = math.log(max(number, low) / low) / math.log(high / low)
    else:
        share = (number - low) / (high - low)
    return min(max(share, 0.0), 1.0)
