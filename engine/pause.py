"""POST /pause and /resume, as vLLM has them: an engine that stands still, and what became of it.

    wait    nothing new is started, what has begun is finished, be it preempted meanwhile; at the
            deadline, if one was given, what is left stands still (keep)
    keep    no step runs: running requests keep their KV, and go on when the engine is resumed
    abort   what runs or waits ends with an error that says so (vLLM's default, and ours)

In each, new requests queue, up to the bounds of the queue.
"""

from __future__ import annotations

import asyncio
import math
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.core import Core

DEADLINE_S_MAX = 3600.0
LOOK_EVERY_S = 0.01
ABORTED = "aborted: the engine was paused with mode=abort before this was finished"


class Pause(StrEnum):
    """How an engine stands still; NOT, which is false, if it does not."""

    NOT = ""
    WAIT = "wait"
    KEEP = "keep"
    ABORT = "abort"


MODES = tuple(mode for mode in Pause if mode)


def read_mode(text: str) -> Pause:
    """Raises ValueError with what is allowed."""
    if text not in MODES:
        raise ValueError(f"got {text!r}, allowed: {', '.join(MODES)}")
    return Pause(text)


def read_deadline_s(text: str, mode: Pause) -> float:
    """How long to wait for what runs; infinite for "". Raises ValueError with what is allowed."""
    if not text:
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if mode is not Pause.WAIT or not 0 <= seconds <= DEADLINE_S_MAX:
        raise ValueError(f"got {text!r}, allowed: with mode=wait, 0 to {DEADLINE_S_MAX:g} seconds")
    return seconds


async def pause(core: Core, mode: Pause, deadline_s: float) -> None:
    """Returns when the engine stands still, or another order came meanwhile; of the event loop."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    if core.paused is not mode:
        core.pause(mode)
    while core.alive and core.paused is mode and not stands(core):
        if loop.time() >= deadline:
            mode = Pause.KEEP
            core.pause(mode)
        await asyncio.sleep(LOOK_EVERY_S)


def stands(core: Core) -> bool:
    """Whether the step thread knows of the pause, and nothing is left that it lets run."""
    scheduler = core.scheduler
    if scheduler.paused is not core.paused:
        return False
    return core.paused is Pause.KEEP or not scheduler.begun


def told(core: Core) -> dict[str, Any]:
    """What /pause, /resume and /is_paused answer; `status` as vLLM."""
    return {
        "status": "paused" if core.paused else "resumed",
        "is_paused": bool(core.paused),
        "mode": str(core.paused) or None,
        "running": len(core.scheduler.running),
        "waiting": len(core.scheduler.waiting) + len(core.inbox),
    }
