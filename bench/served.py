"""An engine behind its door in this process, asked and changed as by clients, step by step."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import uvicorn

from engine.__main__ import SWITCH_INTERVAL_S
from engine.config import EngineConfig
from engine.exec.build import home
from engine.sched.request import Request
from engine.sched.scheduler import Outcome
from engine.serve import Server, listen
from engine.server import App
from engine.steps import StepTimes, Watch
from engine.stream import Stream

STEPS_BETWEEN = 4  # two changes
VOCABULARY = 256


class Step(NamedTuple):
    """One step as its step thread saw it, when its tokens had been delivered.

    `cpu_s` and `forward_s` (of it, in forward and sampling): CPU seconds since the delivery before.
    `at`: monotonic seconds. `uses`: which pool, capture, tables and cache; `rollbacks` so far.
    """

    cpu_s: float
    forward_s: float
    decodes: int
    prompt_tokens: int
    at: float
    uses: tuple[int, ...]
    rollbacks: int


class Served:
    """The engine, its step thread, and its event loop in a thread of its own."""

    def __init__(self, config: EngineConfig) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.app = App(config)
        self.core = self.app.core
        self.steps: list[Step] = []
        self.accepted_at = 0.0  # when a change was last offered to the step thread
        self.ending = False
        self.asking: list[Future[None]] = []
        self.last = (0.0, 0.0, 0, 0)
        boundary = self.core.runtime.boundary
        self.deliver, self.core.deliver = self.core.deliver, self._delivered
        self.wake, boundary.wake = boundary.wake, self._offered
        door = listen(config.name, config.host, config.port)
        assert door is not None
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{door.getsockname()[1]}", timeout=30)
        settings = uvicorn.Config(self.app, lifespan="off", log_config=None, access_log=False)
        ready = f"serving {config.model_name}"
        self.server = Server(settings, self.app, ready, config.drain_s_max)
        self.thread = threading.Thread(target=self.server.run, args=([door],), name="door")
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def _delivered(self, outcome: Outcome) -> None:
        self.deliver(outcome)
        core, metrics = self.core, self.core.metrics
        now = (
            time.thread_time(),
            metrics.forward_cpu_s,
            metrics.step_decode_tokens,
            metrics.step_prefill_tokens,
        )
        cpu_s, forward_s, decodes, tokens = (b - a for a, b in zip(self.last, now, strict=True))
        runner = core.runner
        used = (runner.pool, runner.captured, runner.rows.layout, core.scheduler.prefixes)
        at, uses, rollbacks = time.monotonic(), tuple(map(id, used)), core.barrier.rollbacks
        self.steps.append(Step(cpu_s, forward_s, int(decodes), int(tokens), at, uses, rollbacks))
        self.last = now

    def _offered(self) -> None:
        self.accepted_at = time.monotonic()
        self.wake()

    def _begin(self, asking: Coroutine[Any, Any, None]) -> Future[None]:
        assert self.app.loop is not None
        return asyncio.run_coroutine_threadsafe(asking, self.app.loop)

    async def _answered(self, prompt: np.ndarray, answer_tokens: int) -> None:
        """As App does, without HTTP and text."""
        now = time.monotonic()
        request = Request("", prompt, answer_tokens, now, ignore_eos=True)
        request.stream = stream = Stream(eager=True)
        self.core.submit(request)
        while not stream.done or stream.tokens:
            await stream.take()
        stream.left = True
        self.core.record(request)

    def ask(self, prompts: list[np.ndarray], answer_tokens: int) -> None:
        """All at once; returns when all are answered."""

        async def all_of_them() -> None:
            await asyncio.gather(*(self._answered(each, answer_tokens) for each in prompts))

        self._begin(all_of_them()).result()

    def ask_on(self, prompt_tokens: int, answer_tokens: int, clients: int) -> None:
        """So many clients, each of which asks again when it was answered, until `end_asking`."""
        rng = np.random.default_rng(clients)

        async def again() -> None:
            while not self.ending:
                prompt = rng.integers(0, VOCABULARY, prompt_tokens)
                await self._answered(prompt, answer_tokens)

        self.ending = False
        self.asking = [self._begin(again()) for _ in range(clients)]

    def end_asking(self) -> None:
        self.ending = True
        for each in self.asking:
            each.result()

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            time.sleep(0.001)

    def patch(self, **values: object) -> httpx.Response:
        version = self.http.get("/v1/runtime_config").headers["ETag"]
        return self.http.patch("/v1/runtime_config", json=values, headers={"If-Match": version})

    def change(self, **values: object) -> Change:
        """Under load; returns when STEPS_BETWEEN more steps have run."""
        self.core.steps.watch = watch = Watch(sys.maxsize)
        self.wait(lambda: len(watch.steps) > 0)
        first, sent = len(self.steps) - 1, time.monotonic()
        answer = self.patch(**values)
        answered, more = time.monotonic(), len(watch.steps) + STEPS_BETWEEN
        self.wait(lambda: len(watch.steps) >= more)
        self.core.steps.watch = None
        return Change(
            answer, sent, self.accepted_at, answered, list(watch.steps), self.steps[first:]
        )

    def stop(self) -> None:
        self.end_asking()
        self.http.close()
        self.server.should_exit = True
        self.thread.join()
        self.app.close()


@dataclass(frozen=True)
class Change:
    """What a change of knobs was to the steps, from the last that ended before it was sent on.

    Moments are monotonic seconds.
    """

    answer: httpx.Response
    sent: float
    accepted: float
    answered: float
    times: list[StepTimes]
    steps: list[Step]

    @property
    def pause_ms(self) -> float:
        """The longest time between two steps."""
        return 1000 * max(b.began - a.handed_out for a, b in pairwise(self.times))

    @property
    def gap_ms(self) -> float:
        """The longest time between two tokens of one that decodes."""
        return 1000 * max(b.sampled - a.sampled for a, b in pairwise(self.times))

    def begun_under(self, version: int, after: float) -> int:
        """Steps that began after that moment, under that version or an older one."""
        return sum(one.began > after and one.config_version <= version for one in self.times)


@contextmanager
def serving(**chosen: Any) -> Iterator[Served]:
    """An engine with a state on disk, as EngineConfig says."""
    with tempfile.TemporaryDirectory() as folder:
        served = Served(EngineConfig(port=0, cache=home(), state=Path(folder), **chosen))
        try:
            yield served
        finally:
            served.stop()
