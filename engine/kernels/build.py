"""Compiles every kernel for the GPUs it is meant for, on a CPU, and says what each takes.

    python -m engine.kernels.build [--target 90] [--only decode] [--all]

Each case is a call of a public function with tensors on torch's `meta` device; its launches are
recorded and compiled as Triton would for that GPU. Registers are a thread's; spills are bytes of
registers kept in memory, by ptxas; shared memory is a program's. Exit status 1 if anything spills.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.kernels import attention, quant, rms_norm, rope, sampler, store, swiglu
from engine.kernels.interface import BLOCK_SIZES, Batch, PagedKV
from engine.kernels.lang import FLOATS, Launch, recorded, triton

TARGETS = {80: "sm_80 (A100)", 90: "sm_90 (H100, H200)", 100: "sm_100 (B200)"}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
KV_HEADS, GROUP = 8, 4


class Cost(NamedTuple):
    registers: int  # of a thread
    spills: int  # bytes stored and loaded for want of registers
    shared: int  # bytes of a program


class Case(NamedTuple):
    op: str
    variant: str
    call: Callable[[], object]


def cases() -> Iterator[Case]:
    """What to compile: the dtypes, head sizes and block sizes that a model may have."""
    yield from _attention(torch.float16, 128, 16)
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (32, 64, 128, 256):
            yield from _attention(dtype, dim, 16)
        yield from _attention(dtype, 128, 16, quantised=True)
    for size in (size for size in BLOCK_SIZES if size != 16):
        yield from _attention(torch.bfloat16, 128, size)
    for dtype in FLOATS:
        kind = TYPES[dtype]
        yield _storing(dtype, 128, quantised=False)
        yield _storing(dtype, 128, quantised=True)
        for bits, per_column in itertools.product((8, 4), (False, True)):
            yield _coding(dtype, bits, per_column)
        for hidden in (576, 4096, rms_norm.HIDDEN_MAX):
            yield _norm(dtype, hidden)
        turning = partial(rope.rope, _new(64, 48, 128, dtype=dtype), 40, _new(64, 64, 2))
        yield Case("rope", kind, turning)
        yield Case("swiglu", kind, partial(swiglu.swiglu, _new(64, 28_672, dtype=dtype)))
        logits = _new(64, 128_256, dtype=dtype)
        yield Case("sample", kind, partial(sampler.sample, logits, _new(64), _new(64)))


def compiled(launch: Launch, target: int) -> Cost:
    """Compiles one launch for compute capability `target` / 10; raises what Triton raises."""
    package = triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(launch.kernel.jit.arg_names)
    constants = dict(launch.constants)
    signature, attributes = dict.fromkeys(names, "constexpr"), {}
    for name, value in launch.arguments.items():
        kind, aligned = specialised(value)
        if kind == "constexpr":
            constants[name] = value
        signature[name] = kind
        if aligned:
            attributes[names.index(name),] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel.jit, signature, constants, attributes)
    said = io.StringIO()
    package.knobs.compilation.always_compile = True  # what is cached says nothing
    package.knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(said):
        kernel = package.compile(
            source,
            target=GPUTarget("cuda", target, 32),
            options={"num_warps": launch.warps, "num_stages": launch.stages},
        )
    text = said.getvalue()
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    registers = re.findall(r"Used (\d+) registers", text)
    return Cost(max(map(int, registers)), sum(map(int, spills)), kernel.metadata.shared)


def specialised(value: Any) -> tuple[str, bool]:
    """The type Triton compiles an argument for, and whether it is a multiple of 16 (bytes)."""
    if isinstance(value, torch.Tensor):
        first = value.storage_offset() * value.element_size()
        return f"*{TYPES[value.dtype]}", first % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    if value == 1:
        return "constexpr", False
    return "i32" if abs(value) < 2**31 else "i64", value % 16 == 0


def costs(number: int, target: int) -> dict[str, Cost]:
    """What the launches of a case take, by what they do: the kernel's name, or the attention's."""
    case = list(cases())[number]
    with recorded() as launches:
        case.call()
    names = [case.op if each.kernel.name == "attend" else each.kernel.name for each in launches]
    return {name: compiled(each, target) for name, each in zip(names, launches, strict=True)}


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _cache(dtype: torch.dtype, dim: int, block_size: int, *, quantised: bool) -> PagedKV:
    shape = (KV_HEADS, 64, block_size, dim)
    if not quantised:
        return PagedKV(_new(*shape, dtype=dtype), _new(*shape, dtype=dtype))
    return PagedKV(_new(*shape, dtype=dtype), _new(*shape, dtype=torch.int8), _new(*shape[:3]))


def _attention(
    dtype: torch.dtype, dim: int, block_size: int, *, quantised: bool = False
) -> Iterator[Case]:
    kv = _cache(dtype, dim, block_size, quantised=quantised)
    variant = f"{TYPES[dtype]} dim {dim} blocks of {block_size}" + ", int8 values" * quantised

    def asked(queries: Sequence[int]) -> tuple[torch.Tensor, PagedKV, Batch, float]:
        tables = np.zeros((len(queries), 2048 // block_size), np.int32)
        batch = Batch.of(queries, [2048] * len(queries), tables, block_size, "meta")
        return _new(sum(queries), KV_HEADS * GROUP, dim, dtype=dtype), kv, batch, 1.0

    yield Case("decode", variant, partial(attention.decode, *asked([1] * 8), splits=1))
    yield Case("decode, split", variant, partial(attention.decode, *asked([1] * 8), splits=4))
    yield Case("prefill", variant, partial(attention.prefill, *asked([1, 512] * 8)))


def _storing(dtype: torch.dtype, dim: int, *, quantised: bool) -> Case:
    kv = _cache(dtype, dim, 16, quantised=quantised)
    tokens, slots = _new(64, KV_HEADS, dim, dtype=dtype), _new(64, dtype=torch.int64)
    variant = f"{TYPES[dtype]} dim {dim}" + ", int8 values" * quantised
    return Case("store", variant, partial(store.store, kv, slots, tokens, tokens))


def _coding(dtype: torch.dtype, bits: int, per_column: bool) -> Case:
    def call() -> None:
        x = _new(512, 128, dtype=dtype)
        quant.dequantise(quant.quantise(x, bits=bits, per_column=per_column), dtype)

    return Case("quantise", f"{TYPES[dtype]} int{bits}" + " by column" * per_column, call)


def _norm(dtype: torch.dtype, hidden: int) -> Case:
    x, weight = _new(64, hidden, dtype=dtype), _new(hidden, dtype=dtype)
    return Case("rms_norm", f"{TYPES[dtype]} {hidden}", partial(rms_norm.rms_norm, x, weight, 1e-5))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles every kernel for each GPU.")
    parser.add_argument("--target", type=int, choices=TARGETS, action="append")
    parser.add_argument("--only", default="", help="ops whose name begins so")
    parser.add_argument("--all", action="store_true", help="a line for each variant")
    options = parser.parse_args()
    targets = options.target or list(TARGETS)
    os.environ.pop("TRITON_INTERPRET", None)
    some = [(i, case) for i, case in enumerate(cases()) if case.op.startswith(options.only)]
    found: dict[str, dict[int, list[Cost]]] = {}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        asked = [(case, each, pool.submit(costs, i, each)) for i, case in some for each in targets]
        for case, target, answer in asked:
            for op, cost in answer.result().items():
                label = f"{op}: {case.variant}" if options.all else op
                found.setdefault(label, {}).setdefault(target, []).append(cost)
    return table(found, targets)


def table(found: Mapping[str, Mapping[int, Sequence[Cost]]], targets: Sequence[int]) -> int:
    """Prints the most that any variant of each op takes; the exit status."""
    say = sys.stdout.write
    say("| op | variants | " + " | ".join(TARGETS[each] for each in targets) + " |\n")
    say("| --- | --- |" + " --- |" * len(targets) + "\n")
    for op, by_target in found.items():
        most = [Cost(*map(max, zip(*by_target[each], strict=True))) for each in targets]
        cells = [f"{cost.registers} / {cost.spills} / {cost.shared}" for cost in most]
        say(f"| {op} | {len(by_target[targets[0]])} | " + " | ".join(cells) + " |\n")
    every = [cost for by_target in found.values() for each in by_target.values() for cost in each]
    spilled = sum(cost.spills > 0 for cost in every)
    say("registers of a thread / spilled bytes / shared bytes of a program, at most\n")
    say(f"{len(every)} compiled, {spilled} with spills\n")
    return 1 if spilled or not every else 0


if __name__ == "__main__":
    sys.exit(main())
