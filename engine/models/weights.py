"""From a file's tensors to the model's: checked, joined, turned, of one dtype.

What the model uses as the file has it stays a view of the mapped file: pages come in when they
are first read, and the system may drop them. Only what is joined (query, key and value; gate and
up) or of another dtype is copied, straight to where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.models.errors import ModelError
from engine.models.llama import Layer, Shape, Weights

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

Said = Callable[[int, int], None]
"""(layers read, of how many)"""


class Tensors(Protocol):
    """The tensors of a file by name."""

    @property
    def file(self) -> str:
        """For errors."""

    def names(self) -> Collection[str]: ...

    def read(self, name: str) -> torch.Tensor:
        """Of a floating dtype, (out, in); a view of the file where that holds it so."""


@dataclass(frozen=True)
class Names:
    """What a format calls its tensors; {} is the layer. `unread`: endings of what is not needed.

    `halves`: a head's first half is turned with its second, as in Hugging Face's files. Else
    neighbours are, as here and in Meta's own; llama.cpp's converter turns the rows back to that.
    """

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    query: str
    key: str
    value: str
    out: str
    feed_norm: str
    gate: str
    up: str
    down: str
    halves: bool
    factors: str = ""
    unread: tuple[str, ...] = ()


def assemble(
    shape: Shape, tensors: Tensors, names: Names, dtype: torch.dtype, said: Said
) -> Weights:
    """Raises ModelError for a tensor that is missing, of another shape or dtype, or not known."""
    return _Assembly(shape, tensors, names, dtype).weights(said)


class _Assembly:
    def __init__(self, shape: Shape, tensors: Tensors, names: Names, dtype: torch.dtype) -> None:
        self.shape, self.tensors, self.names, self.dtype = shape, tensors, names, dtype
        self.there = set(tensors.names())
        self.left = set(self.there)

    def weights(self, said: Said) -> Weights:
        shape, names = self.shape, self.names
        embedding = self.one(names.embedding, shape.vocabulary, shape.hidden)
        # Tied embeddings: the head is the embedding.
        head = embedding
        if names.head in self.there:
            head = self.one(names.head, shape.vocabulary, shape.hidden)
        factors = None
        if names.factors in self.there:
            factors = self.read(names.factors, (shape.head_dim // 2,)).float()
        layers = []
        for layer in range(shape.layers):
            layers.append(self.layer(layer))
            said(layer + 1, shape.layers)
        final_norm = self.one(names.final_norm, shape.hidden)
        self.check_left()
        return Weights(embedding, layers, final_norm, head.t(), factors)

    def layer(self, layer: int) -> Layer:
        shape, names = self.shape, self.names
        hidden, dim = shape.hidden, shape.head_dim
        query, key = shape.heads * dim, shape.kv_heads * dim
        qkv = self.joined(layer, hidden, (names.query, query), (names.key, key), (names.value, key))
        if names.halves:
            for rows in (qkv[:query], qkv[query : query + key]):
                rows.copy_(neighbours(rows, dim))
        qkv[:query] *= dim**-0.5
        gate_up = self.joined(
            layer, hidden, (names.gate, shape.feed_forward), (names.up, shape.feed_forward)
        )
        return Layer(
            attention_norm=self.one(names.attention_norm.format(layer), hidden),
            qkv=qkv.t(),
            out=self.one(names.out.format(layer), hidden, query).t(),
            feed_norm=self.one(names.feed_norm.format(layer), hidden),
            gate_up=gate_up.t(),
            down=self.one(names.down.format(layer), hidden, shape.feed_forward).t(),
        )

    def one(self, name: str, *want: int) -> torch.Tensor:
        return self.read(name, want).to(self.dtype)

    def joined(self, layer: int, width: int, *parts: tuple[str, int]) -> torch.Tensor:
        """(all rows, width): the parts one below the other."""
        target = torch.empty(sum(rows for _, rows in parts), width, dtype=self.dtype)
        at = 0
        for name, rows in parts:
            target[at : at + rows].copy_(self.read(name.format(layer), (rows, width)))
            at += rows
        return target

    def read(self, name: str, want: tuple[int, ...]) -> torch.Tensor:
        if name not in self.there:
            raise ModelError(f"{self.tensors.file}: {name}: no such tensor, want {want}")
        self.left.discard(name)
        tensor = self.tensors.read(name)
        if tensor.shape != want:
            raise ModelError.of(self.tensors.file, f"{name}: shape", tuple(tensor.shape), f"{want}")
        if tensor.dtype not in FLOATS:
            raise ModelError.of(self.tensors.file, f"{name}: dtype", tensor.dtype, FLOATS)
        return tensor

    def check_left(self) -> None:
        """What is left over would change the answers: a bias, a norm of heads, experts."""
        left = sorted(name for name in self.left if not name.endswith(self.names.unread))
        if left:
            raise ModelError(
                f"{self.tensors.file}: {left[0]}: a Llama has no such tensor "
                f"({len(left)} of {len(self.there)} are not known)"
            )


def neighbours(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows of each head (dim of them) from (half, pair) to (pair, half)."""
    width = rows.size(1)
    return rows.view(-1, 2, dim // 2, width).transpose(1, 2).reshape(-1, width)


def positive(file: object, field: str, value: object) -> float:
    """A number of a file that is above 0 and finite; raises ModelError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError.of(file, field, value, "finite numbers above 0")
    return float(value)


def check_shape(shape: Shape, file: object) -> None:
    """Raises ModelError where the numbers make no model."""
    if shape.heads % shape.kv_heads:
        allowed = f"divisors of its {shape.heads} attention heads"
        raise ModelError.of(file, "key-value heads", shape.kv_heads, allowed)
    if shape.head_dim % 2:
        raise ModelError.of(file, "head_dim", shape.head_dim, "even numbers")
