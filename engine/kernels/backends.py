"""The two attention backends: torch, and Triton, which is imported when it is asked for."""

from __future__ import annotations

import torch

from engine.kernels import attention, lang
from engine.kernels.interface import AttentionBackend, Batch, PagedKV
from engine.kernels.store import store, store_reference


class TorchBackend:
    """Gathers each sequence's context, then dense attention: any device, no Triton."""

    name = "torch"

    def store(self, kv: PagedKV, batch: Batch, key: torch.Tensor, value: torch.Tensor) -> None:
        store_reference(kv, batch.slots, key, value)

    def decode(self, query: torch.Tensor, kv: PagedKV, batch: Batch, scale: float) -> torch.Tensor:
        return attention.attend_reference(query, kv, batch, scale)

    def prefill(self, query: torch.Tensor, kv: PagedKV, batch: Batch, scale: float) -> torch.Tensor:
        return attention.attend_reference(query, kv, batch, scale)


class TritonBackend:
    """A GPU, or any device with TRITON_INTERPRET=1. Raises ImportError where Triton is missing."""

    name = "triton"

    def __init__(self) -> None:
        lang.triton()

    def store(self, kv: PagedKV, batch: Batch, key: torch.Tensor, value: torch.Tensor) -> None:
        store(kv, batch.slots, key, value)

    def decode(self, query: torch.Tensor, kv: PagedKV, batch: Batch, scale: float) -> torch.Tensor:
        return attention.decode(query, kv, batch, scale)

    def prefill(self, query: torch.Tensor, kv: PagedKV, batch: Batch, scale: float) -> torch.Tensor:
        return attention.prefill(query, kv, batch, scale)


BACKENDS: dict[str, type[TorchBackend | TritonBackend]] = {
    backend.name: backend for backend in (TorchBackend, TritonBackend)
}


def backend(name: str) -> AttentionBackend:
    """The backend of that name. Raises ValueError for none such, ImportError without Triton."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend: got {name!r}, allowed: {', '.join(BACKENDS)}")
    return BACKENDS[name]()
