"""Choices from logits: the best token of each row, or one drawn by seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kdgen.plan.ir import ONE, Cost, Kernel, Launch, RowKind
from kdgen.plan.ops.op import ROW_EXTENT, Argument, Op, buffer, number, reads, reads_floats, reads_ints, writes
from kdgen.plan.tuning import block_for, cluster_of


@dataclass(frozen=True)
class Argmax:
    """Context of argmax.cu.j2."""

    name: str
    vocab: int
    sharded: bool
    block: int
    vector: int
    cluster: int


@dataclass(frozen=True)
class Sample:
    """Context of sample.cu.j2."""

    name: str
    vocab: int
    block: int


@dataclass(frozen=True)
class ArgmaxOp(Op):
    """The best token of each row, ties to the lowest id; a rank's best token and its logit, where ranks divide the vocabulary."""

    def kernel(self) -> Kernel:
        vocab, block = self.c.spec.vocab_size, block_for(self.c.spec.vocab_size // 4, 1024)
        p = Argmax("argmax", vocab, not self.c.shard.whole, block, 1 if vocab % 4 else 4, cluster_of(block))
        grid, cost = (ROW_EXTENT, ONE, ONE), Cost(bytes_per_row=vocab * 4, operations_per_row=vocab)
        return Kernel(
            "argmax", "argmax.cu.j2", p, block, grid, 0, cost, "greedy choice", cluster=p.cluster, early=("num_tokens",),
            group="embedding and logits",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        read = (*reads_ints("num_tokens"), *reads_floats("logits"))
        if self.c.shard.whole:
            return *read, writes("int", "next_token")
        return *read, number("first_token", self.c.shard.rank * self.c.spec.vocab_size), writes("int", "choice")


@dataclass(frozen=True)
class SampleOp(Op):
    """A token drawn by its sequence's seed for rows with a temperature, from whole rows of logits in the buffer ``logits``."""

    logits: str

    def kernel(self) -> Kernel:
        vocab, block = self.c.whole.vocab_size, block_for(self.c.whole.vocab_size // 4, 1024)
        p = Sample("sample", vocab, block)
        cost = Cost(bytes_per_row=40)  # greedy rows, which return at once; a drawn row reads its logits some 30 times, from L2
        return Kernel(
            "sample", "sample.cu.j2", p, block, (ROW_EXTENT, ONE, ONE), 0, cost, "seeded choice for rows with a temperature",
            group="embedding and logits",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("num_tokens"),
            reads("float", "logits", buffer(self.logits)),
            *reads_ints("row_sequence row_position"),
            *reads_floats("temperature"),
            *reads_ints("top_k"),
            *reads_floats("top_p min_p"),
            *reads_ints("seed"),
            writes("int", "next_token"),
        )


@dataclass(frozen=True)
class OfLogitRowsOp(Op):
    """``op`` over the rows that have logits, instead of all token rows."""

    op: Op

    @property
    def rows(self) -> RowKind:
        return "logits"

    def kernel(self) -> Kernel:
        return self.op.kernel()

    def arguments(self) -> tuple[Argument, ...]:
        rows_of = {"num_tokens": "num_logits", "row_sequence": "logit_sequence", "row_position": "logit_position"}
        found = self.op.arguments()
        return tuple(replace(each, value=replace(each.value, name=rows_of.get(each.value.name, each.value.name))) for each in found)

    def lowered(self) -> tuple[Kernel | None, Launch]:
        kernel, launch = self.op.lowered()
        return (kernel, replace(launch, rows="logits")) if kernel is None else super().lowered()
