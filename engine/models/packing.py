"""Matrices laid out once the way a CPU multiplies by them.

A BLAS lays a matrix out anew for every product, and with the few rows of a decode step that is a
good part of it; oneDNN's layout is made once. Such a matrix is opaque: it goes into `product` and
`added`, and nothing else is done with it. A row of the result is the same, to the bit, whatever
other rows there are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch

CAPABILITIES = ("AVX2", "AVX512")  # where oneDNN has kernels for it in float32

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def available() -> bool:
    """Whether this CPU and this torch have it."""
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and torch.backends.cpu.get_cpu_capability() in CAPABILITIES


def packed(matrix: torch.Tensor) -> torch.Tensor:
    """(in, out) float32 → the same, opaque."""
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous())
    return found


def product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """(rows, in) · (in, out), packed or not."""
    if not matrix.is_mkldnn:
        return torch.mm(rows, matrix)
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return (_traceable() if tracing else _product)(rows, matrix)


def added(to: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`to` (rows, out) + (rows, in) · (in, out), packed or not."""
    if not matrix.is_mkldnn:
        return torch.addmm(to, rows, matrix)
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, to, matrix, None, "add")
    return found


def _product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix, None, "none", [], None)
    return found


@cache
def _traceable() -> Product:
    """`_product` as a tracer can record it: of an empty list of numbers it cannot tell the type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted: Product = torch.jit.script(_product)
    return scripted
