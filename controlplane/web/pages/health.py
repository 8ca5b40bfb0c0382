"""For machines: is this process up (`/health`), and what does it cost (`/metrics`)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from functools import wraps

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, Gauge, generate_latest

from controlplane.accounts.models import Token
from controlplane.accounts.selectors import token_find

SHARE_OVER_S = 60.0


class CpuShare:
    """This process's share of the whole machine's CPU time, over about the last minute.

    Measured between calls: from the oldest call of the last minute, or from the process's start.
    """

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float]] = deque([(time.monotonic(), 0.0)], maxlen=120)

    def __call__(self) -> float:
        now, spent = time.monotonic(), time.process_time()
        while len(self.samples) > 1 and self.samples[1][0] <= now - SHARE_OVER_S:
            self.samples.popleft()
        since, before = self.samples[0]
        self.samples.append((now, spent))
        return (spent - before) / max(now - since, 1e-9) / (os.cpu_count() or 1)


cpu_share = Gauge(
    "trimtab_process_cpu_share",
    "Share of the machine's CPU time this process takes (1: all)",
)
cpu_share.set_function(CpuShare())


def error(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> JsonResponse:
    body = {"error": {"code": code, "message": message, "param": None}}
    return JsonResponse(body, status=status, headers=headers)


def read_only(view: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    @csrf_exempt  # changes nothing, and machines shall read why they were refused
    @wraps(view)
    def answer(request: HttpRequest) -> HttpResponse:
        if request.method in ("GET", "HEAD"):
            return view(request)
        words = f"{request.method}: allowed here: GET, HEAD"
        return error(405, "method_not_allowed", words, {"Allow": "GET, HEAD"})

    return answer


@read_only
def health(request: HttpRequest) -> HttpResponse:
    """200 while the process answers; nothing secret, no token."""
    return JsonResponse({"status": "ok"})


@read_only
def metrics(request: HttpRequest) -> HttpResponse:
    """Prometheus text of this process, for a bearer token of kind *api*."""
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or token_find(secret.strip(), kinds={Token.Kind.API}) is None:
        words = "An API token is needed."
        return error(401, "not_authenticated", words, {"WWW-Authenticate": "Bearer"})
    return HttpResponse(generate_latest(REGISTRY), content_type=CONTENT_TYPE_LATEST)
