"""What the pool keeps of keys and values: floats of any width, or codes of the values.

A code is round(value / scale); a scale is the largest of its group / 127 (int8) or / 7 (int4), as
in kernels/quant.py. A token comes alone, so what shares a scale comes with it: a group is the
values of one token, of as many heads as have GROUP_VALUES together. Keys stay floats: an error in a
key moves the whole softmax, one in a value only its own share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.kernels.quant import LARGEST, codes_reference, packed, unpacked

GROUP_VALUES = 256  # at most, that share a scale
SCALES = torch.bfloat16  # the range of float32; rounding one moves no code beyond the largest


class Part(NamedTuple):
    """Of keys, values or scales what is kept of a token: `width` numbers for each of `heads`.

    Of scales the heads are groups.
    """

    heads: int
    width: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of one head."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Format:
    """`dtype` of the keys, and of the values unless they are codes of `bits`."""

    dtype: torch.dtype
    bits: int = 0

    @classmethod
    def of(cls, name: str, compute: torch.dtype) -> Format:
        """From the knob's value; "auto" is what the model computes in."""
        if name == "auto":
            return cls(compute)
        dtype, _, bits = name.partition("_int")
        return cls(getattr(torch, dtype), int(bits or 0))

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}_int{self.bits}" if self.bits else dtype

    def exact(self, compute: torch.dtype) -> bool:
        """Whether what was computed in that dtype comes back as it was."""
        return not self.bits and torch.promote_types(self.dtype, compute) == self.dtype

    def groups(self, kv_heads: int, head_dim: int) -> int:
        """Scales of a token."""
        together = max(1, GROUP_VALUES // head_dim)
        return next(
            n for n in range(1, kv_heads + 1) if not kv_heads % n and kv_heads <= n * together
        )

    def parts(self, kv_heads: int, head_dim: int) -> list[Part]:
        """What is kept of a token. Raises ValueError for an odd head_dim with int4."""
        key = Part(kv_heads, head_dim, self.dtype)
        if not self.bits:
            return [key, key]
        if self.bits == 4 and head_dim % 2:
            raise ValueError(f"head_dim: got {head_dim}, allowed with int4 values: even")
        value = Part(kv_heads, head_dim * self.bits // 8, torch.int8)
        return [key, value, Part(self.groups(kv_heads, head_dim), 1, SCALES)]

    def token_bytes(self, layers: int, kv_heads: int, head_dim: int) -> int:
        """What the KV of one token takes."""
        return layers * sum(part.heads * part.bytes for part in self.parts(kv_heads, head_dim))

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        """The parts (heads, tokens, width) of keys and values (kv_heads, tokens, head_dim)."""
        key = cast(key, self.dtype)
        if not self.bits:
            return [key, cast(value, self.dtype)]
        kv_heads, tokens, head_dim = value.shape
        groups = self.groups(kv_heads, head_dim)
        grouped = value.float().reshape(groups, kv_heads // groups, tokens, head_dim)
        scales = (grouped.abs().amax((1, 3), keepdim=True) / LARGEST[self.bits]).to(SCALES)
        codes = codes_reference(grouped, scales.float()).flatten(0, 1)
        coded = packed(codes) if self.bits == 4 else codes.to(torch.int8)
        return [key, coded, scales.squeeze(1)]

    def decode(
        self, parts: list[torch.Tensor], compute: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (…, kv_heads, tokens, head_dim) of that dtype from their parts."""
        key, value, *scales = parts
        if scales:
            codes = unpacked(value) if self.bits == 4 else value
            together = value.size(-3) // scales[0].size(-3)
            value = codes.to(compute) * scales[0].to(compute).repeat_interleave(together, -3)
        return cast(key, compute), cast(value, compute)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor.to`, which leaves an operation in a captured graph even where there is none to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
