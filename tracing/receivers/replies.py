"""What a sender is answered, whatever the transport: OTLP 1.11, Success, Partial Success, Failures.

Retryable are a full queue (RESOURCE_EXHAUSTED with RetryInfo) and what this process or its stores
cannot do now (UNAVAILABLE with RetryInfo); everything else is final.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from django.db import DatabaseError

from tracing import wire
from tracing.ingest import Accepted, Draining, NotStored, QueueFull
from tracing.types import StoreError

logger = logging.getLogger(__name__)

# A bearer token to the tenant it writes for, None when it is no good.
Authenticate = Callable[[str], Awaitable[str | None]]

UNKNOWN_SENDER = "A valid ingest token is needed: Authorization: Bearer <token>"
MESSAGE_CHARS_MAX = 1_000
READ_S_MAX = 10.0  # for a whole message: OTLP exporters give up after 10 s

_TYPE = "type.googleapis.com/google.rpc."
# Clients give up when a wait exceeds what is left of their 10 s deadline.
_WAIT_S = (1, 3)


class Code(IntEnum):
    """google.rpc.Code, those used here."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


@dataclass
class Refused(Exception):
    """An answer that is no success. `retry_after_s` asks to be tried again then."""

    code: Code
    message: str
    retry_after_s: int | None = None

    def __post_init__(self) -> None:
        self.message = self.message[:MESSAGE_CHARS_MAX]

    @property
    def retry_info(self) -> bytes | None:
        """A serialized google.rpc.RetryInfo."""
        if self.retry_after_s is None:
            return None
        info = wire.RetryInfo()
        info.retry_delay.seconds = self.retry_after_s
        raw: bytes = info.SerializeToString()
        return raw

    def status_json(self) -> bytes:
        """As `status`, in protobuf's JSON mapping."""
        details: list[dict[str, Any]] = []
        if self.code is Code.INVALID_ARGUMENT:
            violation = {"field": "body", "description": self.message}
            details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [violation]})
        if self.retry_after_s is not None:
            details.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": f"{self.retry_after_s}s"})
        answer = {"code": self.code, "message": self.message, "details": details}
        return json.dumps(answer).encode()

    def status(self) -> bytes:
        """A serialized google.rpc.Status with what is known in its details."""
        status = wire.Status(code=self.code, message=self.message.encode())
        if self.code is Code.INVALID_ARGUMENT:
            detail = wire.BadRequest()
            detail.field_violations.add(field=b"body", description=self.message.encode())
            status.details.add(
                type_url=f"{_TYPE}BadRequest".encode(), value=detail.SerializeToString()
            )
        if self.retry_info is not None:
            status.details.add(type_url=f"{_TYPE}RetryInfo".encode(), value=self.retry_info)
        raw: bytes = status.SerializeToString()
        return raw


def too_slow() -> str:
    return f"The message was not complete within {READ_S_MAX:g} s"


def refused(error: Exception, what: str) -> Refused:
    """The answer to an error of the door; an unforeseen one is logged as one of `what`."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, wire.Undecodable):
        return Refused(Code.INVALID_ARGUMENT, str(error))
    if isinstance(error, QueueFull):
        return Refused(Code.RESOURCE_EXHAUSTED, str(error), wait_s())
    if isinstance(error, Draining | NotStored | StoreError):
        return Refused(Code.UNAVAILABLE, str(error), wait_s())
    if isinstance(error, DatabaseError):
        logger.warning("a token could not be looked up: %s", error)
        return Refused(Code.UNAVAILABLE, "Tokens cannot be checked now", wait_s())
    # Final for the sender: what fails here for no known reason would fail again.
    logger.error("%s could not be answered", what, exc_info=error)
    return Refused(Code.INTERNAL, "Our mistake; the log says more")


def success_json(accepted: Accepted, rejected_name: str) -> bytes:
    """As `success`; `rejected_name` is rejectedSpans or rejectedDataPoints."""
    if not accepted.rejected:
        return b"{}"
    message = accepted.message[:MESSAGE_CHARS_MAX]
    partial = {rejected_name: str(accepted.rejected), "errorMessage": message}
    return json.dumps({"partialSuccess": partial}).encode()


def success(accepted: Accepted) -> bytes:
    """ExportTraceServiceResponse, or its twin for metrics (same fields); empty when all is well."""
    response = wire.ExportResponse()
    if accepted.rejected:
        response.partial_success.rejected = accepted.rejected
        response.partial_success.error_message = accepted.message[:MESSAGE_CHARS_MAX].encode()
    body: bytes = response.SerializeToString()
    return body


def bearer(authorization: str) -> str | None:
    """The token of an Authorization header, None when it is of another scheme."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def wait_s() -> int:
    return random.randint(*_WAIT_S)
