"""A step as machine code: compiled ahead of time by AOTInductor into a shared library.

Compiled, the small operations between two matrix products are one loop each, and attention reads
the KV blocks where they stand instead of gathering them first. All sizes but the model's are
dynamic, so there is one library for a model's shape; weights and KV are its inputs.

It is called through its C interface (torch/csrc/inductor/aoti_runtime/interface.h) by ctypes, which
lets go of the interpreter meanwhile. torch's own binding keeps it, and the event loop would stand
still for as long as a step takes.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import torch

from engine.config import BLOCK_SIZES
from engine.exec.capture import CaptureError, agree
from engine.exec.decode import Chosen, Context, block_attention, choose
from engine.exec.rows import Rows
from engine.exec.step import Step
from engine.kv.pool import KVPool
from engine.models.llama import Llama, rounding
from engine.sched.scheduler import Plan

OUTPUTS = 3  # the parts of Chosen
PROMPT_READS_MAX = 24_000  # a prompt of 218 tokens; from some 30,000 on the plain step is faster

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]


class BlockStep(torch.nn.Module):
    """A step as a function of tensors; `model` gives the shape only."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        weights: Sequence[torch.Tensor],
        step: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> Chosen:
        tokens, positions, *rest = step
        context, model = Context(*rest), self.model.over(weights)

        def attention(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            return block_attention(model.shape, keys[layer], values[layer], qkv, context)

        logits = model.logits(model.hidden(tokens, positions, attention))
        return choose(logits, model.tolerance)


def inputs(step: Step) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """What BlockStep takes after the weights."""
    places, keys, values = step.pool.dense()
    context = step.context
    if places > 1:
        context = context._replace(block=context.block * places, blocks=context.blocks * places)
    return [step.tokens, step.positions, *context], keys, values


class Compiled:
    """A compiled step that was proved to compute what the plain one does, in blocks of any size.

    `seconds`: what loading it took. Raises CaptureError where the library cannot be loaded or
    computes something else.
    """

    mode = "compiled"

    def __init__(self, path: Path, model: Llama) -> None:
        self.weights = model.tensors()
        self.seconds = 0.0
        self.handle = c_void_p()
        try:
            self.library = ctypes.CDLL(str(path))
            self.entry = self.library.AOTInductorModelContainerRunSingleThreaded
            create = self.library.AOTInductorModelContainerCreateWithDevice
        except (OSError, AttributeError) as error:
            raise CaptureError(f"{path}: {error}") from error
        if create(byref(self.handle), c_size_t(1), b"cpu", None):
            raise CaptureError(f"{path}: the compiled step could not be set up")
        for block_size in BLOCK_SIZES[:2]:
            contexts = contexts_around(block_size, len(model.rotation))
            for part in (contexts, contexts[1:3], contexts[-1:]):
                self.prove(model, block_size, part)

    def run(self, step: Step) -> Chosen | None:
        """None where prompts are so long that the plain step is faster.

        Each token of a prompt counts as a sequence that knows those before it, and reads them
        again. Raises RuntimeError where the library refuses.
        """
        if step.prompt_reads > PROMPT_READS_MAX:
            return None
        chosen = self.forward(step)
        if not step.prefills:
            return chosen
        sampled = torch.from_numpy(step.sampled)
        logits, tokens, rivals = (part.index_select(0, sampled) for part in chosen)
        return logits, tokens, rivals

    def forward(self, step: Step) -> Chosen:
        """Logits and choices of all tokens of the step, padding included."""
        arrays, keys, values = inputs(step)
        tensors = [*self.weights, *arrays, *keys, *values]
        # The library takes over the handles it is given, and hands over those of its results.
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
        given = (c_void_p * len(tensors))(*(_capsule_pointer(each, None) for each in capsules))
        results = (c_void_p * OUTPUTS)()
        count, outputs = c_size_t(len(tensors)), c_size_t(OUTPUTS)
        if self.entry(self.handle, given, count, results, outputs, None, None):
            raise RuntimeError("the compiled step failed")
        logits, tokens, rivals = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(
            [_capsule(each, None, None) for each in results]
        )
        return logits, tokens, rivals

    @torch.inference_mode()
    def prove(self, model: Llama, block_size: int, contexts: Sequence[int]) -> None:
        """Compares it with the plain step: logits, tokens, and the KV they leave."""
        plain, other = (sample(model, block_size, contexts) for _ in range(2))
        hidden = model.hidden(plain.tokens, plain.positions, plain.attention)
        rows = len(contexts)
        expected = choose(model.logits(hidden)[:rows], model.tolerance)
        logits, tokens, _ = (part[:rows] for part in self.forward(other))
        if not agree(expected, tokens):
            raise CaptureError("the compiled step chooses other tokens than the plain one")
        written = (plain.block * block_size + plain.offset)[:rows]
        pairs = [(expected[0], logits)]
        for layer in range(model.shape.layers):
            pairs += zip(*(each.pool.read(layer, written) for each in (plain, other)), strict=True)
        for one, another in pairs:
            error, allowed = float((one - another).abs().max()), rounding(one, model.dtype)
            if not error <= allowed:
                raise CaptureError(
                    f"the compiled step's logits or KV differ by {error:g}, allowed: {allowed:g}"
                )


def contexts_around(block_size: int, longest: int) -> list[int]:
    """Of as many tokens as blocks hold, and one less or more; all sizes of such a step differ."""
    known = (2 * block_size + 5, block_size + 1, block_size, 2, 1)
    return [min(each, longest) for each in known]


def sample(model: Llama, block_size: int, contexts: Sequence[int]) -> Step:
    """A step over sequences of so many known tokens, longest first, in a pool of its own."""
    shape = model.shape
    counts = [-(-context // block_size) for context in contexts]
    pool = KVPool(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        blocks=sum(counts),
        block_size=block_size,
        dtype=model.dtype,
    )
    generator = torch.Generator().manual_seed(0)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_(generator=generator)
    rows = Rows(rows=len(contexts), model_len_max=contexts[0], block_size=block_size)
    begin = 1
    for context, count in zip(contexts, counts, strict=True):
        tokens = np.arange(context) * 89 % shape.vocabulary
        row = rows.open(tokens, context, ignore_eos=True, has_stop=False, begun=True)
        rows.append_blocks(row, list(range(begin, begin + count)))
        rows.computed[row] = context - 1
        begin += count
    return Step(model, pool, rows, Plan([], np.arange(len(contexts)), []))


def compile_step(model: Llama, path: Path) -> None:
    """Writes the library for models of this shape to `path`. Takes tens of seconds, and a compiler.

    Raises whatever torch does.
    """
    from torch.export import Dim, export  # slow to import, and only needed here

    size = BLOCK_SIZES[1]
    step = sample(model, size, contexts_around(size, len(model.rotation)))
    # Only their shapes are looked at, so that memory of a large model's size is never touched.
    weights = [torch.empty_like(each) for each in model.tensors()]
    arrays, keys, values = inputs(step)
    pool = {1: Dim.AUTO, 2: Dim.AUTO}  # blocks and their size
    varying = (
        # The table of positions is as long as the longest sequence of an engine.
        [{0: Dim.AUTO} if each is weights[3] else None for each in weights],
        [dict.fromkeys(range(each.dim()), Dim.AUTO) for each in arrays],
        [pool] * len(keys),
        [pool] * len(values),
    )
    options = {
        "aot_inductor.output_path": str(path),
        "aot_inductor.precompile_headers": False,  # pays off from the second library on
        "cpp.vec_isa_ok": True,  # the CPU's word is taken; trying each takes longer than compiling
        "assert_indirect_indexing": False,  # indices are the engine's own
        "cpp.enable_floating_point_contract_flag": "fast",
    }
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        # A size that happens to be 1 is a size like others.
        torch.fx.experimental._config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
    ):
        warnings.simplefilter("ignore")
        exported = export(BlockStep(model), (weights, arrays, keys, values), dynamic_shapes=varying)
        torch._inductor.aot_compile(
            exported.module(check_guards=False), (weights, arrays, keys, values), options=options
        )
