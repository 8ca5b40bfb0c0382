"""Chat services through Apprise: it knows how each wants a message, post.py carries it.

Apprise tells no more than yes or no. It hides the status and Retry-After, and takes DingTalk's and
WeCom's refusals for a yes, as those come with HTTP 200. So its plug-ins get a `requests` that
posts with our deadline and keeps the answer; a service is then data: which plug-in, how its
address is read, where its answer says what went wrong, and what of that is for good.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import requests
from apprise.asset import AppriseAsset
from apprise.common import NotifyFormat, NotifyType
from apprise.exception import AppriseException
from apprise.plugins.base import NotifyBase
from django.utils.translation import gettext as _

from controlplane.alerts.channel import ChannelError, Message, SendError, Sent
from controlplane.alerts.post import Answer, post

TITLE_CHARS_MAX = 250
ASSET = AppriseAsset(app_id="Trimtab", app_desc="Trimtab", app_url="", http_redirects=False)
# Pictures would be fetched from somebody else's server.
BARE = {"include_image": False, "include_footer": False, "include_timestamp": False}
TONE = {
    "page": NotifyType.FAILURE,
    "ticket": NotifyType.WARNING,
    "resolved": NotifyType.SUCCESS,
    "test": NotifyType.INFO,
}
MARK = {
    "opened": "▲ ", "undone": "▲ ", "stuck": "▲ ", "reminded": "▲ ", "asked": "◆ ",
    "resolved": "● ", "stopped": "■ ", "test": "",
}  # fmt: skip

Parts = Mapping[str, Any]
Sign = Callable[[str, bytes, str], tuple[str, bytes]]


@dataclass(frozen=True)
class Chat:
    """One chat service.

    `parts` reads an address into the plug-in's arguments; None when it is not one of theirs.
    `code` names the member of the answer that is 0 or says what went wrong; "" where the status
    does. `final` are the codes no repetition cures, with what to do; others are tried again.
    `sign` adds a signature to (address, body), given the secret. `bytes_max` is for title and text.
    `markdown`: it reads texts as Markdown and makes no link of a bare address.
    """

    slug: str
    label: str
    address: str
    plugin: type[NotifyBase]
    parts: Callable[[str], Parts | None]
    bytes_max: int
    code: str = ""
    final: Mapping[int, str] = field(default_factory=dict)
    sign: Sign | None = None
    markdown: bool = False

    def __post_init__(self) -> None:
        # The name under which the plug-in finds `requests`: nobody else's is touched.
        sys.modules[self.plugin.__module__].requests = _Requests  # type: ignore[attr-defined]

    @property
    def signs(self) -> bool:
        return self.sign is not None

    def secret_new(self) -> str:
        return ""

    def check(self, *, url: str, secret: str) -> None:
        if secret and not self.signs:
            words = _("%(label)s cannot sign; allowed: none")
            raise ChannelError("secret", words % {"label": self.label})
        self._plugin(url)

    def send(self, *, url: str, secret: str, message: Message, delivery_id: str) -> Sent:
        """What the status or the service's own code says; an unknown code passes.

        No service here takes an id, so a message repeated after a kill is seen twice.
        """
        event = str(message["event"]).rpartition(".")[2]
        try:
            plugin = self._plugin(url)
        except ChannelError as error:
            raise SendError(f"address: {error}", permanent=True) from None
        line = Line(self.sign, secret)
        title = self._plain(MARK[event] + str(message["title"])[:TITLE_CHARS_MAX])
        token = _line.set(line)
        try:
            told = plugin.notify(
                title=title,
                body=self._text(message, room=self.bytes_max - len(title.encode())),
                body_format=NotifyFormat.MARKDOWN if self.markdown else NotifyFormat.TEXT,
                notify_type=TONE.get(event) or TONE[message["severity"]],
            )
        finally:
            _line.reset(token)
        return self._judge(line, told)

    def _plugin(self, url: str) -> NotifyBase:
        """Raises ChannelError when the address is not one of this service."""
        parts = self.parts(url)
        wrong = ChannelError("url", _("wanted: an address like %s") % self.address)
        if parts is None:
            raise wrong
        try:
            return self.plugin(**{**parts, **BARE, "asset": ASSET})
        except (AppriseException, TypeError):
            raise wrong from None

    def _judge(self, line: Line, told: bool) -> Sent:
        if line.error is not None:
            raise line.error
        answer = line.answer
        if answer is None:
            raise SendError("Apprise refused the message before sending it", permanent=True)
        code = self._code(answer)
        if code:  # before the status, which is 200, or 400 whatever the reason
            what = f"{self.code}={code}: {self.final.get(code) or answer.words}"
            raise answer.error(what, permanent=code in self.final)
        if not 200 <= answer.status < 300:
            raise answer.error()
        if not told or code is None:
            # A login page of some proxy, say. Nothing tells whether it lasts.
            raise answer.error(f"not {self.label}'s answer: {answer.words}", permanent=False)
        return Sent(answer.status)

    def _code(self, answer: Answer) -> int | None:
        """0 is fine, None where there is no code to be found."""
        if not self.code:
            return 0
        try:
            code = json.loads(answer.content)[self.code]
        except (ValueError, TypeError, KeyError):
            return None
        return code if isinstance(code, int) else None

    def _text(self, message: Message, room: int) -> str:
        """The sentences, shortened to fit `room` bytes, and the links, which never are."""
        found = links_of(message)
        links = (
            " · ".join(f"[{word}]({url})" for word, url in found)
            if self.markdown
            else "\n".join(f"{word}: {url}" for word, url in found)
        )
        sentences = self._plain(untold(message))
        return f"{clipped(sentences, room - len(links.encode()) - 2)}\n\n{links}"

    def _plain(self, text: str) -> str:
        """Names come from outside: none may call people (`<at …>`, `<!channel>`) or set type."""
        text = re.sub(r"<(?=/?at\b|[!@#])", "‹", text, flags=re.IGNORECASE)
        return re.sub(r"[\\`*\[\]]|\b_|_\b", r"\\\g<0>", text) if self.markdown else text


def links_of(message: Message) -> list[tuple[str, str]]:
    """What a person can do about it, then where to read more; in the order they are shown.

    Our name stands in every message: bots of Feishu and DingTalk may ask for a keyword.
    """
    words = {
        "approve": _("Approve"),
        "reject": _("Reject"),
        "rollback": _("Undo"),
        "clear": _("I have looked"),
    }
    links = [(words.get(verb, verb), url) for verb, url in message["actions"].items()]
    links += [("Trimtab", message["incident_url"]), (_("Trace"), message["trace_url"])]
    return [(word, str(url)) for word, url in links if url]


def untold(message: Message) -> str:
    """The text, without the sentence that stands in the title already."""
    text, what = str(message["text"]), str(message["what"])
    told = what and what.rstrip(".") in str(message["title"])
    return text.removeprefix(f"{what} ") if told else text


def clipped(text: str, bytes_max: int) -> str:
    """At most so many bytes of UTF-8, never half a character."""
    whole = text.encode()
    if len(whole) <= bytes_max:
        return text
    return whole[: max(0, bytes_max - len("…".encode()))].decode("utf-8", "ignore") + "…"


@dataclass
class Line:
    """One message's way out, and what came back on it."""

    sign: Sign | None
    secret: str
    answer: Answer | None = None
    error: SendError | None = None

    def carry(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        if self.sign is not None and self.secret:
            url, body = self.sign(url, body, self.secret)
        try:
            self.answer = post(url, body=body, headers=headers)
        except SendError as error:
            self.error = error
            raise requests.ConnectionError from None
        return self.answer


_line: ContextVar[Line] = ContextVar("line")


class _Answer:
    """An answer as the plug-ins read one of requests'."""

    def __init__(self, answer: Answer) -> None:
        self.status_code = answer.status
        self.content = answer.content
        self.headers = answer.headers


class _Requests:
    """As much of requests as the plug-ins use."""

    codes = requests.codes
    RequestException = requests.RequestException

    @staticmethod
    def post(
        url: str,
        *,
        data: str | bytes,
        headers: Mapping[str, str],
        params: Mapping[str, str] | None = None,
        **_limits: Any,
    ) -> _Answer:
        if params:
            url = f"{url}{'&' if '?' in url else '?'}{urlencode(params)}"
        body = data.encode() if isinstance(data, str) else data
        return _Answer(_line.get().carry(url, body, headers))

    @staticmethod
    def request(method: str, url: str, **arguments: Any) -> _Answer:
        assert method == "post", method
        return _Requests.post(url, **arguments)
