"""How kernels are written and launched, without Triton until the first one is.

A kernel is a plain function under `Kernel`. Its launch runs it on the GPU its tensors are on, or on
a CPU in Triton's interpreter (numpy, one program after another) where TRITON_INTERPRET=1 was set
before Python started. Under `recorded` nothing runs: build.py compiles what would have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NEEDED = "triton==3.7.1"


class Launch(NamedTuple):
    """One launch: `arguments` by name (tensors, numbers), then what is constant for the kernel."""

    kernel: Kernel
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int


class Kernel:
    """A function in Triton's language, whose name `tl` means Triton from the first launch on."""

    record: list[Launch] | None = None

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.name = function.__name__.strip("_")

    @cached_property
    def jit(self) -> Any:
        """The function as Triton's; raises what `triton` raises."""
        self.function.__globals__["tl"] = triton().language
        return triton().jit(self.function)

    def launch(
        self,
        grid: tuple[int, ...],
        *arguments: torch.Tensor | float,
        warps: int = 4,
        stages: int = 2,
        **constants: Any,
    ) -> None:
        """Runs a grid of programs; none where it is empty.

        Raises ValueError for tensors on several devices, RuntimeError for a device without Triton.
        """
        if Kernel.record is not None:
            named = dict(zip(inspect.signature(self.function).parameters, arguments, strict=False))
            Kernel.record.append(Launch(self, named, constants, warps, stages))
            return
        devices = {each.device for each in arguments if isinstance(each, torch.Tensor)}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"{self.name}: got tensors on {names}, allowed: one device")
        if not interpreted() and next(iter(devices)).type != "cuda":
            raise RuntimeError(
                f"{self.name}: got tensors on {next(iter(devices))}, allowed: a CUDA device, or "
                "any with TRITON_INTERPRET=1 set before Python starts"
            )
        if 0 not in grid:
            self.jit[grid](*arguments, **constants, num_warps=warps, num_stages=stages)


@cache
def triton() -> Any:
    """The package; raises ImportError without it, RuntimeError where only half of it interprets."""
    try:
        import triton as package
    except ImportError as error:
        raise ImportError(f"Triton kernels need {NEEDED}: pip install '.[kernels]'") from error
    if package.knobs.runtime.interpret == isinstance(package.language.sum, package.JITFunction):
        raise RuntimeError("TRITON_INTERPRET changed after Triton was imported: set it before")
    return package


def interpreted() -> bool:
    """Whether launches run in the interpreter: no launch costs little, and no tile is too large."""
    return Kernel.record is None and bool(triton().knobs.runtime.interpret)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches inside are listed instead of run, so tensors may be on torch's `meta` device."""
    launches: list[Launch] = []
    Kernel.record = launches
    try:
        yield launches
    finally:
        Kernel.record = None


def power(size: int) -> int:
    """The least power of two that is not below `size`: the sizes Triton's tiles have."""
    return 1 << max(size - 1, 0).bit_length()


def check(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> None:
    """Raises ValueError unless shape and dtype are as allowed; names in `shape` stand for any size.

    Elements of the last dimension must be neighbours: kernels read them as one.
    """
    fits = tensor.dim() == len(shape) and all(
        isinstance(wanted, str) or size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = ", ".join(map(str, shape))
        got = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        raise ValueError(f"{name}: got {got}, allowed: {kinds} of shape ({sizes})")
    if tensor.dim() and tensor.size(-1) > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: got a last stride of {tensor.stride(-1)}, allowed: 1 (call contiguous())"
        )
