"""The disk spool: bodies ready to send, one file each, and the sender that drains it.

A batch is on disk (fsync of file and folder) before `put` returns, so it outlives kill -9; a file
half written has another name and is swept at the next start. The spool is capped by bytes and by
age, oldest first out, and every drop is counted. The newest batch is sent first, so that after an
outage the present is seen at once and the past fills in behind it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu_agent.backoff import Backoff
from gpu_agent.bounded import why
from gpu_agent.standing import Standing

log = logging.getLogger(__name__)

BATCH_BYTES_MAX = 16 * 1024 * 1024
# So often a batch may be answered 5xx before it waits behind the others.
REFUSALS_MAX = 3


@dataclass(frozen=True, slots=True)
class Batch:
    sequence: int
    created_ms: int
    batch_id: str
    size_bytes: int

    @property
    def file_name(self) -> str:
        return f"{self.sequence:012d}-{self.created_ms}-{self.batch_id}.otlp"


class Spool:
    """Thread-safe. `folder` belongs to this process alone.

    Raises ValueError for limits that leave no room.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bytes_max: int,
        age_s_max: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        if bytes_max <= 0 or age_s_max <= 0:
            raise ValueError(
                f"spool: got {bytes_max} bytes and {age_s_max} s, allowed: both above 0"
            )
        self.folder = folder
        self.bytes_max = bytes_max
        self.age_s_max = age_s_max
        self.dropped: Counter[str] = Counter()
        self.bytes = 0
        self._now = now
        self._batches: dict[int, Batch] = {}  # oldest first
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        folder.mkdir(parents=True, exist_ok=True)
        self._sequence = self._recover()

    def _recover(self) -> int:
        found: list[Batch] = []
        for path in self.folder.iterdir():
            batch = _batch_of(path)
            if batch is None or batch.size_bytes == 0:
                path.unlink()  # the torn tail of a process that was killed
            else:
                found.append(batch)
        for batch in sorted(found, key=lambda batch: batch.sequence):
            self._batches[batch.sequence] = batch
            self.bytes += batch.size_bytes
        return max(self._batches, default=0)

    def put(self, body: bytes) -> str:
        """Keeps one body and returns its batch id. Raises OSError when the disk refuses."""
        with self._lock:
            self._sequence += 1
            batch = Batch(self._sequence, int(self._now() * 1000), uuid.uuid4().hex, len(body))
            if batch.size_bytes > min(BATCH_BYTES_MAX, self.bytes_max):
                self.dropped["batch larger than the spool allows"] += 1
                return batch.batch_id
            self._make_room(batch.size_bytes)
        self._write(batch, body)  # outside the lock: a slow disk must not hold up `depth`
        with self._filled:
            self._batches[batch.sequence] = batch
            self.bytes += batch.size_bytes
            self._filled.notify_all()
        return batch.batch_id

    def _write(self, batch: Batch, body: bytes) -> None:
        path = self.folder / batch.file_name
        torn = path.with_suffix(".torn")
        with torn.open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        torn.rename(path)
        _sync_folder(self.folder)

    def _make_room(self, bytes_wanted: int) -> None:
        oldest_ms = (self._now() - self.age_s_max) * 1000
        for batch in list(self._batches.values()):
            if batch.created_ms < oldest_ms:
                self._forget(batch, "older than the spool allows")
            elif self.bytes + bytes_wanted > self.bytes_max:
                self._forget(batch, "spool full")
            else:
                break

    def _forget(self, batch: Batch, reason: str = "") -> None:
        if self._batches.pop(batch.sequence, None) is None:
            return
        self.bytes -= batch.size_bytes
        (self.folder / batch.file_name).unlink(missing_ok=True)
        if reason:
            self.dropped[reason] += 1

    def newest(self, *, timeout_s: float, but: Collection[int] = ()) -> tuple[Batch, bytes] | None:
        """The newest batch, waiting up to timeout_s for one; it stays until `done` or `drop`.

        Those whose sequence is in `but` come after all the others.
        """
        with self._filled:
            self._filled.wait_for(lambda: bool(self._batches), timeout=timeout_s)
            self._make_room(0)
            while self._batches:
                newest_first = reversed(self._batches)
                sequence = next((s for s in newest_first if s not in but), None)
                batch = self._batches[sequence or next(reversed(self._batches))]
                try:
                    return batch, (self.folder / batch.file_name).read_bytes()
                except FileNotFoundError:
                    self._forget(batch, "file removed by someone else")
            return None

    def done(self, batch: Batch) -> None:
        with self._lock:
            self._forget(batch)

    def drop(self, batch: Batch, reason: str) -> None:
        with self._lock:
            self._forget(batch, reason)

    def depth(self) -> tuple[int, int, float]:
        """Batches, bytes, and the age in seconds of the oldest batch."""
        with self._lock:
            if not self._batches:
                return 0, 0, 0.0
            oldest = self._batches[next(iter(self._batches))]
            age_s = max(0.0, self._now() - oldest.created_ms / 1000)
            return len(self._batches), self.bytes, age_s


def _batch_of(path: Path) -> Batch | None:
    words = path.stem.split("-")
    if path.suffix != ".otlp" or len(words) != 3 or not (words[0] + words[1]).isdigit():
        return None
    return Batch(int(words[0]), int(words[1]), words[2], path.stat().st_size)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to one post."""

    status: int
    body: bytes = b""
    retry_after_s: float | None = None


class Post(Protocol):
    """Sends one body. Raises OSError when there is no answer."""

    def __call__(self, body: bytes, headers: dict[str, str]) -> Answer: ...


class Sender:
    """Drains the spool. 2xx ends a batch, 429 and 5xx keep it, anything else drops it counted.

    A batch the receiver chokes on must not keep the older ones from it: after REFUSALS_MAX answers
    of 5xx it is tried again only when nothing else waits.
    """

    def __init__(
        self,
        spool: Spool,
        post: Post,
        *,
        token: str,
        backoff: Backoff | None = None,
        standing: Standing | None = None,
        rejected_points: Callable[[bytes], tuple[int, str]] = lambda body: (0, ""),
    ) -> None:
        self.spool = spool
        self.post = post
        self.backoff = backoff or Backoff()
        self.sent = 0
        self.points_rejected = 0
        self.errors: Counter[str] = Counter()
        self.standing = standing or Standing()
        self._token = token
        self._rejected_points = rejected_points
        self._refusals: Counter[int] = Counter()
        self._warned: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            found = self.next(timeout_s=0.5)
            if found is not None:
                wait_s = self.send(*found)
                if wait_s > 0:
                    stop.wait(wait_s)

    def next(self, *, timeout_s: float) -> tuple[Batch, bytes] | None:
        """The batch to send now."""
        put_off = {s for s, count in self._refusals.items() if count >= REFUSALS_MAX}
        found = self.spool.newest(timeout_s=timeout_s, but=put_off)
        if found is None or found[0].sequence in put_off:
            self._refusals.clear()  # nothing else waits, so they are in turn again
        return found

    def send(self, batch: Batch, body: bytes) -> float:
        """Tries one batch; returns the seconds to wait before the next try."""
        headers = {
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "gzip",
            "Authorization": f"Bearer {self._token}",
            "X-Batch-Id": batch.batch_id,
        }
        try:
            answer = self.post(body, headers)
        except OSError as error:
            return self._failed(f"network: {why(error)}", "network", None)
        if 200 <= answer.status < 300:
            self._succeeded(batch, answer)
            return 0.0
        if answer.status == 429 or answer.status >= 500:
            reason = f"HTTP {answer.status}"
            self._refusals[batch.sequence] += answer.status >= 500
            return self._failed(reason, reason, answer.retry_after_s)
        reason = f"HTTP {answer.status}"
        words = answer.body.decode("utf-8", "replace").replace(self._token, "…")
        self._warn_once(f"{reason} drops batches: {words[:200]}")
        self.spool.drop(batch, reason)
        self.standing.bad(reason)
        return 0.0

    def _succeeded(self, batch: Batch, answer: Answer) -> None:
        self.spool.done(batch)
        self.sent += 1
        self.backoff.succeed()
        self.standing.good()
        if answer.body:
            try:
                count, reason = self._rejected_points(answer.body)
            except Exception as error:  # noqa: BLE001 - a reply nobody can read loses no data
                count, reason = 0, f"unreadable reply: {error}"
            self.points_rejected += count
            if reason:
                self._warn_once(f"receiver says: {reason[:200]}")

    def _failed(self, reason: str, kind: str, retry_after_s: float | None) -> float:
        self.errors[kind] += 1
        self.standing.bad(reason)
        return self.backoff.fail(retry_after_s)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned and len(self._warned) < 100:
            self._warned.add(message)
            log.warning("telemetry: %s", message)
