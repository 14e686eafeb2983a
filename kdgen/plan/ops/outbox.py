"""Outboxes: kernels whose results are a rank's part of a sum, and that send them to every rank instead of leaving them in a buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from kdgen.plan.ir import Cost, Kernel
from kdgen.plan.ops.op import Argument, Context, buffer, inboxes, number, reads
from kdgen.plan.ops.same_bits import SameBits
from kdgen.plan.tuning import column_blocks

TO_RANKS = "_to_ranks"  #: suffix of a kernel that sends its part of a sum to all ranks


@dataclass(frozen=True)
class Outbox:
    """Context of outbox.cuh.j2: the memory of every rank, where results go that are a rank's part of a sum. A row has ``width`` words and
    ``counters`` rounds."""

    ranks: int
    width: int
    counters: int


class Sender(SameBits):
    """Base of the context of a kernel that may have an outbox: then it sends the bits that the kernel without one leaves in a buffer."""

    name: str
    outbox: Outbox | None

    @property
    def same_bits_as(self) -> tuple[str, ...]:
        return (self.name.removesuffix(TO_RANKS),) if self.outbox else ()


def outbox_of(kernel: Kernel, c: Context) -> Kernel:
    """``kernel``, whose context has an ``outbox``, as the one that sends its results to all ranks."""
    width, ranks = c.spec.hidden_size, c.shard.ranks
    box = Outbox(ranks, width, column_blocks(width))
    name = kernel.name + TO_RANKS
    params = replace(cast(Any, kernel.params), name=name, outbox=box)
    cost = kernel.cost + Cost(bytes_per_row=width * (8 * ranks - 4))
    return replace(kernel, name=name, params=params, cost=cost, summary=f"{kernel.summary}, sent to all ranks")


def sends(c: Context) -> tuple[Argument, ...]:
    """What a kernel with an outbox is given instead of an output."""
    rounds = reads("int", "rounds", buffer("rounds_sum"))
    return inboxes("inbox_sum"), number("my_rank", c.shard.rank), number("rows", c.limits.max_rows), rounds
