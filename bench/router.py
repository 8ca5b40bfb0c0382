"""What does a router add to a request? The same requests to an engine, directly and through one.

    python bench/router.py [--rounds N]

By turns, one request at a time: one token as a whole answer, and 64 tokens streamed. Medians of the
time at the client with 95 % intervals of their difference, and the CPU time of the router.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack

import httpx
import numpy as np
import psutil
from failover import Process, ended, engine
from plant import cpu_s, say, verdict

REQUESTS = 20  # of a round and a way
RESAMPLES = 2000
ADDED_MS_MAX = 5.0
KINDS = {
    "whole": {"prompt": "hello there", "max_tokens": 1},
    "streamed": {"prompt": "hello there", "max_tokens": 64, "stream": True},
}


def timed(client: httpx.Client, body: dict[str, object]) -> float:
    """Milliseconds of one request."""
    began = time.perf_counter()
    answer = client.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    answer.raise_for_status()
    return (time.perf_counter() - began) * 1e3


def added(direct: np.ndarray, through: np.ndarray) -> tuple[float, float, float]:
    """The difference of the medians, and its 95 % interval (bootstrap)."""
    draw = np.random.default_rng(0)

    def medians(values: np.ndarray) -> np.ndarray:
        rows = draw.integers(0, len(values), (RESAMPLES, len(values)))
        found: np.ndarray = np.median(values[rows], axis=1)
        return found

    low, high = np.quantile(medians(through) - medians(direct), [0.025, 0.975])
    return float(np.median(through) - np.median(direct)), float(low), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    passed = []
    with ExitStack() as stack:
        a = stack.enter_context(ended(engine("a")))
        command = ("engine.router", "--port", "0", "--engine", a.url)
        door = stack.enter_context(ended(Process(*command)))
        router = psutil.Process(door.process.pid)
        direct, through = (
            stack.enter_context(httpx.Client(base_url=url, timeout=60)) for url in (a.url, door.url)
        )
        for kind, body in KINDS.items():
            times: dict[httpx.Client, list[float]] = {direct: [], through: []}
            used = 0.0
            for client in times:
                timed(client, body)
            for _ in range(rounds):
                for client, found in times.items():
                    before = cpu_s(router)
                    found += [timed(client, body) for _ in range(REQUESTS)]
                    used += (cpu_s(router) - before) * (client is through)
            middle, low, high = added(np.array(times[direct]), np.array(times[through]))
            say(
                f"{kind}: {np.median(times[direct]):.2f} ms directly, "
                f"{np.median(times[through]):.2f} through; {middle:+.2f} ms ({low:+.2f} to "
                f"{high:+.2f}); {used / rounds / REQUESTS * 1e3:.2f} ms of the router's CPU"
            )
            passed.append(verdict(f"{kind}_added_ms", middle, f"<= {ADDED_MS_MAX:g}",
                                  middle <= ADDED_MS_MAX))  # fmt: skip
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
