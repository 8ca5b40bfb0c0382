"""The demo's child processes: started with a log each, remembered on disk, ended by name.

What is recorded is (pid, start time), so a recycled pid is never signalled. `python -m
controlplane.demo.processes HOME` ends whatever is recorded below HOME: this is `trimtab stop`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOP_S_MAX = 15.0
STORIES = "scenarios"  # below the demo's home: the house of each scenario


class Died(Exception):
    """A child ended by itself; says which, how, and the end of its log."""


class Processes:
    """Children of one demo. `start` records, `stop` ends them in reverse order."""

    def __init__(self, home: Path) -> None:
        self.run = home / "run"
        self.log = home / "log"
        self.run.mkdir(parents=True, exist_ok=True)
        self.log.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.log_begins: dict[str, int] = {}  # where in its file the log of this run begins

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        with self.log_of(name).open("ab") as log, uninterrupted():
            self.log_begins[name] = log.tell()
            child = subprocess.Popen(
                argv,
                env={**os.environ, "TZ": "UTC", **env},  # logs have the time of the pages
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.children[name] = child
            record(self.run, name, child.pid)

    def check(self) -> None:
        """Raises Died when a child is no longer running."""
        for name, child in list(self.children.items()):
            if child.poll() is not None:
                raise Died(
                    f"{name} {how_ended(child.returncode)}. Start again: make run\n"
                    f"The end of its log, {self.log_of(name)}:\n{self.tail(name)}"
                )

    def log_of(self, name: str) -> Path:
        return self.log / f"{name}.log"

    def tail(self, name: str, lines_max: int = 12) -> str:
        """What it said last, since it was started here."""
        with self.log_of(name).open("rb") as log:
            log.seek(self.log_begins.get(name, 0))
            text = log.read().decode(errors="replace")
        lines = text.splitlines()[-lines_max:] or ["(nothing)"]
        return "\n".join(f"    {line}" for line in lines)

    def kill(self, name: str) -> None:
        """SIGKILL, now; for proofs. The child is gone when this returns, its record stays."""
        child = self.children.pop(name)
        child.kill()
        child.wait()

    def end(self, name: str) -> None:
        stop_recorded(self.run / f"{name}.json")
        self.children.pop(name).wait()

    def stop(self) -> None:
        for name in reversed(list(self.children)):
            self.end(name)


def how_ended(status: int) -> str:
    """A child's exit status in words; negative where a signal ended it."""
    if status >= 0:
        return f"ended with status {status}"
    if -status == signal.SIGKILL:
        return "was killed (signal 9), by hand or because the machine ran out of memory"
    return f"was ended by signal {-status} ({signal.strsignal(-status)})"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A signal that ends this process waits until the block is through: interrupted between its
    start and its record, a child would be nobody's."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    handlers = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def started_at(pid: int) -> str | None:
    """The start time the system keeps for a process, None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
        told = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return told.stdout.strip() or None
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended; only its parent has not asked yet.
    return None if fields[0] == "Z" else fields[19]


def record(run: Path, name: str, pid: int) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    path = run / f"{name}.json"
    path.write_text(json.dumps({"pid": pid, "started": started_at(pid)}))
    return path


def stop_recorded(path: Path) -> bool:
    """Ends the process a record names; True when it was running. The record goes away."""
    try:
        kept = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        path.unlink(missing_ok=True)
        return False
    pid, running = kept["pid"], False
    deadline = time.monotonic() + STOP_S_MAX
    number = signal.SIGTERM
    while started_at(pid) is not None and started_at(pid) == kept["started"]:
        if not running or time.monotonic() > deadline:
            if running:
                number = signal.SIGKILL
                deadline = float("inf")
            running = True
            os.kill(pid, number)
        time.sleep(0.05)
    path.unlink(missing_ok=True)
    return running


def closing_line(home: Path) -> Path:
    """Where a demo that has ended left word of what it did, on one line."""
    return home / "run" / "closing.txt"


def records(home: Path) -> list[Path]:
    """Of the demo and its children, those of a scenario's house too."""
    return sorted([*home.glob("run/*.json"), *home.glob(f"{STORIES}/*/run/*.json")])


def running(home: Path) -> list[str]:
    """Names of recorded processes that still run."""
    names = []
    for path in records(home):
        kept = json.loads(path.read_text())
        if kept["started"] is not None and started_at(kept["pid"]) == kept["started"]:
            names.append(path.stem)
    return names


def main(home: Path) -> int:
    # The demo first: it ends its children in order.
    demo_first = sorted(records(home), key=lambda path: path.stem != "demo")
    ended = [path.stem for path in demo_first if stop_recorded(path)]
    line = closing_line(home)
    if "demo" in ended and line.exists():
        print(line.read_text().strip())
    print(f"Stopped: {', '.join(ended)}." if ended else "Nothing of the demo was running.")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
