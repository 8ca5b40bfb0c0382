"""How many requests a minute one caller may make of the REST API, and other things so limited."""

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


class Buckets:
    """So much a minute for each caller, refilled evenly.

    Kept in this process: several web processes allow as many times more.
    """

    def __init__(self) -> None:
        # caller → (how much is left, when that was so); the longest unused first
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._left)

    def take(self, caller: str, per_minute: int) -> float | None:
        """Takes one: None, or the seconds until there is one to take."""
        now = time.monotonic()
        with self._lock:
            left, at = self._left.pop(caller, (per_minute, now))
            left = min(per_minute, left + (now - at) * per_minute / 60)
            wait_s = None if left >= 1 else (1 - left) * 60 / per_minute
            self._left[caller] = (left - 1 if wait_s is None else left, now)
            while len(self._left) > CALLERS_MAX:
                self._left.popitem(last=False)
        return wait_s

    def refill(self, caller: str) -> None:
        with self._lock:
            self._left.pop(caller, None)


class RequestsPerMinute(BaseThrottle):
    """TRIMTAB_API_REQUESTS_PER_MIN for each token, person or address."""

    _buckets = Buckets()
    _wait_s: float | None = None

    def allow_request(self, request: Request, view: APIView) -> bool:
        size = settings.TRIMTAB_API_REQUESTS_PER_MIN
        self._wait_s = self._buckets.take(caller_of(request), size)
        return self._wait_s is None

    def wait(self) -> float | None:
        return self._wait_s


def caller_of(request: Request) -> str:
    if isinstance(request.auth, Token):
        return f"token {request.auth.pk}"
    if request.user is not None and request.user.pk is not None:
        return f"user {request.user.pk}"
    return f"address {request.META.get('REMOTE_ADDR', '')}"
