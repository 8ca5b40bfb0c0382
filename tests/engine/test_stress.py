"""Random changes of all knobs while requests run: none fails, no token is wrong.

python -m tests.engine.test_stress 500      the long run, with its figures
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.knobs import KNOBS
from tests.engine.conftest import EngineProcess

pytestmark = pytest.mark.processes

CHANGES = 50
PROMPTS = 24
CLIENTS = 12
# Quotas are turned on and off too; what they hold is more than the storm asks for.
STORM = {"tokens_per_minute": 10**9, "burst_tokens": 10**9}


@dataclass
class Told:
    """What the run came to."""

    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    changed: int = 0
    excluded: int = 0  # asked for what excludes each other, and refused
    refused: list[str] = field(default_factory=list)
    change_s: list[float] = field(default_factory=list)


def bodies(rng: random.Random) -> list[dict[str, Any]]:
    """Greedy requests that differ in length, each with one right answer."""
    return [
        {
            "prompt": [rng.randrange(256) for _ in range(rng.randint(1, 220))],
            "max_tokens": rng.randint(1, 60),
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(PROMPTS)
    ]


# Of the others, each has an answer of its own.
EXACT = {"kv_dtype": ("auto", "float32")}


def random_change(rng: random.Random) -> dict[str, Any]:
    """One to three knobs; never so that the load itself (priority realtime) is turned away."""
    values: dict[str, Any] = {}
    for name in rng.sample(sorted(KNOBS), rng.randint(1, 3)):
        values[name] = rng.choice(EXACT.get(name, KNOBS[name].ladder))
    return values


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    headers = {"x-priority": "realtime", "x-tenant": "storm"}
    response = await client.post("/v1/completions", json=body, headers=headers)
    if response.status_code != 200:
        raise ValueError(f"HTTP {response.status_code}: {response.text}")
    return json.dumps(response.json()["choices"][0])


async def ask(
    client: httpx.AsyncClient,
    asked: list[dict[str, Any]],
    right: list[str],
    rng: random.Random,
    told: Told,
    stop: asyncio.Event,
) -> None:
    while not stop.is_set():
        i = rng.randrange(len(asked))
        try:
            got = await answer(client, asked[i])
        except (ValueError, httpx.HTTPError) as error:
            told.failed.append(repr(error))
            continue
        told.answered += 1
        if got != right[i]:
            told.wrong.append(f"prompt {i}: {got} instead of {right[i]}")


async def turn(client: httpx.AsyncClient, rng: random.Random, told: Told, changes: int) -> None:
    for _ in range(changes):
        config = await client.get("/v1/runtime_config")
        etag, values = config.headers["etag"], random_change(rng)
        asked = config.json()["values"] | values
        began = time.monotonic()
        response = await client.patch("/v1/runtime_config", json=values, headers={"If-Match": etag})
        told.change_s.append(time.monotonic() - began)
        if (asked["kv_allocator"], asked["prefix_cache"]) == ("contiguous", "on"):
            assert response.status_code == 409
            assert response.json()["error"]["code"] == "excluded"
            told.excluded += 1
        elif response.status_code == 200:
            told.changed += 1
            took = response.json()["values"]
            assert {name: took[name] for name in values} == values
        else:
            told.refused.append(f"{values}: {response.text}")
        await asyncio.sleep(rng.uniform(0, 0.05))


async def stress(url: str, changes: int, seed: int) -> Told:
    rng, told, stop = random.Random(seed), Told(), asyncio.Event()
    limits = httpx.Limits(max_connections=CLIENTS + 1)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        asked = bodies(rng)
        right = [await answer(client, body) for body in asked]
        asking = [
            asyncio.create_task(ask(client, asked, right, random.Random(i), told, stop))
            for i in range(CLIENTS)
        ]
        await turn(client, rng, told, changes)
        stop.set()
        await asyncio.gather(*asking)
    return told


def started(folder: Path) -> EngineProcess:
    tenants = folder / "tenants.json"
    tenants.write_text(json.dumps({"tenants": {"storm": "storm"}, "tiers": {"storm": STORM}}))
    return EngineProcess("--tenants", str(tenants))


def test_random_changes_under_load_fail_no_request_and_change_no_token(tmp_path: Path) -> None:
    engine = started(tmp_path)
    try:
        told = asyncio.run(stress(engine.url, CHANGES, seed=3))
    finally:
        assert engine.stop() == 0
    assert told.failed == []
    assert told.wrong == []
    assert told.refused == []
    assert told.changed + told.excluded == CHANGES
    assert told.changed > told.excluded
    assert told.answered > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        subject = started(Path(made))
    result = asyncio.run(stress(subject.url, int(sys.argv[1]), seed=7))
    subject.stop()
    result.change_s.sort()
    middle, worst = result.change_s[len(result.change_s) // 2], result.change_s[-1]
    print(
        f"{result.changed} changes, {result.excluded} that exclude each other, "
        f"{len(result.refused)} refused, {result.answered} answers, "
        f"{len(result.failed)} failed, {len(result.wrong)} wrong; a change took "
        f"{middle * 1000:.0f} ms (median), {worst * 1000:.0f} ms (longest)"
    )
    print(*result.refused[:3], *result.failed[:3], *result.wrong[:3], sep="\n")
