"""Load with the statistics of a public chat trace: when requests come, and how long they are.

Source: AzureLLMInferenceTrace_conv 2023 (Azure/AzurePublicDataset, CC-BY 4.0; Patel et al.,
"Splitwise", ISCA'24): 19,366 requests in 58 minutes, 5.53 a second. Fitted to it:
- within a minute, gaps are gamma with a coefficient of variation of 1.02;
- the rate of a minute varies by 0.22 of its mean and follows its neighbour with a correlation of
  0.85. Together they give the trace's 1.09 over all gaps;
- prompt and output lengths, nearly uncorrelated (-0.11), by the quantile tables below.
More load is more users: k times the trace's rate is k such crowds side by side, whose minutes vary
less, by the root of k. (A recorded trace is made faster instead, bursts and all: `read_azure_csv`.)
Lengths are divided by 8 and capped, so that a small model on a CPU keeps the trace's proportions:
118 prompt and 26 output tokens on average (the trace: 1,155 and 211; the cap shortens 14 % of the
prompts).

Imports no torch: the control plane's demo uses this module (replay.py sends what it draws).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.traces.formats import azure

GAP_CV = 1.02
RATE_CV = 0.22
RATE_CORRELATION = 0.85
RATE_WINDOW_S = 60.0
TRACE_REQUESTS_PER_S = 5.53
LENGTH_DIVISOR = 8
PROMPT_TOKENS_MAX = 256
OUTPUT_TOKENS_MAX = 128
QUANTILES = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
PROMPT_TOKENS = (
    *(2, 29, 181, 207, 387, 403, 703, 1020),
    *(1071, 1097, 1130, 1315, 2734, 4083, 4142, 14050),
)
OUTPUT_TOKENS = (7, 16, 41, 54, 77, 91, 103, 129, 177, 217, 384, 400, 424, 451, 601, 1000)

# A crowd that comes at once (an agent's fan-out, a mail to all): a quarter of the time.
BURST_PERIOD_S = 3.0
BURST_SHARE, BURST_LOAD = 0.25, 2.8
LULL_SHARE, LULL_LOAD = (0.5, 1.0), 0.4


@dataclass(frozen=True)
class Request:
    """When to send (seconds after the start) and how long prompt and answer are.

    `priority` is sent as x-priority; "": none is sent.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    id: str
    priority: str = ""

    def prompt(self) -> list[int] | None:
        """Token ids to send; None: as many letters, which the sender draws."""
        return None


def arrivals(seed: int, phases: Sequence[tuple[float, float]], *, name: str = "r") -> list[Request]:
    """Requests of consecutive (duration_s, requests_per_s) phases; the same for the same seed.

    The rate wanders and bursts as the trace's does, with exactly the mean asked for each phase
    (the count still varies as a renewal process does). Raises ValueError for what is no phase.
    """
    rng = np.random.default_rng(seed)
    times: list[np.ndarray] = []
    start, level = 0.0, float(rng.standard_normal())
    for duration_s, rate in phases:
        if not duration_s > 0 or not rate >= 0:
            raise ValueError(
                f"phase ({duration_s}, {rate}): allowed: seconds above 0 and requests/s from 0 on"
            )
        if rate > 0:
            at, level = _phase(rng, duration_s, rate, level)
            times.append(start + at)
        start += duration_s
    at_s = np.concatenate([*times, np.empty(0)])
    prompts = _lengths(rng, PROMPT_TOKENS, len(at_s), PROMPT_TOKENS_MAX)
    outputs = _lengths(rng, OUTPUT_TOKENS, len(at_s), OUTPUT_TOKENS_MAX)
    return [
        Request(at, prompt, output, f"{name}-{seed}-{i}")
        for i, (at, prompt, output) in enumerate(zip(at_s.tolist(), prompts, outputs, strict=True))
    ]


def bursts(
    seed: int, duration_s: float, rate: float, *, period_s: float = BURST_PERIOD_S
) -> list[tuple[float, float]]:
    """Phases for `arrivals` with `rate` requests/s on average, in bursts.

    One of BURST_SHARE × `period_s` at BURST_LOAD times the rate follows each lull of LULL_SHARE
    (uniform) × `period_s` at LULL_LOAD times: a crowd about every `period_s`.
    Not from the trace: its seconds are calmer (index of dispersion 1.4).
    """
    rng = np.random.default_rng([seed, 1])
    phases: list[tuple[float, float]] = []
    left = duration_s
    while left > 0:
        lull = float(rng.uniform(*LULL_SHARE))
        for share, load in ((lull, LULL_LOAD), (BURST_SHARE, BURST_LOAD)):
            seconds = share * period_s
            if left > 0:
                phases.append((min(seconds, left), load * rate))
                left -= seconds
    return phases


def _phase(
    rng: np.random.Generator, duration_s: float, rate: float, level: float
) -> tuple[np.ndarray, float]:
    """Arrival times of one phase, and the level of the rate at its end.

    Gaps of a unit-rate renewal process, stretched by the inverse of the integrated rate.
    """
    levels = []
    for noise in rng.standard_normal(math.ceil(duration_s / RATE_WINDOW_S)):
        level = RATE_CORRELATION * level + math.sqrt(1 - RATE_CORRELATION**2) * noise
        levels.append(level)
    crowds = max(1.0, rate / TRACE_REQUESTS_PER_S)
    sigma = math.sqrt(math.log1p(RATE_CV**2 / crowds))
    edges = np.minimum(np.arange(len(levels) + 1) * RATE_WINDOW_S, duration_s)
    load = np.exp(sigma * np.array(levels)) * np.diff(edges)
    expected = rate * duration_s
    passed = np.concatenate([[0.0], np.cumsum(load) / load.sum() * expected])
    count = int(expected + 10 * math.sqrt(expected) + 20)
    shape = GAP_CV**-2
    work = rng.gamma(shape, 1 / shape, count).cumsum()
    return np.interp(work[work < expected], passed, edges), level


def _lengths(rng: np.random.Generator, table: Sequence[int], count: int, maximum: int) -> list[int]:
    drawn = np.interp(rng.random(count), QUANTILES, table)
    lengths: list[int] = np.clip(np.rint(drawn / LENGTH_DIVISOR), 1, maximum).astype(int).tolist()
    return lengths


def read_azure_csv(
    path: Path, scale: float = 1.0, *, requests_max: int = 1_000_000
) -> list[Request]:
    """The published CSV (TIMESTAMP, ContextTokens, GeneratedTokens), `scale` times as fast.

    Lengths are divided by LENGTH_DIVISOR and capped as in `arrivals`. Raises TraceError.
    """
    if not scale > 0:
        raise ValueError(f"scale: got {scale}, allowed: above 0")
    requests: list[Request] = []
    first_us: int | None = None
    for row in azure(path):
        first_us = row.at_us if first_us is None else first_us
        prompt, output = (
            max(round(tokens / LENGTH_DIVISOR), 1)
            for tokens in (row.prompt_tokens, row.output_tokens)
        )
        requests.append(
            Request(
                at_s=(row.at_us - first_us) / 1e6 / scale,
                prompt_tokens=min(prompt, PROMPT_TOKENS_MAX),
                output_tokens=min(output, OUTPUT_TOKENS_MAX),
                id=f"azure-{row.number - 1}",
            )
        )
        if len(requests) >= requests_max:
            break
    return requests
