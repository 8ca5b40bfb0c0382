"""The one door in: admit, decode, count what is left out, acknowledge only what is durable.

    admit (event loop) → decode (a thread) → queue → commit (a thread) → acknowledge

Requests that arrive while a commit is on its way share the next one: an fsync costs the same for
one span and for 50,000, so group commit is what makes durable acknowledgements cheap.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from tracing.limits import Limits
from tracing.samples import SampleDecoder, SeriesCache
from tracing.spans import SpanDecoder
from tracing.store.store import Store
from tracing.wire import Encoding

# One tenant alone may hold three quarters of the queue, as it may of the places to read in.
SHARE_OF_FREE = 3


class QueueFull(RuntimeError):
    """More is waiting to become durable than the limits allow; send it again later."""


class Draining(RuntimeError):
    """This process is about to end and takes nothing new; send it again to the next one."""


class NotStored(RuntimeError):
    """The store failed; nothing was acknowledged, send it again later."""


@dataclass(frozen=True)
class Accepted:
    """A durable request. `rejected` spans or points were left out; `reasons` says why."""

    rejected: int
    reasons: Mapping[str, int]
    first: str = ""

    @property
    def message(self) -> str:
        """Every reason with its count, then the first fault in words; empty when all was kept."""
        counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.reasons.items()))
        return f"{counts}; first: {self.first}" if self.first else counts


class Meters:
    """What the door counts about itself, for /metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # The client adds `_total` to the name of a counter itself.
        self.spans = Counter("trimtab_ingest_spans", "Spans made durable", registry=registry)
        self.samples = Counter("trimtab_ingest_samples", "Samples made durable", registry=registry)
        self.rejected = Counter(
            "trimtab_ingest_rejected",
            "Spans and points left out, requests refused",
            ["reason"],
            registry=registry,
        )
        self.trimmed = Counter(
            "trimtab_ingest_trimmed", "Parts of kept spans left out", ["reason"], registry=registry
        )
        self.queue_bytes = Gauge(
            "trimtab_ingest_queue_bytes", "Bytes not durable yet", registry=registry
        )
        self.queue_spans = Gauge(
            "trimtab_ingest_queue_spans", "Spans and samples not durable yet", registry=registry
        )
        self.commit_seconds = Histogram(
            "trimtab_ingest_commit_seconds", "Time of one group commit", registry=registry
        )


class Room:
    """What a tenant's request holds of the queue, from its first byte until it is durable."""

    def __init__(self, door: Door, tenant: str) -> None:
        self._door = door
        self._tenant = tenant
        self.bytes = 0
        self.rows = 0

    def take(self, size_bytes: int = 0, rows: int = 0) -> None:
        """Raises QueueFull or Draining, and then takes nothing."""
        self._door.reserve(self._tenant, size_bytes, rows)
        self.bytes += size_bytes
        self.rows += rows

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self._door.release(self._tenant, self.bytes, self.rows)


@dataclass(frozen=True)
class _Waiting:
    """Decoded tables of one request, in the order they must become durable."""

    tables: Mapping[str, Any]
    durable: Future[None] = field(default_factory=Future)

    @property
    def rows(self) -> int:
        return sum(table.num_rows for table in self.tables.values())


class Door:
    """Accepts OTLP requests of any tenant. Use from one event loop; `close` drains it."""

    def __init__(
        self,
        store: Store,
        limits: Limits | None = None,
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.limits = limits or Limits()
        self.meters = Meters(registry)
        self._store = store
        self._cache = SeriesCache(self.limits.series_cached_max)
        self._spans = SpanDecoder(self.limits)
        self._samples = SampleDecoder(self.limits, self._cache)
        self._lock = threading.Condition()
        self._bytes = 0
        self._rows = 0
        self._held: dict[str, tuple[int, int]] = {}  # tenant → its part of the two above
        self._queue: deque[_Waiting] = deque()
        self._in_decoding = 0
        self._closing = False
        self._decoding = ThreadPoolExecutor(1, thread_name_prefix="ingest-decode")
        self._committing = threading.Thread(target=self._commit, name="ingest-commit", daemon=True)
        self._committing.start()

    # --- admission -----------------------------------------------------------------------------

    def room(self, tenant: str) -> Room:
        """Space in the queue for one request: `with door.room(tenant) as room: room.take(…)`."""
        return Room(self, tenant)

    def reserve(self, tenant: str, size_bytes: int, rows: int) -> None:
        """Takes a tenant's share. It may hold SHARE_OF_FREE times what it leaves free, so that
        whoever fills the queue leaves room for the next to come (dynamic thresholds, Choudhury and
        Hahne, 1998)."""
        limits = self.limits
        with self._lock:
            held_bytes, held_rows = self._held.get(tenant, (0, 0))
            free_bytes = limits.queue_bytes_max - self._bytes - size_bytes
            free_rows = limits.queue_spans_max - self._rows - rows
            over_bytes = size_bytes and held_bytes + size_bytes > SHARE_OF_FREE * free_bytes
            over_rows = rows and held_rows + rows > SHARE_OF_FREE * free_rows
            # A request larger than the whole queue may pass alone, or it never could.
            full = over_bytes or (over_rows and self._rows > 0)
            closing = self._closing
            if not full and not closing:
                self._hold(tenant, size_bytes, rows)
            self._measure()
        if closing:
            raise Draining("The door is closing")
        if full:
            self.meters.rejected.labels("queue_full").inc()
            raise QueueFull(
                f"{held_bytes} bytes and {held_rows} rows of yours are waiting to be stored; "
                f"allowed: {SHARE_OF_FREE} times what is free of {limits.queue_bytes_max} bytes, "
                f"{limits.queue_spans_max} rows"
            )

    def release(self, tenant: str, size_bytes: int, rows: int) -> None:
        with self._lock:
            self._hold(tenant, -size_bytes, -rows)
            self._measure()

    def _hold(self, tenant: str, size_bytes: int, rows: int) -> None:
        held_bytes, held_rows = self._held.pop(tenant, (0, 0))
        held = held_bytes + size_bytes, held_rows + rows
        assert min(held) >= 0
        if any(held):
            self._held[tenant] = held
        self._bytes += size_bytes
        self._rows += rows

    def _measure(self) -> None:
        self.meters.queue_bytes.set(self._bytes)
        self.meters.queue_spans.set(self._rows)

    # --- the two signals -----------------------------------------------------------------------

    async def traces(
        self,
        tenant: str,
        body: Callable[[], bytes],
        room: Room,
        encoding: Encoding = Encoding.PROTOBUF,
    ) -> Accepted:
        """Store an ExportTraceServiceRequest; `body` is called in a thread (it may decompress).

        Returns when durable. Raises Undecodable, QueueFull, Draining, NotStored, and whatever
        `body` does.
        """

        def decode() -> tuple[Accepted, _Waiting]:
            decoded = self._spans.decode(tenant, body(), encoding)
            return self._account(decoded), _Waiting({"spans": decoded.rows})

        accepted, spans = await self._store_durably(decode, room)
        self.meters.spans.inc(spans)
        return accepted

    async def metrics(
        self,
        tenant: str,
        body: Callable[[], bytes],
        room: Room,
        encoding: Encoding = Encoding.PROTOBUF,
    ) -> Accepted:
        """As `traces`, for an ExportMetricsServiceRequest."""
        fresh: dict[int, int] = {}

        def decode() -> tuple[Accepted, _Waiting]:
            decoded = self._samples.decode(tenant, body(), encoding)
            fresh.update(decoded.fresh)
            # Series first: a sample whose series is unknown could never be found.
            waiting = _Waiting({"series": decoded.series, "samples": decoded.rows})
            return self._account(decoded), waiting

        accepted, rows = await self._store_durably(decode, room)
        self._cache.remember(fresh)
        self.meters.samples.inc(rows - len(fresh))
        return accepted

    def _account(self, decoded: Any) -> Accepted:
        rejected = decoded.rejected
        for reason, count in rejected.reasons.items():
            self.meters.rejected.labels(reason).inc(count)
        for reason, count in decoded.trimmed.items():
            self.meters.trimmed.labels(reason).inc(count)
        return Accepted(rejected.reasons.total(), rejected.reasons, rejected.first)

    async def _store_durably(
        self, decode: Callable[[], tuple[Accepted, _Waiting]], room: Room
    ) -> tuple[Accepted, int]:
        loop = asyncio.get_running_loop()
        with self._lock:
            self._in_decoding += 1
        try:
            accepted, waiting = await loop.run_in_executor(self._decoding, decode)
            if waiting.rows:
                room.take(rows=waiting.rows)
                with self._lock:
                    if self._closing:
                        raise Draining("The door is closing")
                    self._queue.append(waiting)
        finally:
            with self._lock:
                self._in_decoding -= 1
                self._lock.notify()
        if waiting.rows:
            await asyncio.wrap_future(waiting.durable)
        return accepted, waiting.rows

    # --- group commit --------------------------------------------------------------------------

    def _next_group(self) -> list[_Waiting]:
        """Blocks until something waits; empty once the door is closed and drained."""
        with self._lock:
            while not self._queue and not self._closing:
                self._lock.wait()
            # Whoever is being decoded may still come along: large commits make fewer parts, and
            # merging parts costs as much as writing them. Nobody in decoding, nothing to wait for.
            deadline = time.monotonic() + self.limits.commit_linger_ms / 1000
            while self._in_decoding and not self._closing and not self._enough():
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._lock.wait(left_s):
                    break
        group: list[_Waiting] = []
        rows = 0
        with self._lock:
            while self._queue and (not group or rows < self.limits.commit_rows_max):
                group.append(self._queue.popleft())
                rows += group[-1].rows
        return group

    def _enough(self) -> bool:
        return sum(waiting.rows for waiting in self._queue) >= self.limits.commit_rows_max

    def _commit(self) -> None:
        while group := self._next_group():
            with self.meters.commit_seconds.time():
                error = self._insert(group)
            if error is None or len(group) == 1:
                self._settle(group, error)
                continue
            # One bad request must not take its neighbours down: each on its own.
            for waiting in group:
                self._settle([waiting], self._insert([waiting]))

    def _insert(self, group: list[_Waiting]) -> Exception | None:
        try:
            for name in ("series", "samples", "spans"):
                tables = [w.tables[name] for w in group if name in w.tables]
                rows = pa.concat_tables(tables) if tables else None
                if rows is not None and rows.num_rows:
                    self._store.insert(name, rows)
        except Exception as error:  # noqa: BLE001 - a dead committer would hang every sender
            return error
        return None

    def _settle(self, group: list[_Waiting], error: Exception | None) -> None:
        for waiting in group:
            if not waiting.durable.set_running_or_notify_cancel():
                continue  # The client went away; what it sent is stored all the same
            if error is None:
                waiting.durable.set_result(None)
            else:
                self.meters.rejected.labels("store_failed").inc()
                waiting.durable.set_exception(NotStored(str(error)))

    def close(self) -> None:
        """Refuse new requests, make durable what waits, stop the threads; idempotent."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._decoding.shutdown(wait=True)
        self._committing.join()
