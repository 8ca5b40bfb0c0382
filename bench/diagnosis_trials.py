"""Changes ordered on trial in bench/diagnosis.py: one that mends nothing, one that does harm."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from diagnosis_runs import house_of, play

from controlplane.demo.house import House
from controlplane.demo.pace import FAST
from controlplane.demo.play import Play
from controlplane.demo.scenarios import SCENARIOS, Scenario
from engine.replay import Status


@dataclass(frozen=True)
class Trial:
    """What is ordered while `scenario` plays: one of `changes`, drawn by the seed.

    `in_trouble`: once an incident is open. `verdicts` are the right ones.
    """

    scenario: Scenario
    changes: tuple[Mapping[str, int], ...]
    in_trouble: bool
    verdicts: tuple[str, ...]


def _endless(name: str) -> Scenario:
    """Its fault stays: no person comes."""
    scenario = SCENARIOS[name]
    return replace(scenario, events=scenario.events[:1], windows=40.0)


TRIALS = {
    # Far from what any of these requests reaches, so that nothing moves.
    "useless-change": Trial(
        _endless("slow-host"),
        ({"max_num_batched_tokens": 4096}, {"prefill_chunk_tokens": 1024}),
        in_trouble=True,
        verdicts=("inconclusive",),
    ),
    "harmful-change": Trial(
        Scenario("harmful-change", "", "", calm=0.5, load=0.5, windows=40.0),
        ({"max_num_seqs": 1}, {"max_num_seqs": 2}),
        in_trouble=False,
        verdicts=("worse",),
    ),
}


@dataclass
class Ordered:
    """Orders the change and watches it to its end; `over` for a Play.

    `applied_at`, `restored_at`: when the engine itself was seen with the new values, and with the
    old ones again (unix seconds, NaN while it was not).
    """

    house: House
    trial: Trial
    values: Mapping[str, int]
    before: dict[str, Any] = field(default_factory=dict)
    action: dict[str, Any] = field(default_factory=dict)
    applied_at: float = math.nan
    restored_at: float = math.nan

    def __call__(self, play: Play) -> bool:
        if not self.action:
            if not self.trial.in_trouble or play.anything("incidents", frozenset({"open"})):
                self.before = self.running()
                self.action = self.order()
            return False
        running = self.running()
        if math.isnan(self.applied_at):
            if running == self.values:
                self.applied_at = time.time()
        elif math.isnan(self.restored_at) and running == self.before:
            self.restored_at = time.time()
        self.action = self.house.api(f"actions/{self.action['id']}/")
        return bool(self.action["ended_at"])

    def running(self) -> dict[str, Any]:
        knobs = httpx.get(f"{self.house.engine_url}/v1/runtime_config", timeout=10).json()["knobs"]
        return {knob: knobs[knob]["value"] for knob in self.values}

    def order(self) -> dict[str, Any]:
        answer = httpx.post(
            f"{self.house.web_url}/api/v1/actions/",
            json={"engine": self.house.engine_name, "values": dict(self.values), "how": "trial",
                  "why": "somebody's idea"},
            headers={"Authorization": f"Bearer {self.house.secrets['api']}"},
            timeout=30,
        )  # fmt: skip
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body


def trial_run(name: str, seed: int, capacity: float, keep: Path | None) -> dict[str, Any]:
    trial = TRIALS[name]
    values = random.Random(seed).choice(trial.changes)
    with house_of(trial.scenario, keep) as house:
        ordered = Ordered(house, trial, values)
        _, summary = play(house, trial.scenario, seed, capacity, ordered)
        action = ordered.action
        lasted_s = ordered.restored_at - ordered.applied_at
        return {
            "kind": "trial",
            "name": name,
            "change": ", ".join(f"{k} {ordered.before.get(k)} → {v}" for k, v in values.items()),
            "state": action.get("state", "not ordered"),
            "verdict": action.get("verdict", ""),
            "lasted_s": lasted_s if not math.isnan(lasted_s) else 9999.0,
            # As the control plane gives an order with an incident twice the time.
            "ttl_s": FAST.ttl_s * (2 if trial.in_trouble else 1),
            "restored": ordered.running() == ordered.before,
            "because": action.get("sentence", ""),
            "against": [step["reason"] for step in action.get("transitions", [])],
            "lost": summary.counts[Status.LOST],
        }
