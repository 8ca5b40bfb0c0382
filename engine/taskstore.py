"""Tasks on disk: what was accepted is there after a kill −9, and what it came to for a time.

One SQLite file (WAL, synchronous=FULL) and one thread that owns it. What is ordered while a commit
is on its way to the disk goes into the next, all of it for one fsync (group commit); an order is
answered after the commit it is part of.
"""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.reconfig import StateError

Order = Callable[[sqlite3.Connection], Any]

GROUP_ORDERS_MAX = 1000  # in one commit
FILE = "tasks.sqlite"
SCHEMA = """
CREATE TABLE IF NOT EXISTS tasks (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    model TEXT NOT NULL,
    chat INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    created REAL NOT NULL,
    deadline REAL NOT NULL,
    body TEXT NOT NULL,
    begun INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'queued',
    ended REAL NOT NULL DEFAULT 0,
    answer TEXT NOT NULL DEFAULT ''
) STRICT
"""
COLUMNS = "number, id, model, chat, priority, created, deadline, deaths, state, ended"
SIZE = "length(CAST(body AS BLOB)) + length(CAST(answer AS BLOB))"


class State(StrEnum):
    """Running is of the process, not of the disk: there such a task is queued."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(eq=False)
class Task:
    """All of a task but its body and its answer. Unix seconds; `ended` 0.0 while it has not.

    `number`: order of acceptance. `deaths`: how often the engine died while this ran.
    """

    number: int
    id: str
    model: str
    chat: bool
    priority: int
    created: float
    deadline: float
    deaths: int = 0
    state: State = State.QUEUED
    ended: float = 0.0
    bytes: int = 0


class TaskStore:
    """Methods return futures of what was committed, which may raise sqlite3.Error; of any thread.

    `loaded`: the tasks there were at the start, in the order of their acceptance. Raises StateError
    for a folder that cannot be used, or that another engine uses.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # it holds prompts
            self.base = sqlite3.connect(
                self.path, timeout=1.0, isolation_level=None, check_same_thread=False
            )
            self.base.execute("PRAGMA locking_mode = EXCLUSIVE")
            self.base.execute("PRAGMA journal_mode = WAL")
            self.base.execute("PRAGMA synchronous = FULL")
            self.base.execute("BEGIN IMMEDIATE")
            self.base.execute(SCHEMA)
            # The engine died while these ran: it did not say otherwise when it ended.
            self.base.execute("UPDATE tasks SET deaths = deaths + begun, begun = 0")
            self.loaded = self._load()
            self.base.execute("COMMIT")
        except (OSError, sqlite3.Error, ValueError) as error:
            raise StateError(
                f"queue_state: {self.path}: not a queue this engine can use ({error}); one engine "
                "uses it at a time, and removing it forgets its tasks"
            ) from error
        self.orders: queue.SimpleQueue[tuple[Order, Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="tasks", daemon=True)
        self.thread.start()

    def add(self, task: Task, body: str) -> Future[None]:
        return self._do(
            "INSERT INTO tasks (number, id, model, chat, priority, created, deadline, body)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            *(task.number, task.id, task.model, task.chat),
            *(task.priority, task.created, task.deadline, body),
        )

    def begin(self, task: Task) -> Future[str]:
        """It runs from now on; gives its body."""

        def work(base: sqlite3.Connection) -> str:
            base.execute("UPDATE tasks SET begun = 1 WHERE number = ?", (task.number,))
            return self._text(base, "body", task)

        return self._do(work)

    def again(self, task: Task) -> Future[None]:
        """It runs no more, and has not ended."""
        return self._do("UPDATE tasks SET begun = 0 WHERE number = ?", task.number)

    def end(self, task: Task, state: State, answer: str, now: float) -> Future[None]:
        """A task ends once: of one that has, or is gone, nothing is changed."""
        return self._do(
            "UPDATE tasks SET state = ?, answer = ?, ended = ?, begun = 0"
            " WHERE number = ? AND state = 'queued'",
            *(state, answer, now, task.number),
        )

    def answer(self, task: Task) -> Future[str]:
        return self._do(lambda base: self._text(base, "answer", task))

    def body(self, task: Task) -> Future[str]:
        return self._do(lambda base: self._text(base, "body", task))

    def remove(self, task: Task) -> Future[None]:
        return self._do("DELETE FROM tasks WHERE number = ?", task.number)

    def close(self) -> None:
        """What runs is begun anew by the next engine, and nobody died."""
        self._do("UPDATE tasks SET begun = 0")
        self.orders.put(None)
        self.thread.join()
        self.base.close()

    def _load(self) -> list[Task]:
        rows = self.base.execute(f"SELECT {COLUMNS}, {SIZE} FROM tasks ORDER BY number")  # noqa: S608
        tasks = [Task(*row) for row in rows]
        for task in tasks:
            task.chat, task.state = bool(task.chat), State(task.state)
        return tasks

    @staticmethod
    def _text(base: sqlite3.Connection, column: str, task: Task) -> str:
        row = base.execute(f"SELECT {column} FROM tasks WHERE number = ?", (task.number,))  # noqa: S608
        found = row.fetchone()
        return str(found[0]) if found else ""

    def _do(self, order: Any, *values: Any) -> Future[Any]:
        """`order`: a statement with its values, or what is done with the connection."""
        work = order
        if isinstance(order, str):

            def work(base: sqlite3.Connection) -> None:
                base.execute(order, values)

        future: Future[Any] = Future()
        self.orders.put((work, future))
        return future

    def _run(self) -> None:
        going = True
        while going:
            group = [self.orders.get()]
            while group[-1] is not None and len(group) < GROUP_ORDERS_MAX:
                try:
                    group.append(self.orders.get_nowait())
                except queue.Empty:
                    break
            going = group[-1] is not None
            self._commit([
                order for order in group if order and order[1].set_running_or_notify_cancel()
            ])  # fmt: skip

    def _commit(self, group: list[tuple[Order, Future[Any]]]) -> None:
        try:
            self.base.execute("BEGIN")
            results = [work(self.base) for work, _ in group]
            self.base.execute("COMMIT")
        except sqlite3.Error as error:
            if self.base.in_transaction:
                self.base.execute("ROLLBACK")
            for _, future in group:
                future.set_exception(error)
            return
        for (_, future), result in zip(group, results, strict=True):
            future.set_result(result)
