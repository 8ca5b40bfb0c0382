"""What the demo prints: one screen at the start, the chat message, the story as it happens."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

WIDTH = 84  # columns, where the terminal has as many
WIDTH_MIN = 40  # columns; a terminal with fewer breaks the lines itself


class Gone(Exception):
    """Nobody reads what is printed any more: a closed pipe, a closed terminal."""


def width() -> int:
    """Columns to print in: those of the terminal, or COLUMNS, WIDTH at most."""
    return max(WIDTH_MIN, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


class Screen:
    """A terminal gets a live last line; a file gets a line every `every_s` seconds.

    Threads may print at once: nothing comes between the lines of a box. There are no colours and no
    escape codes.
    """

    def __init__(self, every_s: float = 15.0) -> None:
        self.terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.every_s = every_s
        self.last_said_s = -every_s
        self.live = ""
        self.gone = False
        self.printing = threading.Lock()

    def say(self, *lines: str) -> None:
        """Lasting lines; the live line moves below them."""
        with self.printing:
            self._write(self._clear() + "".join(f"{line}\n" for line in lines) + self.live)

    def step(self, text: str) -> None:
        """What is done now. Raises Gone once nobody reads it."""
        self.say(*hung("· ", text, width()))
        if self.gone:
            raise Gone

    def event(self, text: str, at: datetime | None = None) -> None:
        """Lasting lines with the time in UTC, as the pages and logs have it: when it happened, now
        where no time is given."""
        when = (at or datetime.now(UTC)).astimezone(UTC)
        self.say(*hung(f"{when:%H:%M:%S}  ", text, width()))

    def progress(self, at_s: float, text: str) -> None:
        """How it goes, `at_s` seconds after the start. Raises Gone once nobody reads it."""
        if self.gone:
            raise Gone
        if self.terminal:
            with self.printing:
                clear = self._clear()
                self.live = f"{int(at_s) // 60:02d}:{int(at_s) % 60:02d}  {text}"[: width()]
                self._write(clear + self.live)
        elif at_s - self.last_said_s >= self.every_s:
            self.last_said_s = at_s
            self.event(text)

    def settle(self) -> None:
        """Ends the live line: what is said from now on stands alone."""
        with self.printing:
            self._write(self._clear())
            self.live = ""
            self.last_said_s = -self.every_s  # what comes next has a beginning of its own

    def chat(self, message: dict[str, Any]) -> None:
        """The message as a chat service would show it."""
        title, text = str(message.get("title", "")), str(message.get("text", ""))
        links = [str(message[key]) for key in ("incident_url", "trace_url") if message.get(key)]
        # A title that is the text's first sentence is read there, whole.
        head = "chat" if text.startswith(title) else f"chat: {title}"
        self.box(head, [*text.splitlines(), "", *links], hang=0)

    def box(self, title: str, lines: Sequence[str], hang: int = 2) -> None:
        """A line too long for the box goes on `hang` columns in."""
        columns = width()
        head = textwrap.shorten(title, columns - 6, placeholder="…")
        top = f"┌─ {head} " + "─" * (columns - len(head) - 5) + "┐"
        inside = (f"│ {part:<{columns - 4}} │" for part in _boxed(lines, columns - 4, hang))
        self.say(top, *inside, "└" + "─" * (columns - 2) + "┘")

    def _clear(self) -> str:
        """Takes the live line away; there is none but on a terminal."""
        return f"\r{' ' * len(self.live)}\r" if self.live else ""

    def _write(self, text: str) -> None:
        if self.gone:
            return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:
            self.gone = True
            # What is still buffered must not fail once more when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def hung(mark: str, text: str, columns: int) -> list[str]:
    """`mark` and the text, broken into lines of at most `columns` that begin below the text."""
    indent = " " * len(mark)
    return textwrap.wrap(
        text, columns, initial_indent=mark, subsequent_indent=indent, break_on_hyphens=False
    ) or [mark.rstrip()]


def _boxed(lines: Sequence[str], columns: int, hang: int) -> Iterator[str]:
    for line in lines:
        # A link is never broken: what is clicked must be whole.
        if "://" in line or len(line) <= columns:
            yield line
        else:
            yield from textwrap.wrap(
                line, columns, subsequent_indent=" " * hang, break_on_hyphens=False
            )
