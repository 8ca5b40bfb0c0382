"""The engine's door: an ASGI application, OpenAI-compatible, with metrics and live configuration.

Tokens come from the step thread once per step; a request's task wakes once for all tokens that
are there, so a slow client costs fewer, larger events and never holds up a step.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from functools import partial

from engine import openai, pause
from engine.config import EngineConfig
from engine.core import Core, Rejected
from engine.faults import FaultError
from engine.http import AGAIN, ApiError, Call, Door, Handler, bad, change, tell
from engine.knobs import KnobError
from engine.memory import described
from engine.sched.request import Finish, Request
from engine.sched.scheduler import Outcome
from engine.steps import WATCH_S_MAX, WATCHED_MAX, Watch
from engine.stream import Stream
from engine.tasks import Tasks
from engine.tokenising import Tokenising


class App(Door):
    """The ASGI application of one engine. `attach` joins it to the loop that serves it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.loop: asyncio.AbstractEventLoop | None = None
        self.core = Core(config, self._deliver)
        self.tokenising = Tokenising()
        self.tasks = None
        if config.queue_state:
            self.tasks = Tasks(self.core, self.tokenising, config.queue_state)
        self.routes: dict[str, dict[str, Handler]] = {
            "/v1/completions": {"POST": self.completions},
            "/v1/chat/completions": {"POST": self.chat},
            "/v1/tasks": {"POST": self.task_accept},
            "/v1/tasks/*": {"GET": self.task_get, "DELETE": self.task_delete},
            "/v1/models": {"GET": self.models},
            "/v1/runtime_config": {"GET": self.config_get, "PATCH": self.config_patch},
            "/health": {"GET": self.health, "HEAD": self.health},
            "/healthz": {"GET": self.health, "HEAD": self.health},
            "/metrics": {"GET": self.metrics},
            "/v1/profile": {"POST": self.profile},
            "/v1/faults": {"POST": self.faults},
            "/pause": {"POST": self.pause},
            "/resume": {"POST": self.resume},
            "/v1/kv/map": {"GET": self.kv_map},
            "/is_paused": {"GET": self.is_paused},
            "/reset_prefix_cache": {"POST": self.reset_prefix_cache},
        }

    async def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.core.start()
        if self.tasks:
            self.tasks.start()

    def drain(self) -> None:
        self.core.draining = True

    def end_all(self) -> None:
        self.core.end_all()

    def close(self) -> None:
        """After the event loop has ended."""
        self.tokenising.close()
        self.core.stop()
        if self.tasks:
            self.tasks.close()

    def _deliver(self, outcome: Outcome) -> None:
        assert self.loop is not None
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._hand_out, outcome)

    def _hand_out(self, outcome: Outcome) -> None:
        """Runs in the event loop, once per step."""
        for request, token in zip(outcome.requests, outcome.tokens, strict=True):
            stream: Stream = request.stream
            stream.tokens.append(token)
            if stream.eager:
                stream.wake()
        for request in outcome.finished:
            request.stream.done = True
            request.stream.wake()
            if request.stream.left:
                self.core.record(request)

    async def completions(self, call: Call) -> None:
        await self._complete(call, chat=False)

    async def chat(self, call: Call) -> None:
        await self._complete(call, chat=True)

    async def _complete(self, call: Call, *, chat: bool) -> None:
        body, arrived = await call.json(), time.monotonic()
        parse = partial(
            openai.parse,
            body,
            chat=chat,
            arrived=arrived,
            request_id=call.header(b"x-request-id") or uuid.uuid4().hex,
            parent=call.header(b"traceparent"),
            priority=call.header(b"x-priority"),
            model=self.config.model_name,
            tokenizer=self.core.tokenizer,
            tokens_max=self.config.model_len_max,
        )
        try:
            self.core.check_room(self.tokenising.waiting)
            parsed = await self.tokenising.run(call.size, parse)
            request = parsed.request
            # As in the file of tenants.
            request.tenant = (
                call.header(b"x-tenant").strip().encode("latin-1").decode(errors="replace")
            )
            request.stream = stream = Stream(parsed.stream)
            self.core.submit(request)
        except Rejected as error:
            after = error.retry_after_s
            headers = {} if after is None else {"retry-after": str(after)}
            raise ApiError(error.status, error.reason, str(error), headers=headers) from None
        gone = asyncio.create_task(self._watch(call, request))
        try:
            writer = openai.Writer(parsed, self.config.model_name, self.core.tokenizer)
            if parsed.stream:
                await self._stream(call, request, stream, writer)
            else:
                tokens = await stream.take()
                self._raise_failed(request)
                if request.finish is not Finish.ABORT:
                    whole = writer.whole(tokens)
                    request.written = time.monotonic()
                    await call.answer(whole, x_request_id=request.id)
        except asyncio.CancelledError:
            self.core.cancel(request)
            raise
        finally:
            gone.cancel()
            stream.left = True
            if stream.done:
                self.core.record(request)

    async def _stream(
        self, call: Call, request: Request, stream: Stream, writer: openai.Writer
    ) -> None:
        while not stream.done or stream.tokens:
            tokens = await stream.take()
            if stream.done and request.finish is Finish.ABORT:
                return
            if stream.done and request.finish is Finish.ERROR:
                if not call.started:
                    self._raise_failed(request)
                error = self._failed(request).body()
                await call.part(f"data: {json.dumps(error)}\n\n", more=False)
                return
            if not call.started:
                headers = {"cache-control": "no-cache", "x-request-id": request.id}
                await call.start(200, "text/event-stream; charset=utf-8", headers)
            final = stream.done
            event = writer.event(tokens, final)
            if final:
                request.written = time.monotonic()
            await call.part(event + writer.end() if final else event, more=not final)
            if final:
                return

    async def _watch(self, call: Call, request: Request) -> None:
        """Cancels the request when its client goes away."""
        while (await call.receive())["type"] != "http.disconnect":
            pass
        if not request.stream.done:
            self.core.cancel(request)

    def _raise_failed(self, request: Request) -> None:
        if request.finish is Finish.ERROR:
            raise self._failed(request)

    @staticmethod
    def _failed(request: Request) -> ApiError:
        status = 503 if request.error_code in AGAIN else 500
        return ApiError(status, request.error_code, request.error)

    def _tasks(self) -> Tasks:
        if self.tasks is None:
            raise ApiError(404, "closed", "tasks: there are none without --queue-state FOLDER")
        return self.tasks

    async def task_accept(self, call: Call) -> None:
        told = await self._tasks().accept(await call.json(), call.size)
        await call.answer(told, 202, location=f"/v1/tasks/{told['id']}")

    async def task_get(self, call: Call) -> None:
        await call.answer(await self._tasks().get(call.scope["path"].rpartition("/")[2]))

    async def task_delete(self, call: Call) -> None:
        await call.answer(await self._tasks().delete(call.scope["path"].rpartition("/")[2]))

    async def models(self, call: Call) -> None:
        model = {"id": self.config.model_name, "object": "model", "owned_by": "trimtab"}
        limit = {"max_model_len": self.config.model_len_max}
        await call.answer({"object": "list", "data": [{**model, **limit}]})

    async def health(self, call: Call) -> None:
        """200 while the step thread lives and requests are taken in; 503 with the reason else.

        Paused, they are taken in: they queue.
        """
        core = self.core
        state = "paused" if core.paused else "ok"
        if core.draining:
            state = "shutting down"
        if not core.alive:
            state = "step thread has ended"
        body = {
            "status": state,
            "engine": self.config.name,
            "model": self.config.model_name,
            "paused": str(core.paused) or None,
        }
        await call.answer(body, 200 if state in ("ok", "paused") else 503)

    async def metrics(self, call: Call) -> None:
        await call.answer(self.core.metrics.render())

    async def profile(self, call: Call) -> None:
        """The next steps, phase by phase; fewer where they do not come within `deadline_s`."""
        wanted = int(call.number("steps", "100", 1, WATCHED_MAX, whole=True))
        deadline_s = call.number("deadline_s", "10", 0, WATCH_S_MAX)
        form = call.query("format", "json")
        if form not in ("json", "chrome"):
            raise bad("format", f"got {form!r}, allowed: json, chrome")
        steps, deadline = self.core.steps, time.monotonic() + deadline_s
        if steps.watch is not None:
            raise ApiError(409, "busy", "profile: one is being taken, come back when it is done")
        steps.watch = watch = Watch(wanted)
        while not watch.complete and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if steps.watch is watch:  # another's, since the step thread is done with this one
            steps.watch = None
        await call.answer(watch.chrome() if form == "chrome" else watch.told())

    async def pause(self, call: Call) -> None:
        """Answers when the engine stands still; told again, it answers the same."""
        field = "mode"
        try:
            mode = pause.read_mode(call.query("mode", "abort"))
            field = "deadline_s"
            deadline_s = pause.read_deadline_s(call.query("deadline_s", ""), mode)
        except ValueError as error:
            raise bad(field, str(error)) from None
        await pause.pause(self.core, mode, deadline_s)
        await self.is_paused(call)

    async def resume(self, call: Call) -> None:
        self.core.pause(pause.Pause.NOT)
        await self.is_paused(call)

    async def is_paused(self, call: Call) -> None:
        await call.answer(pause.told(self.core))

    async def reset_prefix_cache(self, call: Call) -> None:
        """Forgets every cached prefix; running requests keep the blocks they have."""
        try:
            forgotten = await asyncio.to_thread(self.core.reset_prefix_cache)
        except TimeoutError as error:
            raise ApiError(500, "not_taken", str(error)) from None
        await call.answer({"forgotten_blocks": forgotten})

    async def kv_map(self, call: Call) -> None:
        """What each block of the KV pool holds and for whom, in runs, from block `from` on."""
        try:
            pool, version = await asyncio.to_thread(self.core.kv_blocks)
        except TimeoutError as error:
            raise ApiError(500, "not_taken", str(error)) from None
        start, last = call.query("from", "0"), len(pool.states) - 1
        digits = start.isascii() and start.isdigit() and len(start) <= len(str(last))
        if not digits or int(start) > last:
            raise bad("from", f"got {start!r}, allowed: 0 to {last}")
        head = {
            "engine": self.config.name,
            "config_version": version.config_version,
            "allocator": version.config.kv_allocator,
        }
        await call.answer(head | described(pool, int(start)))

    async def faults(self, call: Call) -> None:
        """Breaks something on purpose, or mends it all; closed unless the engine has a token."""
        token = self.config.faults_token
        if not token:
            raise ApiError(
                403, "closed", "faults: closed, open them with --faults-token-env at the start"
            )
        given = call.header(b"authorization").encode()
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise ApiError(
                401,
                "unauthorized",
                "Authorization: want Bearer and the faults token",
                param="Authorization",
                headers={"www-authenticate": "Bearer"},
            )
        body = await call.json()
        try:
            active = await asyncio.to_thread(self.core.faults.inject, body)
        except KnobError as error:
            raise ApiError(409, error.code, str(error), param="fault") from None
        except FaultError as error:
            raise bad(error.param, str(error)) from None
        except TimeoutError as error:
            raise ApiError(500, "not_taken", str(error)) from None
        await call.answer({"active": active})

    async def config_get(self, call: Call) -> None:
        version = self.core.runtime.running
        knobs = version.config.described(self.core.barrier.unsupported)
        knobs["kv_dtype"]["token_bytes"] = self.core.kv_token_bytes
        names = {"engine": self.config.name, "model": self.config.model_name}
        await tell(call, version, knobs, **names)

    async def config_patch(self, call: Call) -> None:
        await change(call, self.core.runtime)
        await self.config_get(call)
