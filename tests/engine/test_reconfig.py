from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from engine.knobs import KNOBS, OutOfBounds, RuntimeConfig, UnknownKnob
from engine.reconfig import RuntimeStore, StaleVersion, StateError


class StepThread:
    """Takes the configuration whenever it is woken, as the step thread does."""

    def __init__(self, folder: Path | None) -> None:
        self.woken = threading.Event()
        self.store = RuntimeStore(folder, self.woken.set, RuntimeConfig())
        self.stopping = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.stopping:
            if self.woken.wait(0.05):
                self.woken.clear()
                self.store.take()

    def __enter__(self) -> RuntimeStore:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.stopping = True
        self.thread.join()


def test_a_change_is_taken_persisted_and_survives_a_restart(tmp_path: Path) -> None:
    with StepThread(tmp_path) as store:
        changed = store.change({"max_num_seqs": 64, "max_wait_ms": 5}, 1, "operator")
        assert store.running is changed
    stored = json.loads((tmp_path / "runtime_config.json").read_text())
    assert stored["config_version"] == 2
    assert stored["changed_by"] == "operator"
    with StepThread(tmp_path) as again:
        assert again.current.config_version == 2
        assert again.current.config == RuntimeConfig(max_num_seqs=64, max_wait_ms=5)
        assert again.change({"max_wait_ms": 0}, 2, "operator").config_version == 3


@pytest.mark.parametrize("values", [{}, {"max_num_seqs": RuntimeConfig().max_num_seqs}])
def test_a_change_that_changes_nothing_makes_no_new_version(
    tmp_path: Path, values: dict[str, int]
) -> None:
    told: list[object] = []
    with StepThread(tmp_path) as store:
        store.listeners.append(told.append)
        assert store.change(values, 1, "operator").config_version == 1
        with pytest.raises(StaleVersion):
            store.change(values, 7, "operator")
    assert told == []
    assert not (tmp_path / "runtime_config.json").exists()


def test_a_stale_version_changes_nothing_and_names_the_current_one(tmp_path: Path) -> None:
    with StepThread(tmp_path) as store:
        store.change({"max_num_seqs": 64}, 1, "first")
        with pytest.raises(StaleVersion, match="expected 1, current is 2") as caught:
            store.change({"max_num_seqs": 8}, 1, "second")
        assert caught.value.current == 2
        assert store.running.config.max_num_seqs == 64


def test_of_many_who_expect_the_same_version_exactly_one_wins(tmp_path: Path) -> None:
    outcomes: list[str] = []
    with StepThread(tmp_path) as store:

        def change(value: int) -> None:
            try:
                store.change({"max_num_seqs": value}, 1, str(value))
                outcomes.append("won")
            except StaleVersion:
                outcomes.append("stale")

        threads = [threading.Thread(target=change, args=(8 + i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.current.config_version == 2
    assert sorted(outcomes) == ["stale"] * 7 + ["won"]


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"max_num_sequences": 3}, UnknownKnob, "no such knob, allowed: max_num_seqs"),
        ({"max_num_seqs": "8"}, UnknownKnob, "got '8', want int"),
        ({"max_num_seqs": True}, UnknownKnob, "got True, want int"),
        ({"max_num_seqs": 0}, OutOfBounds, "got 0 requests, allowed: 1 to 256 requests"),
        ({"max_wait_ms": 51}, OutOfBounds, "got 51 ms, allowed: 0 to 50 ms"),
        ({"max_wait_ms": 5, "max_num_seqs": 999}, OutOfBounds, "max_num_seqs: got 999"),
    ],
)
def test_a_wrong_value_changes_nothing_and_says_what_is_allowed(
    values: dict[str, object], error: type[Exception], words: str
) -> None:
    with StepThread(None) as store:
        with pytest.raises(error, match=words):
            store.change(values, 1, "operator")
        assert store.current.config == RuntimeConfig()


def test_a_broken_state_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "runtime_config.json").write_text('{"config_version": 3}')
    with pytest.raises(StateError, match=r"runtime_config\.json: not a runtime configuration"):
        RuntimeStore(tmp_path, lambda: None, RuntimeConfig())


def test_defaults_and_ladders_lie_within_the_bounds() -> None:
    assert RuntimeConfig().values() == {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "max_wait_ms": 0,
        "prefill_chunk_tokens": 512,
        "shed_below_priority": 0,
        "length_window_tokens": 0,
        "priority_weights": "off",
        "tenant_quotas": "off",
        "backpressure": "off",
        "kv_block_size": 16,
        "kv_dtype": "auto",
        "kv_layout": "separate",
        "graph_capture": "on",
        "prefix_cache": "off",
        "kv_allocator": "paged",
        "kv_compaction": "off",
        "preemption": "recompute",
        "prefetch_depth_tokens": 0,
    }
    for knob in KNOBS.values():
        assert [knob.check(value) for value in knob.ladder] == sorted(knob.ladder)  # type: ignore[type-var]
        assert getattr(RuntimeConfig(), knob.name) == knob.default
