"""Trimtab's own engine: GET and PATCH /v1/runtime_config with an ETag.

The ETag is the `config_version`, persisted by the engine and raised by every change, so it still
tells one change from another after the engine was restarted.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from gpu_agent.bounded import body_read, why
from gpu_agent.engine_adapter import (
    Conflict,
    EngineAdapter,
    EngineState,
    Refused,
    Unreachable,
    Values,
)

PATH = "/v1/runtime_config"
ANSWER_BYTES_MAX = 1024 * 1024
BY_CHARS_MAX = 100


class ReferenceEngine(EngineAdapter):
    """Speaks to one engine over one short connection per call."""

    slug = "reference"
    label = "Trimtab reference engine"

    def read(self) -> EngineState:
        return self._state(*self._ask("GET", {}, None))

    def apply(self, values: Values, *, expected_version: int, by: str) -> EngineState:
        headers = {
            "If-Match": f'"{expected_version}"',
            "Content-Type": "application/json",
            "X-Changed-By": by[:BY_CHARS_MAX],
        }
        return self._state(*self._ask("PATCH", headers, json.dumps(dict(values)).encode()))

    def _ask(self, method: str, headers: dict[str, str], sent: bytes | None) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        https = parts.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        try:
            with contextlib.closing(kind(parts.netloc, timeout=self.timeout_s)) as connection:
                connection.request(method, f"{parts.path}{PATH}", body=sent, headers=headers)
                with connection.getresponse() as response:
                    body = body_read(response, bytes_max=ANSWER_BYTES_MAX, timeout_s=self.timeout_s)
                    return response.status, body
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.url}{PATH}: {why(error)}") from error

    def _state(self, status: int, body: bytes) -> EngineState:
        if status != 200:
            message = f"{self.url}{PATH}: HTTP {status}, {_error_message(body)}"
            if status == 412:
                raise Conflict(message)
            if status in (408, 425, 429) or status >= 500:
                raise Unreachable(message)
            raise Refused(message)
        try:
            answer = json.loads(body)
            version, values = answer["config_version"], answer["values"]
            knobs, model = answer.get("knobs", {}), answer.get("model", "")
            changed = str(answer.get("changed_by", "")), str(answer.get("changed_at", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unreachable(f"{self.url}{PATH}: not a configuration: {error!r}") from error
        fits = type(version) is int and isinstance(values, dict) and isinstance(knobs, dict)
        if not fits or not all(isinstance(knob, dict) for knob in knobs.values()):
            raise Unreachable(
                f"{self.url}{PATH}: config_version {version!r}, want an integer; "
                "values and knobs want objects"
            )
        return EngineState(version, values, str(model), knobs, *changed)


def _error_message(body: bytes) -> str:
    """The engine's own words: `{"error": {"message": …}}`, or the start of what came instead."""
    try:
        message: Any = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", "replace")
    return str(message)[:500]
