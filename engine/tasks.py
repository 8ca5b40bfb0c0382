"""Tasks: requests that outlive their connection, and the engine.

A client of /v1/completions holds a connection; when the engine dies it sees that, and may ask
again. A task is accepted (202) when it is on disk, and from then on it ends exactly once, whatever
dies: succeeded, failed, or expired at its deadline. It is begun as often as that takes, always from
its beginning; its answer is told as often as it is asked for, until it is deleted or forgotten.

Tasks run beside other requests as one of them: in order of priority, then of acceptance, as many at
once as `max_num_seqs` says, and never so that more than half of the queue is theirs to fill. Those
that ran when the engine died run alone, and have failed when it died so five times.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import logging
import re
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from engine import openai
from engine.core import Core, Rejected
from engine.http import AGAIN, ApiError, bad
from engine.sched.request import PRIORITIES, Finish, Request
from engine.stream import Stream
from engine.taskstore import State, Task, TaskStore
from engine.tokenising import Tokenising

log = logging.getLogger("engine")

TASKS_MAX = 20_000
BYTES_MAX = 512 * 2**20  # of bodies and answers
KEPT_S = 24 * 3600.0  # what a task came to
TIMEOUT_S_DEFAULT, TIMEOUT_S_MAX = 3600.0, 7 * 24 * 3600.0
DEATHS_MAX = 5
LOOK_EVERY_S = 0.5
# Not "." or "..", which a client takes out of a path.
ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~-]{1,128}")
FIELDS = ("id", "timeout_s", "priority", "body")


class Tasks:
    """Of the event loop, once `start` was called there. Raises StateError as TaskStore does."""

    def __init__(self, core: Core, tokenising: Tokenising, folder: Path) -> None:
        self.core = core
        self.tokenising = tokenising
        self.store = TaskStore(folder)
        loaded = self.store.loaded
        self.tasks: dict[str, Task] = {}
        self.bytes = 0
        self.number = max((task.number for task in loaded), default=0)
        self.queued: list[tuple[int, int, Task]] = []
        self.running: dict[Task, asyncio.Task[None]] = {}
        self.swept = self.rejected = 0.0  # when, of the clock of the event loop
        self.moved = asyncio.Event()
        self.dispatcher: asyncio.Task[None] | None = None
        for task in loaded:
            self._add(task)
            if task.state is State.QUEUED:
                self._queue(task)

    def start(self) -> None:
        self.core.task_counts = self.counts
        self.dispatcher = asyncio.get_running_loop().create_task(self._dispatch())

    def close(self) -> None:
        """After the event loop has ended."""
        self.store.close()

    def counts(self) -> dict[str, int]:
        found = Counter(task.state for task in self.tasks.values())
        return {str(state): found[state] for state in State}

    async def accept(self, asked: dict[str, Any], size: int) -> dict[str, Any]:
        """Returns once it is on disk. The same id with the same body is the same task.

        `size`: of what was asked, in bytes.
        """
        if self.core.draining:
            raise ApiError(503, "shutting_down", "the engine is shutting down")
        parse, body, timeout_s = self._checked(asked)
        call = await self.tokenising.run(size, parse)
        task_id = call.request.id
        try:
            if (known := self.tasks.get(task_id)) is not None:
                there = await asyncio.wrap_future(self.store.body(known))
                if self.tasks.get(task_id) is not known:
                    return await self.accept(asked, size)  # deleted meanwhile
                if there != body:
                    raise ApiError(
                        409, "id_taken", f"id: {task_id!r} is another task's", param="id"
                    )
                return self.told(known)
            task = self._new(call, len(body.encode()), timeout_s)
            await self._stored(task, body)
        except sqlite3.Error as error:
            raise ApiError(503, "not_stored", f"not accepted, the disk: {error}") from None
        if not task.ended:
            self._queue(task)
            self.moved.set()
        return self.told(task)

    async def _stored(self, task: Task, body: str) -> None:
        """Its id is taken at once: who asks for the same meanwhile waits for the same commit."""
        self._add(task)
        try:
            await asyncio.wrap_future(self.store.add(task, body))
        except sqlite3.Error:
            self._forget(task)
            raise

    async def get(self, task_id: str) -> dict[str, Any]:
        task = self._known(task_id)
        told = self.told(task)
        if task.ended:
            answer = await asyncio.wrap_future(self.store.answer(task))
            told |= json.loads(answer or "{}")
        return told

    async def delete(self, task_id: str) -> dict[str, Any]:
        """Gone from the disk, and no longer run: what it was when it went."""
        task = self._known(task_id)
        told = self.told(task)
        await asyncio.wrap_future(self.store.remove(task))
        if running := self.running.get(task):
            running.cancel()
        self._forget(task)
        return told | {"deleted": True}

    def told(self, task: Task) -> dict[str, Any]:
        told = {
            "id": task.id,
            "state": str(task.state),
            "model": task.model,
            "priority": task.priority,
            "created_at": moment(task.created),
            "deadline": moment(task.deadline),
        }
        return told | ({"ended_at": moment(task.ended)} if task.ended else {})

    def _checked(self, asked: dict[str, Any]) -> tuple[Callable[[], openai.Call], str, float]:
        """How it is read, its body as text, and its timeout_s; raises ApiError."""
        for field in asked:
            if field not in FIELDS:
                raise bad(field, f"no such field of a task, allowed: {', '.join(FIELDS)}")
        task_id = asked.get("id", uuid.uuid4().hex)
        if not isinstance(task_id, str) or not ID.fullmatch(task_id):
            raise bad("id", f"got {task_id!r}, want 1 to 128 of A-Z a-z 0-9 . _ ~ -, not . or ..")
        timeout_s = openai.number(asked, "timeout_s", TIMEOUT_S_DEFAULT, 0, TIMEOUT_S_MAX)
        body = asked.get("body")
        if not isinstance(body, dict):
            raise bad("body", "want what /v1/completions or /v1/chat/completions would get")
        if openai.flag(body, "stream"):
            raise bad("stream", "got True, a task answers as a whole")
        priority = str(asked.get("priority", ""))
        if priority.lower() not in ("", "0", "1", "2", "3", *PRIORITIES):
            raise bad("priority", f"got {priority!r}, allowed: 0 to 3, {', '.join(PRIORITIES)}")
        return partial(self._parse, body, task_id, priority), json.dumps(body), timeout_s

    def _parse(self, body: dict[str, Any], task_id: str, priority: str) -> openai.Call:
        return openai.parse(
            body,
            chat="messages" in body,
            request_id=task_id,
            parent="",
            priority=priority,
            model=self.core.config.model_name,
            tokenizer=self.core.tokenizer,
            tokens_max=self.core.config.model_len_max,
        )

    def _new(self, call: openai.Call, size: int, timeout_s: float) -> Task:
        """A task that is not on disk yet; raises ApiError 429 where no more can be kept."""
        for name, there, most in (
            ("tasks", len(self.tasks) + 1, TASKS_MAX),
            ("bytes of tasks", self.bytes + size, BYTES_MAX),
        ):
            if there > most:
                raise ApiError(
                    429,
                    "tasks_full",
                    f"{there} {name} would be kept, allowed: {most}; DELETE those you have read",
                    headers={"retry-after": "30"},
                )
        now, self.number = time.time(), self.number + 1
        return Task(
            number=self.number,
            id=call.request.id,
            model=self.core.config.model_name,
            chat=call.chat,
            priority=call.request.priority,
            created=now,
            deadline=now + timeout_s,
            bytes=size,
        )

    def _known(self, task_id: str) -> Task:
        task = self.tasks.get(task_id)
        if task is None:
            raise ApiError(404, "not_found", f"{task_id}: no such task, or it is forgotten")
        return task

    def _add(self, task: Task) -> None:
        self.tasks[task.id] = task
        self.bytes += task.bytes

    def _forget(self, task: Task) -> None:
        if self.tasks.get(task.id) is task:
            del self.tasks[task.id]
            self.bytes -= task.bytes

    def _queue(self, task: Task) -> None:
        task.state = State.QUEUED
        heapq.heappush(self.queued, (-task.priority, task.number, task))

    async def _dispatch(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.core.draining:
            if loop.time() >= self.swept + LOOK_EVERY_S:
                self.swept = loop.time()
                await self._sweep(time.time())
            self._begin(loop.time())
            self.moved.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.moved.wait(), LOOK_EVERY_S)

    async def _sweep(self, now: float) -> None:
        """Ends what waited too long, forgets what ended long ago."""
        for task in [*self.tasks.values()]:
            if task.state is State.QUEUED and now > task.deadline:
                with contextlib.suppress(sqlite3.Error):  # the next time, then
                    await self._end(task, State.EXPIRED, late(task).body())
            elif task.ended and now > task.ended + KEPT_S:
                self._forget(task)
                self.store.remove(task)

    def _begin(self, now: float) -> None:
        """Sets going what there is room for."""
        while self.queued and now >= self.rejected + LOOK_EVERY_S:
            _, _, task = self.queued[0]
            if self.tasks.get(task.id) is task and task.state is State.QUEUED:
                if not self._room(task):
                    return
                task.state = State.RUNNING
                self.running[task] = asyncio.create_task(self._run(task))
            heapq.heappop(self.queued)

    def _room(self, task: Task) -> bool:
        core = self.core
        config = core.runtime.running.config
        alone = task.deaths or any(other.deaths for other in self.running)
        return (
            len(self.running) < (1 if alone else config.max_num_seqs)
            and core.waiting < core.config.queue_requests_max / 2
            and task.priority >= config.shed_below_priority
        )

    async def _run(self, task: Task) -> None:
        """One try: ends the task, or queues it again."""
        try:
            ended = await self._outcome(task)
            if ended is None:
                self._again(task)
            else:
                await self._end(task, *ended)
        except (Rejected, sqlite3.Error) as error:
            log.warning("task %s is begun again: %s", task.id, error)
            self.rejected = asyncio.get_running_loop().time()
            self._again(task)
        finally:
            del self.running[task]
            self.moved.set()

    def _again(self, task: Task) -> None:
        self.store.again(task)
        self._queue(task)

    async def _end(self, task: Task, state: State, told: dict[str, Any]) -> None:
        now, text = time.time(), json.dumps(told)
        await asyncio.wrap_future(self.store.end(task, state, text, now))
        task.state, task.ended = state, now
        if self.tasks.get(task.id) is task:
            task.bytes += len(text.encode())
            self.bytes += len(text.encode())

    async def _outcome(self, task: Task) -> tuple[State, dict[str, Any]] | None:
        """What it came to; None: it is to be begun again. Raises Rejected, sqlite3.Error."""
        try:
            return await self._answer(task)
        except (Rejected, sqlite3.Error):
            raise
        except Exception as error:  # however wrong we are, a task ends
            log.exception("task %s", task.id)
            message = f"{type(error).__name__}: {error}"
            return State.FAILED, ApiError(500, "engine_error", message).body()

    async def _answer(self, task: Task) -> tuple[State, dict[str, Any]] | None:
        if task.deaths >= DEATHS_MAX:
            message = f"the engine died {task.deaths} times while this ran"
            return State.FAILED, ApiError(500, "engine_died", message).body()
        text = await asyncio.wrap_future(self.store.begin(task))
        body = {**json.loads(text), "model": task.model}
        try:
            parse = partial(self._parse, body, task.id, str(task.priority))
            call = await self.tokenising.run(len(text), parse)
        except ApiError as error:  # another model is served now
            return State.FAILED, error.body()
        request = call.request
        request.stream = stream = Stream(eager=False)
        try:
            self.core.submit(request)
        except Rejected as error:
            if error.retry_after_s is not None:
                raise
            # It never will be let in.
            return State.FAILED, ApiError(error.status, error.reason, str(error)).body()
        try:
            async with asyncio.timeout(max(0.0, task.deadline - time.time())):
                tokens = await stream.take()
            if request.finish is Finish.ERROR:
                return self._failed(request)
            answer = openai.Writer(call, task.model, self.core.tokenizer).whole(tokens)
            request.written = time.monotonic()
            return State.SUCCEEDED, {"answer": answer}
        except TimeoutError:
            return State.EXPIRED, late(task).body()
        finally:
            if not stream.done:
                self.core.cancel(request)
            stream.left = True
            if stream.done:
                self.core.record(request)

    @staticmethod
    def _failed(request: Request) -> tuple[State, dict[str, Any]] | None:
        if request.error_code in AGAIN:
            return None
        return State.FAILED, ApiError(500, request.error_code, request.error).body()


def late(task: Task) -> ApiError:
    return ApiError(504, "expired", f"not finished by its deadline, {moment(task.deadline)}")


def moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
