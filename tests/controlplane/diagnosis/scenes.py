"""Faults as changes of a plant's mechanics, and what a cause is shown of them.

Each scene is three quiet minutes and one of trouble. Nothing here tells a cause what was done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from controlplane.diagnosis.cause import causes
from controlplane.diagnosis.ranking import Ranking, rank
from controlplane.diagnosis.scene import EngineFacts, ObjectiveFacts, Scene
from controlplane.diagnosis.staging import changes_of, reference_of
from slo.indicator import indicators
from tests.controlplane.plant import START, Plant
from tracing.types import Grid

TTFT = ObjectiveFacts(
    "ttft",
    "TTFT within 500 ms",
    "latency",
    {"source": "metric", "metric": "vllm:time_to_first_token_seconds", "threshold_ms": 500},
    0.95,
    500,
)
GAP = ObjectiveFacts(
    "itl",
    "token gap within 20 ms",
    "latency",
    {"source": "metric", "metric": "vllm:inter_token_latency_seconds", "threshold_ms": 20},
    0.95,
    20,
)
ANSWERED = ObjectiveFacts(
    "answered", "Requests answered", "success", indicators()["success"].clean({}), 0.99, None
)
QUIET_S, BAD_S = 180.0, 60.0


def plant(seed: int = 1, *, cap: int = 32, **mechanics: Any) -> Plant:
    made = Plant(seed=seed, **mechanics)
    made.values["max_num_seqs"] = cap
    return made


# Little asked and much told: they hold their memory long, and eight of them lie side by side in it.
TOLD_MUCH = {"prompt": 8, "output": 128, "rate": 8.0, "kv_tokens": 1280}
# From now on one in five needs half of the pool in one run, for a moment.
MIXED = {"long_share": 0.2, "long": (600, 8)}


def contiguous(seed: int = 1, *, compacted: bool = False, **mechanics: Any) -> Plant:
    """Each request has one run of blocks for all it may become."""
    made = plant(seed, **TOLD_MUCH | mechanics)
    values = {"kv_allocator": "contiguous", "kv_compaction": "on" if compacted else "off"}
    made.apply(values, by="set-up")
    return made


def scene(
    plant: Plant, objective: ObjectiveFacts, *, window_s: float = 15.0, bad_s: float = BAD_S
) -> Scene:
    """Three quiet minutes and one of trouble, up to now."""
    bad_since = START + timedelta(seconds=QUIET_S)
    end = bad_since + timedelta(seconds=bad_s)
    engine = EngineFacts(
        plant.name, plant.service, dict(plant.values), plant.knobs(), plant.config_version
    )
    changes = changes_of(plant.store, engine, Grid(START, end, window_s))
    onset = bad_since - timedelta(seconds=window_s)
    return Scene(
        reader=plant.store,
        now=plant.now,
        engine=engine,
        objective=objective,
        bad_since=bad_since,
        incident=Grid(bad_since, end, window_s),
        reference=reference_of(START, onset, window_s, changes),
        changes=changes,
    )


def trouble(plant: Plant, **changes: Any) -> Plant:
    """Three quiet minutes, then the mechanics change, then a bad minute."""
    return trouble_by(plant, lambda p: p.__dict__.update(changes))


def trouble_by(plant: Plant, fault: Callable[[Plant], object]) -> Plant:
    plant.run_until(QUIET_S)
    fault(plant)
    plant.run_until(QUIET_S + BAD_S + 1)
    return plant


def examined(plant: Plant, objective: ObjectiveFacts) -> Ranking:
    shown = scene(plant, objective)
    return rank([cause.examine(shown) for cause in causes().values()])


@dataclass(frozen=True, eq=False)
class Fault:
    """A plant, what happens to it, and the cause that must come first."""

    name: str
    cause: str
    objective: ObjectiveFacts
    make: Callable[[int], Plant]
    happens: Callable[[Plant], object]

    def run(self, seed: int) -> Plant:
        return trouble_by(self.make(seed), self.happens)


def _set(**mechanics: Any) -> Callable[[Plant], object]:
    return lambda p: p.__dict__.update(mechanics)


def _edit(**values: Any) -> Callable[[Plant], object]:
    return lambda p: p.apply(values, by="alice")


def _too_many(**values: Any) -> Callable[[Plant], object]:
    """More than it serves at any setting, until low tiers are turned away; a queue is left."""

    def happens(p: Plant) -> None:
        p.rate = 140.0
        p.run_until(QUIET_S + 4)
        p.apply(values)

    return happens


FAULTS = (
    Fault(
        "more arrives than the cap lets run",
        "running_cap_too_small",
        TTFT,
        lambda seed: plant(seed, cap=8),
        _set(rate=45.0),
    ),
    Fault(
        "long prompts",
        "batch_too_large",
        GAP,
        lambda seed: plant(seed, rate=4.0, output=60),
        _set(prompt=2000, rate=6.0),
    ),
    Fault(
        "long prompts, whose tokens cost the more the more come before them",
        "batch_too_large",
        GAP,
        lambda seed: plant(seed, rate=12.0, output=26, a=0.001, b=0.00004, k=8e-8, between=0.001),
        _set(prompt=1000, rate=7.0),
    ),
    Fault(
        "more long prompts than it can compute",
        "load_beyond_capacity",
        TTFT,
        lambda seed: plant(seed, rate=12.0, output=26, a=0.001, b=0.00004, k=8e-8, between=0.001),
        _set(prompt=1600, rate=14.0),
    ),
    Fault(
        "many decode together",
        "batch_too_large",
        GAP,
        lambda seed: plant(seed, cap=256, rate=8.0, prompt=10, output=100, c=0.0006),
        _set(rate=15.0),
    ),
    Fault(
        "half of the KV pool is gone",
        "kv_pool_exhausted",
        TTFT,
        lambda seed: plant(seed, cap=64, rate=28.0, output=80, kv_tokens=6400),
        _set(kv_tokens=2400),
    ),
    Fault(
        "longer answers than the KV pool holds",
        "kv_pool_exhausted",
        TTFT,
        lambda seed: plant(seed, cap=64, rate=12.0, output=60, kv_tokens=4000),
        _set(output=240, prompt=160),
    ),
    Fault(
        "long prompts among short ones, in a pool of runs",
        "kv_fragmentation",
        TTFT,
        contiguous,
        _set(**MIXED),
    ),
    Fault(
        "the graph is lost",
        "graph_capture_lost",
        GAP,
        lambda seed: plant(seed, rate=20.0, eager_s=0.015),
        _set(captured=False),
    ),
    Fault(
        "the graph is lost under a load it carried",
        "graph_capture_lost",
        TTFT,
        lambda seed: plant(seed, rate=25.0, eager_s=0.015),
        _set(captured=False),
    ),
    Fault("a slow host", "slow_host", GAP, lambda seed: plant(seed, rate=15.0), _set(slow=4.0)),
    Fault(
        "a slow host, and a queue for it",
        "slow_host",
        TTFT,
        lambda seed: plant(seed, cap=16, rate=25.0),
        _set(slow=2.5),
    ),
    Fault(
        "twice the load it can serve",
        "load_beyond_capacity",
        TTFT,
        lambda seed: plant(seed, rate=25.0),
        _set(rate=140.0),
    ),
    Fault(
        "a quarter more than it can serve, much of whose time lies between its steps",
        "load_beyond_capacity",
        TTFT,
        lambda seed: plant(seed, rate=25.0, a=0.001, between=0.003),
        _set(rate=85.0),
    ),
    Fault(
        "a load beyond any cap, under a small one",
        "load_beyond_capacity",
        TTFT,
        lambda seed: plant(seed, cap=8, rate=15.0),
        _set(rate=120.0),
    ),
    Fault(
        "low tiers turned away from a load beyond capacity, whose queue is there still",
        "shed_by_priority",
        ANSWERED,
        lambda seed: plant(seed, rate=25.0, priorities={0: 0.4, 1: 0.3, 2: 0.3}),
        _too_many(shed_below_priority=2),
    ),
    Fault(
        "low tiers turned away by hand",
        "config_changed_by_hand",
        ANSWERED,
        lambda seed: plant(seed, rate=25.0, priorities={0: 0.4, 1: 0.3, 2: 0.3}),
        _edit(shed_below_priority=1),
    ),
    Fault(
        "the cap lowered by hand",
        "config_changed_by_hand",
        TTFT,
        lambda seed: plant(seed, rate=35.0),
        _edit(max_num_seqs=4),
    ),
    Fault(
        "the chunk raised by hand",
        "config_changed_by_hand",
        GAP,
        lambda seed: plant(seed, rate=5.0, prompt=1500, b=0.00004),
        _edit(prefill_chunk_tokens=2048),
    ),
    Fault(
        "runs no longer moved together, by hand",
        "config_changed_by_hand",
        TTFT,
        lambda seed: contiguous(seed, compacted=True, **MIXED),
        _edit(kv_compaction="off"),
    ),
    Fault(
        "capture turned off by hand",
        "config_changed_by_hand",
        GAP,
        lambda seed: plant(seed, rate=20.0, eager_s=0.015),
        _edit(graph_capture="off"),
    ),
)


def _both(*faults: Callable[[Plant], object]) -> Callable[[Plant], object]:
    return lambda p: [fault(p) for fault in faults]


# Two things go wrong at once, neither of which brings the other's signs by itself.
PAIRS = (
    (
        {"graph_capture_lost", "running_cap_too_small"},
        TTFT,
        lambda seed: plant(seed, cap=8, rate=12.0, eager_s=0.006),
        _set(captured=False, rate=38.0),
    ),
    (
        {"slow_host", "kv_pool_exhausted"},
        TTFT,
        lambda seed: plant(seed, cap=64, rate=18.0, output=80, kv_tokens=6400),
        _set(slow=1.6, kv_tokens=2000),
    ),
    (
        {"slow_host", "config_changed_by_hand"},
        TTFT,
        lambda seed: plant(seed, rate=25.0),
        _both(_set(slow=2.0), _edit(max_num_seqs=4)),
    ),
    (
        {"kv_pool_exhausted", "graph_capture_lost"},
        TTFT,
        lambda seed: plant(seed, cap=64, rate=18.0, output=80, kv_tokens=6400, eager_s=0.008),
        _set(captured=False, kv_tokens=2000),
    ),
)
