"""GPUs through NVML, read by a worker process that may hang without harm.

A driver in trouble blocks NVML calls in the kernel. So they are made in a child process, asked over
a pipe: no answer in time means `agent:nvml_hung_seconds` grows and the tick goes on. A late answer
is dropped, a worker that stays silent is killed. Killing in the middle of a call can itself upset a
driver, which is why that takes `kill_after_s` and not one missed tick.

`python -m gpu_agent.sources.nvml` is the worker: a line in, a line of JSON out. What a GPU does not
support is absent; errors are counted by call. Units: ratios 0–1, bytes, watts, joules, hertz, °C.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from typing import IO, Any

from gpu_agent.source import Family, Kind, Place, Reading, Source, SourceError

ANSWER_BYTES_MAX = 4 * 1024 * 1024
PROCESSES_PER_GPU_MAX = 32
SPAWN_EVERY_S = 60.0  # a node without a driver is asked again, at leisure


class Nvml(Source):
    """`gpu_status` is "ok", "no GPU: why", "hung for N s" or "waiting"."""

    slug = "nvml"
    label = "NVIDIA GPUs (NVML)"

    def __init__(self, *, node: str, timeout_s: float = 2.0, kill_after_s: float = 30.0) -> None:
        self.name = "gpu"
        self.gpu_status = "waiting"
        self.gpus: list[dict[str, Any]] = []
        self.timeout_s = timeout_s
        self.kill_after_s = kill_after_s
        self.worker_pid: int | None = None
        self._resource = {
            "service.name": "trimtab-agent",
            "service.instance.id": node,
            "host.name": node,
        }
        self._worker: subprocess.Popen[bytes] | None = None
        self._asked_at: float | None = None
        self._buffer = bytearray()
        self._spawn_after = 0.0
        self._errors: Counter[tuple[str, str, str]] = Counter()

    @classmethod
    def build(cls, place: Place) -> list[Source]:
        return [cls(node=place.node)] if place.gpu else []

    def collect(self) -> Reading:
        answer = self._ask()
        hung_s = self._hung_s()
        if answer is None and hung_s == 0:
            if self.gpu_status.startswith("no GPU"):
                return Reading(self._resource, time.time_ns(), [])
            raise SourceError(self.gpu_status)
        hung = Family("agent:nvml_hung_seconds", Kind.GAUGE, "How long NVML has not answered.")
        hung.add(hung_s)
        if answer is None:
            self.gpu_status = f"hung for {hung_s:.0f} s"
            return Reading(self._resource, time.time_ns(), [hung], error=self.gpu_status)
        self.gpu_status = "ok"
        self.gpus = [gpu["identity"] for gpu in answer["gpus"]]
        for gpu, call, error in answer["errors"]:
            self._errors[gpu, call, error] += 1
        families = [hung, *self._families(answer)]
        return Reading(self._resource, answer["read_at_ns"], families)

    def _hung_s(self) -> float:
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def _ask(self) -> dict[str, Any] | None:
        """A fresh answer, or None with `gpu_status` or `_asked_at` saying why there is none."""
        if self._asked_at is not None:
            self._catch_up()
        if self._asked_at is not None or not self._alive():
            return None
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        self._asked_at = time.monotonic()
        try:
            worker.stdin.write(b"read\n")
            worker.stdin.flush()
        except OSError:
            self._ended()
            return None
        return self._answer(self.timeout_s)

    def _catch_up(self) -> None:
        """Drops the answer of an earlier tick if it has come; kills a worker silent for long."""
        self._answer(0.0)
        if self._worker is None or self._hung_s() < self.kill_after_s:
            return
        self._worker.kill()
        # A process stuck in the kernel outlives even this; it is asked after again next tick.
        if self._worker.poll() is not None:
            self._ended()

    def _answer(self, timeout_s: float) -> dict[str, Any] | None:
        worker = self._worker
        if worker is None or worker.stdout is None:
            return None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([worker.stdout], [], [], left_s)[0]:
                return None
            chunk = os.read(worker.stdout.fileno(), 65_536)
            if not chunk or len(self._buffer) > ANSWER_BYTES_MAX:
                self._ended()
                return None
            self._buffer += chunk
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        self._asked_at = None
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:  # the library printed into the pipe: start over with a fresh worker
            self._ended()
            return None
        if "absent" in answer:
            self.gpu_status = f"no GPU: {answer['absent']}"
            self._ended()
            return None
        return answer

    def _alive(self) -> bool:
        if self._worker is not None and self._worker.poll() is None:
            return True
        if time.monotonic() < self._spawn_after:
            return False
        self._spawn_after = time.monotonic() + SPAWN_EVERY_S
        self._buffer.clear()
        self._worker = subprocess.Popen(
            [sys.executable, "-W", "ignore::FutureWarning", "-m", "gpu_agent.sources.nvml"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.worker_pid = self._worker.pid
        return True

    def _ended(self) -> None:
        """The worker is gone: by its own word ("no GPU"), or it died and is started again."""
        if self._worker is not None:
            if not self.gpu_status.startswith("no GPU"):
                self.gpu_status = "the NVML worker ended"
                self._spawn_after = 0.0
            _let_go(self._worker)
        self._worker, self.worker_pid, self._asked_at = None, None, None
        self._buffer.clear()

    def close(self) -> None:
        if self._worker is not None:
            _let_go(self._worker)
            self._worker = None

    def _families(self, answer: dict[str, Any]) -> list[Family]:
        found: dict[str, Family] = {}
        for gpu in answer["gpus"]:
            identity = gpu["identity"]
            for name, value, more in gpu["values"]:
                family = found.get(name)
                if family is None:
                    kind = Kind.SUM if name.endswith("_total") else Kind.GAUGE
                    family = found[name] = Family(name, kind)
                labels = {"gpu": str(identity["index"]), "uuid": identity["uuid"], **more}
                family.add(value, **labels)
        errors = Family("agent:nvml_errors_total", Kind.SUM, "NVML calls that failed.")
        for (index, call, error), count in self._errors.items():
            errors.add(count, gpu=index, call=call, error=error)
        return [*found.values(), errors]


def _let_go(worker: subprocess.Popen[bytes]) -> None:
    """End of input tells the worker to shut NVML down; one that cannot is killed, not awaited."""
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        worker.wait(2.0)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.returncode = worker.poll()


# -- the worker -------------------------------------------------------------------------------


class Worker:
    """Reads every GPU once per call. Lives in the child process; imports pynvml there only."""

    def __init__(self) -> None:
        import pynvml

        self.nvml: Any = pynvml
        self.errors: list[tuple[str, str, str]] = []
        self.xids: Counter[tuple[int, int]] = Counter()
        pynvml.nvmlInit()
        self.driver = str(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        self.handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        self.identities = [self._identity(index) for index in range(count)]
        self.events = self._watch_xids()
        self.gpm = [self._gpm_samples(index) for index in range(count)]

    def _try(self, index: int, call: str, *arguments: Any) -> Any:
        """The call's answer; None when unsupported, absent in this driver, or failed (counted)."""
        function = getattr(self.nvml, call, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except (self.nvml.NVMLError_NotSupported, self.nvml.NVMLError_FunctionNotFound):
            return None
        except self.nvml.NVMLError as error:
            self.errors.append((str(index), call, type(error).__name__.removeprefix("NVMLError_")))
            return None

    def _identity(self, index: int) -> dict[str, Any]:
        handle = self.handles[index]
        memory = self._memory(index)
        pci = self._try(index, "nvmlDeviceGetPciInfo", handle)
        mig = self._try(index, "nvmlDeviceGetMigMode", handle)
        return {
            "index": index,
            "uuid": str(self._try(index, "nvmlDeviceGetUUID", handle) or f"index-{index}"),
            "name": str(self._try(index, "nvmlDeviceGetName", handle) or ""),
            "pci": "" if pci is None else _text(pci.busId),
            "memory_total_bytes": 0 if memory is None else memory.total,
            "driver": self.driver,
            "mig": bool(mig and mig[0]),
        }

    def _memory(self, index: int) -> Any:
        """Version 2 where there is one: version 1 counts reserved memory as used."""
        handle = self.handles[index]
        second = self._try(
            index, "nvmlDeviceGetMemoryInfo", handle, getattr(self.nvml, "nvmlMemory_v2", None)
        )
        return second or self._try(index, "nvmlDeviceGetMemoryInfo", handle)

    def _watch_xids(self) -> Any:
        events = self._try(0, "nvmlEventSetCreate") if self.handles else None
        if events is not None:
            for index, handle in enumerate(self.handles):
                kind = self.nvml.nvmlEventTypeXidCriticalError
                self._try(index, "nvmlDeviceRegisterEvents", handle, kind, events)
        return events

    def _gpm_samples(self, index: int) -> list[Any] | None:
        support = self._try(index, "nvmlGpmQueryDeviceSupport", self.handles[index])
        if support is None or not support.isSupportedDevice:
            return None
        samples = [self._try(index, "nvmlGpmSampleAlloc") for _ in range(2)]
        if None in samples:
            return None
        self._try(index, "nvmlGpmSampleGet", self.handles[index], samples[0])
        return samples

    def read(self) -> dict[str, Any]:
        read_at_ns = time.time_ns()
        self._drain_xids()
        gpus = [
            {"identity": identity, "values": self._values(identity["index"])}
            for identity in self.identities
        ]
        errors, self.errors = self.errors, []
        return {"read_at_ns": read_at_ns, "gpus": gpus, "errors": errors}

    def _drain_xids(self) -> None:
        for _ in range(100 if self.events is not None else 0):
            try:
                event = self.nvml.nvmlEventSetWait(self.events, 0)
            except self.nvml.NVMLError:  # nothing more: this is how NVML says timeout
                return
            for index, handle in enumerate(self.handles):
                if _address(handle) == _address(event.device):
                    self.xids[index, int(event.eventData)] += 1

    def _values(self, index: int) -> list[tuple[str, float, dict[str, str]]]:
        rows: list[tuple[str, float, dict[str, str]]] = []

        def row(name: str, value: Any, scale: float = 1.0, **labels: str) -> None:
            if value is not None:
                rows.append((name, value * scale, labels))

        for part in (self._load, self._board, self._faults, self._fields, self._gpm):
            part(index, row)
        for (gpu, xid), count in self.xids.items():
            if gpu == index:
                row("gpu:xid_errors_total", count, xid=str(xid))
        return rows

    def _load(self, index: int, row: Any) -> None:
        handle = self.handles[index]
        memory = self._memory(index)
        if memory is not None:
            row("gpu:memory_total_bytes", memory.total)
            row("gpu:memory_used_bytes", memory.used)
            row("gpu:memory_free_bytes", memory.free)
            row("gpu:memory_reserved_bytes", getattr(memory, "reserved", None))
        use = self._try(index, "nvmlDeviceGetUtilizationRates", handle)
        if use is not None:
            row("gpu:utilization_ratio", use.gpu, 0.01)
            row("gpu:memory_controller_utilization_ratio", use.memory, 0.01)
        running = self._try(index, "nvmlDeviceGetComputeRunningProcesses", handle)
        if running is not None:
            row("gpu:processes", len(running))
            for process in running[:PROCESSES_PER_GPU_MAX]:
                row("gpu:process_memory_bytes", process.usedGpuMemory, pid=str(process.pid))

    def _board(self, index: int, row: Any) -> None:
        nvml, handle = self.nvml, self.handles[index]
        core = nvml.NVML_TEMPERATURE_GPU
        row("gpu:temperature_celsius", self._try(index, "nvmlDeviceGetTemperatureV", handle, core))
        for name, call in (
            ("gpu:power_watts", "nvmlDeviceGetPowerUsage"),
            ("gpu:power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit"),
            ("gpu:energy_joules_total", "nvmlDeviceGetTotalEnergyConsumption"),
        ):
            row(name, self._try(index, call, handle), 1e-3)  # NVML: mW and mJ
        for name, clock in (("sm", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM)):
            megahertz = self._try(index, "nvmlDeviceGetClockInfo", handle, clock)
            row(f"gpu:{name}_clock_hertz", megahertz, 1e6)
        reasons = self._try(index, "nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is not None:
            for reason, bit in _CLOCK_EVENTS.items():
                row("gpu:clock_event_active", float(bool(reasons & bit)), reason=reason)

    def _faults(self, index: int, row: Any) -> None:
        nvml, handle = self.nvml, self.handles[index]
        for kind, code in (
            ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ):
            count = self._try(
                index, "nvmlDeviceGetTotalEccErrors", handle, code, nvml.NVML_VOLATILE_ECC
            )
            row("gpu:ecc_errors_total", count, kind=kind)
        rows = self._try(index, "nvmlDeviceGetRemappedRows", handle)
        if rows is not None:
            for kind, count in zip(
                ("corrected", "uncorrected", "pending", "failure"), rows, strict=True
            ):
                row("gpu:remapped_rows", count, kind=kind)

    def _fields(self, index: int, row: Any) -> None:
        nvml, every_link = self.nvml, 0xFFFFFFFF
        wanted = (
            ("gpu:memory_temperature_celsius", nvml.NVML_FI_DEV_MEMORY_TEMP, 0, 1.0),
            ("gpu:nvlink_sent_bytes_total", 138, every_link, 1024.0),
            ("gpu:nvlink_received_bytes_total", 139, every_link, 1024.0),
        )
        ids = [(field, scope) for _, field, scope, _ in wanted]
        fields = self._try(index, "nvmlDeviceGetFieldValues", self.handles[index], ids)
        for (name, _, _, scale), field in zip(wanted, fields or (), strict=False):
            if field.nvmlReturn == nvml.NVML_SUCCESS:
                row(name, _field_value(field), scale)

    def _gpm(self, index: int, row: Any) -> None:
        """What the SMs did between the last read and this one; per cent in NVML, 0–1 here."""
        nvml, samples = self.nvml, self.gpm[index]
        if samples is None:
            return
        if self._try(index, "nvmlGpmSampleGet", self.handles[index], samples[1]) is None:
            return
        ask = nvml.c_nvmlGpmMetricsGet_t()
        ask.version = nvml.NVML_GPM_METRICS_GET_VERSION
        ask.numMetrics = len(_GPM)
        ask.sample1, ask.sample2 = samples
        for place, metric in enumerate(_GPM.values()):
            ask.metrics[place].metricId = metric
        if self._try(index, "nvmlGpmMetricsGet", ask) is not None:
            for place, name in enumerate(_GPM):
                if ask.metrics[place].nvmlReturn == nvml.NVML_SUCCESS:
                    row(name, ask.metrics[place].value, 0.01)
        samples.reverse()


_GPM = {
    "gpu:sm_active_ratio": 2,
    "gpu:sm_occupancy_ratio": 3,
    "gpu:tensor_active_ratio": 5,
    "gpu:dram_active_ratio": 10,
}
_CLOCK_EVENTS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}
# nvmlValueType_t → member of nvmlValue_t
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def _field_value(field: Any) -> float | None:
    if not 0 <= field.valueType < len(_VALUE_MEMBERS):
        return None
    return float(getattr(field.value, _VALUE_MEMBERS[field.valueType]))


def _address(handle: Any) -> int:
    import ctypes

    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def main(asked: IO[str], answers: IO[str]) -> int:
    """Answers each line of `asked`; "absent" once, with the reason, when there is no NVML."""
    worker: Worker | None = None
    for _ in asked:
        try:
            worker = worker or Worker()
            answer: dict[str, Any] = worker.read()
            if not worker.handles:
                answer = {"absent": "the driver lists none"}
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent shall know why
            answer = {"absent": str(error) or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "absent" in answer:
            return 1
    if worker is not None:
        worker.nvml.nvmlShutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.stdin, sys.stdout))
