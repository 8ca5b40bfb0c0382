"""When the engine says stop: many wait, and it has no time to spare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import Core, Rejected
from engine.sched.backpressure import CHECK_S, Backpressure, IdleClock
from tests.engine.conftest import request
from tests.engine.test_core import Ends


def subject(idle_s: float) -> Backpressure:
    """Looked at a second after it began, of which the step thread waited `idle_s`."""
    clock = IdleClock()
    made = Backpressure(clock, 10.0)
    clock.begin(10.0)
    clock.end(10.0 + idle_s)
    return made


@pytest.mark.parametrize(
    ("waiting", "idle_s", "holds"),
    [(51, 0.1, True), (50, 0.1, False), (51, 0.15, False), (51, 0.1499, True), (500, 1.0, False)],
)
def test_it_takes_a_queue_and_a_busy_engine(waiting: int, idle_s: float, holds: bool) -> None:
    made = subject(idle_s)
    assert made.check(waiting, 11.0) is holds
    assert made.utilisation == pytest.approx(1 - idle_s)


def test_it_is_looked_at_anew_after_200_ms_and_not_before() -> None:
    made = subject(0.0)
    assert made.check(60, 11.0)
    assert made.check(0, 11.19), "the last look stands"
    assert not made.check(0, 11.21)
    assert not made.check(60, 11.4)
    assert made.check(60, 11.42)


def test_a_wait_that_goes_on_counts_and_so_does_a_step_that_goes_on() -> None:
    clock = IdleClock()
    made = Backpressure(clock, 10.0)
    clock.begin(10.0)
    made.check(60, 11.0)
    assert made.utilisation == 0.0
    clock.end(11.5)
    made.check(60, 12.0)
    assert made.utilisation == pytest.approx(0.5)
    made.check(60, 13.0)
    assert made.utilisation == 1.0


def test_an_engine_that_is_held_up_turns_the_next_away_until_its_queue_is_done(
    tmp_path: Path,
) -> None:
    stored = {"config_version": 2, "values": {"backpressure": "on"}}
    stored |= {"changed_by": "test", "changed_at": ""}
    (tmp_path / "runtime_config.json").write_text(json.dumps(stored))
    ends = Ends()
    core = Core(EngineConfig(state=tmp_path), ends)
    for i in range(51):
        core.submit(request(str(i), [66] * 10, 1))
    core.backpressure.checked_at -= CHECK_S  # its step thread has not begun: it waits for nothing
    with pytest.raises(
        Rejected, match="more than 50 requests wait, and the engine is busy 100% of the time"
    ) as caught:
        core.submit(request("late", [66] * 10, 1))
    assert (caught.value.reason, caught.value.status) == ("backpressure", 429)
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
    assert core.metrics.rejected["backpressure"] == 1
    core.start()
    try:
        ends.wait(51)
        core.backpressure.checked_at -= CHECK_S
        core.submit(request("later", [66] * 10, 1))
        assert ends.wait(52)[-1].id == "later"
    finally:
        core.stop()
