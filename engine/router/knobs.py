"""What can be changed of a router while it serves: its registry of knobs, one weight per engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.knobs import Knob, Value, checked
from engine.router.config import WEIGHT_MAX, Upstream

POLICIES = ("least_loaded", "prefix", "round_robin", "session")
WEIGHT = "weight."  # and the engine's name

# name, unit, default, ladder, help, least and most.
KNOBS: tuple[Knob, ...] = (
    Knob("policy", "", "prefix", POLICIES,
         "Who gets a request: session, the engine its session is on; prefix, also the one that has "
         "most of its prompt's beginning; least_loaded; round_robin, by turns."),
    Knob("load_bound_percent", "%", 125, (110, 125, 150, 200, 400),
         "Of its share of all load: an engine that holds more is passed over.", 100, 1000),
    Knob("hot_bound_percent", "%", 150, (125, 150, 200, 400),
         "The same for a session that is on it, or a prompt at least half of which is.", 100, 1000),
    Knob("resident_s", "s", 300, (0, 60, 300, 900, 3600),
         "How long a session, or a prompt's beginning, counts as there after its last request.",
         0, 3600),
    Knob("breaker_error_percent", "%", 8, (2, 4, 8, 16, 32),
         "An engine of whose requests more went wrong is taken out.", 1, 100),
    Knob("breaker_window_s", "s", 30, (10, 30, 60),
         "Over which time they are counted.", 1, 300),
    Knob("breaker_requests_min", "requests", 20, (5, 20, 50),
         "How many there have to be before a share of them says anything.", 1, 10_000),
    Knob("breaker_open_ms", "ms", 10_000, (1000, 5000, 10_000, 30_000),
         "How long an engine that was taken out is left alone before it is tried.", 100, 300_000),
    Knob("health_interval_ms", "ms", 5000, (1000, 2000, 5000, 10_000),
         "How often an engine is asked whether it is well, and how much it has to do.",
         100, 60_000),
    Knob("retries", "", "on", ("off", "on"),
         "Try another engine, once, where the first provably did not begin."),
    Knob("max_in_flight", "requests", 1024, (64, 256, 1024, 4096),
         "Requests under way, over all engines; the next is answered 429.", 1, 100_000),
)  # fmt: skip


@dataclass(frozen=True)
class RouterSettings:
    """The values of one config_version; never changed, only replaced."""

    knobs: Mapping[str, Knob]
    chosen: Mapping[str, Value]

    @staticmethod
    def of(engines: Sequence[Upstream]) -> RouterSettings:
        """The defaults, and the weights the engines were given at the start."""
        weights = tuple(
            Knob(
                name=WEIGHT + engine.name,
                unit="",
                minimum=0,
                maximum=WEIGHT_MAX,
                default=engine.weight,
                ladder=(0, 5, 10, 20, 50, 80, 100),
                help="Its part of all requests, beside the others' weights. 0: it drains.",
            )
            for engine in engines
        )
        knobs = {knob.name: knob for knob in (*KNOBS, *weights)}
        return RouterSettings(knobs, {knob.name: knob.default for knob in knobs.values()})

    def replaced(self, values: Mapping[str, Any]) -> RouterSettings:
        """A copy with `values` taken over; raises UnknownKnob or OutOfBounds, changes nothing."""
        return RouterSettings(self.knobs, {**self.chosen, **checked(self.knobs, values)})

    def values(self) -> dict[str, Value]:
        return dict(self.chosen)

    def number(self, knob: str) -> int:
        value = self.chosen[knob]
        assert isinstance(value, int), knob
        return value

    def word(self, knob: str) -> str:
        value = self.chosen[knob]
        assert isinstance(value, str), knob
        return value

    def weight(self, engine: str) -> int:
        return self.number(WEIGHT + engine)
