"""What an engine says of its knobs holds at the node: bounds, choices, and what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_agent.engine_adapter import EngineState
from gpu_agent.limits import change_refusal
from gpu_agent.protocol import Command, CommandKind

STATE = EngineState(
    7,
    {"graph_capture": "on", "kv_block_size": 16, "kv_dtype": "float32"},
    knobs={
        "graph_capture": {"choices": ["off", "on"], "supported": True},
        "kv_block_size": {"choices": [8, 16, 32], "supported": True},
        "kv_dtype": {"choices": ["float32", "int8"], "supported": False, "reason": "no kernel"},
    },
)


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"graph_capture": "off"}, ""),
        ({"kv_block_size": 32}, ""),
        ({"graph_capture": "maybe"}, "graph_capture: got 'maybe', the engine's choices: off, on"),
        ({"graph_capture": 1}, "graph_capture: got 1, want text"),
        ({"kv_block_size": 24}, "kv_block_size: got 24, the engine's choices: 8, 16, 32"),
        ({"kv_dtype": "int8"}, "kv_dtype: not supported by this engine: no kernel"),
    ],
)
def test_words_and_numbers_go_through_when_the_engine_offers_them(
    values: dict[str, Any], refusal: str
) -> None:
    undo = {name: STATE.values[name] for name in values}
    command = Command(
        command_id="c",
        kind=CommandKind.APPLY,
        engine="e",
        generation=1,
        deadline="2026-01-01T00:00:00Z",
        values=values,
        undo=undo,
        expected_config_version=7,
    )
    assert Command.from_json(command.to_json()) == command
    assert change_refusal(command, STATE, {}) == refusal
