"""Wire messages survive the wire, and what does not fit is named."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_agent.protocol import (
    Command,
    CommandResult,
    EngineReport,
    SyncReply,
    SyncRequest,
    Wire,
    WireError,
)

TEXT = st.text(max_size=20)
NUMBERS = st.integers(0, 2**53)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.dictionaries(TEXT, st.one_of(NUMBERS, st.booleans(), TEXT, FLOATS), max_size=3)
REPORTS = st.builds(EngineReport, values=VALUES, knobs=st.dictionaries(TEXT, VALUES, max_size=2))
RESULTS = st.builds(CommandResult, values=VALUES)
COMMANDS = st.builds(Command, values=VALUES, undo=VALUES, ttl_s=FLOATS)
REQUESTS = st.builds(
    SyncRequest,
    gpus=st.lists(VALUES, max_size=2),
    engines=st.lists(REPORTS, max_size=2),
    results=st.lists(RESULTS, max_size=2),
    spool_oldest_age_s=FLOATS,
    cpu_seconds_total=FLOATS,
)
REPLIES = st.builds(
    SyncReply,
    commands=st.lists(COMMANDS, max_size=2),
    accepted_results=st.lists(TEXT, max_size=2),
    poll_after_s=FLOATS,
)


@given(st.one_of(REQUESTS, REPLIES))
def test_every_message_survives_the_wire(message: Wire) -> None:
    over_the_wire = json.loads(json.dumps(message.to_json()))
    assert type(message).from_json(over_the_wire) == message


@given(REPLIES, VALUES)
def test_a_newer_sender_may_say_more(message: SyncReply, more: dict[str, object]) -> None:
    extra = {f"x_{key}": value for key, value in more.items()}
    assert SyncReply.from_json({**message.to_json(), **extra}) == message


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=10,
)


@given(
    st.dictionaries(
        st.sampled_from(["server_time", "commands", "accepted_results", "poll_after_s"]), JSON
    )
)
def test_nonsense_is_refused_as_a_wire_error_and_nothing_else(message: dict[str, object]) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(SyncReply.from_json(message), SyncReply)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ([], r"SyncReply: got list, want an object"),
        ({}, r"SyncReply.server_time: missing"),
        ({"server_time": 3}, r"SyncReply.server_time: got 3, want str"),
        ({"server_time": "t", "poll_after_s": True}, r"poll_after_s: got True, want float"),
        ({"server_time": "t", "commands": [{}]}, r"Command.command_id: missing"),
        ({"server_time": "t", "accepted_results": [1]}, r"accepted_results\[0\]: got 1, want str"),
    ],
)
def test_an_error_names_the_field_the_value_and_what_is_wanted(message: object, words: str) -> None:
    with pytest.raises(WireError, match=words):
        SyncReply.from_json(message)


def test_an_unknown_kind_names_the_ones_allowed() -> None:
    command = {"command_id": "c", "kind": "x", "engine": "e", "generation": 1, "deadline": "d"}
    with pytest.raises(WireError, match=r"Command\.kind: got 'x', allowed: apply, commit, revert"):
        Command.from_json(command)
