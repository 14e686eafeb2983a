"""Kernels that must give the bits of other kernels: those for many rows, fused ones, and those that send their results."""

from __future__ import annotations

from collections.abc import Sequence

from kdgen.plan.ir import Kernel
from kdgen.plan.ops.outbox import Sender
from kdgen.plan.ops.same_bits import SameBits


def sends(kernel: Kernel) -> bool:
    """Whether the kernel sends its results to all ranks, instead of leaving them in a buffer."""
    return isinstance(kernel.params, Sender) and kernel.params.outbox is not None


def held_to(kernel: Kernel) -> tuple[str, ...]:
    """The names of the kernels whose bits ``kernel`` must give."""
    return kernel.params.same_bits_as if isinstance(kernel.params, SameBits) else ()


def with_those_held_to(kernels: Sequence[Kernel], wanted: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """``wanted``, and those of ``kernels`` whose bits they must give, in the order of ``kernels``."""
    others = {name for each in wanted for name in held_to(each)}
    return tuple(each for each in kernels if each in wanted or each.name in others)
