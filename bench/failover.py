"""One of two engines dies, then errs, behind a router under load: who notices, when, at what price?

    python bench/failover.py [--seed N]

Two engines with the demo's model and one router, each a process, under an open-loop load of half of
what one engine sustains here, so that one can carry it alone. Then, to the second of them:

1. kill −9 in the middle of the load. It is out when the router says so; requests it was answering
   are interrupted, for nobody but their clients knows whether to ask anew.
2. started again on its port: traffic is back with its first answered request.
3. every step of it raises (POST /v1/faults), while its /health goes on well: the breaker opens.
4. mended: traffic is back once more.

Counted at the clients: failed requests, and answers beyond one per request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
from plant import Load, say, verdict
from prometheus_client.parser import text_string_to_metric_families

from engine.load import arrivals
from engine.replay import Record, Status, calibrate, summarise

TOKEN_ENV = "FAILOVER_FAULTS"
TOKEN = "let-it-break"
LOAD_OF_ONE = 0.5
SETTLE_S = 15.0  # of load, before anything happens to it and after
DEAD_S_MAX = 2.0
OPEN_S_MAX = 35.0
BACK_S_MAX = 30.0
LOOK_EVERY_S = 0.05
FAILED = (Status.INTERRUPTED, Status.FAILED, Status.REJECTED, Status.LOST)


class Process:
    """One process of ours, until `end`; `url` where it listens."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,  # what is broken here on purpose says so at every step
            env={**os.environ, TOKEN_ENV: TOKEN},
        )  # fmt: skip
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        if " on http://" not in ready:
            raise SystemExit(f"{arguments[0]} did not start: {ready}")
        self.url = ready.split(" on ")[1].split(",")[0]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Router:
    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=10)

    def engine(self, name: str) -> dict[str, Any]:
        told: dict[str, Any] = self.client.get("/health").json()["engines"][name]
        return told

    def count(self, family: str, **labels: str) -> float:
        page = self.client.get("/metrics").text
        return sum(
            sample.value
            for each in text_string_to_metric_families(page)
            for sample in each.samples
            if sample.name == family and labels.items() <= sample.labels.items()
        )

    def answered(self, name: str) -> float:
        return self.count("router:requests_total", engine=name, outcome="ok")


def until(condition: Callable[[], bool], within_s: float) -> float:
    """Seconds until it holds; infinite when it does not."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > within_s:
            return float("inf")
        time.sleep(LOOK_EVERY_S)
    return time.monotonic() - began


def failed(records: Sequence[Record], since_s: float, until_s: float) -> int:
    """Of those that ended in that time, seconds of the load."""
    return sum(r.status in FAILED and since_s <= r.end_s < until_s for r in records)


def break_steps(url: str, fault: str) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"{url}/v1/faults", json={"fault": fault}, headers=headers, timeout=30)
    answer.raise_for_status()


def engine(name: str, port: int = 0) -> Process:
    faults = ("--faults-token-env", TOKEN_ENV)
    return Process("engine", "--name", name, "--port", str(port), *faults)


@contextmanager
def ended(process: Process) -> Iterator[Process]:
    try:
        yield process
    finally:
        process.end()


def killed(router: Router, b: Process, load: Load, stack: ExitStack) -> tuple[Process, list[bool]]:
    flying = router.engine("b")["in_flight"]
    before = load.replayer.now()
    b.kill()
    at = load.replayer.now()
    out_s = until(lambda: bool(router.engine("b")["out"]), DEAD_S_MAX * 5)
    time.sleep(SETTLE_S)
    records = [r for r in list(load.replayer.records) if r.status in FAILED and r.end_s >= before]
    later = sum(r.sent_s > at for r in records)
    say(
        f"killed with {flying} requests under way: noticed after {out_s:.2f} s; {len(records)} "
        f"requests failed, {later} of those sent after that"
    )
    answered = router.answered("b")
    port = int(b.url.rpartition(":")[2])
    again = stack.enter_context(ended(engine("b", port)))
    back_s = until(lambda: router.answered("b") > answered, BACK_S_MAX * 2)
    return again, [
        verdict("dead_noticed_s", out_s, f"<= {DEAD_S_MAX:g}", out_s <= DEAD_S_MAX),
        verdict("failed_after_death", later, "0", later == 0),
        verdict("dead_back_s", back_s, f"<= {BACK_S_MAX:g}", back_s <= BACK_S_MAX),
    ]


def erring(router: Router, b: Process, load: Load) -> list[bool]:
    at = load.replayer.now()
    break_steps(b.url, "steps_fail")
    open_s = until(lambda: router.engine("b")["breaker"] != "closed", OPEN_S_MAX * 2)
    opened = load.replayer.now()
    time.sleep(SETTLE_S)
    now = load.replayer.now()
    records = load.replayer.records
    errors = failed(records, at, now)
    later = sum(r.status in FAILED and r.sent_s > opened for r in list(records))
    total = sum(at <= r.end_s < now for r in list(records))
    say(
        f"all steps of b failed for {now - at:.1f} s: breaker open after {open_s:.2f} s; "
        f"{errors} of {total} requests failed, {later} of those sent after that"
    )
    before = router.answered("b")
    break_steps(b.url, "none")
    back_s = until(lambda: router.answered("b") > before, BACK_S_MAX * 2)
    return [
        verdict("breaker_open_s", open_s, f"<= {OPEN_S_MAX:g}", open_s <= OPEN_S_MAX),
        verdict("failed_after_open", later, "0", later == 0),
        verdict("erring_back_s", back_s, f"<= {BACK_S_MAX:g}", back_s <= BACK_S_MAX),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    with ExitStack() as stack:
        a, b = (stack.enter_context(ended(engine(name))) for name in "ab")
        names = ("--engine", f"a@{a.url}", "--engine", f"b@{b.url}")
        door = stack.enter_context(ended(Process("engine.router", "--port", "0", *names)))
        router = Router(door.url)
        rate = LOAD_OF_ONE * asyncio.run(calibrate(a.url)).requests_per_s
        say(f"{rate:.1f} requests/s to two engines, half of what one sustains")
        load = Load(door.url, arrivals(seed, [(600.0, rate)], name="failover"))
        load.start()
        time.sleep(SETTLE_S)
        b, passed = killed(router, b, load, stack)
        time.sleep(SETTLE_S)
        passed += erring(router, b, load)
        time.sleep(SETTLE_S)
        records = load.finish()
        summary = summarise(records, load.replayer.unsolicited)
        lost = sum(record.status in FAILED for record in records)
        say(f"{len(records):,} requests: {load.count()}; tried twice: "
            f"{router.count('router:retries_total'):.0f}; no answer at all: "
            f"{summary.counts[Status.LOST]}")  # fmt: skip
        share = lost / len(records)
        passed += [
            verdict("failed_share", share, "<= 0.08", share <= 0.08),
            verdict("answered_twice", summary.duplicated, "0", summary.duplicated == 0),
            verdict("lost", summary.counts[Status.LOST], "0", not summary.counts[Status.LOST]),
        ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
