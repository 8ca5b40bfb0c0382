"""Commit-confirm on one engine: a change that is not confirmed in time undoes itself.

One guard per engine, on a thread of its own. Each pass asks the journal what is open and moves it
one step; nothing lives in memory alone, so a pass after kill -9 is like any other pass:

    received ─▶ applying ─▶ applied (trial armed) ─▶ commit: committed
        │           │                            └─▶ revert asked, or time is up: reverted
        └ rejected  └ rejected, failed                 (or: changed by hand since, left alone)

What a crash or a lost answer left open is settled by the engine's own word. It raises its version
with every change, so version = before says the change did not happen, version = before + 1 with
the values asked for says it did, and anything else says that someone else was there too.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_agent.backoff import Backoff
from gpu_agent.clock import Clock, utc_text, wall_of
from gpu_agent.engine_adapter import Conflict, EngineAdapter, EngineState, Refused, Unreachable
from gpu_agent.journal import Entry, Journal
from gpu_agent.limits import BoundsError, change_refusal, form_refusal, load_bounds
from gpu_agent.protocol import Command, CommandKind, CommandResult, CommandState
from gpu_agent.standing import Standing

log = logging.getLogger(__name__)

RETRY_BASE_S = 0.25
RETRY_CAP_S = 5.0
IDLE_S = 5.0


class Guard:
    """Carries out the commands for `engine`; the only one on this node who changes it.

    `stop_file`: while it exists no apply is carried out; commits and reverts still are.
    `server_offset_s`: server clock minus ours, for deadlines, which the server's clock set.
    `changed` is called after each pass that moved something, so that results go out at once.
    """

    def __init__(
        self,
        engine: str,
        adapter: EngineAdapter,
        journal: Journal,
        *,
        stop_file: Path,
        bounds_file: Path | None = None,
        clock: Clock | None = None,
        server_offset_s: Callable[[], float] = lambda: 0.0,
        changed: Callable[[], None] = lambda: None,
        read_every_s: float = IDLE_S,
    ) -> None:
        self.engine = engine
        self.adapter = adapter
        self.journal = journal
        self.stop_file = stop_file
        self.bounds_file = bounds_file
        self.clock = clock or Clock()
        self.state: EngineState | None = None
        self.error = "not read yet"
        self._standing = Standing(
            lost=f"engine {engine} does not answer", back=f"engine {engine} answers again"
        )
        self.read_every_s = read_every_s
        self._server_offset_s = server_offset_s
        self._changed = changed
        self._moved = False
        self._wake = threading.Event()
        self._backoff = Backoff(base_s=RETRY_BASE_S, cap_s=RETRY_CAP_S)

    def wake(self) -> None:
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._wake.clear()
            self._wake.wait(self.step())

    def step(self) -> float:
        """One pass over everything open on this engine; returns seconds until the next is due."""
        self._moved = False
        try:
            stuck = self._pass()
        except sqlite3.Error as error:
            # Without the journal nothing may be done; what was done will be found by reading.
            log.error("journal of %s: %s", self.engine, error)
            stuck = True
        if self._moved:
            self._changed()
        if stuck:
            return min(self._backoff.fail(), self._next_due_s())
        self._backoff.succeed()
        return min(self.read_every_s, self._next_due_s())

    def _pass(self) -> bool:
        """True when something has to be tried again."""
        stuck = False
        for step in (self._close_trials, self._carry_out, self._look):
            try:
                stuck = step() or stuck
            except Unreachable as error:
                self.error = str(error)
                stuck = True
        return stuck

    def _look(self) -> bool:
        self._read()
        return False

    def _read(self) -> EngineState:
        try:
            self.state = self.adapter.read()
        # Refused: its configuration is not to be had now; it may be later.
        except (Refused, Unreachable) as error:
            self._standing.bad(str(error))
            raise Unreachable(str(error)) from error
        self.error = ""
        self._standing.good()
        return self.state

    # -- trials: commit, revert, and the timer ------------------------------------------------

    def _close_trials(self) -> bool:
        asked = [
            entry
            for entry in self.journal.unfinished(self.engine)
            if entry.command.kind is CommandKind.REVERT
        ]
        for trial in self.journal.open_trials(self.engine):
            own = [
                entry
                for entry in asked
                if entry.command.target_command_id == trial.command.command_id
            ]
            if own or trial.trial == "reverting" or self._left_s(trial) <= 0:
                self._revert(trial, own)
        return False

    def _left_s(self, trial: Entry) -> float:
        """Seconds until the trial undoes itself; negative when it is overdue.

        Within one boot the boot clock counts. After a reboot only the wall clock is left, and it
        may have been set back: the time left is then never more than the whole ttl.
        """
        assert trial.revert_wall is not None
        assert trial.revert_boottime is not None
        if trial.revert_boot_id == self.clock.boot_id:
            return trial.revert_boottime - self.clock.boottime_s()
        left_s = min(trial.revert_wall - self.clock.wall_s(), trial.command.ttl_s)
        self.journal.rearm(
            trial.command.command_id,
            boot_id=self.clock.boot_id,
            revert_boottime=self.clock.boottime_s() + left_s,
        )
        return left_s

    def _next_due_s(self) -> float:
        try:
            trials = self.journal.open_trials(self.engine)
            waits = [self._left_s(trial) for trial in trials if trial.trial == "armed"]
        except sqlite3.Error:
            return RETRY_CAP_S
        return max(0.0, min(waits, default=float("inf")))

    def _revert(self, trial: Entry, asked: list[Entry]) -> None:
        """Back to `undo`, if the engine still stands where this agent put it."""
        command = trial.command
        if trial.trial != "reverting":
            why = "revert asked" if asked else "time is up"
            self.journal.reverting(command.command_id, why)
        state = self._read()
        if _runs(state, command.undo):
            self._end_revert(trial, asked, CommandState.REVERTED, "", state)
            return
        if state.config_version != trial.after_version:
            self._end_revert(trial, asked, CommandState.FAILED, _by_hand(state), state)
            return
        assert trial.after_version is not None
        by = f"trimtab-agent revert {command.command_id}"
        try:
            self.adapter.apply(command.undo, expected_version=trial.after_version, by=by)
        except Conflict as error:
            raise Unreachable(str(error)) from error  # someone was quicker: look again
        except Refused as error:
            self._end_revert(trial, asked, CommandState.FAILED, f"undo refused: {error}", state)
            return
        state = self._read()
        if _runs(state, command.undo):
            self._end_revert(trial, asked, CommandState.REVERTED, "", state)
        else:
            self._end_revert(trial, asked, CommandState.FAILED, _by_hand(state), state)

    def _end_revert(
        self,
        trial: Entry,
        asked: list[Entry],
        state: CommandState,
        reason: str,
        engine: EngineState,
    ) -> None:
        """Answers the revert commands; a timer's revert is told on the apply command itself."""
        told = [self._result(entry.command, state, reason, engine) for entry in asked]
        if not asked:
            assert trial.revert_wall is not None
            why = trial.reason or f"no commit before {utc_text(trial.revert_wall)}"
            own = CommandState.FAILED if trial.state is CommandState.FAILED else state
            told.append(self._result(trial.command, own, f"{why}; {reason or 'undone'}", engine))
        ended = "reverted" if state is CommandState.REVERTED else "abandoned"
        self.journal.end_trial(trial.command.command_id, ended, *told)
        self._moved = True

    def _result(
        self, command: Command, state: CommandState, reason: str, engine: EngineState
    ) -> CommandResult:
        return CommandResult(
            command_id=command.command_id,
            kind=command.kind,
            state=state,
            at=utc_text(self.clock.wall_s()),
            reason=reason,
            config_version=engine.config_version,
            values=dict(engine.values),
        )

    # -- commands -----------------------------------------------------------------------------

    def _carry_out(self) -> bool:
        stuck = False
        for entry in self.journal.unfinished(self.engine):
            try:
                stuck = not self._CARRY_OUT[entry.command.kind](self, entry) or stuck
            except Unreachable as error:
                self.error = str(error)
                stuck = True
        return stuck

    def _finish(
        self,
        entry: Entry,
        state: CommandState,
        reason: str = "",
        engine: EngineState | None = None,
    ) -> bool:
        version = None if engine is None else engine.config_version
        values = None if engine is None else dict(engine.values)
        self.journal.finish(entry.command.command_id, state, reason, version, values)
        self._moved = True
        return True

    def _commit(self, entry: Entry) -> bool:
        target = self._target(entry)
        if target is None:
            return self._finish(entry, CommandState.REJECTED, self._no_target(entry))
        if target.trial == "committed":
            return self._finish(entry, CommandState.COMMITTED, "already committed")
        if target.trial != "armed" and target.final:
            return self._finish(entry, CommandState.REJECTED, _no_trial(target))
        if self._expired(entry.command):
            return self._finish(entry, CommandState.REJECTED, self._expiry(entry.command))
        if target.trial != "armed":
            return False  # its apply is not settled yet
        end = CommandResult(
            command_id=entry.command.command_id,
            kind=entry.command.kind,
            state=CommandState.COMMITTED,
            at=utc_text(self.clock.wall_s()),
            config_version=target.config_version,
            values=target.values,
        )
        self.journal.end_trial(target.command.command_id, "committed", end)
        self._moved = True
        return True

    def _revert_without_trial(self, entry: Entry) -> bool:
        """Open trials were closed before; here is what to say when there is none to close.

        A revert has no use for its deadline: going back late is better than not going back.
        """
        target = self._target(entry)
        if target is None:
            return self._finish(entry, CommandState.REJECTED, self._no_target(entry))
        if target.trial in ("armed", "reverting") or not target.final:
            return False
        if target.trial == "reverted":
            return self._finish(entry, CommandState.REVERTED, target.reason or "already reverted")
        if target.trial == "abandoned":
            return self._finish(entry, CommandState.FAILED, target.reason)
        return self._finish(entry, CommandState.REJECTED, _no_trial(target))

    def _target(self, entry: Entry) -> Entry | None:
        target = self.journal.get(entry.command.target_command_id)
        fits = (
            target is not None
            and target.command.kind is CommandKind.APPLY
            and target.command.engine == self.engine
        )
        return target if fits else None

    def _no_target(self, entry: Entry) -> str:
        wanted = entry.command.target_command_id
        return f"target_command_id: {wanted!r} is no apply command known for {self.engine}"

    # -- apply --------------------------------------------------------------------------------

    def _apply(self, entry: Entry) -> bool:
        command = entry.command
        if entry.state is CommandState.APPLYING:
            return self._settle(entry)
        reason = form_refusal(command) or self._forbidden(command)
        if reason:
            return self._finish(entry, CommandState.REJECTED, reason)
        state = self._read()
        try:
            reason = change_refusal(command, state, load_bounds(self.bounds_file))
        except BoundsError as error:
            reason = str(error)  # a node whose own limits cannot be read changes nothing
        if reason:
            return self._finish(entry, CommandState.REJECTED, reason, state)
        return self._change(entry, state)

    def _forbidden(self, command: Command) -> str:
        """Reasons of the moment, which hold for a second try after a crash as well."""
        if self._expired(command):
            return self._expiry(command)
        if self.stop_file.exists():
            return f"kill switch: {self.stop_file} exists, no change is applied on this node"
        for trial in self.journal.open_trials(self.engine):
            return f"conflict: the trial of command {trial.command.command_id} is still open"
        for other in self.journal.unfinished(self.engine):
            asked = other.command.target_command_id == command.command_id
            if asked and other.command.kind is CommandKind.REVERT:
                return f"revert {other.command.command_id} came before it was applied"
        return ""

    def _expired(self, command: Command) -> bool:
        try:
            deadline = wall_of(command.deadline)
        except ValueError:
            return True
        return self.clock.wall_s() + self._server_offset_s() > deadline

    def _expiry(self, command: Command) -> str:
        tail = f"; {self.error}" if self.error else ""
        return f"expired: deadline {command.deadline} has passed{tail}"

    def _change(self, entry: Entry, before: EngineState) -> bool:
        command = entry.command
        self.journal.applying(
            command.command_id,
            before_version=before.config_version,
            before_values=dict(before.values),
            revert_wall=self.clock.wall_s() + command.ttl_s,
            boot_id=self.clock.boot_id,
            revert_boottime=self.clock.boottime_s() + command.ttl_s,
        )
        by = f"trimtab-agent apply {command.command_id}"
        try:
            made = self.adapter.apply(command.values, expected_version=before.config_version, by=by)
        except Refused as error:
            return self._finish(entry, CommandState.FAILED, f"engine refused: {error}", before)
        except Conflict as error:
            if entry.attempts == 0:
                reason = f"conflict: {error}"
                return self._finish(entry, CommandState.REJECTED, reason, self._read())
            return False  # an earlier try may have landed after all: settle it by reading
        return self._read_back(entry, made.config_version)

    def _read_back(self, entry: Entry, made_version: int) -> bool:
        command = entry.command
        state = self._read()
        values = dict(state.values)
        self._moved = True
        if _runs(state, command.values):
            self.journal.applied(
                command.command_id,
                after_version=made_version,
                read_version=state.config_version,
                values=values,
            )
            return True
        if state.config_version != made_version:
            return self._finish(entry, CommandState.FAILED, _by_hand(state), state)
        reason = f"read back {_only(values, command.values)}, asked for {command.values}"
        self.journal.misapplied(
            command.command_id, reason, after_version=made_version, values=values
        )
        return False

    def _settle(self, entry: Entry) -> bool:
        """After a crash or a lost answer in `applying`: the engine says what happened."""
        command = entry.command
        assert entry.before_version is not None
        assert entry.revert_wall is not None
        state = self._read()
        if state.config_version == entry.before_version:
            # An answer given up on may still be on its way in the engine; a second try is fenced
            # by the version, but a rejection must not be overtaken by it.
            if reason := self._forbidden(command):
                tried_s = self.clock.wall_s() - (entry.revert_wall - command.ttl_s)
                if 0 <= tried_s < self.adapter.timeout_s:
                    return False
                return self._finish(entry, CommandState.REJECTED, reason, state)
            return self._change(entry, state)
        if _runs(state, command.values):
            self.journal.applied(
                command.command_id,
                after_version=entry.before_version + 1,
                read_version=state.config_version,
                values=dict(state.values),
            )
            self._moved = True
            return True
        if _runs(state, entry.before_values) and state.config_version < entry.before_version:
            reason = f"conflict: the engine's version fell to {state.config_version}"
            return self._finish(entry, CommandState.REJECTED, reason, state)
        reason = f"indeterminate after a lost answer: {_by_hand(state)}"
        return self._finish(entry, CommandState.FAILED, reason, state)

    _CARRY_OUT: Mapping[CommandKind, Callable[[Guard, Entry], bool]] = {
        CommandKind.APPLY: _apply,
        CommandKind.COMMIT: _commit,
        CommandKind.REVERT: _revert_without_trial,
    }


def _runs(state: EngineState, wanted: Mapping[str, Any]) -> bool:
    return all(name in state.values and state.values[name] == wanted[name] for name in wanted)


def _only(values: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values.get(name) for name in names}


def _by_hand(state: EngineState) -> str:
    return f"changed by hand since, version {state.config_version}"


def _no_trial(target: Entry) -> str:
    end = f"trial {target.trial}" if target.trial else target.state.value
    return f"command {target.command.command_id} ended: {end}; {target.reason}".rstrip("; ")
