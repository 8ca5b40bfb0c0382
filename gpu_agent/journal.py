"""The agent's memory of commands: SQLite, synchronous=FULL, written before every side effect.

One row per command. A row of kind *apply* also carries its trial: what the engine ran before, the
version the agent produced, and when the change undoes itself. `history` keeps each step in order.

A trial goes `'' → armed → reverting → reverted`, or ends `committed` or `abandoned` (someone else
changed the engine since, or it refused; the reason is on the command). `armed` and `reverting` are
open: such a row is never forgotten.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_agent.clock import utc_text
from gpu_agent.protocol import (
    COMMAND_STATES_FINAL,
    Command,
    CommandResult,
    CommandState,
)

COMMANDS_KEPT_MAX = 1000
REASON_CHARS_MAX = 500

_SCHEMA = """
CREATE TABLE IF NOT EXISTS command (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    command_id TEXT NOT NULL UNIQUE,
    engine TEXT NOT NULL,
    generation INTEGER NOT NULL,
    kind TEXT NOT NULL,
    payload TEXT NOT NULL,
    state TEXT NOT NULL,
    at TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    config_version INTEGER,
    config_values TEXT NOT NULL DEFAULT '{}',
    reported INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    before_version INTEGER,
    before_values TEXT NOT NULL DEFAULT '{}',
    after_version INTEGER,
    trial TEXT NOT NULL DEFAULT '',
    revert_wall REAL,
    revert_boot_id TEXT NOT NULL DEFAULT '',
    revert_boottime REAL
);
CREATE INDEX IF NOT EXISTS command_open ON command (state, trial);
CREATE TABLE IF NOT EXISTS history (
    command_id TEXT NOT NULL,
    at TEXT NOT NULL,
    step TEXT NOT NULL,
    reason TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS history_command ON history (command_id);
CREATE TABLE IF NOT EXISTS generation (engine TEXT PRIMARY KEY, highest INTEGER NOT NULL);
"""


@dataclass(frozen=True)
class Entry:
    """One command as journalled; the fields from `attempts` on matter for kind *apply* only."""

    command: Command
    state: CommandState
    at: str
    reason: str
    config_version: int | None
    values: dict[str, Any]
    attempts: int
    before_version: int | None
    before_values: dict[str, Any]
    after_version: int | None
    trial: str
    revert_wall: float | None
    revert_boot_id: str
    revert_boottime: float | None

    @property
    def final(self) -> bool:
        return self.state in COMMAND_STATES_FINAL

    def result(self) -> CommandResult:
        return CommandResult(
            command_id=self.command.command_id,
            kind=self.command.kind,
            state=self.state,
            at=self.at,
            reason=self.reason,
            config_version=self.config_version,
            values=self.values,
        )


class Journal:
    """Thread-safe. Every method that writes has committed, fsynced, when it returns."""

    def __init__(self, path: Path, *, commands_kept_max: int = COMMANDS_KEPT_MAX) -> None:
        self.commands_kept_max = commands_kept_max
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA cache_size=-512")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def receive(self, command: Command) -> bool:
        """Notes a command before anything is done about it; False for one already known.

        A known command's stored result is reported again. A generation lower than the highest
        seen for its engine is rejected here, in the same transaction that remembers the highest.
        """
        with self._lock, _Transaction(self._db):
            known = self._db.execute(
                "UPDATE command SET reported = 0 WHERE command_id = ?", (command.command_id,)
            )
            if known.rowcount:
                return False
            highest = self._highest(command.engine)
            self._insert(command)
            if highest is not None and command.generation < highest:
                reason = f"stale generation {command.generation}, seen {highest}"
                self._set(command.command_id, CommandState.REJECTED, reason)
            else:
                self._db.execute(
                    "INSERT INTO generation VALUES (?, ?) "
                    "ON CONFLICT (engine) DO UPDATE SET highest = excluded.highest",
                    (command.engine, command.generation),
                )
            self._forget_oldest()
            return True

    def _highest(self, engine: str) -> int | None:
        row = self._db.execute(
            "SELECT highest FROM generation WHERE engine = ?", (engine,)
        ).fetchone()
        return None if row is None else int(row["highest"])

    def _insert(self, command: Command) -> None:
        at = utc_text(time.time())
        self._db.execute(
            "INSERT INTO command (command_id, engine, generation, kind, payload, state, at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                command.command_id,
                command.engine,
                command.generation,
                command.kind.value,
                json.dumps(command.to_json()),
                CommandState.RECEIVED.value,
                at,
            ),
        )
        self._note(command.command_id, CommandState.RECEIVED.value, "")

    def _forget_oldest(self) -> None:
        """Keeps the newest; a command still open, or not yet accepted by the server, stays."""
        finals = ",".join(f"'{state.value}'" for state in COMMAND_STATES_FINAL)
        self._db.execute(
            f"DELETE FROM command WHERE state IN ({finals}) AND reported = 1 "  # noqa: S608
            "AND trial NOT IN ('armed', 'reverting') AND seq <= "
            "(SELECT max(seq) FROM command) - ?",
            (self.commands_kept_max,),
        )
        self._db.execute(
            "DELETE FROM history WHERE command_id NOT IN (SELECT command_id FROM command)"
        )

    def applying(
        self,
        command_id: str,
        *,
        before_version: int,
        before_values: dict[str, Any],
        revert_wall: float,
        boot_id: str,
        revert_boottime: float,
    ) -> None:
        """The last word before the engine is asked to change; the revert timer is already set."""
        with self._lock, _Transaction(self._db):
            self._db.execute(
                "UPDATE command SET before_version = ?, before_values = ?, "
                "revert_wall = ?, revert_boot_id = ?, revert_boottime = ?, attempts = attempts + 1 "
                "WHERE command_id = ?",
                (
                    before_version,
                    json.dumps(before_values),
                    revert_wall,
                    boot_id,
                    revert_boottime,
                    command_id,
                ),
            )
            self._set(command_id, CommandState.APPLYING, "")

    def applied(
        self, command_id: str, *, after_version: int, read_version: int, values: dict[str, Any]
    ) -> None:
        """The change was read back; its trial runs until a commit, a revert or the timer."""
        self._open_trial(
            command_id, "armed", CommandState.APPLIED, "", after_version, read_version, values
        )

    def misapplied(
        self, command_id: str, reason: str, *, after_version: int, values: dict[str, Any]
    ) -> None:
        """The engine took the change but runs other values: to be undone at once."""
        self._open_trial(
            command_id,
            "reverting",
            CommandState.FAILED,
            reason,
            after_version,
            after_version,
            values,
        )

    def _open_trial(
        self,
        command_id: str,
        trial: str,
        state: CommandState,
        reason: str,
        after_version: int,
        read_version: int,
        values: dict[str, Any],
    ) -> None:
        with self._lock, _Transaction(self._db):
            self._db.execute(
                "UPDATE command SET after_version = ?, trial = ? WHERE command_id = ?",
                (after_version, trial, command_id),
            )
            self._set(command_id, state, reason, read_version, values)

    def reverting(self, target_id: str, reason: str) -> None:
        """The last word before the engine is asked to go back."""
        with self._lock, _Transaction(self._db):
            self._db.execute(
                "UPDATE command SET trial = 'reverting' WHERE command_id = ?", (target_id,)
            )
            self._note(target_id, "reverting", reason)

    def rearm(self, target_id: str, *, boot_id: str, revert_boottime: float) -> None:
        """Carries the timer of a trial over to another boot's clock."""
        with self._lock, _Transaction(self._db):
            self._db.execute(
                "UPDATE command SET revert_boot_id = ?, revert_boottime = ? WHERE command_id = ?",
                (boot_id, revert_boottime, target_id),
            )

    def end_trial(self, target_id: str, trial: str, *also: CommandResult) -> None:
        """Closes a trial and, in the same transaction, the commands that this answers."""
        assert trial in ("committed", "reverted", "abandoned")
        with self._lock, _Transaction(self._db):
            self._db.execute(
                "UPDATE command SET trial = ? WHERE command_id = ?", (trial, target_id)
            )
            self._note(target_id, f"trial {trial}", "")
            for end in also:
                self._set(end.command_id, end.state, end.reason, end.config_version, end.values)

    def finish(
        self,
        command_id: str,
        state: CommandState,
        reason: str,
        config_version: int | None = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        assert state in COMMAND_STATES_FINAL
        with self._lock, _Transaction(self._db):
            self._set(command_id, state, reason, config_version, values)

    def _set(
        self,
        command_id: str,
        state: CommandState,
        reason: str,
        config_version: int | None = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        reason = reason[:REASON_CHARS_MAX]
        changed = self._db.execute(
            "UPDATE command SET state = ?, at = ?, reason = ?, reported = 0, "
            "config_version = coalesce(?, config_version), "
            "config_values = coalesce(?, config_values) WHERE command_id = ?",
            (
                state.value,
                utc_text(time.time()),
                reason,
                config_version,
                None if values is None else json.dumps(values),
                command_id,
            ),
        )
        assert changed.rowcount == 1, f"no command {command_id} in the journal"
        self._note(command_id, state.value, reason)

    def _note(self, command_id: str, step: str, reason: str) -> None:
        self._db.execute(
            "INSERT INTO history VALUES (?, ?, ?, ?)",
            (command_id, utc_text(time.time()), step, reason[:REASON_CHARS_MAX]),
        )

    def get(self, command_id: str) -> Entry | None:
        found = self._select("command_id = ?", (command_id,))
        return found[0] if found else None

    def unfinished(self, engine: str) -> list[Entry]:
        """Commands received or in the middle of being applied, in the order they came."""
        return self._select("state IN ('received', 'applying') AND engine = ?", (engine,))

    def open_trials(self, engine: str) -> list[Entry]:
        """Changes that still stand to be committed or undone."""
        return self._select("trial IN ('armed', 'reverting') AND engine = ?", (engine,))

    def results(self, limit: int) -> list[CommandResult]:
        """Results the server has not accepted yet, oldest first."""
        return [entry.result() for entry in self._select("reported = 0", limit=limit)]

    def accepted(self, results: list[CommandResult]) -> None:
        """The server has these; one that changed since it was sent stays to be sent."""
        with self._lock, _Transaction(self._db):
            for result in results:
                self._db.execute(
                    "UPDATE command SET reported = 1 WHERE command_id = ? AND state = ? AND at = ?",
                    (result.command_id, result.state.value, result.at),
                )

    def history(self, command_id: str) -> list[str]:
        """The steps of one command, in order."""
        with self._lock:
            rows = self._db.execute(
                "SELECT step FROM history WHERE command_id = ? ORDER BY rowid", (command_id,)
            )
            return [row["step"] for row in rows]

    def _select(
        self, where: str, parameters: tuple[object, ...] = (), limit: int = -1
    ) -> list[Entry]:
        with self._lock:
            rows = self._db.execute(
                f"SELECT * FROM command WHERE {where} ORDER BY seq LIMIT {limit:d}",  # noqa: S608
                parameters,
            ).fetchall()
        return [_entry(row) for row in rows]


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK when the block raises."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __enter__(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.db.execute("COMMIT")
        finally:
            # A block that raised, or a commit that failed. On a full disk SQLite may have rolled
            # back by itself.
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")


def _entry(row: sqlite3.Row) -> Entry:
    return Entry(
        command=Command.from_json(json.loads(row["payload"])),
        state=CommandState(row["state"]),
        at=row["at"],
        reason=row["reason"],
        config_version=row["config_version"],
        values=json.loads(row["config_values"]),
        attempts=row["attempts"],
        before_version=row["before_version"],
        before_values=json.loads(row["before_values"]),
        after_version=row["after_version"],
        trial=row["trial"],
        revert_wall=row["revert_wall"],
        revert_boot_id=row["revert_boot_id"],
        revert_boottime=row["revert_boottime"],
    )
