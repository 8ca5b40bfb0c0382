"""Live settings: the registry of knobs and the immutable RuntimeConfig a step reads once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import BLOCK_SIZES, KV_DTYPES, KV_LAYOUTS, MODEL_LEN_MAX, SEQS_MAX

Value = int | str

LENGTH_WINDOW_ADAPTIVE = -1  # a value of length_window_tokens


class KnobError(ValueError):
    """A knob value that cannot be taken; `code` is what the API answers, `knob` names it."""

    def __init__(self, code: str, knob: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.knob = knob


class UnknownKnob(KnobError):
    """No knob of that name, or a value of the wrong type (HTTP 400)."""


class OutOfBounds(KnobError):
    """The right type, but outside the bounds, or none of the choices (HTTP 422)."""


class NotPossible(KnobError):
    """An allowed value that this engine cannot take now; everything is as before (HTTP 409)."""


@dataclass(frozen=True)
class Knob:
    """One live setting, with bounds or with choices (then `ladder` is all there is).

    `apply_class` hot: read at the next step boundary. barrier: built beside the running steps,
    exchanged between two of them, proved, and put back if the proof fails. Neither drops a request.
    `ladder` holds the values a tuner should try; within bounds any integer is accepted.
    """

    name: str
    unit: str
    default: Value
    ladder: tuple[Value, ...]
    help: str
    minimum: int | None = None
    maximum: int | None = None
    apply_class: str = "hot"

    @property
    def choices(self) -> tuple[Value, ...] | None:
        return self.ladder if self.minimum is None else None

    def check(self, value: object) -> Value:
        """`value`, if it may be taken; raises UnknownKnob or OutOfBounds."""
        kind = type(self.default)
        if type(value) is not kind:
            want = "int" if kind is int else "text"
            message = f"{self.name}: got {value!r}, want {want}"
            raise UnknownKnob("invalid_type", self.name, message)
        assert isinstance(value, int | str)
        allowed = f"{self.minimum} to {self.maximum} {self.unit}"
        if self.minimum is None or self.maximum is None:
            fits, allowed = value in self.ladder, ", ".join(map(str, self.ladder))
        else:
            fits = self.minimum <= int(value) <= self.maximum
        if not fits:
            got = f"{value} {self.unit}".rstrip()
            raise OutOfBounds(
                "out_of_bounds", self.name, f"{self.name}: got {got}, allowed: {allowed}"
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
        Knob(
            name="shed_below_priority",
            unit="priority",
            minimum=0,
            maximum=3,
            default=0,
            ladder=(0, 1, 2, 3),
            help="Requests of a lower x-priority (low 0, normal 1, high 2, realtime 3) get 429.",
        ),
        Knob(
            name="length_window_tokens",
            unit="tokens",
            minimum=LENGTH_WINDOW_ADAPTIVE,
            maximum=8192,
            default=0,
            ladder=(LENGTH_WINDOW_ADAPTIVE, 0, 64, 256, 1024),
            help="How far the lengths of the prompts of one step may differ; 0: any; -1: adaptive, "
            "1024 times the free share of the KV pool, at least 64, and slices by their lengths.",
        ),
        Knob(
            name="priority_weights",
            unit="",
            default="off",
            ladder=("off", "on"),
            help="Share the engine by x-priority (high and realtime 2, normal 1, low 1/4), instead "
            "of first come first served.",
        ),
        Knob(
            name="tenant_quotas",
            unit="",
            default="off",
            ladder=("off", "on"),
            help="Hold each x-tenant to the tokens a minute of its tier (--tenants).",
        ),
        Knob(
            name="backpressure",
            unit="",
            default="off",
            ladder=("off", "on"),
            help="Answer 429 while more than 50 requests wait and the engine is over 0.85 busy.",
        ),
        Knob(
            name="kv_block_size",
            unit="tokens",
            default=16,
            ladder=BLOCK_SIZES,
            help="Tokens of a KV block. Running requests are moved over with their KV.",
            apply_class="barrier",
        ),
        Knob(
            name="kv_dtype",
            unit="",
            default="auto",
            ladder=KV_DTYPES,
            help="How KV is kept; auto: as the model computes. Running requests' is converted.",
            apply_class="barrier",
        ),
        Knob(
            name="kv_layout",
            unit="",
            default="separate",
            ladder=KV_LAYOUTS,
            help="Keys and values in tensors of their own, or a block of each by turns in one.",
            apply_class="barrier",
        ),
        Knob(
            name="graph_capture",
            unit="",
            default="on",
            ladder=("off", "on"),
            help="Run steps compiled, or replayed from a captured graph, instead of op by op.",
            apply_class="barrier",
        ),
        Knob(
            name="prefix_cache",
            unit="",
            default="off",
            ladder=("off", "on"),
            help="Begin a request with the KV blocks of others that began with the same tokens.",
            apply_class="barrier",
        ),
        Knob(
            name="kv_allocator",
            unit="",
            default="paged",
            ladder=("contiguous", "paged"),
            help="Give a request blocks as it grows, or one run of blocks for all it may become.",
            apply_class="barrier",
        ),
        Knob(
            name="kv_compaction",
            unit="",
            default="off",
            ladder=("off", "on"),
            help="Move contiguous sequences together when a request finds no run long enough.",
        ),
        Knob(
            name="preemption",
            unit="",
            default="recompute",
            ladder=("recompute", "swap"),
            help="Compute a preempted request's KV again, or keep it in host memory meanwhile.",
        ),
        Knob(
            name="prefetch_depth_tokens",
            unit="tokens",
            minimum=0,
            maximum=MODEL_LEN_MAX,
            default=0,
            ladder=(0, 256, 1024, 4096),
            help="Tokens of a swapped request copied back ahead of its turn, beside the steps; 0: "
            "none.",
        ),
    )
}


def checked(knobs: Mapping[str, Knob], values: Mapping[str, object]) -> dict[str, Value]:
    """`values`, if all of them may be taken; raises UnknownKnob or OutOfBounds."""
    for name in values:
        if name not in knobs:
            raise UnknownKnob(
                "unknown_knob", name, f"{name}: no such knob, allowed: {', '.join(knobs)}"
            )
    return {name: knobs[name].check(value) for name, value in values.items()}


def described(
    knobs: Mapping[str, Knob], values: Mapping[str, Value], unsupported: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """The knob table of GET /v1/runtime_config; `unsupported`: knob → why it cannot be had here."""
    table: dict[str, dict[str, Any]] = {}
    for knob in knobs.values():
        table[knob.name] = {
            "value": values[knob.name],
            "unit": knob.unit,
            "ladder": list(knob.ladder),
            "default": knob.default,
            "apply_class": knob.apply_class,
            "help": knob.help,
            "supported": knob.name not in unsupported,
        }
        if knob.name in unsupported:
            table[knob.name]["reason"] = unsupported[knob.name]
        if knob.choices is not None:
            table[knob.name]["choices"] = list(knob.choices)
        else:
            table[knob.name] |= {"minimum": knob.minimum, "maximum": knob.maximum}
    return table


@dataclass(frozen=True)
class RuntimeConfig:
    """All knob values of one config_version; never changed, only replaced."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_wait_ms: int = 0
    prefill_chunk_tokens: int = 512
    shed_below_priority: int = 0
    length_window_tokens: int = 0
    priority_weights: str = "off"
    tenant_quotas: str = "off"
    backpressure: str = "off"
    kv_block_size: int = 16
    kv_dtype: str = "auto"
    kv_layout: str = "separate"
    graph_capture: str = "on"
    prefix_cache: str = "off"
    kv_allocator: str = "paged"
    kv_compaction: str = "off"
    preemption: str = "recompute"
    prefetch_depth_tokens: int = 0

    def replaced(self, values: Mapping[str, Any]) -> RuntimeConfig:
        """A copy with `values` taken over; raises UnknownKnob or OutOfBounds, changes nothing."""
        taken: dict[str, Any] = checked(KNOBS, values)
        return dataclasses.replace(self, **taken)

    def values(self) -> dict[str, Value]:
        return {name: getattr(self, name) for name in KNOBS}

    def described(self, unsupported: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """The knob table of GET /v1/runtime_config, with the running values.

        `unsupported`: knob → why this device cannot.
        """
        return described(KNOBS, self.values(), unsupported)
