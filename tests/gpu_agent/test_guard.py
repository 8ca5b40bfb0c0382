"""The guard over a real journal and a real HTTP engine, one pass at a time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpu_agent.clock import Clock
from gpu_agent.engines.reference import ReferenceEngine
from gpu_agent.guard import Guard
from gpu_agent.journal import Journal
from gpu_agent.protocol import Command, CommandKind, CommandState

from .conftest import apply_command, follow_up
from .servers import EngineServer


class SetClock(Clock):
    """A clock a test can move and reboot."""

    def __init__(self) -> None:
        super().__init__()
        self.wall_ahead_s = 0.0
        self.boot_ahead_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.wall_ahead_s

    def boottime_s(self) -> float:
        return super().boottime_s() + self.boot_ahead_s

    def pass_s(self, seconds: float) -> None:
        self.wall_ahead_s += seconds
        self.boot_ahead_s += seconds


class Bench:
    """A guard that can be thrown away and made again over the same state."""

    def __init__(self, folder: Path, engine: EngineServer) -> None:
        self.folder = folder
        self.engine = engine
        self.clock = SetClock()
        self.bounds_file: Path | None = None
        self.journal = Journal(folder / "journal.sqlite3")
        self.restart()

    def restart(self) -> None:
        self.journal.close()
        self.journal = Journal(self.folder / "journal.sqlite3")
        self.guard = Guard(
            "engine-0",
            ReferenceEngine(url=self.engine.url, timeout_s=2.0),
            self.journal,
            stop_file=self.folder / "STOP",
            bounds_file=self.bounds_file,
            clock=self.clock,
        )

    def do(self, command: Command) -> tuple[CommandState, str]:
        self.journal.receive(command)
        self.guard.step()
        return self.said(command.command_id)

    def said(self, command_id: str = "apply-1") -> tuple[CommandState, str]:
        entry = self.journal.get(command_id)
        assert entry is not None
        return entry.state, entry.reason


@pytest.fixture
def bench(tmp_path: Path, engine: EngineServer) -> Bench:
    return Bench(tmp_path, engine)


APPLIED = (CommandState.APPLIED, "")


def test_apply_changes_the_engine_reads_back_and_arms_the_timer(bench: Bench) -> None:
    assert bench.do(apply_command()) == APPLIED
    result = bench.journal.results(10)[0]
    assert (result.config_version, result.values["max_num_seqs"]) == (8, 64)
    assert bench.engine.changes == [(8, {"max_num_seqs": 64}, "trimtab-agent apply apply-1")]
    assert bench.journal.history("apply-1") == ["received", "applying", "applied"]
    assert [trial.trial for trial in bench.journal.open_trials("engine-0")] == ["armed"]


def test_a_duplicate_is_answered_from_the_journal_and_changes_nothing(bench: Bench) -> None:
    bench.do(apply_command())
    bench.journal.accepted(bench.journal.results(10))
    assert bench.journal.results(10) == []
    assert bench.do(apply_command()) == APPLIED
    assert len(bench.journal.results(10)) == 1
    assert len(bench.engine.changes) == 1


def test_commit_turns_the_timer_off(bench: Bench) -> None:
    bench.do(apply_command())
    assert bench.do(follow_up(CommandKind.COMMIT, "commit-1"))[0] == CommandState.COMMITTED
    bench.clock.pass_s(3600)
    bench.guard.step()
    assert bench.engine.values["max_num_seqs"] == 64
    assert bench.do(follow_up(CommandKind.COMMIT, "commit-2"))[0] == CommandState.COMMITTED
    state, reason = bench.do(follow_up(CommandKind.REVERT, "revert-1"))
    assert state == CommandState.REJECTED
    assert "committed" in reason


def test_revert_asked_restores_the_undo_values(bench: Bench) -> None:
    bench.do(apply_command())
    assert bench.do(follow_up(CommandKind.REVERT, "revert-1")) == (CommandState.REVERTED, "")
    assert (bench.engine.version, bench.engine.values["max_num_seqs"]) == (9, 32)
    assert bench.do(follow_up(CommandKind.REVERT, "revert-2"))[0] == CommandState.REVERTED
    state, reason = bench.do(follow_up(CommandKind.COMMIT, "commit-1"))
    assert state == CommandState.REJECTED
    assert "reverted" in reason
    assert len(bench.engine.changes) == 2


def test_without_a_commit_the_change_undoes_itself(bench: Bench) -> None:
    bench.do(apply_command())
    bench.clock.pass_s(59)
    bench.guard.step()
    assert bench.said() == APPLIED
    bench.clock.pass_s(2)
    bench.guard.step()
    state, reason = bench.said()
    assert state == CommandState.REVERTED
    assert "no commit before" in reason
    assert bench.engine.values["max_num_seqs"] == 32


def test_the_timer_survives_a_restart_and_reverts_at_once_when_overdue(bench: Bench) -> None:
    bench.do(apply_command())
    bench.clock.pass_s(61)
    bench.restart()
    bench.guard.step()
    assert bench.said()[0] == CommandState.REVERTED


def test_setting_the_wall_clock_back_does_not_postpone_the_revert(bench: Bench) -> None:
    bench.do(apply_command())
    bench.clock.wall_ahead_s = -86_400
    bench.clock.boot_ahead_s = 61
    bench.guard.step()
    assert bench.said()[0] == CommandState.REVERTED


def test_after_a_reboot_with_the_clock_set_back_the_revert_waits_no_longer_than_the_ttl(
    bench: Bench,
) -> None:
    bench.do(apply_command())
    bench.clock.boot_id = "another-boot"
    bench.clock.wall_ahead_s = -86_400
    bench.restart()
    bench.guard.step()
    assert bench.said() == APPLIED
    bench.clock.boot_ahead_s += 61
    bench.guard.step()
    assert bench.said()[0] == CommandState.REVERTED


def test_after_a_reboot_past_its_time_the_change_is_reverted_at_once(bench: Bench) -> None:
    bench.do(apply_command())
    bench.clock.boot_id = "another-boot"
    bench.clock.boot_ahead_s = -1e6
    bench.clock.wall_ahead_s = 61
    bench.restart()
    bench.guard.step()
    assert bench.said()[0] == CommandState.REVERTED


def test_a_revert_that_cannot_reach_the_engine_keeps_trying(bench: Bench) -> None:
    bench.do(apply_command())
    bench.engine.down = True
    bench.clock.pass_s(61)
    for _ in range(3):
        assert bench.guard.step() <= 5.0
    assert bench.said() == APPLIED
    assert bench.do(follow_up(CommandKind.COMMIT, "late"))[0] == CommandState.REJECTED
    bench.engine.down = False
    bench.restart()
    bench.guard.step()
    assert bench.said()[0] == CommandState.REVERTED


def test_a_hand_edit_is_not_overwritten_by_the_timer(bench: Bench) -> None:
    bench.do(apply_command())
    bench.engine.change({"max_num_seqs": 128}, "a hand")
    bench.clock.pass_s(61)
    bench.guard.step()
    state, reason = bench.said()
    assert state == CommandState.FAILED
    assert "changed by hand since, version 9" in reason
    assert bench.engine.values["max_num_seqs"] == 128
    assert bench.journal.open_trials("engine-0") == []


def test_a_hand_edit_is_not_overwritten_by_a_revert_that_is_asked(bench: Bench) -> None:
    bench.do(apply_command())
    bench.engine.change({"max_wait_ms": 5}, "a hand")
    state, reason = bench.do(follow_up(CommandKind.REVERT, "revert-1"))
    assert (state, reason) == (CommandState.FAILED, "changed by hand since, version 9")
    assert bench.engine.values == {"max_num_seqs": 64, "max_wait_ms": 5}


def test_a_hand_edit_between_look_and_change_wins(bench: Bench) -> None:
    bench.engine.at["patch"] = lambda: bench.engine.change({"max_num_seqs": 16}, "a hand")
    state, reason = bench.do(apply_command())
    assert state == CommandState.REJECTED
    assert "conflict" in reason
    assert "config_version is 8" in reason
    assert bench.engine.values["max_num_seqs"] == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expected_config_version": 6}, "engine-0 stands at version 7, expected 6"),
        ({"expected_config_version": None}, "expected_config_version: got none"),
        ({"values": {}}, "want at least one knob"),
        ({"undo": {}}, "undo: no value for max_num_seqs"),
        ({"values": {"tea": 1}, "undo": {"tea": 0}}, "tea: unsupported by this engine"),
        ({"values": {"max_num_seqs": "64"}}, "max_num_seqs: got '64', want number"),
        ({"values": {"max_num_seqs": True}}, "max_num_seqs: got True, want number"),
        ({"values": {"max_num_seqs": 512}}, "engine's bounds: 1 to 256"),
        ({"undo": {"max_num_seqs": 0}}, "undo: max_num_seqs: got 0"),
        ({"ttl_s": 0.0}, "ttl_s: got 0.0"),
        ({"ttl_s": 1e9}, "ttl_s: got 1000000000.0"),
        ({"deadline": "soon"}, "deadline: time: got 'soon', want RFC 3339"),
        ({"deadline": "2020-01-01T00:00:00Z"}, "expired: deadline 2020-01-01T00:00:00Z"),
    ],
)
def test_a_command_that_must_not_run_is_rejected_untouched(
    bench: Bench, changes: dict[str, object], words: str
) -> None:
    state, reason = bench.do(apply_command(**changes))
    assert state == CommandState.REJECTED
    assert words in reason
    assert bench.engine.changes == []


def test_the_nodes_own_bounds_hold_whatever_the_server_says(bench: Bench) -> None:
    bench.bounds_file = bench.folder / "bounds.toml"
    bench.bounds_file.write_text("[max_num_seqs]\nminimum = 8\nmaximum = 48\n")
    bench.restart()
    state, reason = bench.do(apply_command())
    assert (state, reason) == (
        CommandState.REJECTED,
        "max_num_seqs: got 64, allowed by this node's bounds: 8 to 48",
    )
    assert bench.do(apply_command(command_id="b", values={"max_num_seqs": 48}))[0] == "applied"


def test_bounds_that_cannot_be_read_let_nothing_through(bench: Bench) -> None:
    bench.bounds_file = bench.folder / "bounds.toml"
    bench.bounds_file.write_text("[max_num_seqs]\nmaximum = 'many'\n")
    bench.restart()
    state, reason = bench.do(apply_command())
    assert state == CommandState.REJECTED
    assert "max_num_seqs.maximum: got 'many', want a number" in reason


def test_the_kill_switch_stops_changes_but_not_the_way_back(bench: Bench) -> None:
    bench.do(apply_command())
    (bench.folder / "STOP").touch()
    assert bench.do(follow_up(CommandKind.REVERT, "revert-1"))[0] == CommandState.REVERTED
    state, reason = bench.do(apply_command(command_id="apply-2", expected_config_version=9))
    assert state == CommandState.REJECTED
    assert "kill switch" in reason


def test_a_stale_generation_is_rejected_even_after_a_restart(bench: Bench) -> None:
    bench.do(apply_command(generation=5))
    bench.restart()
    state, reason = bench.do(apply_command(command_id="old", generation=4))
    assert (state, reason) == (CommandState.REJECTED, "stale generation 4, seen 5")


def test_one_trial_per_engine(bench: Bench) -> None:
    bench.do(apply_command())
    state, reason = bench.do(apply_command(command_id="apply-2", expected_config_version=8))
    assert state == CommandState.REJECTED
    assert "the trial of command apply-1 is still open" in reason


def test_commands_about_unknown_ones_are_rejected(bench: Bench) -> None:
    for kind in (CommandKind.COMMIT, CommandKind.REVERT):
        state, reason = bench.do(follow_up(kind, f"{kind}-x", target="nobody"))
        assert state == CommandState.REJECTED
        assert "'nobody' is no apply command known for engine-0" in reason


def test_an_engine_out_of_reach_is_tried_until_the_deadline(bench: Bench) -> None:
    bench.engine.down = True
    assert bench.do(apply_command())[0] == CommandState.RECEIVED
    bench.clock.pass_s(61)
    bench.guard.step()
    state, reason = bench.said()
    assert state == CommandState.REJECTED
    assert "expired" in reason
    assert "HTTP 503" in reason


def test_a_revert_overtakes_an_apply_that_has_not_run(bench: Bench) -> None:
    bench.engine.down = True
    bench.do(apply_command())
    bench.engine.down = False
    bench.do(follow_up(CommandKind.REVERT, "revert-1"))
    assert bench.said() == (
        CommandState.REJECTED,
        "revert revert-1 came before it was applied",
    )
    assert bench.said("revert-1")[0] == CommandState.REJECTED
    assert bench.engine.changes == []


def test_a_lost_answer_is_settled_by_reading(bench: Bench) -> None:
    def fall() -> None:
        bench.engine.down = True
        raise ConnectionResetError

    bench.engine.at["patched"] = fall
    assert bench.do(apply_command())[0] == CommandState.APPLYING
    bench.engine.down = False
    bench.guard.step()
    assert bench.said() == APPLIED
    assert len(bench.engine.changes) == 1


def test_a_change_lost_on_its_way_is_made_again(bench: Bench) -> None:
    def fall() -> None:
        raise ConnectionResetError

    bench.engine.at["patch"] = fall
    assert bench.do(apply_command())[0] == CommandState.APPLYING
    bench.restart()
    bench.guard.step()
    assert bench.said() == APPLIED
    assert len(bench.engine.changes) == 1


def test_neither_before_nor_after_is_told_as_indeterminate(bench: Bench) -> None:
    def fall() -> None:
        bench.engine.change({"max_num_seqs": 128}, "a hand")
        raise ConnectionResetError

    bench.engine.at["patched"] = fall
    bench.do(apply_command())
    bench.guard.step()
    state, reason = bench.said()
    assert state == CommandState.FAILED
    assert "indeterminate" in reason


def test_an_engine_that_runs_other_values_than_asked_is_put_back(bench: Bench) -> None:
    bench.engine.clamp = {"max_num_seqs": 48}
    bench.do(apply_command())
    bench.engine.clamp = {}
    bench.guard.step()
    state, reason = bench.said()
    assert state == CommandState.FAILED
    assert "read back {'max_num_seqs': 48}, asked for {'max_num_seqs': 64}; undone" in reason
    assert bench.engine.values["max_num_seqs"] == 32


def test_deadlines_follow_the_servers_clock(bench: Bench) -> None:
    bench.guard._server_offset_s = lambda: -3600.0
    late = (datetime.now(UTC) - timedelta(seconds=1800)).isoformat()
    assert bench.do(apply_command(deadline=late)) == APPLIED
