"""Wire messages between a node's agent and the control plane, as plain dataclasses.

The agent polls `POST /api/v1/agent/sync` with a `SyncRequest` and gets a `SyncReply`: JSON both
ways, bearer token of kind *agent*. Delivery is at least once in both directions; the effect is
exactly once because a command has an id, the agent journals it before the side effect, and a
change names the `config_version` it expects (design: commit-confirm with a local revert timer).

Times are RFC 3339 strings in UTC; durations carry their unit last in the name.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

PROTOCOL_VERSION = 1
SYNC_PATH = "/api/v1/agent/sync"

_type_hints: dict[type, dict[str, Any]] = {}


class CommandKind(StrEnum):
    APPLY = "apply"
    COMMIT = "commit"
    REVERT = "revert"


class CommandState(StrEnum):
    """What the agent says of one command. All but `RECEIVED` and `APPLYING` are final."""

    RECEIVED = "received"
    APPLYING = "applying"
    APPLIED = "applied"  # apply: values read back equal the values asked for
    COMMITTED = "committed"  # commit: the revert timer is off
    REVERTED = "reverted"  # revert asked for, or the timer ran out (then reason says so)
    REJECTED = "rejected"  # nothing was touched: expired, stale, conflict, unsupported, bounds
    FAILED = "failed"  # the engine refused, or its state is neither before nor after


COMMAND_STATES_FINAL = frozenset(
    {
        CommandState.APPLIED,
        CommandState.COMMITTED,
        CommandState.REVERTED,
        CommandState.REJECTED,
        CommandState.FAILED,
    }
)


class WireError(ValueError):
    """A message that does not fit; says which field, the value, and what is allowed."""


class Wire:
    """To and from JSON-ready dicts. Unknown keys are ignored, so that either side may be newer."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls, message: object) -> Self:
        """Raises WireError naming the field, the value and the type wanted."""
        if not isinstance(message, dict):
            raise WireError(f"{cls.__name__}: got {type(message).__name__}, want an object")
        hints = _type_hints.get(cls)
        if hints is None:
            hints = _type_hints[cls] = typing.get_type_hints(cls)
        arguments: dict[str, Any] = {}
        for spec in dataclasses.fields(cls):  # type: ignore[arg-type]
            if spec.name in message:
                where = f"{cls.__name__}.{spec.name}"
                arguments[spec.name] = _decode(hints[spec.name], message[spec.name], where)
            elif (
                spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
            ):
                raise WireError(f"{cls.__name__}.{spec.name}: missing")
        return cls(**arguments)


def _decode(hint: Any, value: object, where: str) -> Any:
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in parameters:
            return None
        return _decode(next(p for p in parameters if p is not type(None)), value, where)
    if origin in (list, dict):
        if not isinstance(value, origin):
            raise WireError(f"{where}: got {value!r}, want a {origin.__name__}")
        if origin is list:
            return [_decode(parameters[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
        return {str(k): _decode(parameters[1], v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, Wire):
        return hint.from_json(value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        try:
            return hint(str(value))
        except ValueError:
            allowed = ", ".join(hint)
            raise WireError(f"{where}: got {value!r}, allowed: {allowed}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise WireError(f"{where}: got an integer no float can hold") from None
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise WireError(f"{where}: got {value!r}, want {hint.__name__}")
    return value


@dataclass(frozen=True)
class EngineReport(Wire):
    """One engine as the agent last read it back.

    `knobs` is the engine's own table: name → {value, unit, minimum, maximum or choices,
    apply_class, supported}. Values are numbers or words and go through unchanged.
    `reachable` false keeps the last values read, with `error` saying why.
    `changed_by` and `changed_at`: who made this config_version and when, "" where unknown.
    """

    name: str
    service: str
    adapter: str
    url: str
    reachable: bool
    model: str = ""
    config_version: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    changed_by: str = ""
    changed_at: str = ""


@dataclass(frozen=True)
class CommandResult(Wire):
    """The journal's last word on one command.

    `values` and `config_version` are what the engine answered when read back, after the effect.
    """

    command_id: str
    kind: CommandKind
    state: CommandState
    at: str
    reason: str = ""
    config_version: int | None = None
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Command(Wire):
    """One order. Values are absolute, never deltas.

    apply: set `values` if the engine still stands at `expected_config_version`, before `deadline`;
    arm a timer that restores `undo` at applied + `ttl_s` unless a commit comes.
    commit / revert: end the trial of the apply command named by `target_command_id`.
    `generation` only grows per engine; the agent refuses one lower than it has seen.
    """

    command_id: str
    kind: CommandKind
    engine: str
    generation: int
    deadline: str
    values: dict[str, Any] = field(default_factory=dict)
    undo: dict[str, Any] = field(default_factory=dict)
    expected_config_version: int | None = None
    ttl_s: float = 90.0
    target_command_id: str = ""


@dataclass(frozen=True)
class SyncRequest(Wire):
    """A heartbeat: who, what runs here, what became of the commands, and room for new ones.

    `kill_switch`: the node's stop file exists, so no apply command would be carried out.
    """

    agent_id: str
    boot_id: str
    node: str
    agent_version: str
    sent_at: str
    protocol: int = PROTOCOL_VERSION
    gpus: list[dict[str, Any]] = field(default_factory=list)
    gpu_status: str = "no GPU"
    engines: list[EngineReport] = field(default_factory=list)
    results: list[CommandResult] = field(default_factory=list)
    spool_bytes: int = 0
    spool_oldest_age_s: float = 0.0
    spool_dropped_total: int = 0
    cpu_seconds_total: float = 0.0
    rss_bytes: int = 0
    stopping: bool = False
    kill_switch: bool = False


@dataclass(frozen=True)
class SyncReply(Wire):
    """`accepted_results` may be forgotten by the agent; the rest is sent again."""

    server_time: str
    commands: list[Command] = field(default_factory=list)
    accepted_results: list[str] = field(default_factory=list)
    poll_after_s: float = 2.0
