"""Demos as people treat them: ended while they play, read in part, two at once, in a small window.

Three are started at the same time, since most of a demo's beginning is waiting.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.demo.house import Ports
from controlplane.demo.processes import records

from .houses import ROOT, trimtab, until

COLUMNS = 60
PLAYING = ("req/s", "no answers yet")  # the live line
START_S_MAX = 180.0
ENDED = 130  # as a shell has it after Ctrl-C


class Demo:
    """One demo and what it has printed so far, on a terminal of COLUMNS or into a pipe.

    Its output into a pipe is read up to `lines_max` lines; then the pipe is closed.
    """

    def __init__(self, home: Path, *, terminal: bool = False, lines_max: int = 10_000) -> None:
        self.home, self.ports, self.shown = home, ports(), ""
        read, write = pty.openpty() if terminal else os.pipe()
        # A test runner may say how wide its own lines are.
        without_size = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        if terminal:
            fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "controlplane.cli", *self.arguments],
            cwd=ROOT,
            env={**without_size, "DJANGO_SETTINGS_MODULE": "controlplane.settings",
                 "NO_COLOR": "1", "TERM": "xterm-256color"},
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        os.close(write)
        self.reader = threading.Thread(target=self._read, args=(read, lines_max))
        self.reader.start()

    @property
    def arguments(self) -> list[str]:
        return [
            "demo", "--scenario", "engine-killed", "--pace", "fast", "--quiet-min", "10",
            "--minutes", "20", "--calm", "0.1", "--home", str(self.home), *self.ports,
        ]  # fmt: skip

    def _read(self, read: int, lines_max: int) -> None:
        """A terminal whose program is gone says so by an error."""
        with open(read, errors="replace", newline="") as stream:
            for _ in range(lines_max):
                try:
                    self.shown += (line := stream.readline())
                except OSError:
                    return
                if not line:
                    return

    @property
    def plays(self) -> bool:
        return any(word in self.shown for word in PLAYING)

    def ends(self, number: int | None = None) -> None:
        """Told so by a signal if one is given: in time, with its status, and quietly."""
        if number is not None:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=START_S_MAX)
        self.reader.join()
        assert (self.process.returncode, said) == (ENDED, "")
        assert "Traceback" not in self.shown

    @property
    def family(self) -> list[str]:
        """Commands of running processes that work in this home."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            try:
                command, around = (each / "cmdline").read_bytes(), (each / "environ").read_bytes()
            except OSError:
                continue
            if os.fsencode(self.home) in command + around:
                found.append(command.replace(b"\0", b" ").decode())
        return found


def ports() -> list[str]:
    given = vars(Ports.free()).items()
    return [word for name, at in given for word in (f"--{name.replace('_', '-')}-port", str(at))]


@contextmanager
def interruptible() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C, and so would all it starts."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


@contextmanager
def killed_at_last(*demos: Demo) -> Iterator[None]:
    try:
        yield
    finally:
        for demo in demos:
            demo.process.kill()
            demo.process.wait()
            trimtab("stop", env={"TRIMTAB_HOME": str(demo.home)})


def test_demos_end_when_told_leave_nothing_and_keep_out_of_each_others_way(tmp_path: Path) -> None:
    with interruptible():
        watched = Demo(tmp_path / "a", terminal=True)
        beside = Demo(tmp_path / "b")
        unread = Demo(tmp_path / "c", lines_max=1)
    with killed_at_last(watched, beside, unread):
        unread.ends()  # as `| head -1`
        assert unread.shown.count("\n") == 1
        leaves_nothing(unread)

        # Another one over the same home is not started, and says what to do.
        another = trimtab("demo", "--home", str(watched.home), *ports(), env={})
        assert another.returncode == 1
        assert f"A demo runs over {watched.home} already (" in unwrapped(another.stdout)
        assert "`make stop` ends it" in unwrapped(another.stdout)
        assert another.stderr == ""

        for demo, ended_by in ((watched, "Ctrl-C"), (beside, "make stop")):
            until(lambda demo=demo: demo.plays, START_S_MAX, "a demo that plays")
            assert len(demo.family) >= 4  # control plane, engine, agent, itself
            elsewhere = ""
            if ended_by == "Ctrl-C":
                demo.ends(signal.SIGINT)
            else:
                elsewhere = trimtab("stop", env={"TRIMTAB_HOME": str(demo.home)}).stdout
                demo.ends()
            assert "Stopping." in demo.shown
            counts = r"Sent [\d,]+ requests: [\d,]+ answered, .*0 lost\. Incidents: 0, 0 of them "
            counts += r"open\. Changes: 0 kept, 0 undone\."
            assert re.search(counts, unwrapped(demo.shown)), demo.shown
            assert ended_by == "Ctrl-C" or re.match(counts, elsewhere), elsewhere
            leaves_nothing(demo)
    fits_a_small_window(watched.shown)
    assert "\033" not in beside.shown


def leaves_nothing(demo: Demo) -> None:
    assert demo.family == []
    assert records(demo.home) == []


def fits_a_small_window(shown: str) -> None:
    """Whatever the live line does: it is rewritten in place, without escape codes."""
    assert "\033" not in shown
    lines = shown.replace("\r", "\n").splitlines()
    assert [line for line in lines if len(line) > COLUMNS and "/" not in line] == []
    assert max(len(line) for line in lines if line[:1] in ("┌", "└")) == COLUMNS


def unwrapped(text: str) -> str:
    return " ".join(text.split())
