"""What each step took, phase by phase: added up for all, kept where they are sampled or watched.

schedule   who runs, in which blocks
prepare    the step's arrays
forward    the model, and where it is captured or greedy the choice of the tokens
sample     tokens drawn at a temperature, and near ties decided
hand_out   books kept, tokens given to the event loop
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

PHASES = ("schedule", "prepare", "forward", "sample", "hand_out")
SAMPLED_EVERY_S = 0.5
WATCHED_MAX = 1000
WATCH_S_MAX = 60.0


class StepTimes(NamedTuple):
    """One step. Times are monotonic seconds: its beginning, and the end of each of PHASES.

    `mode` is how the model ran: compiled, graph or eager.
    """

    number: int
    began: float
    scheduled: float
    prepared: float
    forwarded: float
    sampled: float
    handed_out: float
    decode_requests: int
    prompt_chunks: int
    prompt_tokens: int
    waiting: int
    mode: str
    config_version: int

    @property
    def tokens(self) -> int:
        return self.decode_requests + self.prompt_tokens

    @property
    def phases_s(self) -> tuple[float, ...]:
        """Seconds of each of PHASES."""
        return tuple(after - before for before, after in pairwise(self[1:7]))


@dataclass
class Watch:
    """The next `wanted` steps, as they come."""

    wanted: int
    steps: list[StepTimes] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.steps) >= self.wanted

    def told(self) -> dict[str, Any]:
        """For reading: seconds, from the beginning of the first step on."""
        start = self.steps[0].began if self.steps else 0.0
        return {
            "complete": self.complete,
            "steps": [
                {
                    "began_s": step.began - start,
                    "total_s": step.handed_out - step.began,
                    "phases_s": dict(zip(PHASES, step.phases_s, strict=True)),
                    **facts(step),
                }
                for step in self.steps
            ],
        }

    def chrome(self) -> dict[str, Any]:
        """For chrome://tracing or Perfetto: an event a step, and below it one a phase."""
        events: list[dict[str, Any]] = []
        for step in self.steps:
            events.append(event("step", step.began, step.handed_out, facts(step)))
            for phase, (began, ended) in zip(PHASES, pairwise(step[1:7]), strict=True):
                events.append(event(phase, began, ended, {}))
        return {"displayTimeUnit": "ms", "traceEvents": events}


def facts(step: StepTimes) -> dict[str, int | str]:
    return {
        "number": step.number,
        "decode_requests": step.decode_requests,
        "prompt_chunks": step.prompt_chunks,
        "prompt_tokens": step.prompt_tokens,
        "waiting": step.waiting,
        "mode": step.mode,
        "config_version": step.config_version,
    }


def event(name: str, began: float, ended: float, args: dict[str, int | str]) -> dict[str, Any]:
    """A complete event of the Trace Event Format, in its microseconds."""
    times = {"ts": began * 1e6, "dur": (ended - began) * 1e6}
    return {"name": name, "ph": "X", "pid": 1, "tid": 1, **times, "args": args}


class Steps:
    """Adds up steps; of the step thread, but for `watch`, which any thread may set.

    `phase_s`: seconds of each of PHASES, since the start. `watch` is None, or gets each step until
    it is complete.
    """

    def __init__(self) -> None:
        self.phase_s = [0.0] * len(PHASES)
        self.sampled_at = 0.0
        self.watch: Watch | None = None

    def due(self, now: float) -> bool:
        """Whether the step that ended now is a sampled one: the first after SAMPLED_EVERY_S.

        So a step that takes longer than that always is, and the first after a rest.
        """
        if now - self.sampled_at < SAMPLED_EVERY_S:
            return False
        self.sampled_at = now
        return True

    def add(self, step: StepTimes) -> None:
        for i, seconds in enumerate(step.phases_s):
            self.phase_s[i] += seconds
        if (watch := self.watch) is not None:
            watch.steps.append(step)
            if watch.complete:
                self.watch = None
