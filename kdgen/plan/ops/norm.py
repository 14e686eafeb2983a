"""RMSNorm of token rows, and of the rows among them that have logits."""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.plan.ir import ONE, Arg, Cost, Group, Kernel, RowKind
from kdgen.plan.ops.op import COUNT, ROW_EXTENT, Argument, Op, buffer, reads, stored, writes
from kdgen.plan.tuning import CType, block_for


@dataclass(frozen=True)
class RmsNorm:
    """Context of rmsnorm.cu.j2."""

    name: str
    width: int
    x_stride: int
    eps: float
    act: CType
    block: int
    vector: int
    row_count_ready_before_wait: bool
    chosen: bool
    cluster: int = 0


@dataclass(frozen=True)
class RmsNormOp(Op):
    """``y = rmsnorm(x) * gain`` of float32 rows ``x``, ``x_stride`` numbers apart (0: ``width``).

    ``chosen``: of the rows that ``logit_row`` lists, one after another, instead of all. ``count`` is the buffer that says how many rows
    there are; ``count_is_ready``: it was written before anything that this may overlap.
    """

    name: str
    width: int
    eps: float
    x: str
    gain: Arg
    y: str
    x_stride: int = 0
    chosen: bool = False
    count: str = "num_tokens"
    count_is_ready: bool = True
    group: Group = "norms and rows"

    @property
    def rows(self) -> RowKind:
        return "logits" if self.chosen else "tokens"

    def kernel(self) -> Kernel:
        mode, stride = self.c.mode, self.x_stride or self.width
        vector = 1 if self.width % 4 or stride % 4 else 4
        block = block_for(self.width // vector, 1024)
        p = RmsNorm(self.name, self.width, stride, self.eps, mode.act, block, vector, self.count_is_ready, self.chosen)
        cost = Cost(bytes_fixed=self.width * 4, bytes_per_row=self.width * (4 + mode.act_bytes), operations_per_row=4 * self.width)
        summary = "RMSNorm of the low-rank query" if self.x_stride else "RMSNorm of the residual"
        if self.chosen:
            summary += ", of rows that have logits"
        early = COUNT if self.count_is_ready else ()
        return Kernel(self.name, "rmsnorm.cu.j2", p, block, (ROW_EXTENT, ONE, ONE), 0, cost, summary, early=early, group=self.group)

    def arguments(self) -> tuple[Argument, ...]:
        listed = (reads("int", "row_list", buffer("logit_row")),) if self.chosen else ()
        count = buffer("num_logits" if self.chosen else self.count)
        return (
            reads("int", "num_tokens", count),
            *listed,
            reads("float", "x", buffer(self.x)),
            stored("float", "weight", self.gain),
            writes(self.c.mode.act, "y", buffer(self.y)),
        )
