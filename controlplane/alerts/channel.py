"""The contract of a channel: how one message reaches people.

A channel is one module in channels/ with a module-level `CHANNEL`. It imports this, what carries
it (post.py, chat.py), and nothing else of ours; queueing, retries and the log are the outbox's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from slo.plugins import plugins

Message = Mapping[str, Any]
SEND_WITHIN_S = 10.0


@dataclass(frozen=True)
class Sent:
    """The receiver took it. `status` is its HTTP status."""

    status: int


class SendError(Exception):
    """It was not taken. `permanent`: trying the same again cannot help.

    `retry_after_s` is what the receiver asked for, if it did.
    """

    def __init__(
        self,
        message: str,
        *,
        permanent: bool,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.permanent = permanent
        self.status = status
        self.retry_after_s = retry_after_s


class ChannelError(ValueError):
    """A field of a channel or a silence that does not fit; `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Channel(Protocol):
    """Implemented by `CHANNEL` of each module in channels/."""

    @property
    def slug(self) -> str: ...

    @property
    def label(self) -> str: ...

    @property
    def address(self) -> str:
        """What an address of this kind looks like, for the person who is asked for one."""
        ...

    @property
    def signs(self) -> bool:
        """Whether messages can be signed with the channel's secret."""
        ...

    def secret_new(self) -> str:
        """A secret made up for a new channel; "" where the service makes them, or none can sign."""
        ...

    def check(self, *, url: str, secret: str) -> None:
        """Raises ChannelError naming `url` or `secret` when it could never deliver."""
        ...

    def send(self, *, url: str, secret: str, message: Message, delivery_id: str) -> Sent:
        """Hand over one message; raises SendError. Takes at most SEND_WITHIN_S, whoever answers.

        `delivery_id` lets the receiver recognise a message it has seen (delivery is at least once).
        Signs with `secret` unless it is empty.
        """
        ...


@cache
def channels() -> dict[str, Channel]:
    """Every kind of channel by slug, found by looking into channels/."""
    return plugins("controlplane.alerts.channels", "CHANNEL")
