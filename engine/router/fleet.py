"""The engines behind the router: which may be had, how much each has to do, and who went away.

Each is asked on its own: HEAD /health (GET where HEAD is not known), then /metrics for the load
that others bring it. A refused connection says at once that nobody is there; a silent or failing
answer counts from the second in a row; a broken answer to a client has its engine asked at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import time
from collections.abc import Callable, Sequence

import aiohttp

from engine.router.breaker import Breaker, State
from engine.router.config import RouterConfig, Upstream
from engine.router.knobs import RouterSettings

log = logging.getLogger("engine.router")

CONNECT_S_MAX = 2.0
PROBE_S_MAX = 2.0
PROOF_S_MAX = 10.0
PROBES_FAILED_MAX = 2
PROBE_GAP_S = 0.2  # however often it is suspected
# Of an idle connection: less than the 5 s after which uvicorn, and so vLLM, closes it; a request
# that crosses with the close could not be told from one that was begun.
IDLE_S_MAX = 4.0
BUFFER_BYTES = 8192  # of an answer, read ahead of its client; twice this at most
LOAD = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.M)
# What the transport says when no request can have been begun.
UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class Engine:
    """One engine as the router sees it. `bit` sets it apart in sets; `turn`: choice.py."""

    def __init__(self, upstream: Upstream, bit: int) -> None:
        self.name = upstream.name
        self.url = upstream.url
        self.spare = upstream.spare
        self.bit = bit
        self.turn = 0.0
        self.breaker = Breaker()
        self.ill = "not asked yet"  # why it cannot serve; "" when it can
        self.probes_failed = 0
        self.in_flight = 0
        self.elsewhere = 0  # requests that did not come through here, when last asked
        self.suspected = asyncio.Event()

    @property
    def load(self) -> int:
        return self.in_flight + self.elsewhere

    def out(self, settings: RouterSettings) -> str:
        """Why it gets no request; "" when it does."""
        if self.ill:
            return self.ill
        if self.breaker.state is not State.CLOSED:
            return f"breaker {self.breaker.state}"
        return "" if settings.weight(self.name) else "weight 0"

    def lost(self, error: aiohttp.ClientError | TimeoutError) -> None:
        """No connection to it came about, and so no request."""
        self.found(no_connection(error))
        self.suspected.set()

    def found(self, ill: str) -> None:
        if ill != self.ill:
            told = f"out: {ill}" if ill else "there"
            log.log(logging.WARNING if ill else logging.INFO, "%s is %s", self.name, told)
        self.ill = ill


def no_connection(error: Exception) -> str:
    return f"no connection: {getattr(error, 'strerror', None) or type(error).__name__}"


def no_files(error: Exception) -> bool:
    """Whether it is this process that could not connect: of an engine that says nothing."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


class Fleet:
    """All engines of a router; of the event loop, from `start` on."""

    def __init__(self, config: RouterConfig, read: Callable[[], RouterSettings]) -> None:
        self.silence_s_max = config.silence_s_max
        self.read = read
        self.engines = [Engine(each, 1 << i) for i, each in enumerate(config.engines)]
        self.tasks: list[asyncio.Task[None]] = []
        self.session: aiohttp.ClientSession

    async def start(self) -> None:
        """Returns when each engine was asked once."""
        self.session = aiohttp.ClientSession(
            # Requests are limited at the door.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S_MAX),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_S_MAX, sock_read=self.silence_s_max
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            read_bufsize=BUFFER_BYTES,
        )
        await asyncio.gather(*(self._probe(engine) for engine in self.engines))
        self.tasks = [asyncio.create_task(self._watch(engine)) for engine in self.engines]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.session.close()

    def available(self, tried: Sequence[Engine] = ()) -> list[Engine]:
        """Those that may be had and were not `tried`.

        Spare ones while one that is none is out, or was tried.
        """
        settings = self.read()
        weighted = [engine for engine in self.engines if settings.weight(engine.name)]
        there = [engine for engine in weighted if not engine.out(settings)]
        main = [engine for engine in weighted if not engine.spare]
        if main and not any(each in tried or each.out(settings) for each in main):
            there = main
        # A share of errors is better than nobody: with all breakers open, none counts.
        there = there or [engine for engine in weighted if not engine.ill]
        return [engine for engine in there if engine not in tried]

    def told(self) -> str:
        """Each engine, and why it gets no request."""
        settings = self.read()
        return ", ".join(f"{each.name}: {each.out(settings) or 'there'}" for each in self.engines)

    async def _watch(self, engine: Engine) -> None:
        while True:
            interval_s = self.read().number("health_interval_ms") / 1000
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.suspected.wait(), interval_s)
            engine.suspected.clear()
            try:
                await self._probe(engine)
            except Exception:
                log.exception("%s could not be asked", engine.name)
            await asyncio.sleep(PROBE_GAP_S)

    async def _probe(self, engine: Engine) -> None:
        try:
            engine.found(await self._health(engine))
            engine.probes_failed = 0
        except aiohttp.ClientConnectorError as error:
            if no_files(error):
                return
            engine.found(no_connection(error))
        except (aiohttp.ClientError, TimeoutError) as error:
            engine.probes_failed += 1
            if engine.probes_failed >= PROBES_FAILED_MAX:
                engine.found(f"/health: {type(error).__name__}")
            return
        if engine.ill:
            return
        await self._read_load(engine)
        if engine.breaker.due(time.monotonic(), self.read()):
            engine.breaker.proved(await self._proof(engine), time.monotonic())
            log.info("%s was asked for a token: breaker %s", engine.name, engine.breaker.state)
            if engine.breaker.state is State.HALF_OPEN:
                engine.suspected.set()  # and so asked again at once

    async def _health(self, engine: Engine) -> str:
        """ "" when it is well, else what it says."""
        timeout = aiohttp.ClientTimeout(PROBE_S_MAX)
        for method in ("HEAD", "GET"):
            async with self.session.request(
                method, f"{engine.url}/health", timeout=timeout
            ) as answer:
                if method == "GET" or answer.status not in (405, 501):
                    return "" if answer.status == 200 else f"/health answers {answer.status}"
        raise AssertionError

    async def _read_load(self, engine: Engine) -> None:
        """Requests that others sent it; none where it does not tell."""
        before = engine.in_flight
        timeout = aiohttp.ClientTimeout(PROBE_S_MAX)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self.session.get(f"{engine.url}/metrics", timeout=timeout) as answer:
                told = LOAD.findall(await answer.text())
            ours = max(before, engine.in_flight)
            engine.elsewhere = max(0, round(sum(map(float, told))) - ours)

    async def _proof(self, engine: Engine) -> bool:
        """Whether it answers a request for one token; that it refuses to is an answer."""
        timeout = aiohttp.ClientTimeout(PROOF_S_MAX)
        asked = {"prompt": "a", "max_tokens": 1, "temperature": 0}
        try:
            async with self.session.post(
                f"{engine.url}/v1/completions", json=asked, timeout=timeout
            ) as answer:
                await answer.read()
                return answer.status < 500
        except (aiohttp.ClientError, TimeoutError):
            return False
