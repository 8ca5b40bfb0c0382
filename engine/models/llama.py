"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Touvron et al. 2023 (arXiv:2302.13971), GQA: Ainslie et al. 2023 (arXiv:2305.13245). Weights are
drawn from a seed or read from a file (loader.py), in float32 or bfloat16; the softmax scale is
folded into the query projection.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.models import packing
from engine.models.packing import added, product
from engine.models.tokenizer import VOCABULARY

Attention = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, qkv (tokens, heads + 2 kv_heads, head_dim), rotated) → (tokens, heads · head_dim)."""

Rounded = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Keys and values (kv_heads, tokens, head_dim) → the same."""


class Ops(NamedTuple):
    """What a layer does beside matrix products and attention; exec/kernel_step.py has Triton's."""

    rms_norm: Callable[[torch.Tensor, list[int], torch.Tensor, float], torch.Tensor]
    turned: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
    swiglu: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    head_dim: int = 32
    vocabulary: int = VOCABULARY
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


SHAPES = {
    "1.3m": Shape(layers=3, hidden=192, heads=6, kv_heads=2, feed_forward=512),
    "8m": Shape(layers=10, hidden=256, heads=8, kv_heads=4, feed_forward=768),
}


class Layer(NamedTuple):
    """Weights as (in, out) matrices, packed or not, so that every product is one operation."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    feed_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


MATRICES = ("qkv", "out", "gate_up", "down")


class Weights(NamedTuple):
    """All that a shape leaves open, of one dtype."""

    embedding: torch.Tensor  # (vocabulary, hidden)
    layers: list[Layer]
    final_norm: torch.Tensor
    head: torch.Tensor  # (hidden, vocabulary)
    rope_factors: torch.Tensor | None = None  # (head_dim / 2,): what slows each turn down

    def to(self, dtype: torch.dtype) -> Weights:
        layers = [Layer(*(tensor.to(dtype) for tensor in layer)) for layer in self.layers]
        embedding, final_norm, head = (
            each.to(dtype) for each in (self.embedding, self.final_norm, self.head)
        )
        return Weights(embedding, layers, final_norm, head, self.rope_factors)

    @property
    def parameters(self) -> int:
        """Numbers in all of them; what is used twice is counted once."""
        matrices = [self.embedding, self.final_norm, self.head]
        distinct = {
            each.data_ptr(): each.numel()
            for each in (*matrices, *(tensor for layer in self.layers for tensor in layer))
        }
        return sum(distinct.values())


LOGIT_TOLERANCE = 1e-5  # of float32, where logits are about 1 as with the weights drawn here
PROBE_TOKENS = 24


class Llama:
    """Weights and the forward pass; attention is handed in, so paged and dense share the rest."""

    def __init__(
        self, shape: Shape, *, positions: int, seed: int = 0, weights: Weights | None = None
    ) -> None:
        """`weights` None: drawn from the seed, in float32."""
        self.shape = shape
        weights = weights or drawn(shape, seed)
        self.parameters = weights.parameters
        self.packed: list[torch.Tensor] = []
        self.embedding, self.layers, self.final_norm, self.head, factors = weights
        self.rotation = rotation(shape, positions, factors)
        if self.dtype != torch.float32:  # there are no complex numbers of 16 bits
            self.rotation = torch.view_as_real(self.rotation)
        self.tolerance = torch.tensor(LOGIT_TOLERANCE)

    def pack(self) -> None:
        """Lays all matrices out for products (packing.py), one by one; `packed` then lists them.

        In float32 only, and where packing is available.
        """
        for index, layer in enumerate(self.layers):
            matrices = {name: packing.packed(getattr(layer, name)) for name in MATRICES}
            self.layers[index] = layer._replace(**matrices)
            self.packed += matrices.values()
        self.head = packing.packed(self.head)
        self.packed.append(self.head)

    def set_tolerance(self) -> None:
        """Sets by how much two ways to the same logits may differ: rounding grows with them."""
        tokens = torch.arange(PROBE_TOKENS) * 97 % self.shape.vocabulary
        self.tolerance = torch.tensor(rounding(self.dense(tokens), self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def tensors(self) -> list[torch.Tensor]:
        """All of it as real numbers, in the order `over` takes; not of what is packed."""
        assert not self.packed
        complex_ = self.rotation.is_complex()
        turns = torch.view_as_real(self.rotation) if complex_ else self.rotation
        weights = [tensor for layer in self.layers for tensor in layer]
        return [self.embedding, self.final_norm, self.head, turns, self.tolerance, *weights]

    def over(self, tensors: Sequence[torch.Tensor]) -> Llama:
        """The same model over other tensors: what graph capture compiles."""
        other = copy.copy(self)
        other.embedding, other.final_norm, other.head, other.rotation, other.tolerance = tensors[:5]
        size = len(Layer._fields)
        other.layers = [Layer(*tensors[at : at + size]) for at in range(5, len(tensors), size)]
        return other

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        ops: Ops | None = None,
    ) -> torch.Tensor:
        """(tokens,) int64 and their positions → (tokens, hidden), before the final norm."""
        shape, ops = self.shape, ops or TORCH
        width = [shape.hidden]
        rotated_heads = shape.heads + shape.kv_heads
        all_heads = rotated_heads + shape.kv_heads
        rotation = self.rotation.index_select(0, positions).unsqueeze(1)
        x = self.embedding.index_select(0, tokens)
        for index, layer in enumerate(self.layers):
            h = ops.rms_norm(x, width, layer.attention_norm, shape.norm_eps)
            qkv = product(h, layer.qkv).view(-1, all_heads, shape.head_dim)
            qkv = ops.turned(qkv, rotated_heads, rotation)
            x = added(x, attention(index, qkv), layer.out)
            h = ops.rms_norm(x, width, layer.feed_norm, shape.norm_eps)
            x = added(x, ops.swiglu(product(h, layer.gate_up)), layer.down)
        return x

    def logits(self, hidden: torch.Tensor, ops: Ops | None = None) -> torch.Tensor:
        """(rows, hidden) → (rows, vocabulary), always float32."""
        norm, shape = (ops or TORCH).rms_norm, self.shape
        normed = norm(hidden, [shape.hidden], self.final_norm, shape.norm_eps)
        logits = product(normed, self.head)
        return logits if logits.dtype == torch.float32 else logits.float()

    @torch.inference_mode()
    def dense(self, tokens: torch.Tensor, rounded: Rounded | None = None) -> torch.Tensor:
        """The plain reference: the whole sequence at once, no cache; (tokens, vocabulary).

        With keys and values `rounded` as a cache would.
        """
        shape = self.shape

        def attention(_: int, qkv: torch.Tensor) -> torch.Tensor:
            heads = [shape.heads, shape.kv_heads, shape.kv_heads]
            q, k, v = (part.transpose(0, 1) for part in torch.split(qkv, heads, dim=1))
            if rounded is not None:
                k, v = rounded(k, v)
            out = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=1.0, enable_gqa=True
            )
            return out[0].transpose(0, 1).reshape(qkv.shape[0], -1)

        return self.logits(self.hidden(tokens, torch.arange(len(tokens)), attention))


def rounding(numbers: torch.Tensor, dtype: torch.dtype) -> float:
    """By how much two ways to these numbers may differ where both compute in `dtype`."""
    coarse = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    size = float(numbers.float().square().mean().sqrt())
    return LOGIT_TOLERANCE * coarse * max(1.0, size)


def blank(shape: Shape, dtype: torch.dtype) -> Weights:
    """Norms of ones, all else uninitialised."""

    def matrix(fan_in: int, fan_out: int) -> torch.Tensor:
        # Stored (out, in), used transposed: the layout the BLAS packs fastest.
        return torch.empty(fan_out, fan_in, dtype=dtype).t()

    head_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layers = [
        Layer(
            attention_norm=torch.ones(shape.hidden, dtype=dtype),
            qkv=matrix(shape.hidden, head_rows),
            out=matrix(shape.heads * shape.head_dim, shape.hidden),
            feed_norm=torch.ones(shape.hidden, dtype=dtype),
            gate_up=matrix(shape.hidden, 2 * shape.feed_forward),
            down=matrix(shape.feed_forward, shape.hidden),
        )
        for _ in range(shape.layers)
    ]
    embedding = torch.empty(shape.vocabulary, shape.hidden, dtype=dtype)
    final_norm = torch.ones(shape.hidden, dtype=dtype)
    return Weights(embedding, layers, final_norm, matrix(shape.hidden, shape.vocabulary))


def drawn(shape: Shape, seed: int) -> Weights:
    """float32 weights from a seed, such that every layer keeps the scale of what it gets."""
    generator = torch.Generator().manual_seed(seed)
    weights = blank(shape, torch.float32)

    def draw(matrix: torch.Tensor) -> None:
        matrix.t().normal_(generator=generator).mul_(matrix.size(0) ** -0.5)

    weights.embedding.normal_(generator=generator)
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
            draw(matrix)
        layer.qkv[:, : shape.heads * shape.head_dim] *= shape.head_dim**-0.5
    draw(weights.head)
    return weights


def turned(qkv: torch.Tensor, heads: int, rotation: torch.Tensor) -> torch.Tensor:
    """(tokens, all heads, head_dim) with adjacent pairs of the first `heads` heads turned.

    A complex `rotation` (tokens, 1, head_dim / 2) turns in place. A real one (…, 2) makes anew what
    it turns: compilers know no complex numbers.
    """
    pairs = qkv.view(*qkv.shape[:2], -1, 2)[:, :heads]
    if rotation.is_complex():
        torch.view_as_complex(pairs).mul_(rotation)
        return qkv
    (a, b), (cosine, sine) = pairs.unbind(-1), rotation.unbind(-1)
    pairs = torch.stack([a * cosine - b * sine, a * sine + b * cosine], -1)
    if pairs.dtype != qkv.dtype:
        pairs = pairs.to(qkv.dtype)
    return torch.cat([pairs.flatten(2), qkv[:, heads:]], dim=1)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """(tokens, 2 · feed_forward), gate first → (tokens, feed_forward): silu(gate) · up."""
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


TORCH = Ops(F.rms_norm, turned, swiglu)


def rotation(shape: Shape, positions: int, factors: torch.Tensor | None = None) -> torch.Tensor:
    """complex64 (positions, head_dim / 2): rotary turns of adjacent pairs (arXiv:2104.09864).

    `factors` (head_dim / 2,) divide the frequencies, as a model stretched to longer texts wants.
    """
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
    if factors is not None:
        frequency = frequency / factors.double()
    angle = torch.outer(torch.arange(positions).double(), frequency)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
