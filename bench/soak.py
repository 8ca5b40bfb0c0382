"""Does an engine grow? A storm of all it can do, then rest, over and over, then counted.

    python bench/soak.py [--minutes 12] [--clients 48] [--seed 1]

A real engine (`python -m engine`) with the prefix cache, tasks on disk, tenants, spans that
somebody takes, and a pool so small that requests are preempted. Clients ask without a break:
prompts and answers of all lengths, many beginning alike, of all priorities and tenants, some with
mistakes; some hang up at any moment. Beside them tasks are given and taken back, knobs are changed
(all of them), faults injected and mended, the engine is paused in all three ways, its cache
forgotten, and everything it tells is read.

Every --cycle seconds the storm holds its breath: all is answered, mended, and as it was configured
at first, and what the engine holds then is compared with what it held the times before, after the
first third (warm-up): resident memory by a robust slope (Theil and Sen, 95 %), file handles and
threads by their most. In the end as many requests as it has rows must run at once.

How much that was is told in requests, against a day at the demo's rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import psutil
from collector import collector
from plant import capacity_here, say, verdict

from controlplane.demo.scenarios import CALM
from engine.config import SEQS_MAX
from engine.knobs import KNOBS
from engine.replay import LETTERS

ROOT = Path(__file__).resolve().parents[1]
FAULTS_TOKEN = "TRIMTAB_SOAK_FAULTS_TOKEN"
MODEL_LEN_MAX = 1024
BASE: dict[str, Any] = {name: knob.default for name, knob in KNOBS.items()} | {"prefix_cache": "on"}
TENANTS = {
    "tenants": {"acme": "gold", "shop": "saas", "lab": "test", "storm": "storm"},
    "tiers": {"storm": {"tokens_per_minute": 10**9, "burst_tokens": 10**9}},
}
ANSWER_S_MAX = 60.0
WARM = 1 / 3  # of the time
DAY_S = 86_400
# What an engine may answer to all this: mistakes 400; gone 404; excluded or no room 409; stale 412;
# turned away 429; aborted, or a tenant of tier test 503.
EXPECTED = (200, 202, 400, 404, 409, 412, 429, 503)
REST_S = 1.5  # for spans on their way, and connections that close
REST_S_MAX = 90.0


@dataclass(frozen=True)
class Held:
    """What the engine held at a rest; `requests` asked by then."""

    requests: int
    resident_mib: float
    handles: int
    threads: int
    blocks: int  # of KV, not free


@dataclass(frozen=True)
class Answer:
    """`status` 0: the client hung up."""

    status: int
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.body)
        return told


class Engine:
    """A process, and what is asked of it: a connection for each request."""

    def __init__(self, folder: Path, otlp_url: str) -> None:
        tenants, self.log = folder / "tenants.json", folder / "engine.log"
        tenants.write_text(json.dumps(TENANTS))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine", "--port", "0", "--prefix-cache", "on",
             "--model-len-max", str(MODEL_LEN_MAX), "--kv-pool-blocks", "640",
             "--host-tier-bytes", str(4 * 2**20), "--prefix-ttl-s", "20",
             "--state", str(folder / "state"), "--queue-state", str(folder / "tasks"),
             "--tenants", str(tenants), "--otlp", otlp_url, "--faults-token-env", FAULTS_TOKEN],
            cwd=ROOT,
            env={**os.environ, FAULTS_TOKEN: FAULTS_TOKEN},
            stdout=subprocess.PIPE,
            stderr=self.log.open("wb"),
            text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert " on http://" in ready, self.log.read_text()
        self.port = int(ready.split(",")[0].rpartition(":")[2])
        self.watched = psutil.Process(self.process.pid)

    async def ask(
        self, method: str, path: str, body: Any = None, *, patience: int = -1, **headers: str
    ) -> Answer:
        """Raises OSError or TimeoutError. With `patience` it hangs up after so many reads."""
        payload = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: soak",
            "Connection: close",
            f"Content-Length: {len(payload)}",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
            for _ in range(patience):
                await asyncio.wait_for(reader.read(256), ANSWER_S_MAX)
            if patience >= 0:
                writer.transport.abort()
                return Answer(0, b"")
            head, _, rest = (await asyncio.wait_for(reader.read(), ANSWER_S_MAX)).partition(
                b"\r\n\r\n"
            )
            return Answer(int(head[9:12]), rest)
        finally:
            writer.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


class Soak:
    """The storm over one engine. `held`: what it held at each rest."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine = engine
        self.options = options
        self.draw = random.Random(options.seed)
        self.beginnings = [self.text(self.draw.randint(40, 400)) for _ in range(8)]
        self.answers: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.requests = self.tasks = self.changed = self.faults = self.pauses = 0
        self.going = asyncio.Event()
        self.over = False
        self.busy = 0
        self.held: list[Held] = []

    def text(self, tokens: int) -> str:
        return "".join(self.draw.choices(LETTERS, k=tokens))

    async def call(self, method: str, path: str, body: Any = None, **how: Any) -> Answer:
        """Asks, and notes what may not be."""
        try:
            answer = await self.engine.ask(method, path, body, **how)
        except (OSError, TimeoutError, ValueError) as error:
            self.unexpected.append(f"{method} {path}: {error!r}")
            return Answer(-1, b"{}")
        self.answers[f"{answer.status or 'hung up'}"] += 1
        if answer.status and answer.status not in EXPECTED:
            self.unexpected.append(f"{method} {path}: {answer.status} {answer.body[:200]!r}")
        return answer

    async def client(self) -> None:
        """Asks for one completion or chat."""
        draw = self.draw
        prompt = self.text(max(1, min(int(draw.lognormvariate(3.2, 1.0)), 600)))
        if draw.random() < 0.4:
            prompt = draw.choice(self.beginnings) + prompt
        body: dict[str, Any] = {
            "max_tokens": max(1, min(int(draw.lognormvariate(1.8, 1.0)), 300)),
            "temperature": draw.choice((0, 0, 0, 0.8)),
            "ignore_eos": draw.random() < 0.7,
            "stream": draw.random() < 0.5,
        }
        chat = draw.random() < 0.2
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        if draw.random() < 0.1:
            body["stop"] = [self.text(2)]
        if draw.random() < 0.2:
            body["cache_salt"] = draw.choice(("a", "b", "c"))
        if draw.random() < 0.02:
            body |= draw.choice(({"n": 2}, {"max_tokens": 10**6}, {"prompt": 7}))
        patience = draw.randint(0, 3) if draw.random() < 0.1 else -1
        path = "/v1/chat/completions" if chat else "/v1/completions"
        self.requests += 1
        answer = await self.call(
            "POST", path, body, patience=patience,
            x_priority=draw.choice(("low", "normal", "high", "realtime")),
            x_tenant=draw.choice(("storm", "storm", "acme", "shop", "lab", self.text(8).strip())),
        )  # fmt: skip
        whole = b"data: [DONE]" in answer.body or not body["stream"]
        if answer.status == 200 and not whole and b'"aborted"' not in answer.body:
            self.unexpected.append(f"cut off: {answer.body[-200:]!r}")

    async def task(self) -> None:
        """Gives a task, looks after it, and has it forgotten, ended or not."""
        draw = self.draw
        body = {"prompt": self.text(draw.randint(1, 200)), "max_tokens": draw.randint(1, 60)}
        asked = {"body": body, "timeout_s": draw.choice((0.1, 60))}
        given = await self.call("POST", "/v1/tasks", asked)
        if given.status != 202:
            return
        self.requests += 1
        self.tasks += 1
        path = f"/v1/tasks/{given.json['id']}"
        for _ in range(draw.randint(0, 20)):
            if (await self.call("GET", path)).json.get("state") not in ("queued", "running"):
                break
            await asyncio.sleep(0.05)
        await self.call("DELETE", path)

    async def configure(self, values: dict[str, Any]) -> Answer:
        version = (await self.call("GET", "/v1/runtime_config")).json.get("config_version", 0)
        return await self.call(
            "PATCH", "/v1/runtime_config", values,
            if_match=f'"{version}"', x_changed_by=self.draw.choice(("soak", "agent 7", "a person")),
        )  # fmt: skip

    async def turn(self) -> None:
        """Changes one to three knobs, or puts all back."""
        values = {
            name: self.draw.choice(KNOBS[name].ladder)
            for name in self.draw.sample(sorted(KNOBS), self.draw.randint(1, 3))
        }
        changed = await self.configure(values if self.draw.random() < 0.8 else BASE)
        self.changed += changed.status == 200
        await asyncio.sleep(self.draw.uniform(0, 1))

    async def break_it(self) -> None:
        """A fault for a while, or a pause."""
        draw = self.draw
        await asyncio.sleep(draw.uniform(0, 3))
        if draw.random() < 0.5:
            mode = draw.choice(("mode=keep", "mode=abort", "mode=wait", "mode=wait&deadline_s=0.5"))
            await self.call("POST", f"/pause?{mode}")
            await asyncio.sleep(draw.uniform(0, 0.5))
            await self.call("POST", "/resume")
            self.pauses += 1
        else:
            await self.fault(draw.choice(("slow_host", "capture_lost", "kv_pool_halved")))
            await asyncio.sleep(draw.uniform(0, 3))
            await self.fault("none")
            self.faults += 1

    async def fault(self, name: str) -> None:
        order = {"fault": name, "processes": 1}
        await self.call("POST", "/v1/faults", order, authorization=f"Bearer {FAULTS_TOKEN}")

    async def look(self) -> None:
        """Reads something it tells, or has the cache forgotten."""
        await asyncio.sleep(self.draw.uniform(0, 0.5))
        method, path = self.draw.choice((
            ("GET", "/metrics"), ("GET", "/metrics"), ("GET", "/v1/kv/map"), ("GET", "/health"),
            ("GET", "/v1/models"), ("GET", "/is_paused"), ("GET", "/nowhere"),
            ("POST", "/v1/profile?steps=20&deadline_s=1"), ("POST", "/reset_prefix_cache"),
        ))  # fmt: skip
        await self.call(method, path)

    async def keep_on(self, act: Callable[[], Awaitable[None]]) -> None:
        while not self.over:
            await self.going.wait()
            self.busy += 1
            try:
                await act()
            finally:
                self.busy -= 1

    async def until(self, what: str, holds: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + REST_S_MAX
        while not await holds():
            if time.monotonic() > deadline:
                self.unexpected.append(f"not within {REST_S_MAX:g} s: {what}")
                return
            await asyncio.sleep(0.05)

    async def paused(self) -> dict[str, Any]:
        return (await self.call("GET", "/is_paused")).json

    async def rest(self) -> None:
        """Until nobody asks and nothing runs; then what the engine holds."""
        self.going.clear()

        async def nobody_asks() -> bool:
            return self.busy == 0

        async def nothing_runs() -> bool:
            told = await self.paused()
            return told.get("running") == told.get("waiting") == 0

        await self.until("every client has its answer", nobody_asks)
        await self.fault("none")
        await self.until("nothing runs or waits", nothing_runs)
        if (back := await self.configure(BASE)).status != 200:
            self.unexpected.append(f"not as at first: {back.body!r}")
        await self.call("POST", "/reset_prefix_cache")
        await asyncio.sleep(REST_S)
        counts = (await self.call("GET", "/v1/kv/map")).json["counts"]
        process = self.engine.watched
        with process.oneshot():
            held = Held(
                self.requests,
                process.memory_info().rss / 2**20,
                process.num_fds(),
                process.num_threads(),
                counts["allocated"] + counts["cached"] + counts["withheld"],
            )
        self.held.append(held)
        self.going.set()

    async def crowd(self) -> int:
        """As many requests as there are rows, at once: how many ran at a time."""
        await self.configure({"max_num_seqs": SEQS_MAX})
        await self.call("POST", "/pause?mode=keep")
        body = {"prompt": "soak", "max_tokens": 60, "ignore_eos": True}
        asked = [
            asyncio.create_task(self.call("POST", "/v1/completions", body)) for _ in range(SEQS_MAX)
        ]

        async def all_wait() -> bool:
            return bool((await self.paused())["waiting"] == SEQS_MAX)

        await self.until("a crowd waits", all_wait)
        await self.call("POST", "/resume")
        most = 0
        while not all(one.done() for one in asked):
            most = max(most, (await self.paused())["running"])
            await asyncio.sleep(0.01)
        await self.configure(BASE)
        return most

    def line(self, began: float) -> str:
        last = self.held[-1]
        return (
            f"{time.monotonic() - began:5.0f} s  {self.requests:,} requests, {self.tasks} tasks, "
            f"{self.changed} changes, {self.faults} faults, {self.pauses} pauses, "
            f"{len(self.unexpected)} unexpected  ·  at rest {last.resident_mib:.1f} MiB, "
            f"{last.handles} handles, {last.threads} threads, {last.blocks} blocks"
        )

    async def run(self) -> int:
        """The whole storm; returns what `crowd` found."""
        began, live = time.monotonic(), sys.stdout.isatty()
        acts = [*[self.client] * self.options.clients, *[self.task] * 4, self.turn, self.break_it,
                self.look]  # fmt: skip
        storm = [asyncio.create_task(self.keep_on(act)) for act in acts]
        await self.rest()
        while time.monotonic() - began < 60 * self.options.minutes:
            until = time.monotonic() + self.options.cycle
            while (left := until - time.monotonic()) > 0:
                if live:
                    print(f"\r{self.line(began)}", end="", flush=True)
                await asyncio.sleep(min(left, 1.0))
            await self.rest()
            say("\r" * live + self.line(began))
        self.over = True
        await asyncio.gather(*storm)
        most = await self.crowd()
        await self.rest()
        return most


def told(soak: Soak, day_requests: float) -> None:
    """What the verdicts rest on."""
    share = soak.requests / day_requests
    say(f"{soak.requests:,} requests: {share:.1%} of a day of the demo, {24 * share:.1f} hours")
    say(f"answers: {', '.join(f'{n:,} × {status}' for status, n in soak.answers.most_common())}")
    for line in soak.unexpected[:10]:
        say(f"  {line}")


def theil_sen(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """The median slope of all pairs of points, and its 95 % interval (Sen, JASA 1968)."""
    slopes = sorted((y[j] - y[i]) / (x[j] - x[i]) for i, j in combinations(range(len(x)), 2))
    n = len(x)
    wide = NormalDist().inv_cdf(0.975) * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low, high = (round((len(slopes) + side * wide) / 2) for side in (-1, 1))
    return median(slopes), slopes[max(0, low - 1)], slopes[min(len(slopes) - 1, high)]


def judge(soak: Soak, most: int, day_requests: float, log: str) -> bool:
    told(soak, day_requests)
    first, *held = soak.held[int(WARM * len(soak.held)) :]
    asked = [one.requests / day_requests for one in (first, *held)]
    slope, low, high = theil_sen(asked, [one.resident_mib for one in (first, *held)])
    say(
        f"resident at rest: {first.resident_mib:.1f} MiB after warm-up, "
        f"{held[-1].resident_mib:.1f} in the end; by request {slope:.0f} MiB "
        f"({low:.0f} to {high:.0f}) in a day of the demo"
    )
    warm = soak.held[: len(soak.held) - len(held)]
    handles = max(one.handles for one in held) - max(one.handles for one in warm)
    threads = max(one.threads for one in held) - max(one.threads for one in warm)
    blocks = max(one.blocks for one in soak.held)
    complaints = [line for line in log.splitlines() if " ERROR " in line or "Traceback" in line]
    for line in complaints[:5]:
        say(f"  log: {line}")
    passed = [
        verdict("memory_mib_a_day", float(low), "<=0, the low end", low <= 0),
        verdict("handles_more", handles, "<=0", handles <= 0),
        verdict("threads_more", threads, "<=0", threads <= 0),
        verdict("blocks_not_free", blocks, "0", blocks == 0),
        verdict("rows_free", most, f"{SEQS_MAX}", most == SEQS_MAX),
        verdict("unexpected", len(soak.unexpected) + len(complaints), "0",
                not soak.unexpected and not complaints),
    ]  # fmt: skip
    return all(passed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--cycle", type=float, default=15, help="seconds between two rests")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rate = CALM * capacity_here()
    say(f"the demo here: {rate:.1f} requests/s, {rate * DAY_S:,.0f} a day")
    with tempfile.TemporaryDirectory(prefix="trimtab-soak-") as folder, collector() as url:
        engine = Engine(Path(folder), url)
        try:
            soak = Soak(engine, options)
            most = asyncio.run(soak.run())
        finally:
            status = engine.stop()
        assert status == 0, f"the engine ended with {status}"
        return 0 if judge(soak, most, rate * DAY_S, engine.log.read_text()) else 1


if __name__ == "__main__":
    sys.exit(main())
