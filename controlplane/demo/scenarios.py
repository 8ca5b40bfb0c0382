"""The stories `trimtab demo --scenario NAME` plays: what arrives, what goes wrong, what to watch.

Each begins with the same quiet traffic. `load` then arrives, as shares of what this machine's
engine sustains, and the events happen, counted in control windows from there. Whatever is broken is
mended at last, as a person would, so that every story ends. The control plane is told nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from controlplane.demo.supervisor import Supervisor
from engine.load import OUTPUT_TOKENS_MAX, Request, arrivals, bursts

Deed = Callable[[Supervisor], object]

CALM = 0.4
SUPPLY_PER_S = 2000.0
MENDED_WINDOWS = 20.0
CAP_BY_HAND = 2  # running requests: far fewer than the quiet traffic needs
LONG_PROMPT_TOKENS = 1200
LONG_ANSWERS = 6  # times as long as usual; capped as usual: 94 tokens on average instead of 26
# Little asked and much told: steps that only decode, which is what a captured graph is for.
ASKED_TOKENS, TOLD_TOKENS = 8, 256
# As somebody promises who speaks while it is generated: 3 % of a window's gaps are bad enough.
SPOKEN = {
    "slug": "chat-gap",
    "name": "Gap between tokens within 50 ms",
    "service": "chat",
    "indicator": "latency",
    "spec": {
        "source": "metric",
        "metric": "vllm:inter_token_latency_seconds",
        "threshold_ms": 50,
    },
    "target": 0.99,
    "fast_burn": 3.0,
}
# A whole prompt in one step serves the most tokens a second, while nobody asks with a long one.
THROUGHPUT_FIRST = {"prefill_chunk_tokens": 2048}
# Half of 96 blocks still serve nine tenths of what they all do, half of these two thirds.
SMALL_POOL = ("--model-len-max", "448", "--kv-pool-blocks", "56")
# KV memory as before PagedAttention. Nine requests fit in, and while all ask for as much, whoever
# ends leaves a run that fits the next; a long one needs half of the pool in one run, for a moment.
RUNS = {"kv_allocator": "contiguous"}
POOL_OF_RUNS = ("--kv-pool-blocks", "160")
LABEL_TOKENS = 8


@dataclass(frozen=True)
class Event:
    """Done `after_windows` control windows after the shift; `on_trial`: once, from then on, a
    change is on trial as well."""

    what: str
    do: Deed
    after_windows: float = 0.0
    on_trial: bool = False


@dataclass(frozen=True)
class Scenario:
    """`calm` and, after the shift, `load` are shares of what a house sustains of requests as they
    are before the shift; it lasts `windows` at most. With `crowd_every_s` requests come in crowds
    after the shift (engine.load.bursts).

    `long_prompts` is the share of requests that ask with LONG_PROMPT_TOKENS after the shift, and
    are told `long_told` tokens, as usual where that is 0; answers are `answers` times as long then,
    up to OUTPUT_TOKENS_MAX; with `decode_bound` all ask with ASKED_TOKENS and are told TOLD_TOKENS.
    `tiers` are the shares of the priorities sent.
    `knobs` is how the engine was set up, and `promises` are objectives, besides those of every
    demo. `cause` is what a right explanation names first; "" where nothing is to be explained.
    Only benches compare with it, afterwards.
    """

    name: str
    about: str
    watch_for: str
    events: tuple[Event, ...] = ()
    calm: float = CALM
    load: float = CALM
    crowd_every_s: float = 0.0
    long_prompts: float = 0.0
    long_told: int = 0
    answers: int = 1
    decode_bound: bool = False
    tiers: Mapping[str, float] = field(default_factory=dict)
    engine_options: tuple[str, ...] = ()
    knobs: Mapping[str, Any] = field(default_factory=dict)
    promises: tuple[Mapping[str, Any], ...] = ()
    windows: float = 40.0
    cause: str = ""

    def requests(self, seed: int, capacity: float, quiet_s: float, story_s: float) -> list[Request]:
        """The quiet traffic, then the story's; the same for the same seed."""
        rate = self.load * capacity
        shifted = [(story_s, rate)]
        if self.crowd_every_s:
            shifted = bursts(seed, story_s, rate, period_s=self.crowd_every_s)
        plain = self._drawn([(quiet_s, self.calm * capacity), *shifted], seed)
        rng = np.random.default_rng([seed, 2])
        long = rng.random(len(plain)) < self.long_prompts
        tiers = drawn_from(rng, self.tiers, len(plain))
        return [
            replace(self._shifted(request, is_long) if request.at_s >= quiet_s else request,
                    priority=tier)
            for request, is_long, tier in zip(plain, long, tiers, strict=True)
        ]  # fmt: skip

    def supply(self, seconds: float) -> list[Request]:
        """Requests as before the shift, more than any engine answers in that time."""
        return self._drawn([(seconds, SUPPLY_PER_S)], seed=0)

    def _drawn(self, phases: Sequence[tuple[float, float]], seed: int) -> list[Request]:
        drawn = arrivals(seed, phases, name=self.name)
        if not self.decode_bound:
            return drawn
        return [
            replace(each, prompt_tokens=ASKED_TOKENS, output_tokens=TOLD_TOKENS) for each in drawn
        ]

    def _shifted(self, request: Request, is_long: bool) -> Request:
        if is_long:
            told = self.long_told or request.output_tokens
            request = replace(request, prompt_tokens=LONG_PROMPT_TOKENS, output_tokens=told)
        if self.answers == 1:
            return request
        tokens = min(self.answers * request.output_tokens, OUTPUT_TOKENS_MAX)
        return replace(request, output_tokens=tokens)


def drawn_from(rng: np.random.Generator, shares: Mapping[str, float], count: int) -> list[str]:
    if not shares:
        return [""] * count
    drawn: list[str] = rng.choice(list(shares), count, p=list(shares.values())).tolist()
    return drawn


def fault(name: str, **how: Any) -> Deed:
    return lambda supervisor: supervisor.house.break_engine(name, **how)


def by_hand(values: dict[str, Any]) -> Deed:
    return lambda supervisor: supervisor.house.configure(values, by="night-shift")


def kill(victim: str) -> Deed:
    return lambda supervisor: supervisor.kill(victim)


def mended(what: str) -> Event:
    return Event(what, fault("none"), after_windows=MENDED_WINDOWS)


EDIT = Event(
    f"A hand sets max_num_seqs to {CAP_BY_HAND} on the engine itself.",
    by_hand({"max_num_seqs": CAP_BY_HAND}),
)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "burst",
            "Requests come in crowds, and ask for longer answers.",
            "First tokens come late behind the running cap; the cap goes up and stays there if "
            "fewer are late.",
            # Long answers hold their places, so that the cap decides and not the machine's speed,
            # which may be another than when it was measured (docs/results.md).
            calm=0.35,
            load=0.35,
            crowd_every_s=5.0,
            answers=LONG_ANSWERS,
            cause="running_cap_too_small",
        ),
        Scenario(
            "long-prompts",
            f"A third of the requests ask with {LONG_PROMPT_TOKENS:,} tokens from now on.",
            "The gaps between tokens grow while prompts share the steps; fewer prompt tokens may "
            "share one.",
            calm=0.15,  # so many tokens a second are two thirds of what the engine computes
            load=0.15,
            long_prompts=0.33,
            knobs=THROUGHPUT_FIRST,
            promises=(SPOKEN,),
            cause="batch_too_large",
        ),
        Scenario(
            "capture-lost",
            "The engine loses its captured graphs and cannot build them again.",
            "Steps of decode alone take half as long again; the cause names the graphs, not the "
            "load, and no knob is turned.",
            events=(
                Event("The captured graphs are dropped.", fault("capture_lost")),
                mended("A person mends the engine: graphs are captured again."),
            ),
            # Without graphs it serves two thirds of that; of shorter answers it would serve more.
            decode_bound=True,
            calm=0.75,
            load=0.75,
            cause="graph_capture_lost",
        ),
        Scenario(
            "kv-pool-halved",
            "Half of the blocks of a small KV pool are taken away.",
            "Running requests are sent back and others wait for memory; no knob is turned, as the "
            "pool holds what it holds: the message says what would help.",
            events=(
                Event("Half of the KV pool's blocks are taken away.", fault("kv_pool_halved")),
                mended("A person gives the blocks back."),
            ),
            # Half of the pool serves two thirds of what all of it does.
            calm=0.75,
            load=0.75,
            engine_options=SMALL_POOL,
            cause="kv_pool_exhausted",
        ),
        Scenario(
            "kv-fragmented",
            f"One request in five brings {LONG_PROMPT_TOKENS:,} tokens to be labelled; the engine "
            "gives each one run of KV memory for all it may become.",
            "Requests wait for a free run long enough while memory enough is free, but apart; what "
            "runs is moved together from then on, and stays so if fewer are late.",
            decode_bound=True,
            calm=0.5,
            load=0.55,
            long_prompts=0.2,
            long_told=LABEL_TOKENS,
            engine_options=POOL_OF_RUNS,
            knobs=RUNS,
            cause="kv_fragmentation",
        ),
        Scenario(
            "slow-host",
            "Other processes take the CPU of the engine's step thread.",
            "Steps take longer at the same tokens; no knob is turned, the message says where to "
            "look.",
            events=(
                Event("Two busy processes share the engine's CPU.", fault("slow_host")),
                mended("A person ends the busy processes."),
            ),
            calm=0.5,
            load=0.5,
            cause="slow_host",
        ),
        Scenario(
            "hand-edit",
            "Somebody changes a setting on the engine itself, past Trimtab.",
            "The edit is named with who and when, and put back to the very value.",
            events=(EDIT,),
            calm=0.5,
            load=0.5,
            cause="config_changed_by_hand",
        ),
        Scenario(
            "overload",
            "More arrives than the engine serves at any setting, of four priorities.",
            "Infeasible, said so; the low tiers get 429 and the others first tokens in time.",
            load=1.6,
            tiers={"low": 0.4, "normal": 0.3, "high": 0.2, "realtime": 0.1},
            windows=24,
            cause="load_beyond_capacity",
        ),
        Scenario(
            "engine-killed",
            "The engine is killed under load and started again.",
            "Requests it held fail at once and are counted as interrupted; its configuration is "
            "as it was.",
            events=(Event("The engine is killed.", kill("engine")),),
            windows=20,
        ),
        Scenario(
            "agent-killed",
            "The agent is killed while a change is on trial and started again.",
            "The trial comes to its end, kept or undone; the agent's journal knows which.",
            events=(
                EDIT,
                Event("The agent is killed, mid-action.", kill("agent"), on_trial=True),
            ),
            calm=0.5,
            load=0.5,
        ),
        Scenario(
            "control-plane-killed",
            "The control plane is killed while a change is on trial and started again.",
            "The trial comes to its end, by the control plane or by the agent's own timer.",
            events=(
                EDIT,
                Event(
                    "The control plane is killed, mid-trial.", kill("control-plane"), on_trial=True
                ),
            ),
            calm=0.5,
            load=0.5,
        ),
    )
}
