"""The router's door: an ASGI application that speaks as an engine does, and passes requests on."""

from __future__ import annotations

import asyncio
import re
import uuid

from engine.http import ApiError, Call, Door, Handler, bad, change, parsed, tell
from engine.knobs import described
from engine.reconfig import RuntimeStore
from engine.router import forward
from engine.router.choice import Choice, Wanted, wanted
from engine.router.config import RouterConfig
from engine.router.fleet import Fleet
from engine.router.forward import NOT_ASKED, Forwarder, Passage, passed_on
from engine.router.knobs import RouterSettings
from engine.router.observe import Metrics, Outcome
from engine.router.spans import Tracing

# Allowed in no header (RFC 9110, 5.5): uvicorn lets them in, aiohttp lets none of them out.
CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class App(Door):
    """The ASGI application of one router. `attach` joins it to the loop that serves it."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.loop: asyncio.AbstractEventLoop | None = None
        self.runtime = RuntimeStore(config.state, self._wake, RouterSettings.of(config.engines))
        self.fleet = Fleet(config, lambda: self.runtime.running.config)
        self.choice = Choice()
        self.tracing = Tracing(config) if config.otlp_endpoint else None
        self.metrics = Metrics(
            self.fleet, self.choice, self.runtime,
            lambda: self.tracing.exporter.dropped if self.tracing else 0,
        )  # fmt: skip
        self.forwarder = Forwarder(self.fleet, self.choice, self.runtime, self.metrics)
        self.passages: set[Passage] = set()
        self.draining = False
        self.ending = False
        self.routes: dict[str, dict[str, Handler]] = {
            "/v1/completions": {"POST": self.completions},
            "/v1/chat/completions": {"POST": self.completions},
            "/v1/models": {"GET": self.models},
            "/v1/runtime_config": {"GET": self.config_get, "PATCH": self.config_patch},
            "/health": {"GET": self.health, "HEAD": self.health},
            "/healthz": {"GET": self.health, "HEAD": self.health},
            "/metrics": {"GET": self.render},
        }

    def _wake(self) -> None:
        # A change is taken between two events, as an engine's step thread does between two steps.
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self.runtime.take()
        for engine in self.fleet.engines:
            engine.suspected.set()  # asked at once, and from then on as often as is said now

    async def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        await self.fleet.start()

    def drain(self) -> None:
        self.draining = True

    def end_all(self) -> None:
        self.ending = True
        for passage in self.passages:
            assert passage.task is not None
            if not passage.done:
                passage.task.cancel()

    async def detach(self) -> None:
        await self.fleet.close()

    def close(self) -> None:
        """After the event loop has ended."""
        if self.tracing:
            self.tracing.close()

    async def completions(self, call: Call) -> None:
        raw = await call.body()
        asked = wanted(
            parsed(raw), session=call.header(b"x-session"), tenant=call.header(b"x-tenant")
        )
        await self._pass(call, raw, asked)

    async def models(self, call: Call) -> None:
        """Of any engine: they serve the same."""
        await self._pass(call, b"", Wanted())

    async def _pass(self, call: Call, raw: bytes, asked: Wanted) -> None:
        """To an engine and back; stops there when its client leaves."""
        for name, value in call.scope["headers"]:
            if CONTROL.search(value):
                # Not the value: it may be a secret.
                raise bad(name.decode(errors="replace"), "has control characters, allowed: none")
        if self.draining:
            self.metrics.unrouted.labels("shutting_down").inc()
            raise shutting_down()
        limit = self.runtime.running.config.number("max_in_flight")
        if len(self.passages) >= limit:
            self.metrics.unrouted.labels("max_in_flight").inc()
            message = f"{limit} requests are under way (max_in_flight)"
            raise ApiError(429, "max_in_flight", message, headers={"retry-after": "1"})
        headers = [
            # aiohttp writes text as UTF-8.
            (name.decode(errors="replace"), value.decode(errors="replace"))
            for name, value in passed_on(call.scope["headers"], NOT_ASKED)
        ]
        request_id = next((v for k, v in headers if k == "x-request-id"), "") or uuid.uuid4().hex
        passage = Passage(call, raw, headed(headers, "x-request-id", request_id), asked)
        span = None
        if self.tracing:
            span, below = self.tracing.begin(call.header(b"traceparent"), request_id)
            passage.headers = headed(passage.headers, "traceparent", below)
        passage.task = asyncio.current_task()
        self.passages.add(passage)
        watch = asyncio.create_task(self._watch(passage))
        error = ""
        try:
            await self.forwarder.run(passage)
        except ApiError as told:
            error, passage.status = str(told), told.status
            raise
        except Exception as mistake:
            error = type(mistake).__name__
            raise
        except asyncio.CancelledError:
            if passage.left or passage.done:
                return
            if not self.ending:
                raise
            await forward.tell(passage, shutting_down())
        finally:
            watch.cancel()
            self.passages.discard(passage)
            if self.tracing and span:
                failed = passage.outcome is Outcome.ERROR
                self.tracing.end(span, told_of(passage), error or ("error" if failed else ""))

    @staticmethod
    async def _watch(passage: Passage) -> None:
        """Ends what is under way when its client goes away."""
        while (await passage.call.receive())["type"] != "http.disconnect":
            pass
        if not passage.done:
            assert passage.task is not None
            passage.left = True
            passage.task.cancel()

    async def health(self, call: Call) -> None:
        """200 while some engine can be had and requests are taken in; 503 with the reason else."""
        settings = self.runtime.running.config
        state = "ok" if self.fleet.available() else "no engine"
        if self.draining:
            state = "shutting down"
        engines = {
            engine.name: {
                "url": engine.url,
                "out": engine.out(settings) or None,
                "weight": settings.weight(engine.name),
                "spare": engine.spare,
                "breaker": engine.breaker.state,
                "in_flight": engine.in_flight,
                "elsewhere": engine.elsewhere,
            }
            for engine in self.fleet.engines
        }
        body = {"status": state, "router": self.config.name, "engines": engines}
        await call.answer(body, 200 if state == "ok" else 503)

    async def render(self, call: Call) -> None:
        await call.answer(self.metrics.render())

    async def config_get(self, call: Call) -> None:
        version = self.runtime.running
        knobs = described(version.config.knobs, version.config.chosen, {})
        await tell(call, version, knobs, engine=self.config.name, model="")

    async def config_patch(self, call: Call) -> None:
        await change(call, self.runtime)
        await self.config_get(call)


def shutting_down() -> ApiError:
    return ApiError(503, "shutting_down", "the router is shutting down")


def headed(headers: list[tuple[str, str]], name: str, value: str) -> list[tuple[str, str]]:
    return [*((k, v) for k, v in headers if k != name), (name, value)]


def told_of(passage: Passage) -> dict[str, str | int | float]:
    """A span's attributes."""
    attributes: dict[str, str | int | float] = {
        "trimtab.router.engine": passage.engine,
        "trimtab.router.by": passage.by,
        "trimtab.router.retries": passage.retries,
        "trimtab.router.outcome": passage.outcome,
        "http.response.status_code": passage.status,
    }
    if passage.first:
        attributes["trimtab.router.first_byte_s"] = passage.first - passage.began
    return attributes
