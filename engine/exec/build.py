"""Where compiled decode steps are kept, and the process that makes them.

    python -m engine.exec.build [--model 1.3m]     compiles, unless it is there already

A step is compiled once for a machine: what it was made from and for is in the name of its file.
While it is not there an engine replays a TorchScript graph, and orders it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import inspect
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.config import MODELS, EngineConfig
from engine.exec import decode
from engine.exec.capture import CaptureError
from engine.exec.compiled import BlockStep, Compiled, compile_step, inputs
from engine.kv.pool import KVPool
from engine.models import llama, packing
from engine.models.llama import SHAPES, Llama, Shape, blank

log = logging.getLogger("engine")

ROOT = Path(__file__).parents[2]
SOURCES: tuple[Any, ...] = (
    *(decode, llama, packing.product, packing.added),
    *(BlockStep, inputs, compile_step, KVPool.dense),
)
COMPILER = os.environ.get("CXX", "g++")
POSITIONS = 512  # of the model that is compiled from; how many there are is no part of the code


def home() -> Path:
    """Where libraries are kept unless another folder is asked for."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab"


def library(folder: Path, shape: Shape, threads: int) -> Path:
    """The file for models of this shape, by all that its code depends on."""
    try:
        cpu = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0]
    except OSError:
        cpu = ""
    made_from = [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        cpu,
        asdict(shape),
        "float32",
        threads,
        *(inspect.getsource(source) for source in SOURCES),
    ]
    digest = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
    return folder / f"decode-{digest[:24]}.so"


def build(folder: Path, shape: Shape, threads: int) -> float:
    """Compiles into `folder` unless that was done; returns the seconds it took, 0 for none.

    One process at a time in a folder: others wait, and find it done. The folder is its owner's
    only: what is in it is run.
    """
    path = library(folder, shape, threads)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return 0.0
        began = time.monotonic()
        draft = folder / "draft"
        shutil.rmtree(draft, ignore_errors=True)  # of one that was killed
        draft.mkdir()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(draft)
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        torch.set_num_threads(threads)
        model = Llama(shape, positions=POSITIONS, weights=blank(shape, torch.float32))
        compile_step(model, draft / "step.so")
        (draft / "step.so").replace(path)
        shutil.rmtree(draft)
        return time.monotonic() - began


class Workshop:
    """The compiled step of one engine: the one there is, or the one being made beside it.

    `folder` None: there is none. Nor in bfloat16, whose rounding would hide a step that is wrong,
    nor of packed weights: a compiler knows no opaque tensors, and calls the slower product.
    """

    def __init__(self, folder: Path | None, model: Llama, threads: int) -> None:
        self.path = library(folder, model.shape, threads) if folder else None
        if self.path and (model.packed or model.dtype != torch.float32):
            what = "of packed weights" if model.packed else f"in {model.dtype}"
            log.info("decode steps %s replay a TorchScript graph, uncompiled", what)
            self.path = None
        self.model = model
        self.threads = threads
        self.found: Compiled | None = None
        self.tried = False
        self.worker: subprocess.Popen[str] | None = None
        self.closed = False

    def find(self) -> Compiled | None:
        """The compiled step, loaded and proved; None where there is none, or none to be used."""
        # Not Path.exists, which raises where the folder may not be read.
        if self.found is None and self.path is not None and os.path.exists(self.path):
            began = time.monotonic()
            try:
                self.found = Compiled(self.path, self.model)
            except (CaptureError, RuntimeError) as error:
                log.warning("a compiled step is not used (remove it for another): %s", error)
                self.path = None
            else:
                self.found.seconds = time.monotonic() - began
        return self.found

    def order(self, ready: Callable[[Compiled], None]) -> None:
        """Has it made in a process of its own, of the lowest priority; `ready` gets it.

        That is called on a thread of its own, and only if it was made; it is tried once.
        """
        if self.path is None or self.tried:
            return
        self.tried = True
        if shutil.which(COMPILER) is None:
            log.warning("no %s: decode steps replay a TorchScript graph, uncompiled", COMPILER)
            return
        command = [sys.executable, "-m", "engine.exec.build", "--nice", "19"]
        command += ["--folder", str(self.path.parent), "--threads", str(self.threads)]
        command += ["--shape", json.dumps(asdict(self.model.shape))]
        self.worker = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        arguments = (self.worker, ready)
        threading.Thread(target=self._wait, args=arguments, name="build", daemon=True).start()

    def close(self) -> None:
        """Ends what is being made, compilers included."""
        self.closed = True
        if self.worker is not None and self.worker.poll() is None:
            os.killpg(self.worker.pid, signal.SIGKILL)
            self.worker.wait()

    def _wait(self, worker: subprocess.Popen[str], ready: Callable[[Compiled], None]) -> None:
        _, errors = worker.communicate()
        if self.closed:
            return
        if worker.returncode:
            said = errors.strip().splitlines()[-1:] or [f"exit status {worker.returncode}"]
            log.warning("the decode step was not compiled: %s", said[0])
        elif compiled := self.find():
            ready(compiled)


def main() -> int:
    default = EngineConfig()
    parser = argparse.ArgumentParser(description="Compiles the decode step of a built-in model.")
    add = parser.add_argument
    add("--model", choices=MODELS, default=default.model)
    add("--shape", type=lambda text: Shape(**json.loads(text)), help="instead of a built-in one's")
    add("--threads", type=int, default=default.threads)
    add("--folder", type=Path, default=home())
    add("--nice", type=int, default=0)
    options = parser.parse_args()
    os.nice(options.nice)
    if shutil.which(COMPILER) is None:
        sys.stdout.write(
            f"No {COMPILER}: decode steps are not compiled, and take half as long again. "
            "On Debian: apt-get install g++\n"
        )
        return 0
    shape = options.shape or SHAPES[options.model]
    try:
        seconds = build(options.folder, shape, options.threads)
    except OSError as error:
        sys.exit(
            f"Cannot keep compiled decode steps in {options.folder}: {error.strerror or error}. "
            "Set XDG_CACHE_HOME to a folder that may be written to."
        )
    if seconds:
        sys.stdout.write(f"compiled the decode step of {options.model} in {seconds:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
