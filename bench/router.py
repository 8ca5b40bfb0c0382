"""What does a router add to a request? The same requests to an engine, directly and through one.

    python bench/router.py [--rounds N]

By turns, one request at a time: one token as a whole answer, then 64 tokens streamed, of which the
time to the first and the time of each further one are told. Medians at the client with 95 %
intervals of their difference, and the CPU time of the router. Passed is what adds at most 1 % of
the demo's promises: 500 ms to the first token, 100 ms for a further one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from contextlib import ExitStack

import httpx
import numpy as np
import psutil
from failover import Process, ended, engine
from plant import cpu_s, say, verdict

REQUESTS = 20  # of a round, a kind and a way
RESAMPLES = 2000
TOKENS = 64
ASKED = {"prompt": "hello there", "temperature": 0, "ignore_eos": True}
ADDED_MS_MAX = {"whole": 5.0, "first": 5.0, "token": 1.0}


def whole(client: httpx.Client) -> dict[str, float]:
    """Milliseconds."""
    began = time.perf_counter()
    answer = client.post("/v1/completions", json={**ASKED, "max_tokens": 1})
    answer.raise_for_status()
    return {"whole": (time.perf_counter() - began) * 1e3}


def streamed(client: httpx.Client) -> dict[str, float]:
    body = {**ASKED, "max_tokens": TOKENS, "stream": True}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        parts = answer.iter_raw()
        next(parts)
        first = time.perf_counter()
        for _ in parts:
            pass
    ended_at = time.perf_counter()
    return {"first": (first - began) * 1e3, "token": (ended_at - first) * 1e3 / (TOKENS - 1)}


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
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        a = stack.enter_context(ended(engine("a")))
        command = ("engine.router", "--port", "0", "--engine", a.url)
        door = stack.enter_context(ended(Process(*command)))
        router = psutil.Process(door.process.pid)
        ways = {
            way: stack.enter_context(httpx.Client(base_url=url, timeout=60))
            for way, url in (("direct", a.url), ("through", door.url))
        }
        for ask in (whole, streamed):
            used = 0.0
            for client in ways.values():
                ask(client)
            for _ in range(rounds):
                for way, client in ways.items():
                    before = cpu_s(router)
                    for _ in range(REQUESTS):
                        for what, ms in ask(client).items():
                            times[what, way].append(ms)
                    used += (cpu_s(router) - before) * (way == "through")
            cpu_ms = used / rounds / REQUESTS * 1e3
            say(f"{ask.__name__}: {cpu_ms:.2f} ms of the router's CPU a request")
    passed = []
    for what, most in ADDED_MS_MAX.items():
        direct, through = (np.array(times[what, way]) for way in ("direct", "through"))
        middle, low, high = added(direct, through)
        say(
            f"{what}: {np.median(direct):.2f} ms directly, {np.median(through):.2f} through; "
            f"{middle:+.2f} ({low:+.2f} to {high:+.2f})"
        )
        passed.append(verdict(f"{what}_added_ms", middle, f"<= {most:g}", middle <= most))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
