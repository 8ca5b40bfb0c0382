"""Live pages: one poller per process tells every open page which of its parts changed.

The poller compares a cheap stamp of each tenant's rows once a second and only for tenants with an
open page, so 300 pages cost what one does. A page's stream waits on a queue and holds no database
connection. Events: `ready` (all parts; sent once the stamp is taken, so nothing falls between),
`changed` (one part), `point` (the newest values of an objective's charts).
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping
from datetime import datetime
from types import FrameType
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections
from django.db.models import Count, Max, OuterRef, Subquery, Sum
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils import timezone

from controlplane.accounts.selectors import tenants_of_sessions
from controlplane.actions.models import Action
from controlplane.alerts.models import Delivery
from controlplane.diagnosis.models import Diagnosis, Incident
from controlplane.fleet.models import Engine, Node
from controlplane.fleet.selectors import engine_state
from controlplane.web.charts import Drawn, newest_point
from slo.models import Objective, Reading
from tracing.types import StoreError

logger = logging.getLogger(__name__)

POLL_S = 1.0
HEARTBEAT_S = 15.0
ASK_S = 3.0  # how often it is asked whether who listens is still signed in, and a member
STREAM_S_MAX = 900.0  # then a page connects again, as it does after any end
RETRY_MS = 2_000
PAGES_MAX = 1_000  # streams of one process
QUEUE_MAX = 256  # messages a page may lag behind before it is told to connect again

PARTS = ("objectives", "incidents", "actions", "deliveries", "fleet")
ENGINE_COLUMNS = (
    "tenant_id", "name", "config_version", "error", "reachable", "last_seen_at",
    "node__stopped_at", "node__last_seen_at",
)  # fmt: skip
Stamps = dict[str, Hashable]
STREAM_ENDS = None


def stamps_read(tenant_ids: Collection[UUID], now: datetime) -> dict[UUID, Stamps]:
    """For each tenant and part a value that differs when a row of it does. Seven small queries."""
    parts: dict[UUID, dict[str, list[Hashable]]] = {
        tenant: {part: [] for part in PARTS} for tenant in tenant_ids
    }
    newest = (
        Reading.objects.filter(objective=OuterRef("pk"), scope="")
        .order_by("-window_end")
        .values("window_end")[:1]
    )
    for tenant, *row in (
        Objective.objects.filter(tenant__in=tenant_ids)
        .order_by("id")
        .values_list("tenant_id", "slug", "updated_at", Subquery(newest))
    ):
        parts[tenant]["objectives"].append(tuple(row))
    counted = (
        ("incidents", Incident, "tenant_id", (Max("updated_at"),)),
        ("incidents", Diagnosis, "incident__tenant_id", (Max("made_at"),)),
        ("actions", Action, "tenant_id", (Max("updated_at"),)),
        ("deliveries", Delivery, "tenant_id", (Sum("attempts"), Max("sent_at"))),
    )
    for part, model, owner, columns in counted:
        rows = (
            model._default_manager.filter(**{f"{owner}__in": tenant_ids})
            .order_by()
            .values_list(owner)
            .annotate(Count("id"), *columns)
        )
        for tenant, *row in rows:
            parts[tenant][part].append((model.__name__, *row))
    engines = Engine.objects.filter(tenant__in=tenant_ids).select_related("node")
    # Not the tables of knobs, which would be decoded every second.
    for engine in engines.only(*ENGINE_COLUMNS):
        parts[engine.tenant_id]["fleet"].append(
            (engine.name, engine.config_version, engine_state(engine, now), engine.error)
        )
    for tenant, *row in Node.objects.filter(tenant__in=tenant_ids).values_list(
        "tenant_id", "name", "gpu_status", "stopped_at"
    ):
        parts[tenant]["fleet"].append(tuple(row))
    return {t: {part: tuple(rows) for part, rows in own.items()} for t, own in parts.items()}


def message(event: str, data: str) -> str:
    return f"event: {event}\ndata: {data}\n\n"


class Hub:
    """The open pages of one event loop, by tenant, and the poller that feeds them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = False
        # tenant → what each of its pages is to be told → the session it was opened in
        self._pages: dict[UUID, dict[asyncio.Queue[str | None], str]] = defaultdict(dict)
        self._stamps: dict[UUID, Stamps] = {}
        self._reading = asyncio.Lock()
        self._poller: asyncio.Task[None] | None = None
        self._ask_at = 0.0

    @property
    def pages(self) -> int:
        return sum(len(queues) for queues in self._pages.values())

    async def stream(self, tenant: UUID, session_key: str) -> AsyncIterator[str]:
        """Messages for one page until it leaves, lags too far behind, 15 minutes have passed, its
        session opens the tenant no more, or the hub closes."""
        queue: asyncio.Queue[str | None] = asyncio.Queue(QUEUE_MAX)
        ends = self.loop.time() + STREAM_S_MAX
        self._pages[tenant][queue] = session_key
        try:
            yield f"retry: {RETRY_MS}\n\n"
            if tenant not in self._stamps:
                await self._look({tenant})
            if self._poller is None or self._poller.done():
                self._poller = asyncio.create_task(self._poll())
            yield message("ready", " ".join(PARTS))
            while not self.closed and (left_s := ends - self.loop.time()) > 0:
                try:
                    text = await asyncio.wait_for(queue.get(), min(HEARTBEAT_S, left_s))
                except TimeoutError:
                    text = ": still here\n\n"
                if text is STREAM_ENDS:
                    return
                yield text
        finally:
            self._pages[tenant].pop(queue, None)
            if not self._pages[tenant]:
                del self._pages[tenant]
                self._stamps.pop(tenant, None)

    def close(self) -> None:
        """Ends every stream, so that the server can stop; the pages connect again by themselves."""
        self.closed = True
        for tenant in list(self._pages):
            self._tell(tenant, STREAM_ENDS)

    def _tell(self, tenant: UUID, text: str | None) -> None:
        for queue in self._pages.get(tenant, ()):
            if queue.full() or text is STREAM_ENDS:
                _end(queue)
            else:
                queue.put_nowait(text)

    async def _poll(self) -> None:
        while self._pages and not self.closed:
            await asyncio.sleep(POLL_S)
            try:
                if self.loop.time() >= self._ask_at:
                    self._ask_at = self.loop.time() + ASK_S
                    await self._ask()
                await self._look(set(self._pages))
            except DatabaseError as error:
                logger.warning("Live pages wait: the database did not answer: %s", error)
            except Exception:
                logger.exception("Live pages wait: what changed could not be read")

    async def _ask(self) -> None:
        """Ends the streams of whoever signed out, was deactivated or taken out of the tenant."""
        asked = {
            queue: (tenant, key)
            for tenant, pages in self._pages.items()
            for queue, key in pages.items()
        }
        known = await asyncio.to_thread(_tenants_read, {key for _tenant, key in asked.values()})
        for queue, (tenant, key) in asked.items():
            if known.get(key) != tenant:
                _end(queue)

    async def _look(self, tenants: set[UUID]) -> None:
        async with self._reading:
            known = {tenant: self._stamps.get(tenant) for tenant in tenants}
            fresh, points = await asyncio.to_thread(_changes_read, known)
        for tenant, stamps in fresh.items():
            before = known[tenant]
            if tenant in self._pages:
                self._stamps[tenant] = stamps
            if before is None:
                continue
            for part, stamp in stamps.items():
                if stamp != before[part]:
                    self._tell(tenant, message("changed", part))
            for point in points.get(tenant, ()):
                self._tell(tenant, message("point", json.dumps(point)))


def _end(queue: asyncio.Queue[str | None]) -> None:
    """Nothing half-told: the page connects again, if it may, and fetches every part."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(STREAM_ENDS)


def _tenants_read(session_keys: Collection[str]) -> dict[str, UUID]:
    """Runs in a thread, as `_changes_read` does."""
    try:
        return tenants_of_sessions(session_keys)
    finally:
        connections.close_all()


def _changes_read(
    known: Mapping[UUID, Stamps | None],
) -> tuple[dict[UUID, Stamps], dict[UUID, list[dict[str, Any]]]]:
    """Fresh stamps, and chart points of the objectives that were read anew. Runs in a thread."""
    try:
        fresh = stamps_read(known.keys(), timezone.now())
        points: dict[UUID, list[dict[str, Any]]] = defaultdict(list)
        for tenant, before in known.items():
            if before is None or before["objectives"] == fresh[tenant]["objectives"]:
                continue
            drawn: Drawn = {}
            old = set(_rows(before["objectives"]))
            slugs = [row[0] for row in _rows(fresh[tenant]["objectives"]) if row not in old]
            for objective in Objective.objects.filter(tenant=tenant, slug__in=slugs):
                try:
                    point = newest_point(objective, drawn)
                except StoreError as error:
                    logger.warning("Live charts wait: telemetry did not answer: %s", error)
                    continue
                if point is not None:
                    points[tenant].append(point)
        return fresh, points
    finally:
        connections.close_all()


def _rows(stamp: Hashable) -> tuple[Any, ...]:
    assert isinstance(stamp, tuple)
    return stamp


_hub: Hub | None = None


def hub() -> Hub:
    """The hub of the running event loop; the first call arranges that a stop signal closes it."""
    global _hub
    if _hub is None or _hub.closed or _hub.loop is not asyncio.get_running_loop():
        _hub = Hub()
        _close_on_signals(_hub)
    return _hub


def _close_on_signals(current: Hub) -> None:
    # The server waits for open responses before it tells anyone that it stops, and a stream never
    # ends by itself: so listen to the signal too, and then let the server have it.
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        previous = signal.getsignal(number)
        if callable(previous):
            signal.signal(number, _closing(current, previous))


def _closing(
    current: Hub, previous: Callable[[int, FrameType | None], Any]
) -> Callable[[int, FrameType | None], Any]:
    def handler(number: int, frame: FrameType | None) -> Any:
        if not current.loop.is_closed():
            current.loop.call_soon_threadsafe(current.close)
        return previous(number, frame)

    return handler


async def events(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """GET /events/: the stream of the signed-in user's tenant; 403 for anyone else."""
    tenant = getattr(request, "tenant", None)
    if tenant is None:
        return HttpResponse(status=403)
    if request.method != "GET":
        return HttpResponse(status=405, headers={"Allow": "GET"})
    # Who asks is known; the connection that answered it must not wait with the page.
    await sync_to_async(connections.close_all)()
    current = hub()
    if current.pages >= PAGES_MAX:
        return HttpResponse(status=503, headers={"Retry-After": "30"})
    response = StreamingHttpResponse(
        current.stream(tenant.id, request.session.session_key or ""),
        content_type="text/event-stream; charset=utf-8",
    )
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Accel-Buffering"] = "no"
    return response
