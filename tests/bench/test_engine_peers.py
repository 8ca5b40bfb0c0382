"""How the bench of other engines asks them, and what it makes of their answers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

DRIVERS = Path(__file__).parents[2] / "bench" / "peers"
COUNTING = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(DRIVERS)!r})
from rounds import serve

def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def load(asked):
    os.write(1, b"loading, says a library\\n")
    def answer(how, prompts, tokens):
        print("thinking")
        if how == "die":
            sys.exit("out of thought")
        burn(0.2)
        work = "import time\\nwhile time.process_time() < 0.3: pass"
        subprocess.run([sys.executable, "-c", work], check=True)
        return [[prompt[-1] + 1 + i for i in range(tokens)] for prompt in prompts]
    return asked["dtype"], answer

serve(load)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Any]:
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)
    made = import_module("engine_peers").Driver(
        [sys.executable, script], tmp_path / "log", {"dtype": "float32"}
    )
    yield made
    made.close()


def test_a_round_costs_what_the_process_and_its_children_computed(driver: Any) -> None:
    assert driver.version == "float32"
    cpu_s, made = driver.round("", [[1, 2], [7]], 3)
    assert made == [[3, 4, 5], [8, 9, 10]]
    assert cpu_s >= 0.45  # of 0.5, in ticks of a hundredth, each cut


def test_between_two_rounds_a_driver_stands_still(driver: Any) -> None:
    driver.round("", [[1]], 1)
    deadline = time.monotonic() + 10
    while driver.tree.status() != "stopped":  # once it has got the signal
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_driver_that_dies_is_told_with_its_last_words(driver: Any) -> None:
    peers = import_module("engine_peers")
    with pytest.raises(peers.NotRun, match=r"out of thought \(all of it: .*log\)"):
        driver.round("die", [[1]], 1)


def test_a_peer_that_is_not_installed_is_told_with_the_command_that_does(tmp_path: Path) -> None:
    peers = import_module("engine_peers")
    for name in peers.PEERS:
        with pytest.raises(peers.NotRun, match=rf"engine_peers.py --install {name}"):
            peers.command(tmp_path, name)


def test_a_ratio_is_of_rounds_that_took_turns() -> None:
    """The machine is half as fast in the second round, for both."""
    found = import_module("engine_peers").Measured()
    for cpu_s in (1.0, 2.0, 1.0):
        found.add("ours", 8, cpu_s, [[1, 2], [3, 4]])
        found.add("vllm", 8, 1.5 * cpu_s, [[1, 2], [3, 5]])
    assert found.rates["ours", 8] == [4.0, 2.0, 4.0]
    assert found.ratio("vllm", 8) == pytest.approx((1.5, 1.5, 1.5))
    assert found.same("vllm", 8) == "3 of 6"


def test_every_target_is_of_an_arm_that_there_is() -> None:
    peers = import_module("engine_peers")
    assert {target.arm for target in peers.TARGETS} == set(peers.ARMS) - {"ours"}
    assert {name for name, _ in peers.ARMS.values()} == {"ours", *peers.PEERS}
    assert all(os.access(DRIVERS / peer.driver, os.R_OK) for peer in peers.PEERS.values())
