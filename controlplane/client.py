"""The REST API as commands use it: every failure ends the command in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import httpx

TIMEOUT_S = 30
ERROR_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


class Stop(Exception):
    """Ends a command with a reason and a remedy for the person who typed it."""


class Refused(Stop):
    """The API said no; `param` names the field at fault, if one is."""

    def __init__(self, status: int, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Client:
    """A connection to one control plane. Every call raises Stop when that does not answer, and
    Refused when it refuses."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            why = ERROR_NUMBER.sub("", str(error)) or type(error).__name__
            raise Stop(
                f"no control plane at {self.url}: {why.lower()}. Start one: trimtab up"
            ) from None
        if answer.is_success:
            return answer
        try:
            said = answer.json()["error"]
            message, param = str(said["message"]), said["param"]
        except (ValueError, KeyError, TypeError):
            raise stranger(answer) from None
        raise Refused(answer.status_code, message, param)

    def get(self, path: str, **query: Any) -> Any:
        answer = self.call("GET", f"/api/v1/{path}", params=query)
        try:
            return answer.json()
        except ValueError:
            raise stranger(answer) from None

    def rows(self, noun: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Every row of a list, page after page."""
        while True:
            page = self.get(f"{noun}/", limit=200, **query)
            yield from page[noun]
            if page["next"] is None:
                return
            query["cursor"] = page["next"]


def check_address(url: str) -> None:
    """Raises Stop where nothing can be called by this address."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL()
    if parts.scheme not in ("http", "https") or not parts.host:
        raise Stop(
            f"--url (or TRIMTAB_PUBLIC_URL) is {url!r}, which is no address. "
            "Allowed: http or https, as in http://127.0.0.1:8000"
        )


def stranger(answer: httpx.Response) -> Stop:
    """What to say of an answer no control plane gives: who gave it, and how to name another."""
    asked = answer.request.url
    kind = answer.headers.get("content-type", "no content type").partition(";")[0]
    by = answer.headers.get("server", "a server without a name")
    return Stop(
        f"no control plane answers at {asked.scheme}://{asked.netloc.decode()}, but {by[:60]}: "
        f"{asked.path} gave {answer.status_code}, {kind}. "
        "Name yours with --url or TRIMTAB_PUBLIC_URL."
    )
