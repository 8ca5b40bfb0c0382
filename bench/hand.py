"""A person who turns one engine's knobs through the REST interface, again and again.

An order that got no answer, because the control plane was killed under it, is sent again with the
same key: it must be one action all the same.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any
from uuid import UUID

import httpx

from controlplane.demo.house import House

# Any of these carries the load; what is shed is answered 429, and counted.
MENU: dict[str, tuple[int | str, ...]] = {
    "max_num_seqs": (8, 16, 32, 64, 128),
    "max_num_batched_tokens": (512, 1024, 2048, 4096),
    "prefill_chunk_tokens": (128, 256, 512, 1024),
    "max_wait_ms": (0, 2, 5),
    "kv_block_size": (8, 16, 32),
    "graph_capture": ("on", "off"),
    "shed_below_priority": (0, 1),
}
ON_TRIAL, KEPT = frozenset({"applied", "verifying"}), "verified"
POLL_S = 0.5
WAIT_S = (0.0, 0.5)  # between two orders
END_S_MAX = 90.0
AGAIN = (408, 425, 429, 500, 502, 503, 504)


class Hand(threading.Thread):
    """Orders until `finish`; a share `undo` of what was changed is taken back.

    `changed` are the actions that did, `taken_back` those among them that had been kept before;
    `refused` counts the words of refusals, `repeated` what was asked again for want of an answer.
    """

    def __init__(self, house: House, engine: str, seed: int, undo: float) -> None:
        super().__init__(name=f"hand-{engine}", daemon=True)
        self.house, self.engine, self.undo = house, engine, undo
        self.draw = random.Random(f"{seed}/{engine}")
        self.changed: list[str] = []
        self.taken_back: list[str] = []
        self.ordered: list[str] = []
        self.refused: Counter[str] = Counter()
        self.repeated = 0
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.wait(self.draw.uniform(*WAIT_S)):
            self.turn()

    def finish(self) -> None:
        self.ending.set()
        self.join()

    def turn(self) -> None:
        """One change, kept at once; now and then taken back, once kept or before that."""
        engine = self.ask(f"engines/{self.engine}/")
        knob = self.draw.choice(sorted(MENU))
        if engine is None or knob not in engine["values"]:
            return
        value = self.draw.choice([v for v in MENU[knob] if v != engine["values"][knob]])
        undo = self.draw.random() < self.undo
        early = undo and self.draw.random() < 0.5
        # Few engines of a service may be on trial at once: else it is no trial.
        action = self.order(knob, value, "trial") if early else None
        action = action or self.order(knob, value, "at_once")
        action = self.follow(action["id"], ON_TRIAL if early else frozenset()) if action else None
        if action is None or not action["applied_at"]:
            return
        self.changed.append(action["id"])
        if undo and action["state"] in (*ON_TRIAL, KEPT):
            self.take_back(action["id"])

    def order(self, knob: str, value: int | str, how: str) -> dict[str, Any] | None:
        key = str(UUID(int=self.draw.getrandbits(128)))
        asked = {"engine": self.engine, "values": {knob: value}, "how": how, "key": key}
        action = self.ask("actions/", asked)
        if action is not None:
            self.ordered.append(action["id"])
        return action

    def take_back(self, action_id: str) -> None:
        for _ in range(2):  # refused while its confirmation is on its way: again once it is kept
            answer = self.ask(f"actions/{action_id}/rollback/", {})
            undo = answer["id"] if answer else self.undo_of(action_id)
            done = self.follow(undo)
            if done is None:
                return
            if undo != action_id and done["state"] == KEPT:
                self.taken_back.append(action_id)
            if undo != action_id or done["state"] != KEPT:
                return

    def undo_of(self, action_id: str) -> str:
        """The action that takes it back: another for a kept one, else itself."""
        rows = self.ask(f"actions/?engine={self.engine}&limit=20")
        found = (row["id"] for row in rows["actions"] if row["undoes"] == action_id) if rows else ()
        return next(iter(found), action_id)

    def follow(self, action_id: str, to: frozenset[str] = frozenset()) -> dict[str, Any] | None:
        """The action once it has ended, or has come to one of the states; None after END_S_MAX."""
        deadline = time.monotonic() + END_S_MAX
        while time.monotonic() < deadline and not self.ending.wait(POLL_S):
            action = self.ask(f"actions/{action_id}/")
            if action is not None and (action["ended_at"] or action["state"] in to):
                return action
        return None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The answer, asked for until there is one; None when it is a refusal."""
        while True:
            try:
                answer: dict[str, Any] = self.house.api(path, body)
                return answer
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in AGAIN:
                    self.refused[error.response.json()["error"]["message"]] += 1
                    return None
            except httpx.TransportError:
                pass
            self.repeated += 1
            time.sleep(POLL_S)
