"""One request as the engine sees it: what was asked, where it stands, when things happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from engine.kv.prefix import Chain


class Finish(StrEnum):
    """How a request ended; the first three are vLLM's `finished_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


PRIORITIES = ("low", "normal", "high", "realtime")  # x-priority 0 … 3
NORMAL = PRIORITIES.index("normal")


@dataclass(eq=False)
class Request:
    """Times are monotonic seconds, 0.0 while it has not happened. `row` is -1 while it waits.

    `tokens` (int64) is the prompt, and after a preemption also what was generated before it.
    `salt` sets its cached KV apart from that of other salts; `chain` is its place in the prefix
    cache, `cached_tokens` how many of its prompt it found there. `stream` is where its tokens go;
    the scheduler never looks into it.
    """

    id: str
    tokens: np.ndarray
    max_tokens: int
    arrived: float
    ignore_eos: bool = False
    stop: tuple[bytes, ...] = ()
    temperature: float = 0.0
    generator: np.random.Generator | None = None
    stream: Any = None
    parent: str = ""
    priority: int = NORMAL
    salt: str = ""
    prompt_tokens: int = field(init=False)
    limit: int = field(init=False)
    row: int = -1
    chain: Chain | None = None
    cached_tokens: int = 0
    generated: int = 0
    preemptions: int = 0
    chunks: list[tuple[float, float, int]] = field(default_factory=list)  # began, ended, tokens
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    finish: Finish | None = None
    error: str = ""
    error_code: str = "engine_error"
    config_version: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.limit = self.prompt_tokens + self.max_tokens

    @property
    def queue_s(self) -> float:
        return (self.scheduled or self.finished) - self.arrived

    @property
    def prefill_s(self) -> float:
        return (self.first_token or self.finished) - self.scheduled if self.scheduled else 0.0

    @property
    def decode_s(self) -> float:
        return self.finished - self.first_token if self.first_token else 0.0

    @property
    def time_per_output_token_s(self) -> float:
        """Mean gap after the first token; 0 when there was at most one (as vLLM)."""
        return self.decode_s / (self.generated - 1) if self.generated > 1 else 0.0
