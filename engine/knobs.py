"""Live settings: the registry of knobs and the immutable RuntimeConfig a step reads once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import SEQS_MAX


class KnobError(ValueError):
    """A knob value that cannot be taken; `code` is what the API answers, `knob` names it."""

    def __init__(self, code: str, knob: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.knob = knob


class UnknownKnob(KnobError):
    """No knob of that name, or a value of the wrong type (HTTP 400)."""


class OutOfBounds(KnobError):
    """The right type, but outside [minimum, maximum] (HTTP 422)."""


@dataclass(frozen=True)
class Knob:
    """One live setting. `apply_class` hot: read at the next step boundary, drops no request.

    `ladder` holds the values a tuner should try; any integer within the bounds is accepted.
    """

    name: str
    unit: str
    minimum: int
    maximum: int
    default: int
    ladder: tuple[int, ...]
    help: str
    apply_class: str = "hot"

    def check(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnknownKnob("invalid_type", self.name, f"{self.name}: got {value!r}, want int")
        if not self.minimum <= value <= self.maximum:
            raise OutOfBounds(
                "out_of_bounds",
                self.name,
                f"{self.name}: got {value} {self.unit}, "
                f"allowed: {self.minimum} to {self.maximum} {self.unit}",
            )
        return value


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            name="max_num_seqs",
            unit="requests",
            minimum=1,
            maximum=SEQS_MAX,
            default=32,
            ladder=(4, 8, 16, 32, 64, 128, 256),
            help="Requests in the running batch. Lowered, it drains down; it never preempts.",
        ),
        Knob(
            name="max_num_batched_tokens",
            unit="tokens/step",
            minimum=64,
            maximum=8192,
            default=2048,
            ladder=(128, 256, 512, 1024, 2048, 4096),
            help="Tokens of one step, decodes and prefill chunks together.",
        ),
        Knob(
            name="max_wait_ms",
            unit="ms",
            minimum=0,
            maximum=50,
            default=0,
            ladder=(0, 2, 5, 10, 20, 50),
            help="How long an idle engine holds its first waiting request to gather a batch.",
        ),
        Knob(
            name="prefill_chunk_tokens",
            unit="tokens",
            minimum=32,
            maximum=4096,
            default=512,
            ladder=(32, 64, 128, 256, 512, 1024, 2048, 4096),
            help="Prompt tokens of one request that one step may compute.",
        ),
    )
}


@dataclass(frozen=True)
class RuntimeConfig:
    """All knob values of one config_version; never changed, only replaced."""

    max_num_seqs: int = KNOBS["max_num_seqs"].default
    max_num_batched_tokens: int = KNOBS["max_num_batched_tokens"].default
    max_wait_ms: int = KNOBS["max_wait_ms"].default
    prefill_chunk_tokens: int = KNOBS["prefill_chunk_tokens"].default

    def replaced(self, values: Mapping[str, Any]) -> RuntimeConfig:
        """A copy with `values` taken over; raises UnknownKnob or OutOfBounds, changes nothing."""
        checked: dict[str, int] = {}
        for name, value in values.items():
            if name not in KNOBS:
                raise UnknownKnob(
                    "unknown_knob", name, f"{name}: no such knob, allowed: {', '.join(KNOBS)}"
                )
            checked[name] = KNOBS[name].check(value)
        return dataclasses.replace(self, **checked)

    def values(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in KNOBS}

    def described(self) -> dict[str, dict[str, Any]]:
        """The knob table of GET /v1/runtime_config, with the running values."""
        return {
            knob.name: {
                "value": getattr(self, knob.name),
                "unit": knob.unit,
                "minimum": knob.minimum,
                "maximum": knob.maximum,
                "ladder": list(knob.ladder),
                "default": knob.default,
                "apply_class": knob.apply_class,
                "help": knob.help,
            }
            for knob in KNOBS.values()
        }
