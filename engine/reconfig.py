"""Who may change the running configuration, and how: compare-and-set on config_version.

One owner of the version, whoever asks. A change is persisted with fsync first, then offered to
the step thread, which takes it between two steps; only then is it answered. Killed in between,
the engine comes back with the new version: it was never answered, so its asker reads it back.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.knobs import KnobError, RuntimeConfig

CHANGED_BY_CHARS_MAX = 100
TAKEN_S_MAX = 10.0  # a step takes milliseconds; longer means that the step thread is stuck


class StaleVersion(Exception):
    """The change expected another version than the current one."""

    def __init__(self, expected: int, current: int) -> None:
        super().__init__(f"config_version: expected {expected}, current is {current}")
        self.current = current


class StateError(ValueError):
    """The state file cannot be used; says which file and why."""


@dataclass(frozen=True)
class Versioned:
    """One version of the configuration and who made it."""

    config_version: int
    config: RuntimeConfig
    changed_by: str
    changed_at: str


class RuntimeStore:
    """Holds the current version. `change` may be called from any thread, `take` by the step thread.

    With `folder` None nothing is persisted (tests, benches).
    """

    def __init__(self, folder: Path | None, wake: Callable[[], None] = lambda: None) -> None:
        self.path = folder / "runtime_config.json" if folder else None
        self.wake = wake
        self.changing = threading.Lock()
        self.taken = threading.Condition()
        self.current = self._load()
        self.running = self.current
        self.listeners: list[Callable[[Versioned], None]] = []

    def take(self) -> RuntimeConfig:
        """The configuration of the next step; called once per step, at its boundary."""
        current = self.current
        if current is not self.running:
            with self.taken:
                self.running = current
                self.taken.notify_all()
        return current.config

    def change(self, values: Mapping[str, Any], expected: int, changed_by: str) -> Versioned:
        """Absolute values; returns once they are durable and the step thread has taken them.

        Values that are those in force already (or none at all) make no new version.
        Raises StaleVersion, KnobError (nothing was changed), TimeoutError (durable, not taken).
        """
        with self.changing:
            before = self.current
            if before.config_version != expected:
                raise StaleVersion(expected, before.config_version)
            config, after = before.config.replaced(values), before
            if config != before.config:
                after = Versioned(
                    config_version=before.config_version + 1,
                    config=config,
                    changed_by=changed_by[:CHANGED_BY_CHARS_MAX],
                    changed_at=datetime.now(UTC).isoformat(),
                )
                self._save(after)
                self.current = after
            self.wake()
            with self.taken:
                if not self.taken.wait_for(lambda: self.running is after, TAKEN_S_MAX):
                    raise TimeoutError(
                        f"config_version {after.config_version} is stored, but no step took it "
                        f"within {TAKEN_S_MAX} s"
                    )
        if after is not before:
            for listener in self.listeners:
                listener(after)
        return after

    def _load(self) -> Versioned:
        if self.path is None or not self.path.exists():
            return Versioned(1, RuntimeConfig(), "default", datetime.now(UTC).isoformat())
        try:
            stored = json.loads(self.path.read_text())
            return Versioned(
                config_version=int(stored["config_version"]),
                config=RuntimeConfig().replaced(stored["values"]),
                changed_by=str(stored["changed_by"]),
                changed_at=str(stored["changed_at"]),
            )
        except (KnobError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"{self.path}: not a runtime configuration ({error}); "
                "mend it, or remove it to start from the defaults"
            ) from error

    def _save(self, version: Versioned) -> None:
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
