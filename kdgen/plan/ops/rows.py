"""The rows of a step: where they stand, which have logits, their embeddings, and the commit of what was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kdgen.plan.ir import ONE, Cost, Extent, Kernel
from kdgen.plan.ops.op import ROW_EXTENT, Argument, Op, buffer, number, reads, reads_ints, stored, weight, writes, writes_ints
from kdgen.plan.ops.outbox import Outbox, Sender, outbox_of, sends
from kdgen.plan.tuning import block_for, column_blocks


@dataclass(frozen=True)
class ChainRows:
    """Context of chain_rows.cu.j2."""

    name: str
    block: int


@dataclass(frozen=True)
class LogitRows:
    """Context of logit_rows.cu.j2."""

    name: str
    block: int


@dataclass(frozen=True)
class Advance:
    """Context of advance.cu.j2."""

    name: str


@dataclass(frozen=True)
class Embed(Sender):
    """Context of embed.cu.j2."""

    name: str
    hidden: int
    rows: int
    sharded: bool
    block: int
    outbox: Outbox | None = None


@dataclass(frozen=True)
class ChainRowsOp(Op):
    """Where each of a run of tokens stands: those that the host wrote, or with ``from_root`` the sequences' root tokens."""

    from_root: bool

    def kernel(self) -> Kernel:
        p, cost = ChainRows("chain_rows", 64), Cost(bytes_per_row=16)
        return Kernel(
            "chain_rows", "chain_rows.cu.j2", p, 64, (ONE, ONE, ONE), 0, cost, "row metadata of runs of tokens", timing="in steps"
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("step_count step_sequence"),
            *writes_ints("step_begin num_tokens tokens"),
            *reads_ints("sequence_length root_token"),
            *writes_ints("row_sequence row_position row_prefix row_slot"),
            number("from_root", int(self.from_root)),
        )


@dataclass(frozen=True)
class LogitRowsOp(Op):
    """Which rows of a prefill have logits: as many of each sequence's last ones as the host asks for."""

    def kernel(self) -> Kernel:
        p, cost = LogitRows("logit_rows", 64), Cost(bytes_per_row=20)
        return Kernel("logit_rows", "logit_rows.cu.j2", p, 64, (ONE, ONE, ONE), 0, cost, "token rows that have logits")

    def arguments(self) -> tuple[Argument, ...]:
        read = reads_ints("step_count step_begin logit_begin row_sequence row_position")
        return *read, *writes_ints("num_logits logit_row logit_sequence logit_position")


@dataclass(frozen=True)
class AdvanceOp(Op):
    """The step's tokens committed: lengths grow, and what was chosen becomes the roots. ``begin`` says where each place's choices begin."""

    begin: Literal["step_begin", "logit_begin"]

    def kernel(self) -> Kernel:
        return Kernel(
            "advance", "advance.cu.j2", Advance("advance"), 32, (ONE, ONE, ONE), 0, Cost(), "commits runs of tokens", timing="in steps"
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        begin = reads("int", "logit_begin", buffer(self.begin))
        steps = reads_ints("step_count step_sequence step_begin")
        return *steps, begin, *reads_ints("next_token"), *writes_ints("sequence_length root_token")


@dataclass(frozen=True)
class EmbedOp(Op):
    """The step's tokens into the residual. A rank has a part of the table: it writes its part of a sum over ranks, or sends that."""

    outbox: bool = False

    def kernel(self) -> Kernel:
        s, block = self.c.spec, block_for(self.c.spec.hidden_size)
        p = Embed("embed", s.hidden_size, s.vocab_size, not self.c.shard.whole, block)
        cost = Cost(bytes_per_row=s.hidden_size * (4 + (4 if s.dtype == "float32" else 2)))
        grid = (ROW_EXTENT, Extent(column_blocks(s.hidden_size)), ONE)
        kernel = Kernel("embed", "embed.cu.j2", p, block, grid, 0, cost, "token embedding into the residual", group="embedding and logits")
        return outbox_of(kernel, self.c) if self.outbox else kernel

    def arguments(self) -> tuple[Argument, ...]:
        c = self.c
        ctype = "float" if c.spec.dtype == "float32" else "bf16"
        part: tuple[Argument, ...] = ()
        if not c.shard.whole:
            target = sends(c) if self.outbox else (writes("float", "y", buffer("mlp_part")),)
            part = (number("first_token", c.shard.rank * c.spec.vocab_size), *target)
        return *reads_ints("num_tokens tokens"), stored(ctype, "table", weight("embed_tokens")), *part, writes("float", "residual")
