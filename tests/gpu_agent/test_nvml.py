"""The real pynvml in the real worker process, over a stub libnvidia-ml.so.1."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_agent.source import Reading, Source, SourceError
from gpu_agent.sources.nvml import Nvml

from .conftest import REPOSITORY, wait_for

pytestmark = pytest.mark.processes

State = Callable[[str], None]


@pytest.fixture
def state(nvml_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Sets what the stub driver says from now on."""
    path = tmp_path / "nvml.txt"

    def write(text: str) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(path)

    write("gpus 2\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_folder))
    monkeypatch.setenv("FAKE_NVML_STATE", str(path))
    monkeypatch.chdir(REPOSITORY)
    return write


@pytest.fixture
def gpus() -> Iterator[Nvml]:
    source = Nvml(node="node-1", timeout_s=5.0)
    yield source
    source.close()


def values(reading: Reading, name: str) -> dict[tuple[str, ...], float]:
    """Label values but the uuid → value."""
    return {
        tuple(text for key, text in sample.labels.items() if key != "uuid"): sample.value
        for family in reading.families
        if family.name == name
        for sample in family.samples
    }


def test_a_reading_has_units_labels_and_the_time_it_was_made(state: State, gpus: Nvml) -> None:
    before = time.time_ns()
    reading = gpus.collect()
    assert before <= reading.read_at_ns <= time.time_ns()
    assert values(reading, "gpu:utilization_ratio") == {("0",): 0.5, ("1",): 0.5}
    assert values(reading, "gpu:power_watts")["0",] == pytest.approx(512.34)
    assert values(reading, "gpu:energy_joules_total")["0",] == pytest.approx(7.0)
    assert values(reading, "gpu:sm_clock_hertz")["0",] == 1.98e9
    assert values(reading, "gpu:memory_used_bytes")["1",] == 20 * 2**30
    assert values(reading, "gpu:memory_temperature_celsius")["0",] == 70
    assert values(reading, "gpu:nvlink_sent_bytes_total")["0",] == 2048
    assert values(reading, "gpu:ecc_errors_total") == {
        ("0", "corrected"): 40,
        ("0", "uncorrected"): 3,
        ("1", "corrected"): 40,
        ("1", "uncorrected"): 3,
    }
    assert values(reading, "gpu:clock_event_active")["0", "sw_power_cap"] == 1
    assert values(reading, "agent:nvml_hung_seconds") == {(): 0.0}
    assert gpus.gpu_status == "ok"
    assert [gpu["uuid"][-1] for gpu in gpus.gpus] == ["0", "1"]
    assert gpus.gpus[0]["driver"] == "580.105.08"


def test_mig_leaves_utilisation_out_and_is_no_error(state: State, gpus: Nvml) -> None:
    state("gpus 2\nmig 1\n")
    reading = gpus.collect()
    assert values(reading, "gpu:utilization_ratio") == {("0",): 0.5}
    assert set(values(reading, "gpu:memory_used_bytes")) == {("0",), ("1",)}
    assert values(reading, "agent:nvml_errors_total") == {}
    assert gpus.gpus[1]["mig"] is True


def test_a_lost_gpu_is_counted_and_the_other_one_still_read(state: State, gpus: Nvml) -> None:
    gpus.collect()
    state("gpus 2\nlost 0\nutil 90\n")
    reading = gpus.collect()
    assert values(reading, "gpu:utilization_ratio") == {("1",): 0.9}
    errors = values(reading, "agent:nvml_errors_total")
    assert errors["0", "nvmlDeviceGetUtilizationRates", "GpuIsLost"] == 1


def test_an_xid_is_an_event_that_is_counted(state: State, gpus: Nvml) -> None:
    state("gpus 1\nxid 79\n")
    gpus.collect()
    assert values(gpus.collect(), "gpu:xid_errors_total") == {("0", "79"): 1}


def test_without_the_library_it_says_no_gpu_and_why(
    gpus: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert gpus.collect().families == []
    assert gpus.gpu_status.startswith("no GPU: ")
    assert gpus.worker_pid is None


def test_without_the_driver_it_says_no_gpu_and_why(state: State, gpus: Nvml) -> None:
    state("init 9\n")
    assert gpus.collect().families == []
    assert gpus.gpu_status == "no GPU: Driver Not Loaded"


def test_a_hung_driver_is_reported_killed_in_the_end_and_read_again(state: State) -> None:
    gpus = Nvml(node="node-1", timeout_s=0.1, kill_after_s=0.3)
    wait_for(lambda: _collect(gpus).families and gpus.gpu_status == "ok")
    first = gpus.worker_pid
    state("gpus 1\nhang_ms 600000\n")
    reading = gpus.collect()
    assert values(reading, "agent:nvml_hung_seconds")[()] >= 0.1
    assert values(reading, "gpu:memory_used_bytes") == {}
    assert reading.error.startswith("hung for ")
    wait_for(lambda: _collect(gpus) and gpus.worker_pid != first)
    state("gpus 1\n")
    wait_for(lambda: _collect(gpus).families and gpus.gpu_status == "ok")
    gpus.close()


def test_an_answer_that_comes_late_is_dropped(state: State) -> None:
    gpus = Nvml(node="node-1", timeout_s=0.1, kill_after_s=60)
    wait_for(lambda: _collect(gpus).families and gpus.gpu_status == "ok")
    state("gpus 1\nhang_ms 400\n")
    assert gpus.collect().error
    state("gpus 1\n")
    time.sleep(0.5)
    asked = time.time_ns()
    assert gpus.collect().read_at_ns >= asked
    gpus.close()


def _collect(gpus: Nvml) -> Reading:
    try:
        return gpus.collect()
    except SourceError:
        return Reading({}, 0, [])
