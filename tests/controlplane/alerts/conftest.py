from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from controlplane.accounts.models import Tenant
from controlplane.alerts.models import Channel
from controlplane.diagnosis.models import Incident
from slo.models import Objective
from tests.controlplane.alerts.receiver import NOW, Receiver
from tests.controlplane.diagnosis.scenes import TTFT


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def incident() -> Incident:
    tenant = Tenant.objects.create(slug="acme", name="Acme")
    objective = Objective.objects.create(
        tenant=tenant, slug="ttft", name="TTFT within 500 ms", service="chat",
        indicator="latency", spec=TTFT.spec, target=0.95,
    )  # fmt: skip
    return Incident.objects.create(
        tenant=tenant, objective=objective, scope="engine-0", trigger="fast burn",
        bad_since=NOW, opened_at=NOW, example_trace_id="ab" * 16,
    )  # fmt: skip


@pytest.fixture
def chat(incident: Incident) -> Channel:
    return Channel.objects.create(tenant=incident.tenant, name="chat", url="http://127.0.0.1:1/")


@pytest.fixture
def everywhere(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Receiver:
    """Every https host leads to `receiver`.

    The chat services' hosts are fixed and cannot be reached from a test. Only the last step of
    httpx is turned aside, the socket: the request stays the one that would have gone out, Host
    header and all.
    """
    real = httpx.AsyncHTTPTransport.handle_async_request

    async def to_receiver(self: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        if request.url.scheme == "https":
            port = receiver.server_address[1]
            request.url = request.url.copy_with(scheme="http", host="127.0.0.1", port=port)
        return await real(self, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", to_receiver)
    return receiver
