"""The two ways out of the node: one HTTP connection kept open, and the sync loop on top of it.

Every call has a time limit and a size limit; certificates are always verified, against the
system's authorities or the CA file given.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import random
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpu_agent.backoff import Backoff
from gpu_agent.bounded import body_read, why
from gpu_agent.clock import wall_of
from gpu_agent.protocol import SYNC_PATH, Command, SyncReply, SyncRequest, WireError
from gpu_agent.spool import Answer
from gpu_agent.standing import Standing

log = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 4 * 1024 * 1024
COMMANDS_MAX = 100
POLL_S_MIN = 0.1
POLL_S_MAX = 60.0
FIRST_DELAY_S_MAX = 1.0


class Connection:
    """Posts to one server over one connection, opened anew when it broke. Not thread-safe."""

    def __init__(self, url: str, *, timeout_s: float, ca_file: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        parts = urlsplit(self.url)
        self._place, self._path = parts.netloc, parts.path
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=ca_file)
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self._open: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Raises OSError when there is no answer; every other outcome is an `Answer`."""
        reused = self._open is not None
        try:
            return self._try(path, body, headers)
        except ConnectionError:
            # A server may close an idle connection at any time; what we post is safe twice.
            if not reused:
                raise
        return self._try(path, body, headers)

    def _try(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """One post; a connection that failed in any way is not used again."""
        try:
            return self._post(path, body, headers)
        except OSError:
            self.close()
            raise
        except http.client.HTTPException as error:
            self.close()
            raise OSError(f"{self.url}: {error!r}") from error

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        connection = self._open
        if connection is None:
            if self._tls is not None:
                connection = http.client.HTTPSConnection(
                    self._place, timeout=self.timeout_s, context=self._tls
                )
            else:
                connection = http.client.HTTPConnection(self._place, timeout=self.timeout_s)
            self._open = connection
        connection.request("POST", self._path + path, body=body, headers=headers)
        response = connection.getresponse()
        answer = body_read(response, bytes_max=ANSWER_BYTES_MAX, timeout_s=self.timeout_s)
        if response.will_close:
            self.close()
        retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
        return Answer(response.status, answer, retry_after_s)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _retry_after_s(text: str | None) -> float | None:
    """Seconds, from either form of the header (RFC 9110, 10.2.3); None when it is neither."""
    if text is None:
        return None
    if text.strip().isdecimal():  # isdigit takes ², which float refuses
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


class SyncLoop:
    """Heartbeat, results out, commands in: at least once, for as long as the agent runs.

    `request` makes the next message; `handle` takes the reply and the request it answers.
    `offset_s` is the server's clock minus ours, from the middle of the last round trip (Cristian).
    """

    def __init__(
        self,
        connection: Connection,
        *,
        token: str,
        request: Callable[[bool], SyncRequest],
        handle: Callable[[SyncRequest, SyncReply], None],
        backoff: Backoff | None = None,
    ) -> None:
        self.standing = Standing(
            lost=f"control plane not reached at {connection.url}",
            back=f"control plane reached again at {connection.url}",
        )
        self.offset_s = 0.0
        self._connection = connection
        self._token = token
        self._request = request
        self._handle = handle
        self._backoff = backoff or Backoff()
        self._wake = threading.Event()

    def wake(self) -> None:
        """There is news: do not wait for the next poll. A backoff is waited out all the same."""
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        stop.wait(random.uniform(0, FIRST_DELAY_S_MAX))
        while not stop.is_set():
            self._wake.clear()
            wait_s, failed = self.sync()
            if failed:
                stop.wait(wait_s)
            else:
                self._wake.wait(wait_s)

    def say_goodbye(self) -> None:
        """One last message that this stop is meant; not repeated."""
        self.sync(stopping=True)

    def sync(self, *, stopping: bool = False) -> tuple[float, bool]:
        """One exchange: seconds to wait before the next, and whether this one failed."""
        try:
            reply = self._exchange(self._request(stopping))
        # sqlite3: a journal that cannot be written takes no commands; they will be offered again.
        except (OSError, ValueError, sqlite3.Error) as error:
            self.standing.bad(why(error))
            return self._backoff.fail(), True
        if isinstance(reply, Answer):
            # Whoever stands in between may answer with what it was sent.
            words = reply.body.decode("utf-8", "replace").replace(self._token, "…")
            self.standing.bad(f"HTTP {reply.status}: {words[:200]}")
            return self._backoff.fail(reply.retry_after_s), True
        self._backoff.succeed()
        self.standing.good()
        return min(max(reply.poll_after_s, POLL_S_MIN), POLL_S_MAX), False

    def _exchange(self, request: SyncRequest) -> SyncReply | Answer:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        sent, began = time.time(), time.monotonic()
        body = json.dumps(request.to_json(), separators=(",", ":")).encode()
        answer = self._connection.post(SYNC_PATH, body, headers)
        took_s = time.monotonic() - began
        if answer.status != 200:
            return answer
        reply = reply_of(json.loads(answer.body))
        self.offset_s = wall_of(reply.server_time) - (sent + took_s / 2)
        self._handle(request, reply)
        return reply


def reply_of(message: Any) -> SyncReply:
    """The reply, without the commands this agent cannot read: one of them must not stop the rest.

    Raises WireError when the rest does not fit.
    """
    if not isinstance(message, dict) or not isinstance(message.get("commands", []), list):
        return SyncReply.from_json(message)
    readable: list[Command] = []
    for command in message.get("commands", [])[:COMMANDS_MAX]:
        try:
            readable.append(Command.from_json(command))
        except WireError as error:
            log.error("command left out: %s", error)
    return SyncReply.from_json({**message, "commands": [command.to_json() for command in readable]})
