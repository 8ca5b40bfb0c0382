"""How many requests a minute one caller may make of the REST API."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from django.conf import settings
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from controlplane.accounts.models import Token

if TYPE_CHECKING:
    from rest_framework.views import APIView

CALLERS_MAX = 4_096


class RequestsPerMinute(BaseThrottle):
    """A bucket of TRIMTAB_API_REQUESTS_PER_MIN for each token, person or address, refilled evenly.

    Kept in this process: several web processes allow as many times more.
    """

    # caller → (requests left, when that was so); the longest unused first
    _buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
    _lock = threading.Lock()
    _wait_s: float | None = None

    def allow_request(self, request: Request, view: APIView) -> bool:
        size = settings.TRIMTAB_API_REQUESTS_PER_MIN
        now, caller = time.monotonic(), caller_of(request)
        with self._lock:
            left, at = self._buckets.pop(caller, (size, now))
            left = min(size, left + (now - at) * size / 60)
            allowed = left >= 1
            self._wait_s = None if allowed else (1 - left) * 60 / size
            self._buckets[caller] = (left - 1 if allowed else left, now)
            while len(self._buckets) > CALLERS_MAX:
                self._buckets.popitem(last=False)
        return allowed

    def wait(self) -> float | None:
        return self._wait_s


def caller_of(request: Request) -> str:
    if isinstance(request.auth, Token):
        return f"token {request.auth.pk}"
    if request.user is not None and request.user.pk is not None:
        return f"user {request.user.pk}"
    return f"address {request.META.get('REMOTE_ADDR', '')}"
