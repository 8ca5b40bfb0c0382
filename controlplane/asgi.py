"""The ASGI application: OTLP straight into telemetry's door, everything else through Django.

Its lifespan starts OTLP/gRPC on its own port, and Celery's worker and beat in threads, because the
embedded store belongs to one process (set TRIMTAB_BROKER_URL to run workers elsewhere).
"""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

from django.core.asgi import get_asgi_application

django_application = get_asgi_application()

import asyncio  # noqa: E402
import json  # noqa: E402
import threading  # noqa: E402
import warnings  # noqa: E402
from typing import Any, cast  # noqa: E402

from celery.beat import EmbeddedService  # noqa: E402
from celery.exceptions import SecurityWarning  # noqa: E402
from django.conf import settings  # noqa: E402

from controlplane.accounts.selectors import ingest_tenant  # noqa: E402
from controlplane.celery import SteadyScheduler  # noqa: E402
from controlplane.celery import app as celery_app  # noqa: E402
from tracing import wiring  # noqa: E402
from tracing.receivers import otlp_grpc, otlp_http  # noqa: E402
from tracing.types import StoreError  # noqa: E402

otlp_application = otlp_http.application(ingest_tenant, wiring.door)


class EmbeddedCelery:
    """Worker and beat in threads of this process; both are daemons and end with it."""

    def start(self) -> None:
        # Both close Django's connections as they start, which is not for an event loop's thread.
        threading.Thread(target=self._work, name="celery-worker", daemon=True).start()
        beat = EmbeddedService(
            celery_app,
            thread=True,
            max_interval=1,
            scheduler_cls=SteadyScheduler,
        )
        assert isinstance(beat, threading.Thread)
        self.beat = beat
        self.beat.start()

    def _work(self) -> None:
        # Tasks come from this process alone, in JSON: what the warning about root is for.
        warnings.simplefilter("ignore", SecurityWarning)
        self.worker = celery_app.Worker(
            pool="threads",
            concurrency=3,
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
            quiet=True,
        )
        self.worker.start()

    def stop(self) -> None:
        self.beat.stop()
        self.worker.stop()


class Lifespan:
    """What starts before the first request and is stopped after the last one."""

    def __init__(self) -> None:
        embedded = settings.CELERY_BROKER_URL.startswith("memory:")
        self.celery = EmbeddedCelery() if embedded else None
        grpc = settings.TRIMTAB_OTLP_GRPC_PORT
        self.grpc = otlp_grpc.OtlpGrpc(ingest_tenant, wiring.door) if grpc else None

    async def start(self) -> None:
        """Raises StoreError and OSError, in words that say what to do."""
        # Takes most of a second, which the first sender or reader would wait for.
        await asyncio.to_thread(wiring.door)
        if self.grpc:
            try:
                await self.grpc.start(settings.TRIMTAB_BIND, settings.TRIMTAB_OTLP_GRPC_PORT)
            except OSError as error:
                await asyncio.to_thread(wiring.close)
                raise OSError(
                    f"{error}. Free the port or choose another with TRIMTAB_OTLP_GRPC_PORT=PORT "
                    "(0: none)."
                ) from error
        if self.celery:
            self.celery.start()

    async def stop(self) -> None:
        if self.grpc:
            await self.grpc.stop()
        if self.celery:
            self.celery.stop()
        # Makes durable what waits; it joins threads, so not on the loop that feeds them.
        await asyncio.to_thread(wiring.close)


async def lifespan(receive: otlp_http.Receive, send: otlp_http.Send) -> None:
    life = Lifespan()
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            try:
                await life.start()
            except (StoreError, OSError) as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await life.stop()
            await send({"type": "lifespan.shutdown.complete"})
            return


class Bounded:
    """Django behind a limit on the request's body, held before anyone is asked who calls.

    Django itself writes a body to disk whole, whatever its size, before the first line of ours.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max

    async def __call__(
        self, scope: dict[str, Any], receive: otlp_http.Receive, send: otlp_http.Send
    ) -> None:
        size = 0

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.bytes_max:
                # Django lets go of what it holds of the request, and answers nothing.
                return {"type": "http.disconnect"}
            return message

        told = dict(scope["headers"]).get(b"content-length", b"0")
        if told.isdigit() and int(told) > self.bytes_max:
            await self.refuse(send)
            return
        # django-stubs narrows what an ASGI server's callables may be.
        await django_application(scope, cast(Any, counted), cast(Any, send))
        if size > self.bytes_max:
            await self.refuse(send)

    async def refuse(self, send: otlp_http.Send) -> None:
        words = f"The body is over {self.bytes_max} bytes, which is the most."
        body = json.dumps({"error": {"code": "too_large", "message": words, "param": None}})
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode()})


pages = Bounded(settings.DATA_UPLOAD_MAX_MEMORY_SIZE)


async def application(
    scope: dict[str, Any], receive: otlp_http.Receive, send: otlp_http.Send
) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
    elif scope["type"] == "http" and scope["path"] in otlp_http.PATHS:
        await otlp_application(scope, receive, send)
    else:
        await pages(scope, receive, send)
