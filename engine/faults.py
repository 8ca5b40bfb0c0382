"""Things that go wrong on purpose, for tests, benches and the demo: each really happens.

    slow_host        busy processes share the CPU of the step thread
    capture_lost     the captured graph or compiled step is dropped and cannot be had again
    kv_pool_halved   half of the KV pool's blocks are taken away
    steps_fail       the forward pass raises, so that all requests fail; /health goes on well
    none             all of it is mended

Nothing tells them apart from the real thing: no metric names them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from engine.barrier import Barrier
from engine.knobs import NotPossible, RuntimeConfig
from engine.reconfig import RuntimeStore
from engine.sched.scheduler import Scheduler

PROCESSES_MAX = 16
PROCESSES_DEFAULT = 2
# Ends by itself when the engine, whose process id it is given, is gone: however that ended, and
# were it before this began.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100000))\n"


class FaultError(ValueError):
    """The order cannot be read; `param` is the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Faults:
    """`inject` from any thread. What touches the step thread's things is done between two steps."""

    def __init__(
        self,
        runtime: RuntimeStore[RuntimeConfig],
        scheduler: Scheduler,
        barrier: Barrier,
        step_thread: threading.Thread,
    ) -> None:
        self.runtime = runtime
        self.scheduler = scheduler
        self.barrier = barrier
        self.step_thread = step_thread
        self.active: set[str] = set()
        self.busy: list[subprocess.Popen[bytes]] = []
        self.affinity: set[int] = set()
        self.faults: dict[str, Callable[[int], None]] = {
            "slow_host": self._slow_host,
            "capture_lost": self._lose_capture,
            "kv_pool_halved": self._halve_pool,
            "steps_fail": self._fail_steps,
            "none": self._cure,
        }

    def inject(self, order: Mapping[str, Any]) -> list[str]:
        """`{"fault": name}`, slow_host also with `processes`; returns what is broken now.

        Raises FaultError, NotPossible, TimeoutError.
        """
        fault = order.get("fault")
        if not isinstance(fault, str) or fault not in self.faults:
            raise FaultError("fault", f"got {fault!r}, allowed: {', '.join(self.faults)}")
        processes = order.get("processes", PROCESSES_DEFAULT)
        if type(processes) is not int or not 1 <= processes <= PROCESSES_MAX:
            raise FaultError("processes", f"got {processes!r}, allowed: 1 to {PROCESSES_MAX}")
        with self.runtime.changing:
            if fault not in self.active:
                self.faults[fault](processes)
                self.active.add(fault)
            self.active.discard("none")
            return sorted(self.active)

    def end(self) -> None:
        """Stops the busy processes, and nothing else: the engine has ended."""
        for process in self.busy:
            process.kill()
            process.wait()
        self.busy = []

    def _slow_host(self, processes: int) -> None:
        # On one CPU with the step thread, so that the host is as slow with 2 CPUs as with 64, and
        # what else runs here is left alone.
        if not hasattr(os, "sched_setaffinity"):
            raise NotPossible("not_possible", "", "slow_host: this system binds no thread to a CPU")
        thread = self.step_thread.native_id or 0
        self.affinity = os.sched_getaffinity(thread)
        cpu = {max(self.affinity)}
        try:
            os.sched_setaffinity(thread, cpu)
            for _ in range(processes):
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", BUSY, str(os.getpid())]
                )
                self.busy.append(process)
                os.sched_setaffinity(process.pid, cpu)
        except OSError as error:
            self._free_host()
            raise NotPossible("not_possible", "", f"slow_host: {error}") from error

    def _free_host(self) -> None:
        if self.affinity:
            os.sched_setaffinity(self.step_thread.native_id or 0, self.affinity)
            self.affinity = set()
        self.end()

    def _lose_capture(self, _: int) -> None:
        self.runtime.boundary.run(self.barrier.lose_capture)

    def _halve_pool(self, _: int) -> None:
        self.runtime.boundary.run(self.scheduler.halve_pool)

    def _fail_steps(self, _: int) -> None:
        def forward(*_: object) -> None:
            raise RuntimeError("device error: the forward pass did not return")

        self.runtime.boundary.run(lambda: vars(self.barrier.runner).update(forward=forward))

    def _cure(self, _: int) -> None:
        self._free_host()
        captured = None
        if "capture_lost" in self.active:
            captured = self.barrier.recapture(self.runtime.running.config)

        def mend() -> None:
            self.scheduler.allocator.give_back()
            vars(self.barrier.runner).pop("forward", None)
            if captured is not None:
                self.barrier.runner.captured = captured

        self.runtime.boundary.run(mend)
        self.active.clear()
