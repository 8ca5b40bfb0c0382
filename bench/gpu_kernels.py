"""The kernels on a GPU: are they right, how near to its limits, and does a graph hold them.

    python -m bench.gpu_kernels          five minutes at most; writes its tables into docs/engine.md

Times are medians with a cold cache (triton.testing.do_bench). The floor of an op is the longer of
its bytes at the speed of a copy and its products at the speed of a large matrix product, both
measured in this run. Without a GPU it says so, and leaves the page as it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from engine.exec.kernel_step import KernelStep, choose_triton
from engine.kernels import attention, quant, rms_norm, rope, sampler, store, swiglu
from engine.kernels.interface import Batch, PagedKV
from engine.models.llama import SHAPES, Llama

PAGE = Path(__file__).parents[1] / "docs" / "engine.md"
BEGIN, END = "<!-- gpu tables: python -m bench.gpu_kernels -->\n", "<!-- end of gpu tables -->\n"
DEVICE = "cuda"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KV_HEADS, GROUP, DIM = 8, 4, 128
SCALE = DIM**-0.5
Tensor = torch.Tensor


class Case(NamedTuple):
    """One op at one size: the kernel, its reference, and torch's fastest way where it has one."""

    op: str
    size: str
    kernel: Callable[[], Any]
    reference: Callable[[], Any]
    torch: Callable[[], Any] | None
    bytes: int
    flops: int = 0


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def paged(
    queries: list[int],
    contexts: list[int],
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    quantised: bool = False,
) -> tuple[Tensor, PagedKV, Batch]:
    """A query and a cache whose blocks lie in any order."""
    width = -(-max(contexts) // block_size)
    order = np.random.default_rng(0).permutation(len(contexts) * width)
    tables = order.reshape(len(contexts), width)
    batch = Batch.of(queries, contexts, tables, block_size, DEVICE)
    shape = (KV_HEADS, tables.size, block_size, DIM)
    kv = PagedKV(drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype))
    if quantised:
        codes = torch.randint(-127, 128, shape, device=DEVICE, dtype=torch.int8)
        kv = PagedKV(kv.keys, codes, torch.rand(shape[:3], device=DEVICE) / 64)
    return drawn(sum(queries), KV_HEADS * GROUP, DIM, dtype=dtype), kv, batch


def dense(sequences: int, queries: int, context: int) -> Callable[[], Tensor]:
    """torch's attention over as many keys that lie in order, without pages."""
    q = drawn(sequences, KV_HEADS * GROUP, queries, DIM)
    k, v = (drawn(sequences, KV_HEADS, context, DIM) for _ in range(2))
    causal = queries > 1
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def decodes() -> Iterator[Case]:
    for sequences, context, block_size, quantised in (
        *((64, 4096, size, False) for size in (8, 16, 64, 256)),
        (64, 4096, 16, True),
        (1, 32_768, 16, False),
    ):
        asked = paged([1] * sequences, [context] * sequences, block_size=block_size,
                      quantised=quantised)  # fmt: skip
        wide = 2 * DIM + (DIM + 4 if quantised else 2 * DIM)
        yield Case(
            "decode, split" if sequences == 1 else "decode",
            f"{sequences} × {context}, blocks of {block_size}" + ", int8 values" * quantised,
            lambda asked=asked: attention.decode(*asked, SCALE),
            lambda asked=asked: attention.attend_reference(*asked, SCALE),
            None if quantised else dense(sequences, 1, context),
            sequences * context * KV_HEADS * wide,
        )


def prefills() -> Iterator[Case]:
    for queries, contexts, plain in (
        ([2048] * 8, [2048] * 8, True),
        ([512] * 2 + [1] * 62, [4096] * 64, False),
    ):
        asked = paged(queries, contexts)
        pairs = sum(n * (c - n) + n * (n + 1) // 2 for n, c in zip(queries, contexts, strict=True))
        yield Case(
            "prefill",
            f"8 × {queries[0]}" if plain else "2 chunks of 512 and 62 decodes at 4096",
            lambda asked=asked: attention.prefill(*asked, SCALE),
            lambda asked=asked: attention.attend_reference(*asked, SCALE),
            dense(8, 2048, 2048) if plain else None,
            sum(contexts) * KV_HEADS * DIM * 4 + 2 * asked[0].numel() * 2,
            4 * pairs * KV_HEADS * GROUP * DIM,
        )


def others() -> Iterator[Case]:
    tokens = 8192
    _, kv, batch = paged([tokens], [tokens])
    key, value = (drawn(tokens, KV_HEADS, DIM) for _ in range(2))

    def stored(by: Callable[..., None]) -> Tensor:
        by(kv, batch.slots, key, value)
        return kv.values

    yield Case("store", f"{tokens} tokens", lambda: stored(store.store),
               lambda: stored(store.store_reference), lambda: stored(store.store_reference),
               8 * key.numel())  # fmt: skip
    x, weight = drawn(tokens, 4096), drawn(4096)
    yield Case("rms_norm", f"{tokens} × 4096", lambda: rms_norm.rms_norm(x, weight, 1e-5),
               lambda: rms_norm.rms_norm_reference(x, weight, 1e-5),
               lambda: F.rms_norm(x, (4096,), weight, 1e-5), 4 * x.numel())  # fmt: skip
    qkv, turns = drawn(tokens, 48, DIM), torch.rand(tokens, DIM // 2, 2, device=DEVICE)
    yield Case("rope", f"{tokens} × 40 heads", lambda: rope.rope(qkv.clone(), 40, turns),
               lambda: rope.rope_reference(qkv, 40, turns),
               lambda: rope.rope_reference(qkv, 40, turns),
               8 * qkv.numel())  # fmt: skip
    gate_up = drawn(tokens, 2 * 14_336)
    yield Case("swiglu", f"{tokens} × 14336", lambda: swiglu.swiglu(gate_up),
               lambda: swiglu.swiglu_reference(gate_up),
               lambda: F.silu(gate_up[:, :14_336]) * gate_up[:, 14_336:],
               3 * gate_up.numel())  # fmt: skip
    logits, cold = drawn(64, 128_256, dtype=torch.float32), torch.zeros(64, device=DEVICE)
    yield Case("sample", "64 × 128256, greedy", lambda: sampler.sample(logits, cold, cold)[0],
               lambda: sampler.sample_reference(logits, cold, cold)[0],
               lambda: logits.argmax(1), 4 * logits.numel())  # fmt: skip
    rows = drawn(1 << 18, DIM)
    codes = quant.quantise_reference(rows)
    yield Case("quantise", "262144 × 128, int8", lambda: quant.quantise(rows).codes,
               lambda: codes.codes, None, 3 * rows.numel())  # fmt: skip
    yield Case("dequantise", "262144 × 128, int8", lambda: quant.dequantise(codes, rows.dtype),
               lambda: quant.dequantise_reference(codes, rows.dtype), None,
               3 * rows.numel())  # fmt: skip


def difference(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).abs().max())


def odd_sizes() -> Iterator[tuple[str, float, float]]:
    """(what, largest error, allowed) of attention over sizes that fill no tile."""
    for dtype, allowed in TOLERANCE.items():
        for block_size in (8, 16, 32, 64, 128, 256):
            for quantised in (False, True):
                kind = {"block_size": block_size, "dtype": dtype, "quantised": quantised}
                name = f"{dtype} blocks of {block_size}" + ", int8 values" * quantised
                asked = paged([1, 1, 0, 1], [1, block_size + 1, 3, 777], **kind)
                wanted = attention.attend_reference(*asked, SCALE)
                for splits in (1, 3):
                    got = attention.decode(*asked, SCALE, splits=splits)
                    yield f"decode {name}, {splits} splits", difference(got, wanted), allowed
                asked = paged([1, 17, 0, 300], [1, block_size + 17, 3, 777], **kind)
                wanted = attention.attend_reference(*asked, SCALE)
                got = attention.prefill(*asked, SCALE)
                yield f"prefill {name}", difference(got, wanted), allowed


def limits(bench: Callable[..., float]) -> tuple[float, float]:
    """Bytes and products (multiplications and additions) a second."""
    source, target = (torch.empty(1 << 30, dtype=torch.int8, device=DEVICE) for _ in range(2))
    copy_ms = bench(lambda: target.copy_(source))
    a, b = drawn(8192, 8192), drawn(8192, 8192)
    product_ms = bench(lambda: a @ b)
    return 2 * source.numel() / copy_ms * 1e3, 2 * 8192**3 / product_ms * 1e3


class Decoding:
    """A decode step of the demo's model over buffers that stay where they are."""

    def __init__(self, sequences: int) -> None:
        self.cpu = Llama(SHAPES["1.3m"], seed=0, positions=512)
        self.model = self.cpu.over([each.to(DEVICE) for each in self.cpu.tensors()])
        self.step = KernelStep("triton")
        shape, width = self.model.shape, 16
        self.tables = np.arange(sequences * width).reshape(sequences, width)
        size = (shape.kv_heads, sequences * width, 16, shape.head_dim)
        self.layers = [
            PagedKV(torch.zeros(size, device=DEVICE), torch.zeros(size, device=DEVICE))
            for _ in range(shape.layers)
        ]
        self.sequences = sequences
        self.tokens = torch.zeros(sequences, dtype=torch.int64, device=DEVICE)
        self.positions = torch.zeros_like(self.tokens)
        self.batch = Batch.of([1] * sequences, [256] * sequences, self.tables, 16, DEVICE)

    def prompts(self, prompts: list[np.ndarray]) -> None:
        """Their KV, and the first token of each."""
        lengths = [len(each) for each in prompts]
        batch = Batch.of(lengths, lengths, self.tables, 16, DEVICE)
        tokens = torch.from_numpy(np.concatenate(prompts)).to(DEVICE)
        positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
        hidden = self.step.hidden(self.model, self.layers, batch, tokens, positions)
        ends = torch.tensor(lengths, device=DEVICE).cumsum(0) - 1
        logits = self.model.logits(hidden[ends], self.step.ops)
        self.take(choose_triton(logits)[1], torch.tensor(lengths, device=DEVICE))

    def take(self, tokens: Tensor, positions: Tensor) -> None:
        """The next step's arrays, into the buffers a graph was recorded with."""
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.batch.contexts.copy_(positions + 1)
        block = torch.from_numpy(self.tables).to(DEVICE).gather(1, positions[:, None] // 16)[:, 0]
        self.batch.slots.copy_(block * 16 + positions % 16)

    def __call__(self) -> Tensor:
        hidden = self.step.hidden(self.model, self.layers, self.batch, self.tokens, self.positions)
        return choose_triton(self.model.logits(hidden, self.step.ops))[1]

    def captured(self) -> Callable[[], Tensor]:
        """The same as a CUDA graph; its answer stands in one buffer."""
        for _ in range(2):
            self()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = self()

        def replay() -> Tensor:
            graph.replay()
            return answer

        return replay


def greedy(subject: Decoding, prompts: list[np.ndarray], steps: int, *, graph: bool) -> list[Any]:
    """The tokens of each prompt: (steps, sequences)."""
    subject.prompts(prompts)
    step = subject.captured() if graph else subject
    found = [subject.tokens.tolist()]
    for _ in range(steps - 1):
        subject.take(step(), subject.positions + 1)
        found.append(subject.tokens.tolist())
    return found


@torch.inference_mode()
def graph_lines(bench: Callable[..., float]) -> Iterator[str]:
    """A decode step as a graph: its tokens are those of the plain step and of the CPU."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 262, int(n)) for n in rng.integers(1, 90, 16)]
    subject = Decoding(len(prompts))
    plain = greedy(subject, prompts, 24, graph=False)
    replayed = greedy(subject, prompts, 24, graph=True)
    dense_tokens = []
    for prompt in prompts:
        sequence = prompt.tolist()
        for _ in range(24):
            sequence.append(int(subject.cpu.dense(torch.tensor(sequence))[-1].argmax()))
        dense_tokens.append(sequence[len(prompt) :])
    on_cpu = [list(each) for each in zip(*dense_tokens, strict=True)]
    eager_ms, graph_ms = bench(subject), bench(subject.captured())
    yield (
        f"A decode step of 1.3m, 16 sequences, float32: {eager_ms * 1e3:.0f} µs op by op, "
        f"{graph_ms * 1e3:.0f} µs as a CUDA graph. 24 greedy tokens of each: graph and op by op "
        f"{'equal' if plain == replayed else 'DIFFER'}, GPU and CPU "
        f"{'equal' if plain == on_cpu else 'DIFFER'}.\n"
    )


@torch.inference_mode()
def report() -> tuple[str, bool]:
    """The page's part, and whether all of it is right."""
    from triton.testing import do_bench

    def bench(call: Callable[[], Any]) -> float:
        return float(do_bench(call, warmup=20, rep=100, return_mode="median"))

    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.monotonic()
    name = torch.cuda.get_device_name()
    odd = list(odd_sizes())
    wrong = [f"{what}: {error:g}, allowed {allowed:g}" for what, error, allowed in odd
             if not error <= allowed]  # fmt: skip
    bandwidth, products = limits(bench)
    lines = [
        f"{name}, torch {torch.__version__}: copies {bandwidth / 1e12:.2f} TB/s, bfloat16 "
        f"products {products / 1e12:.0f} TFLOP/s. Attention over {len(odd)} odd shapes: "
        f"{len(wrong)} wrong.\n\n",
        "| op | size (bfloat16) | µs | floor, µs | floor ÷ time | torch, µs | largest error |\n",
        "| --- | --- | --- | --- | --- | --- | --- |\n",
    ]
    for cases in (decodes, prefills, others):
        for case in cases():
            error = difference(case.kernel(), case.reference())
            allowed = 1 if case.op == "quantise" else TOLERANCE[torch.bfloat16]
            if not error <= allowed:
                wrong.append(f"{case.op} {case.size}: {error:g}, allowed {allowed:g}")
            us = bench(case.kernel) * 1e3
            floor = max(case.bytes / bandwidth, case.flops / products) * 1e6
            other = f"{bench(case.torch) * 1e3:.0f}" if case.torch else "–"
            cells = [case.op, case.size, f"{us:.0f}", f"{floor:.0f}", f"{floor / us:.2f}", other]
            lines.append(f"| {' | '.join(cells)} | {error:.1e} |\n")
            torch.cuda.empty_cache()
    lines += ["\n", *graph_lines(bench), *(f"\nWrong: {each}\n" for each in wrong)]
    text = "".join(lines)
    print(text + f"{time.monotonic() - began:.0f} s")
    return text, not wrong and "DIFFER" not in text


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU: not run")
        return 0
    text, right = report()
    page = PAGE.read_text()
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(head + BEGIN + text + END + tail)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
