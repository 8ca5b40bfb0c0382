"""What the demo prints: one screen at the start, the chat message, the story as it happens."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

WIDTH = 84


class Screen:
    """A terminal gets a live last line; a file gets a line every `every_s` seconds."""

    def __init__(self, every_s: float = 15.0) -> None:
        self.terminal = sys.stdout.isatty()
        self.every_s = every_s
        self.last_said_s = -every_s
        self.live = ""

    def say(self, text: str = "") -> None:
        """A lasting line; the live line moves below it."""
        if self.terminal and self.live:
            sys.stdout.write("\r\033[K")
        print(text)
        self._draw()
        sys.stdout.flush()

    def step(self, text: str) -> None:
        self.say(f"· {text}")

    def event(self, text: str) -> None:
        """A lasting line with the time in UTC, as the pages and logs have it."""
        stamp = f"{datetime.now(UTC):%H:%M:%S}"
        first, *rest = textwrap.wrap(text, WIDTH - 12) or [""]
        self.say(f"{stamp}  {first}")
        for line in rest:
            self.say(f"          {line}")

    def progress(self, at_s: float, text: str) -> None:
        """How it goes, `at_s` seconds after the start."""
        if self.terminal:
            self.live = f"{int(at_s) // 60:02d}:{int(at_s) % 60:02d}  {text}"[:WIDTH]
            sys.stdout.write("\r\033[K")
            self._draw()
            sys.stdout.flush()
        elif at_s - self.last_said_s >= self.every_s:
            self.last_said_s = at_s
            self.event(text)

    def _draw(self) -> None:
        if self.terminal:
            sys.stdout.write(self.live)

    def chat(self, message: dict[str, Any]) -> None:
        """The message as a chat service would show it."""
        body: list[str] = []
        for paragraph in str(message.get("text", "")).splitlines():
            body += textwrap.wrap(paragraph, WIDTH - 4) or [""]
        links = [str(message[key]) for key in ("incident_url", "trace_url") if message.get(key)]
        self.box(f"chat: {message.get('title', '')}", [*body, "", *links])

    def box(self, title: str, lines: Sequence[str]) -> None:
        head = textwrap.shorten(title, WIDTH - 6, placeholder="…")
        self.say(f"┌─ {head} " + "─" * (WIDTH - len(head) - 5) + "┐")
        for line in lines:
            # A link is never broken: what is clicked must be whole.
            wide = WIDTH - 4
            parts = [line] if "://" in line else textwrap.wrap(line, wide, subsequent_indent="  ")
            for part in parts or [""]:
                self.say(f"│ {part:<{wide}} │")
        self.say("└" + "─" * (WIDTH - 2) + "┘")
