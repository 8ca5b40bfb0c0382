"""One request on its way: to an engine, at most once to another, and its answer back as it comes.

Never two answers: another engine is asked only when nothing of an answer was sent on and the first
provably did not begin (no connection came about) or says itself that it may well be asked again
(http.AGAIN). Whatever else breaks is told to the client, which alone knows whether to ask anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field

import aiohttp

from engine.http import AGAIN, ApiError, Call
from engine.reconfig import RuntimeStore
from engine.router.choice import Choice, Wanted
from engine.router.fleet import UNREACHED, Engine, Fleet, no_files
from engine.router.knobs import RouterSettings
from engine.router.observe import Metrics, Outcome

log = logging.getLogger("engine.router")

RETRIES_MAX = 1
HELD_BYTES_MAX = 65_536  # of a 503, to read why
# Of one connection, not of the request (RFC 9110, 7.6.1), as is what `connection` names.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
     b"upgrade")
)  # fmt: skip
# What aiohttp writes of its own, and uvicorn.
NOT_ASKED = HOP_BY_HOP | {b"expect", b"host", b"content-length"}
NOT_ANSWERED = HOP_BY_HOP | {b"date"}
SAYS_ERROR = b'data: {"error"'

Lines = list[tuple[bytes, bytes]]


@dataclass(eq=False)
class Passage:
    """A request and what became of it; times are monotonic seconds, 0.0 while not seen."""

    call: Call
    body: bytes
    headers: list[tuple[str, str]]
    wanted: Wanted
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    engine: str = ""
    by: str = ""
    retries: int = 0
    status: int = 0
    first: float = 0.0
    outcome: Outcome = Outcome.ERROR
    events: bool = False  # server-sent ones
    whole: bool = True  # what was sent on ends with an event
    left: bool = False  # its client did
    done: bool = False


class Again(Exception):
    """Another engine may be asked; `held` is the answer where there is no other."""

    def __init__(self, reason: str, held: tuple[int, Lines, bytes] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.held = held


class Forwarder:
    def __init__(
        self, fleet: Fleet, choice: Choice, runtime: RuntimeStore[RouterSettings], metrics: Metrics
    ) -> None:
        self.fleet, self.choice, self.runtime, self.metrics = fleet, choice, runtime, metrics

    async def run(self, passage: Passage) -> None:
        """Answers it, or raises ApiError when nothing was sent on."""
        tried: list[Engine] = []
        engines = self.fleet.available()
        while engines:
            settings, now = self.runtime.running.config, time.monotonic()
            engine, by = self.choice.of(passage.wanted, engines, settings, now)
            passage.engine, passage.by = engine.name, by
            self.metrics.choices.labels(engine.name, by).inc()
            try:
                await self._attempt(engine, passage)
                return
            except Again as again:
                tried.append(engine)
                engine.suspected.set()  # one that ends is known to be out before many have tried it
                settings = self.runtime.running.config
                once_more = settings.word("retries") == "on" and len(tried) <= RETRIES_MAX
                engines = self.fleet.available(tried) if once_more else []
                if engines:
                    passage.retries += 1
                    self.metrics.retries.labels(engine.name, again.reason).inc()
                elif again.held:
                    await self._send(passage, *again.held)
                    return
        self.metrics.unrouted.labels("no_engine").inc()
        interval_ms = self.runtime.running.config.number("health_interval_ms")
        raise ApiError(
            503,
            "no_engine",
            f"no engine can take this request: {self.fleet.told()}",
            headers={"retry-after": str(-(-interval_ms // 1000))},
        )

    async def _attempt(self, engine: Engine, passage: Passage) -> None:
        """At one engine; raises Again, ApiError. A mistake of ours is not held against it."""
        scope = passage.call.scope
        engine.in_flight += 1
        passage.outcome = Outcome.ERROR
        try:
            async with self.fleet.session.request(
                scope["method"],
                engine.url + scope["path"],
                data=passage.body or None,
                headers=passage.headers,
                allow_redirects=False,
            ) as answer:
                await self._pass_on(engine, passage, answer)
        except UNREACHED as error:
            if no_files(error):
                passage.outcome = Outcome.REFUSED
                raise out_of_files() from None
            engine.lost(error)
            passage.outcome = Outcome.AGAIN
            raise Again("unreached") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            engine.suspected.set()
            silent = isinstance(error, TimeoutError)
            why = f"{engine.name} broke off its answer: {type(error).__name__}"
            await tell(
                passage, ApiError(504 if silent else 502, "silent" if silent else "broken", why)
            )
        except asyncio.CancelledError:
            passage.outcome = Outcome.ABORTED
            raise
        except Again:
            raise
        except Exception:
            passage.outcome = Outcome.REFUSED
            raise
        finally:
            engine.in_flight -= 1
            self._ended(engine, passage)

    async def _pass_on(
        self, engine: Engine, passage: Passage, answer: aiohttp.ClientResponse
    ) -> None:
        passage.status = answer.status
        lines = passed_on([(k.lower(), v) for k, v in answer.raw_headers], NOT_ANSWERED)
        lines.append((b"x-engine", engine.name.encode()))
        head = b""
        if answer.status == 503:
            head = await beginning(answer.content)
            if (reason := code(head)) in AGAIN:
                passage.outcome = Outcome.AGAIN
                raise Again(reason, (answer.status, lines, head))
        passage.events = answer.content_type == "text/event-stream"
        outcome = verdict(answer.status)
        send = passage.call.send
        passage.call.started = True
        await send({"type": "http.response.start", "status": answer.status, "headers": lines})
        if head:
            await send({"type": "http.response.body", "body": head, "more_body": True})
        async for chunk in answer.content.iter_any():
            passage.first = passage.first or time.monotonic()
            if passage.events:
                passage.whole = chunk.endswith(b"\n\n")
                if chunk.startswith(SAYS_ERROR):
                    outcome = Outcome.ERROR
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        passage.outcome, passage.done = outcome, True
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, passage: Passage, status: int, lines: Lines, body: bytes) -> None:
        passage.call.started = passage.done = True
        passage.status, passage.outcome = status, Outcome.REFUSED
        await passage.call.send({"type": "http.response.start", "status": status, "headers": lines})
        await passage.call.send({"type": "http.response.body", "body": body})

    def _ended(self, engine: Engine, passage: Passage) -> None:
        outcome, now = passage.outcome, time.monotonic()
        self.metrics.requests.labels(engine.name, outcome).inc()
        if outcome in (Outcome.OK, Outcome.REJECTED, Outcome.ERROR):
            settings = self.runtime.running.config
            if engine.breaker.record(outcome is Outcome.ERROR, now, settings):
                log.warning("%s is out: too many of its requests went wrong", engine.name)
        if outcome is Outcome.OK:
            if passage.first:
                self.metrics.first_byte.labels(engine.name).observe(passage.first - passage.began)
            self.metrics.e2e.labels(engine.name).observe(now - passage.began)


async def tell(passage: Passage, error: ApiError) -> None:
    """What went wrong, to the client: as an answer (raised), or as the last event of a stream.

    What is neither whole nor a stream of events can only be broken off, which the server does.
    """
    if not passage.call.started:
        raise error
    if passage.events and passage.whole:
        passage.done = True
        await passage.call.part(f"data: {json.dumps(error.body())}\n\n", more=False)


def passed_on(lines: Lines, never: frozenset[bytes]) -> Lines:
    """The headers without `never` and those that are of the connection; names in lower case."""
    named = {
        name.strip().lower()
        for key, value in lines
        if key == b"connection"
        for name in value.split(b",")
    }
    return [(key, value) for key, value in lines if key not in never and key not in named]


def out_of_files() -> ApiError:
    return ApiError(
        503,
        "no_files",
        "the router has no file descriptor left for a connection (ulimit -n)",
        headers={"retry-after": "1"},
    )


def verdict(status: int) -> Outcome:
    if status < 400:
        return Outcome.OK
    if status in (429, 503):
        return Outcome.REFUSED
    return Outcome.REJECTED if status < 500 else Outcome.ERROR


async def beginning(content: aiohttp.StreamReader) -> bytes:
    """The whole of a short body, the first HELD_BYTES_MAX of a long one, or a little more."""
    head = b""
    while len(head) < HELD_BYTES_MAX and (part := await content.readany()):
        head += part
    return head


def code(body: bytes) -> str:
    """Of an error; "" where there is none."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""
