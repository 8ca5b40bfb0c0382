"""Who gets a request: the engine its KV is on, else one by hash or by turns; none beyond its share.

What a request may find again is its session's KV, or that of prompts that began alike. Where
those went is remembered (`Residents`). What is not remembered is placed by weighted rendezvous
hashing, so that a key has the same engine in every router, engines get keys as their weights say,
and one that leaves moves nobody else's (Thaler & Ravishankar 1998). What has no key goes by turns,
or to the least loaded where weights are equal. An engine that holds more than its bounded share of
the load is passed over, so that no hot key overloads one (Mirrokni et al. 2018, consistent hashing
with bounded loads).
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from engine.router.fleet import Engine
from engine.router.knobs import RouterSettings

BLOCK_BYTES = 256  # of a prompt, as JSON: some 64 tokens of text
BLOCKS_MAX = 64
KEY_BYTES = 8
RESIDENTS_MAX = 65_536


class By(StrEnum):
    """Why an engine was chosen, as counted."""

    SESSION = "session"  # is on it
    PREFIX = "prefix"  # the prompt's beginning is on it
    HASH = "hash"
    TURN = "turn"  # or least loaded
    SPILLED = "spilled"  # another was meant, and holds more than its share


@dataclass(frozen=True)
class Wanted:
    """What a request may find again. `blocks`: keys of its prompt's beginnings, shortest first."""

    session: bytes = b""
    tenant: bytes = b""
    blocks: tuple[bytes, ...] = ()


def wanted(body: Mapping[str, Any], *, session: str, tenant: str) -> Wanted:
    """`session` and `tenant` are those of the headers; without a session the body's `user` is."""
    user = body.get("user")
    session = session or (user if isinstance(user, str) else "")
    prompt = body.get("messages", body.get("prompt"))
    # Text, token ids and messages alike: what they begin with alike, their JSON begins with. Each
    # character or item is a byte of it at least.
    most = BLOCK_BYTES * BLOCKS_MAX
    text = json.dumps(prompt[:most] if isinstance(prompt, str | list) else prompt).encode()[:most]
    # Engines keep the KV of other models and salts apart.
    begun = blake2b(
        f"{body.get('model')}\0{body.get('cache_salt')}\0".encode(), digest_size=KEY_BYTES
    )
    blocks = []
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        begun.update(text[start : start + BLOCK_BYTES])
        blocks.append(begun.digest())
    return Wanted(
        key("session", f"{tenant}\0{session}") if session else b"",
        key("tenant", tenant) if tenant else b"",
        tuple(blocks),
    )


def key(kind: str, text: str) -> bytes:
    return blake2b(f"{kind}\0{text}".encode(errors="replace"), digest_size=KEY_BYTES).digest()


def score(wanted_key: bytes, engine: str, weight: int) -> float:
    """Of an engine for a key: the highest has it, as often as its weight says."""
    # 48 bits: between 0 and 1 in a float, and neither of them.
    digest = blake2b(wanted_key + engine.encode(), digest_size=6).digest()
    return -weight / math.log((int.from_bytes(digest) + 1) / (2**48 + 1))


class Residents:
    """Which engines a key was sent to, as a set of bits; the keys longest unused are forgotten."""

    def __init__(self, most: int = RESIDENTS_MAX) -> None:
        self.most = most
        self.keys: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def where(self, wanted_key: bytes, since: float) -> int:
        bits, at = self.keys.get(wanted_key, (0, 0.0))
        return bits if at > since else 0

    def put(self, wanted_key: bytes, bits: int, now: float) -> None:
        self.keys[wanted_key] = bits, now
        self.keys.move_to_end(wanted_key)
        if len(self.keys) > self.most:
            self.keys.popitem(last=False)


class Choice:
    """Of one router. `blocks` and `matched` count the beginnings of prompts, and those found."""

    def __init__(self) -> None:
        self.residents = Residents()
        self.clock = 0.0
        self.blocks = 0
        self.matched = 0

    def of(
        self, request: Wanted, engines: Sequence[Engine], settings: RouterSettings, now: float
    ) -> tuple[Engine, By]:
        """One of `engines`, which may all be had; at least one."""
        policy = settings.word("policy")
        weights = {engine: settings.weight(engine.name) for engine in engines}
        if policy in ("round_robin", "least_loaded"):
            return self._turn(weights, by_load=policy == "least_loaded"), By.TURN
        whole, load = sum(weights.values()), 1 + sum(engine.load for engine in engines)

        def fits(engine: Engine, bound: str) -> bool:
            share = weights[engine] / whole * settings.number(bound) / 100
            return engine.load < math.ceil(share * load)

        blocks = request.blocks if policy == "prefix" else ()
        since = now - settings.number("resident_s")
        bits, by = self._home(request.session, blocks, since)
        at_home = [engine for engine in engines if bits & engine.bit]
        at_home.sort(key=lambda engine: engine.load / weights[engine])
        hashed = request.session or (blocks[-1] if blocks else request.tenant)
        if hashed:
            order = sorted(engines, key=lambda e: -score(hashed, e.name, weights[e]))
        else:
            equal = len(set(weights.values())) == 1
            order = [self._turn(weights, by_load=equal)]
        chosen = next((engine for engine in at_home if fits(engine, "hot_bound_percent")), None)
        if chosen is None:
            by = By.HASH if hashed else By.TURN
            chosen = next((engine for engine in order if fits(engine, "load_bound_percent")), None)
            if chosen is None:
                chosen = min(engines, key=lambda engine: engine.load / weights[engine])
            if at_home or chosen is not order[0]:
                by = By.SPILLED
        self._remember(request.session, blocks, chosen, since, now)
        return chosen, by

    def _home(self, session: bytes, blocks: tuple[bytes, ...], since: float) -> tuple[int, By]:
        """Where its session is, or the longest part of its prompt's beginning.

        Less than half of it binds nobody: else all prompts of one service, which begin alike,
        would be on the engine that saw the first.
        """
        if session:
            return self.residents.where(session, since), By.SESSION
        self.blocks += len(blocks)
        half = -(-len(blocks) // 2)
        for count in range(len(blocks), max(half, 1) - 1, -1):
            bits = self.residents.where(blocks[count - 1], since)
            if bits:
                self.matched += count
                return bits, By.PREFIX
        return 0, By.PREFIX

    def _remember(
        self, session: bytes, blocks: tuple[bytes, ...], engine: Engine, since: float, now: float
    ) -> None:
        if session:
            self.residents.put(session, engine.bit, now)
        for block in blocks:
            bits = self.residents.where(block, since)
            self.residents.put(block, bits | engine.bit, now)

    def _turn(self, weights: Mapping[Engine, int], *, by_load: bool) -> Engine:
        """By turns, as often as the weights say: fair queueing by virtual time, so an engine that
        was away does not catch up."""
        self.clock = max(self.clock, min(engine.turn for engine in weights))
        turns = {e: max(e.turn, self.clock) + 1 / weight for e, weight in weights.items()}

        def rank(engine: Engine) -> tuple[float, float]:
            return engine.load / weights[engine] if by_load else 0.0, turns[engine]

        chosen = min(weights, key=rank)
        chosen.turn = turns[chosen]
        return chosen
