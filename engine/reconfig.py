"""Who may change the running configuration, and how: compare-and-set on config_version.

One owner of the version, whoever asks. A change is a transaction: validated, prepared (what a
barrier knob needs is built while steps run), persisted with fsync, then taken by the step thread
between two steps; only then is it answered. What cannot be taken is unwritten again. Killed in
between, the engine comes back with the new version: it was never answered, so its asker reads it
back.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from engine.knobs import KnobError, Value

CHANGED_BY_CHARS_MAX = 100
TAKEN_S_MAX = 10.0  # a step takes milliseconds; longer means that the step thread is stuck


class StaleVersion(Exception):
    """The change expected another version than the current one."""

    def __init__(self, expected: int, current: int) -> None:
        super().__init__(f"config_version: expected {expected}, current is {current}")
        self.current = current


class StateError(ValueError):
    """The state file cannot be used; says which file and why."""


class Settings(Protocol):
    """The values of a registry of knobs; never changed, only replaced."""

    def replaced(self, values: Mapping[str, Any]) -> Self:
        """A copy with `values` taken over; raises UnknownKnob or OutOfBounds, changes nothing."""

    def values(self) -> dict[str, Value]: ...


C = TypeVar("C", bound=Settings)


@dataclass(frozen=True)
class Versioned(Generic[C]):
    """One version of the configuration and who made it."""

    config_version: int
    config: C
    changed_by: str
    changed_at: str


class NotTaken(TimeoutError):
    """No step thread came to take the change; everything is as before."""


class Errand:
    """One piece of work for the step thread, and what became of it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.done = False
        self.error: Exception | None = None


class Boundary:
    """Work of other threads, done by the step thread between two steps."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.moved = threading.Condition()
        self.offered: Errand | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Returns when `work` is done; raises what it raised. One caller at a time.

        NotTaken: no step came within TAKEN_S_MAX, nothing was done. TimeoutError: the work takes
        longer than that by itself, and goes on.
        """
        errand = Errand(work)
        with self.moved:
            self.offered = errand
            self.wake()
            taken = self.moved.wait_for(lambda: errand.done, TAKEN_S_MAX)
            if not taken and self.offered is errand:
                self.offered = None
                raise NotTaken(f"no step took it within {TAKEN_S_MAX} s; nothing was changed")
            if not self.moved.wait_for(lambda: errand.done, TAKEN_S_MAX):
                raise TimeoutError(f"it is being taken, but not done after {TAKEN_S_MAX} s")
        if errand.error is not None:
            raise errand.error

    def turn(self) -> None:
        """The step thread's side, once per step."""
        if self.offered is None:
            return
        with self.moved:
            errand, self.offered = self.offered, None
        if errand is None:
            return
        try:
            errand.work()
        except Exception as error:  # noqa: BLE001 - for who asked; the step thread goes on
            errand.error = error
        with self.moved:
            errand.done = True
            self.moved.notify_all()


def nothing_to_prepare(before: Settings, after: Settings) -> None:
    """For a store without an engine behind it."""


class RuntimeStore(Generic[C]):
    """Holds the current version. `change` may be called from any thread, `take` by the step thread.

    With `folder` None nothing is persisted (tests, benches). `initial` is the configuration where
    nothing was persisted. `prepare` gets the configuration before and after, on the caller's
    thread; what it returns runs at the step boundary that takes the change.
    """

    def __init__(
        self,
        folder: Path | None,
        wake: Callable[[], None],
        initial: C,
    ) -> None:
        self.path = folder / "runtime_config.json" if folder else None
        self.boundary = Boundary(wake)
        self.prepare: Callable[[C, C], Callable[[], None] | None] = nothing_to_prepare
        self.changing = threading.Lock()
        self.initial = initial
        self.current = self._load()
        self.running = self.current
        self.listeners: list[Callable[[Versioned[C]], None]] = []

    def take(self) -> C:
        """The configuration of the next step; called once per step, at its boundary."""
        self.boundary.turn()
        return self.running.config

    def change(self, values: Mapping[str, Any], expected: int, changed_by: str) -> Versioned[C]:
        """Absolute values; returns once they are durable and the step thread has taken them.

        Values that are those in force already (or none at all) make no new version.
        Raises StaleVersion, KnobError, NotTaken (nothing was changed), TimeoutError (durable, being
        taken).
        """
        with self.changing:
            before = self.current
            if before.config_version != expected:
                raise StaleVersion(expected, before.config_version)
            config = before.config.replaced(values)
            if config == before.config:
                return before
            after = Versioned(
                config_version=before.config_version + 1,
                config=config,
                changed_by=changed_by[:CHANGED_BY_CHARS_MAX],
                changed_at=datetime.now(UTC).isoformat(),
            )
            swap = self.prepare(before.config, config)
            self._save(after)
            self.current = after
            try:
                self.boundary.run(lambda: self._take(after, swap))
            except Exception as error:
                if isinstance(error, NotTaken) or not isinstance(error, TimeoutError):
                    self._save(before)
                    self.current = before
                raise
        for listener in self.listeners:
            listener(after)
        return after

    def _take(self, version: Versioned[C], swap: Callable[[], None] | None) -> None:
        if swap is not None:
            swap()
        self.running = version

    def _load(self) -> Versioned[C]:
        if self.path is None or not self.path.exists():
            return Versioned(1, self.initial, "default", datetime.now(UTC).isoformat())
        try:
            stored = json.loads(self.path.read_text())
            return Versioned(
                config_version=int(stored["config_version"]),
                config=self.initial.replaced(stored["values"]),
                changed_by=str(stored["changed_by"]),
                changed_at=str(stored["changed_at"]),
            )
        except (KnobError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"{self.path}: not a runtime configuration ({error}); "
                "mend it, or remove it to start from the defaults"
            ) from error

    def _save(self, version: Versioned[C]) -> None:
        if self.path is None:
            return
        record = {
            "config_version": version.config_version,
            "values": version.config.values(),
            "changed_by": version.changed_by,
            "changed_at": version.changed_at,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".json.draft")
        with draft.open("w") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must survive a power cut
        finally:
            os.close(folder)
