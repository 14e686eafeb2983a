"""Kernels that must give the bits of others: a kernel for many rows, one that stands for two launches, one that sends its results."""

from __future__ import annotations

from collections.abc import Sequence

from kdgen.plan.ir import Kernel
from kdgen.plan.ops.attention_combine import CombineAndHeads
from kdgen.plan.ops.outbox import unsent
from kdgen.plan.ops.ranks import PeerSumNorm


def sends(kernel: Kernel) -> bool:
    """Whether the kernel sends its results to all ranks, instead of leaving them in a buffer."""
    return getattr(kernel.params, "outbox", None) is not None


def held_to(kernel: Kernel) -> tuple[str, ...]:
    """The names of the kernels whose bits ``kernel`` must give."""
    p = kernel.params
    if isinstance(p, PeerSumNorm):
        return p.sum, p.norm.name
    if isinstance(p, CombineAndHeads):
        return p.combine, p.linear
    if sends(kernel):
        return (unsent(kernel.name),)
    decode: str | None = getattr(p, "decode", None)
    return (decode,) if decode else ()


def with_those_held_to(kernels: Sequence[Kernel], wanted: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """``wanted`` and, from among ``kernels``, those whose bits these must give. The order is that of ``kernels``."""
    beside = {name for each in wanted for name in held_to(each)}
    return tuple(each for each in kernels if each in wanted or each.name in beside)
