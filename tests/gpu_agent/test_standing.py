"""What the agent depends on is told when it is lost and when it is back, and no more often."""

from __future__ import annotations

import logging

import pytest

from gpu_agent import standing
from gpu_agent.bounded import why
from gpu_agent.standing import Standing

from .conftest import AgentProcess, wait_for
from .servers import ControlPlane, EngineServer
from .test_transport import Caller, Said


def test_the_first_failure_and_the_recovery_are_a_line_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    one = Standing(lost="it does not answer", back="it answers again")
    one.good()
    for reason in ("refused\nby the host", "refused", "timed out"):
        one.bad(reason)
    one.good()
    one.good()
    assert caplog.messages == ["it does not answer: refused by the host", "it answers again"]
    assert one.errors_total == 3


def test_what_comes_and_goes_is_no_flood_and_what_stays_away_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    one = Standing(lost="lost", back="back")
    for _ in range(20):
        one.bad("no answer")
        one.good()
    assert caplog.messages == ["lost: no answer", "back"]
    one.bad("no answer")
    monkeypatch.setattr(standing, "TOLD_EVERY_S", 0.0)
    one.bad("still no answer")
    assert caplog.messages[2:] == ["lost: still no answer"]


def test_a_standing_without_words_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    Standing().bad("no answer")
    assert caplog.messages == []


def test_a_reason_has_no_error_number() -> None:
    assert why(ConnectionRefusedError(111, "Connection refused")) == "Connection refused"
    assert why(TimeoutError("timed out")) == "timed out"
    assert why(OSError()) == "OSError"


def test_an_answer_that_repeats_the_token_does_not_put_it_into_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Said(401, b'{"sent": "Bearer s3cret"}') as server:
        caller = Caller(server.url, token="s3cret")
        caller.sync()
    (line,) = caplog.messages
    assert line.startswith(f"control plane not reached at {server.url}: HTTP 401: ")
    assert "Bearer …" in line


@pytest.mark.processes
def test_an_agent_that_reaches_nothing_says_so_once_and_when_it_does(
    agent: AgentProcess,
    engine: EngineServer,
    control_plane: ControlPlane,
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine.down = control_plane.down = True
    agent.start()
    seen = ""

    def told(words: str) -> bool:
        nonlocal seen
        seen += capfd.readouterr().err
        return words in seen

    wait_for(lambda: told("engine engine-0 does not answer: "))
    wait_for(lambda: told(f"control plane not reached at {control_plane.url}: "))
    engine.down = control_plane.down = False
    wait_for(lambda: told("engine engine-0 answers again"))
    wait_for(lambda: told(f"control plane reached again at {control_plane.url}"))
    agent.close()
    told("")
    assert seen.count("engine engine-0 does not answer") == 1
    assert seen.count("control plane not reached") == 1
    assert "HTTP 503: no upstream for Bearer …" in seen
    assert "agent-token" not in seen
    assert "ingest-token" not in seen
