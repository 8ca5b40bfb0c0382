"""What can be changed of a router while it serves: its registry of knobs, one weight per engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.knobs import Knob, Value, checked
from engine.router.config import WEIGHT_MAX, Upstream

POLICIES = ("least_loaded", "prefix", "round_robin", "session")
WEIGHT = "weight."  # and the engine's name

KNOBS: tuple[Knob, ...] = (
    Knob(
        name="policy",
        unit="",
        default="prefix",
        ladder=POLICIES,
        help="Who gets a request: session, the engine that its session is on; prefix, also the one "
        "that knows most of its prompt's beginning; least_loaded; round_robin, by turns.",
    ),
    Knob(
        name="load_bound_percent",
        unit="%",
        minimum=100,
        maximum=1000,
        default=125,
        ladder=(110, 125, 150, 200, 400),
        help="Of its share of all load: an engine that holds more is passed over.",
    ),
    Knob(
        name="hot_bound_percent",
        unit="%",
        minimum=100,
        maximum=1000,
        default=150,
        ladder=(125, 150, 200, 400),
        help="The same for a session that is on that engine, or a prompt half of which is.",
    ),
    Knob(
        name="resident_s",
        unit="s",
        minimum=0,
        maximum=3600,
        default=300,
        ladder=(0, 60, 300, 900, 3600),
        help="How long after its last request a session, or a prompt's beginning, counts as there.",
    ),
    Knob(
        name="breaker_error_percent",
        unit="%",
        minimum=1,
        maximum=100,
        default=8,
        ladder=(2, 4, 8, 16, 32),
        help="An engine of whose requests more went wrong is taken out.",
    ),
    Knob(
        name="breaker_window_s",
        unit="s",
        minimum=1,
        maximum=300,
        default=30,
        ladder=(10, 30, 60),
        help="Over which time they are counted.",
    ),
    Knob(
        name="breaker_requests_min",
        unit="requests",
        minimum=1,
        maximum=10_000,
        default=20,
        ladder=(5, 20, 50),
        help="How many of them have to be there before a share of them says anything.",
    ),
    Knob(
        name="breaker_open_ms",
        unit="ms",
        minimum=100,
        maximum=300_000,
        default=10_000,
        ladder=(1000, 5000, 10_000, 30_000),
        help="How long an engine that was taken out is left alone before it is tried.",
    ),
    Knob(
        name="health_interval_ms",
        unit="ms",
        minimum=100,
        maximum=60_000,
        default=5000,
        ladder=(1000, 2000, 5000, 10_000),
        help="How often each engine is asked whether it is well, and how much it has to do.",
    ),
    Knob(
        name="retries",
        unit="",
        default="on",
        ladder=("off", "on"),
        help="Try another engine, once, where the first provably did not begin.",
    ),
    Knob(
        name="max_in_flight",
        unit="requests",
        minimum=1,
        maximum=100_000,
        default=1024,
        ladder=(64, 256, 1024, 4096),
        help="Requests under way, over all engines; the next is answered 429.",
    ),
)


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
