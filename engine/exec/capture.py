"""Graph capture on a CPU: the decode step as one TorchScript graph, replayed without Python.

What an engine has that finds no compiled step (compiled.py), or until it is made.

What a step costs beyond its arithmetic is Python between some hundred small kernels, during which
it also competes with the event loop for the interpreter. The graph runs the same kernels in the
same order, so its logits are the same to the bit; the interpreter is free meanwhile.

There is one graph per number of attention groups (1 … GROUPS_MAX), the one thing that changes
which kernels run. Batch and context stay dynamic: a CPU gains nothing from fixed sizes, and
padding a batch to a bucket costs what the padding computes. Recorded by torch.jit.trace and run
without its profiling executor, which would recompile for new sizes in the middle of serving.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from engine.exec.decode import Chosen, DecodeGroup, choose, decode_attention
from engine.exec.step import Step
from engine.kv.formats import Format
from engine.kv.pool import KVPool
from engine.models.llama import Llama

GROUPS_MAX = 4  # beyond, a batch is so large that Python hardly counts
CONTEXTS_MAX = 4  # of one engine


class Captured(Protocol):
    """A decode step that runs without Python in between; `mode` is what its steps count as."""

    @property
    def mode(self) -> str: ...

    @property
    def seconds(self) -> float:
        """What having it took."""

    def run(self, step: Step) -> Chosen | None:
        """None where nothing was captured for this shape."""


class CaptureError(RuntimeError):
    """The step could not be captured, or the graph does not compute the same."""


class DecodeStep(torch.nn.Module):
    """One decode step as a function of tensors; `pool` gives the layout only."""

    def __init__(self, model: Llama, pool: KVPool) -> None:
        super().__init__()
        self.model = model
        self.pool = pool
        # A tracer makes a constant of any tensor it meets, but cannot of an opaque one.
        for index, matrix in enumerate(model.packed):
            self.register_buffer(f"packed_{index}", matrix)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        block: torch.Tensor,
        offset: torch.Tensor,
        groups: Sequence[tuple[torch.Tensor, torch.Tensor]],
        tensors: Sequence[Sequence[torch.Tensor]],
    ) -> Chosen:
        shape, pool = self.model.shape, self.pool.over(tensors)
        parts = [DecodeGroup(blocks, mask) for blocks, mask in groups]

        def attention(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            key, value = qkv[:, shape.heads :].chunk(2, dim=1)
            pool.store(layer, block, offset, key, value)
            return decode_attention(shape, pool, layer, qkv, parts)

        logits = self.model.logits(self.model.hidden(tokens, positions, attention))
        return choose(logits, self.model.tolerance)


class Graph:
    """One captured step. Called with the arrays of a step and a pool cut and kept as its."""

    def __init__(self, step: DecodeStep, groups: int) -> None:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # of sizes that are meant to be constant
            self.script = torch.jit.trace(  # type: ignore[no-untyped-call]
                step, sample(step.pool, [2] * groups, 1), check_trace=False
            )

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        block: torch.Tensor,
        offset: torch.Tensor,
        groups: Sequence[DecodeGroup],
        pool: KVPool,
    ) -> Chosen:
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            chosen: Chosen = self.script(
                tokens,
                positions,
                block,
                offset,
                tuple((blocks, mask) for blocks, mask in groups),
                pool.tensors,
            )
        return chosen


@dataclass(frozen=True)
class Graphs:
    """What was captured for one model, block size and format, and how long that took."""

    mode: ClassVar[str] = "graph"

    by_groups: dict[int, Graph]
    seconds: float

    def run(self, step: Step) -> Chosen | None:
        graph = None if step.prefills else self.by_groups.get(len(step.groups))
        if graph is None:
            return None
        where = step.block, step.offset
        return graph(step.tokens, step.positions, *where, step.groups, step.pool)


class Contexts:
    """Keeps what was captured for a block size and format, to be used again when they come back.

    The last CONTEXTS_MAX used. `built` counts those captured, `reused` those taken again. One
    caller at a time.
    """

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.built = 0
        self.reused = 0
        self._kept: OrderedDict[tuple[int, Format], Graphs] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, block_size: int, kept: Format) -> Graphs:
        """Raises CaptureError."""
        key = block_size, kept
        graphs = self._kept.pop(key, None)
        if graphs is None:
            graphs = capture(self.model, block_size, kept)
            self.built += 1
        else:
            self.reused += 1
        self._kept[key] = graphs
        if len(self._kept) > CONTEXTS_MAX:
            self._kept.popitem(last=False)
        return graphs

    def drop(self, captured: Captured | None) -> None:
        """This one is not taken again."""
        for key in [key for key, graphs in self._kept.items() if graphs is captured]:
            del self._kept[key]

    def forget(self) -> None:
        """All of them are gone."""
        self._kept.clear()


def capture(model: Llama, block_size: int, kept: Format | None = None) -> Graphs:
    """Records and proves the graphs of all group counts; safe beside a running step thread.

    Raises CaptureError, also where a graph gives other tokens than the plain step, or logits that
    differ by more than the model's tolerance.
    """
    began = time.monotonic()
    shape = model.shape
    pool = KVPool(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        blocks=3,
        block_size=block_size,
        dtype=model.dtype,
        kept=kept,
    )
    step = DecodeStep(model, pool)
    graphs: dict[int, Graph] = {}
    for groups in range(1, GROUPS_MAX + 1):
        try:
            graphs[groups] = Graph(step, groups)
            prove(step, graphs[groups], groups)
        except RuntimeError as error:  # torch's own, and CaptureError
            raise CaptureError(f"the decode step could not be captured: {error}") from error
    return Graphs(graphs, time.monotonic() - began)


def sample(
    pool: KVPool, sequences: Sequence[int], blocks: int
) -> tuple[
    *tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[DecodeGroup, ...],
    tuple[tuple[torch.Tensor, ...], ...],
]:
    """Arguments of a DecodeStep: groups of so many sequences, each of `blocks` blocks."""
    count, heads = sum(sequences), torch.arange(pool.kv_heads)[:, None]
    table = torch.arange(1, blocks + 1) + heads * pool.blocks
    groups = tuple(
        DecodeGroup(table.repeat(n, 1, 1), torch.zeros(n, 1, blocks * pool.block_size))
        for n in sequences
    )
    positions = torch.arange(count)
    where = torch.ones_like(positions), positions % pool.block_size
    return torch.arange(count) + 65, positions, *where, groups, pool.tensors


@torch.inference_mode()
def prove(step: DecodeStep, graph: Graph, groups: int) -> None:
    """Compares both on sizes the graph was not recorded with. Raises CaptureError."""
    for blocks, first in ((1, 3), (2, 5)):
        arguments = sample(step.pool, [first, *[1] * (groups - 1)], blocks)
        plain = step(*arguments)
        logits, tokens, _ = graph(*arguments[:5], step.pool)
        if not agree(plain, tokens):
            raise CaptureError("the captured step chooses other tokens than the plain one")
        error = float((logits - plain[0]).abs().max())
        if not error <= float(step.model.tolerance):
            raise CaptureError(f"the captured step's logits differ by {error:g}")


def agree(plain: Chosen, tokens: torch.Tensor) -> bool:
    """Whether these are the tokens the plain step chose, wherever rounding leaves no doubt."""
    sure = plain[2] == 1
    return torch.equal(tokens[sure], plain[1][sure])
