"""What several ranks put together: sums into the residual, the best token, whole rows of logits. They gather, or share memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

from kdgen.plan.ir import ONE, Arg, Cost, Extent, Gather, Kernel, Launch
from kdgen.plan.ops.dense import Sublayer
from kdgen.plan.ops.logits import Argmax, ArgmaxOp
from kdgen.plan.ops.norm import RmsNorm, RmsNormOp
from kdgen.plan.ops.op import (
    COUNT,
    ROW_EXTENT,
    Argument,
    Context,
    Op,
    buffer,
    inboxes,
    number,
    reads,
    reads_floats,
    reads_ints,
    rows_of_launch,
    stored,
    writes,
)
from kdgen.plan.ops.same_bits import SameBits
from kdgen.plan.tuning import block_for, cluster_of, column_blocks

#: Copies of a row that a rank may send in one exchange before summing on fewer ranks is quicker: where sending the rest takes as long
#: as another delay. By the bandwidth and the delay that kdgen.forecast.gpus has of NVLink; not measured.
DIRECT_COPIES = 28
AND_NORM = "_norm"  #: suffix of a sum over ranks with the norm behind it


@dataclass(frozen=True)
class RankSum:
    """Context of rank_sum.cu.j2."""

    name: str
    width: int
    ranks: int
    bias: bool
    block: int


@dataclass(frozen=True)
class PeerSum:
    """Context of peer_sum.cu.j2."""

    name: str
    width: int
    ranks: int
    direct_rows: int
    bias: bool
    block: int


@dataclass(frozen=True)
class PeerSumNorm(SameBits):
    """Context of peer_sum_norm.cu.j2."""

    name: str
    sum: str
    norm: RmsNorm
    ranks: int
    counters: int
    bias: bool

    @property
    def same_bits_as(self) -> tuple[str, ...]:
        return self.sum, self.norm.name


@dataclass(frozen=True)
class PeerArgmax:
    """Context of peer_argmax.cu.j2."""

    name: str
    part: Argmax
    ranks: int


@dataclass(frozen=True)
class PeerGather:
    """Context of peer_gather.cu.j2."""

    name: str
    width: int
    ranks: int
    block: int


@dataclass(frozen=True)
class RankChoice:
    """Context of rank_choice.cu.j2."""

    name: str
    vocab: int
    ranks: int
    block: int


@dataclass(frozen=True)
class RankLogits:
    """Context of rank_logits.cu.j2."""

    name: str
    vocab: int
    ranks: int
    block: int


Gathered = Literal[Sublayer, "choice", "logits"]  #: what ranks gather: parts of a sum, tokens chosen, or logits


def gather_name(what: Gathered) -> str:
    """The collective that gathers ``what``."""
    return f"gather_{what}"


@dataclass(frozen=True)
class GatherOp(Op):
    """A collective without a kernel: the backend gathers."""

    what: Gathered

    def gather(self) -> Gather:
        hidden, vocab = self.c.spec.hidden_size, self.c.spec.vocab_size
        source, target, row_bytes = {
            "attention": ("attention_part", "parts", 4 * hidden),
            "mlp": ("mlp_part", "parts", 4 * hidden),
            "choice": ("choice", "choices", 8),
            "logits": ("logits", "logits_parts", 4 * vocab),
        }[self.what]
        return Gather(gather_name(self.what), source, target, row_bytes)

    def kernel(self) -> Kernel:
        raise NotImplementedError

    def arguments(self) -> tuple[Argument, ...]:
        return ()

    def lowered(self) -> tuple[None, Launch]:
        return None, Launch(self.gather().name, (), self.rows)


def _places(c: Context, inbox: str, parameter: str, rows: int) -> tuple[Argument, ...]:
    """Where other ranks' words are, and how many rows that memory has."""
    return inboxes(inbox), number("my_rank", c.shard.rank), number(parameter, rows)


@dataclass(frozen=True)
class RankSumOp(Op):
    """The ranks' parts of ``what`` added to the residual, with the bias that belongs to their sum. ``count`` says how many rows."""

    what: Sublayer
    bias: Arg | None = None
    count: str = "num_tokens"

    @property
    def by_peers(self) -> bool:
        return self.c.shard.exchange == "peer"

    def kernel(self) -> Kernel:
        name, width, ranks = "rank_sum_bias" if self.bias else "rank_sum", self.c.spec.hidden_size, self.c.shard.ranks
        block, bias = block_for(width), self.bias is not None
        cost = Cost(bytes_fixed=width * 4 if bias else 0, bytes_per_row=width * 4 * (ranks + 2), operations_per_row=width * ranks)
        grid = (ROW_EXTENT, Extent(column_blocks(width)), ONE)
        summary = "the ranks' partial results added to the residual"
        if self.by_peers:
            peer = PeerSum(name, width, ranks, DIRECT_COPIES // (ranks - 1), bias, block)
            return Kernel(name, "peer_sum.cu.j2", peer, block, grid, 0, cost, f"{summary}, through their memory", group="sums over ranks")
        return Kernel(
            name, "rank_sum.cu.j2", RankSum(name, width, ranks, bias, block), block, grid, 0, cost, summary, group="sums over ranks"
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        count = reads("int", "num_tokens", buffer(self.count))
        end = *((stored("float", "bias", self.bias),) if self.bias else ()), writes("float", "residual")
        if not self.by_peers:
            return count, reads("float", "gathered", buffer("parts")), rows_of_launch(), *end
        return count, reads("float", "part", buffer(f"{self.what}_part")), *self.exchange(), *end

    def exchange(self) -> tuple[Argument, ...]:
        return *_places(self.c, "inbox_sum", "rows", self.c.limits.max_rows), writes("int", "rounds", buffer("rounds_sum"))


@dataclass(frozen=True)
class SumAndNormOp(Op):
    """A sum over ranks and the norm behind it in one launch, for few rows; what computes the parts has sent them."""

    sum: RankSumOp
    norm: RmsNormOp

    def kernel(self) -> Kernel:
        added, norm = self.sum.kernel(), self.norm.kernel()
        peer, blocks = cast(PeerSum, added.params), cluster_of(norm.block)
        normed = replace(cast(RmsNorm, norm.params), cluster=blocks)
        p = PeerSumNorm(added.name + AND_NORM, added.name, normed, self.c.shard.ranks, column_blocks(peer.width), peer.bias)
        cost, summary = added.cost + norm.cost, f"{added.summary}, and its RMSNorm, for few rows"
        early = (*COUNT, "inboxes", "rounds", "residual")
        return Kernel(
            p.name, "peer_sum_norm.cu.j2", p, norm.block, norm.grid, 0, cost, summary, cluster=blocks, early=early, group="sums over ranks",
            timing="behind its sender",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        bias = (stored("float", "bias", self.sum.bias),) if self.sum.bias else ()
        return (
            reads("int", "num_tokens", buffer(self.sum.count)),
            *self.sum.exchange(),
            *bias,
            writes("float", "residual"),
            stored("float", "weight", self.norm.gain),
            writes(self.c.mode.act, "y", buffer(self.norm.y)),
        )


@dataclass(frozen=True)
class PeerArgmaxOp(Op):
    """The best token of each row over the ranks, through their memory. ``most``: rows that a step chooses for."""

    most: int

    def kernel(self) -> Kernel:
        argmax, ranks = ArgmaxOp(self.c).kernel(), self.c.shard.ranks
        p = PeerArgmax("rank_argmax", cast(Argmax, argmax.params), ranks)
        cost, summary = argmax.cost + Cost(bytes_per_row=2 * (4 + 12 * ranks)), "greedy choice over the ranks, through their memory"
        return Kernel(
            p.name, "peer_argmax.cu.j2", p, argmax.block, argmax.grid, 0, cost, summary, cluster=argmax.cluster, early=argmax.early,
            group="sums over ranks",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("num_tokens"),
            *reads_floats("logits"),
            number("first_token", self.c.shard.rank * self.c.spec.vocab_size),
            *_places(self.c, "inbox_choice", "rows", self.most),
            writes("int", "rounds", buffer("rounds_choice")),
            writes("int", "next_token"),
        )


@dataclass(frozen=True)
class RankChoiceOp(Op):
    """The best token of each row among the ranks' best ones, which were gathered."""

    def kernel(self) -> Kernel:
        ranks = self.c.shard.ranks
        p, grid = RankChoice("rank_choice", self.c.whole.vocab_size, ranks, 32), (Extent(per_tokens=32), ONE, ONE)
        return Kernel(
            "rank_choice", "rank_choice.cu.j2", p, 32, grid, 0, Cost(bytes_per_row=8 * ranks + 4, operations_per_row=ranks),
            "greedy choice over the ranks", group="sums over ranks",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        gathered = reads("int", "gathered", buffer("choices"))
        return *reads_ints("num_tokens"), gathered, rows_of_launch(), writes("int", "next_token")


@dataclass(frozen=True)
class PeerGatherOp(Op):
    """Every rank's logits, one rank after another, through their memory. ``most``: rows that a step has logits of."""

    most: int

    def kernel(self) -> Kernel:
        width, ranks = self.c.spec.vocab_size, self.c.shard.ranks
        block = block_for(width)
        p, grid = PeerGather("gather_logits", width, ranks, block), (ROW_EXTENT, Extent(column_blocks(width)), ONE)
        cost = Cost(bytes_per_row=width * (4 + 12 * ranks))
        return Kernel(
            p.name, "peer_gather.cu.j2", p, block, grid, 0, cost, "rows of every rank, through its memory", group="sums over ranks"
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("num_tokens"),
            reads("float", "part", buffer("logits")),
            *_places(self.c, "inbox_logits", "inbox_rows", self.most),
            rows_of_launch(),
            writes("int", "rounds", buffer("rounds_logits")),
            writes("float", "gathered", buffer("logits_parts")),
        )


@dataclass(frozen=True)
class RankLogitsOp(Op):
    """The ranks' logits as whole rows, in the buffer ``target``."""

    target: str

    def kernel(self) -> Kernel:
        vocab, ranks = self.c.spec.vocab_size, self.c.shard.ranks
        block = block_for(vocab)
        p, grid = RankLogits("rank_logits", vocab, ranks, block), (ROW_EXTENT, Extent(-(-vocab // block)), Extent(ranks))
        return Kernel(
            "rank_logits", "rank_logits.cu.j2", p, block, grid, 0, Cost(bytes_per_row=8 * vocab * ranks), "the ranks' logits as rows",
            group="sums over ranks",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        gathered = reads("float", "gathered", buffer("logits_parts"))
        return *reads_ints("num_tokens"), gathered, rows_of_launch(), writes("float", "joined", buffer(self.target))


def whole_logits(c: Context, target: str, most: int) -> tuple[Op, ...]:
    """The ranks' logits as whole rows in the buffer ``target``. ``most``: rows that a step has logits of."""
    gather: Op = GatherOp(c, "logits") if c.shard.exchange == "gather" else PeerGatherOp(c, most)
    return gather, RankLogitsOp(c, target)


def summed(c: Context, what: Sublayer, bias: Arg | None = None, count: str = "num_tokens") -> tuple[Op, ...]:
    """The ranks' parts of ``what`` into the residual, of as many token rows as the buffer ``count`` says."""
    added = RankSumOp(c, what, bias, count)
    return (added,) if added.by_peers else (GatherOp(c, what), added)
