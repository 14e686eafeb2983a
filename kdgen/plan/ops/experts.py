"""Routed experts: their two layers over the rows that chose them, and the weighted sum of what they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kdgen.plan.arch import smem_limit
from kdgen.plan.expert_tiling import (
    COST_PER_ASSIGNMENT,
    COST_PER_PASS,
    EXPERT_TOKEN_TILES,
    MEMORY_BOUND_ASSIGNMENTS,
    expert_split,
)
from kdgen.plan.formats import TILE_ROWS, Format, expert_format
from kdgen.plan.ir import ONE, Cost, Extent, Kernel
from kdgen.plan.ops.op import COUNT, ROW_EXTENT, Argument, Op, buffer, layer_weight, reads, reads_floats, reads_ints, stored, writes
from kdgen.plan.ops.outbox import Outbox, Sender, outbox_of, sends
from kdgen.plan.tuning import GENERIC_TOKENS, CType, block_for, input_slices

#: The lists of experts that have assignments. The kernel that makes them lets the next one begin only when they are complete.
LISTS = ("num_active", "active_expert", "active_begin", "active_end")


@dataclass(frozen=True)
class ExpertsF32:
    """Context of experts_f32.cu.j2."""

    name: str
    rows: int
    cols: int
    assignments_per_x_row: int
    slices: int
    tokens: int
    weight: str  #: the C++ type of what ``weight`` points to
    int4: bool
    group_size: int
    gated: bool
    weight_comment: str


@dataclass(frozen=True)
class ExpertsMma:
    """Context of experts_mma.cu.j2."""

    name: str
    experts: int
    rows: int
    cols: int
    assignments_per_x_row: int
    warps: int
    groups: int
    token_tiles: int
    row_tiles_at_once: int
    memory_bound: int
    cost_per_assignment: int
    cost_per_pass: int
    stage_steps: int
    slots: int
    step_bytes: int
    x_in_registers: bool
    blocks_per_sm: int
    int4: bool
    half_step: bool  #: the last INT4 step of a row has inputs for its first half alone
    out: CType
    gated: bool
    reads_before_wait: bool  #: inputs and lists are complete before the kernel before this one begins
    weight_comment: str


@dataclass(frozen=True)
class MoeCombine(Sender):
    """Context of moe_combine.cu.j2."""

    name: str
    hidden: int
    top_k: int
    accumulate: bool
    block: int
    outbox: Outbox | None = None


@dataclass(frozen=True)
class ExpertsOp(Op):
    """One layer of the routed experts: ``gate_up`` with silu(gate) * up, over the rows' hidden vectors, or ``down``, over its outputs."""

    which: Literal["gate_up", "down"]

    @property
    def format(self) -> Format:
        return expert_format(self.c.spec, self.c.mode)

    def kernel(self) -> Kernel:
        s = self.c.spec
        if self.which == "gate_up":
            summary = "routed SwiGLU: silu(gate) * up"
            return self._kernel("experts_gate_up", 2 * s.moe_intermediate_size, s.hidden_size, s.num_experts_per_tok, summary)
        return self._kernel("experts_down", s.hidden_size, s.moe_intermediate_size, 1, "routed expert outputs, unweighted")

    def _kernel(self, name: str, rows: int, cols: int, per_x_row: int, summary: str) -> Kernel:
        s, mode, top_k, gated = self.c.spec, self.c.mode, self.c.spec.num_experts_per_tok, self.which == "gate_up"
        form = self.format
        outputs = rows // 2 if gated else rows
        out: CType = mode.act if gated else "float"
        cost = Cost(
            bytes_per_expert=int(rows * cols * form.bits / 8),
            bytes_per_row=top_k * (cols * mode.act_bytes + outputs * (4 if out == "float" else 2)),
            operations_per_row=2 * top_k * rows * cols,
        )
        active = Extent(times=top_k, per_tokens=1, cap=s.n_routed_experts or 0)
        if not self.c.tensor_cores:
            slices = input_slices(cols)
            generic = ExpertsF32(
                name=name, rows=rows, cols=cols, assignments_per_x_row=per_x_row, slices=slices, tokens=GENERIC_TOKENS,
                weight=form.c_type(tensor_cores=False), int4=form.name == "int4", group_size=form.group_size, gated=gated,
                weight_comment=form.comment,
            )  # fmt: skip
            grid = (Extent(-(-outputs // 32)), active, ONE)
            return Kernel(name, "experts_f32.cu.j2", generic, slices * 32, grid, 0, cost, summary, group="routed experts")
        steps, row_tiles = form.steps(cols), -(-rows // TILE_ROWS)
        warps, held, ring = expert_split(steps, form.step_bytes, form.step_registers, mode.wgmma)
        group_bytes = warps * ring.bytes + EXPERT_TOKEN_TILES * warps * 512 + steps * form.bias_bytes
        lists = -(-3 * 4 * (s.n_routed_experts or 0) // 16) * 16
        most = smem_limit("sm_90a" if mode.wgmma else "generic")
        groups = next(n for n in (8, 4, 2, 1) if n * warps <= 16 and n * group_bytes + lists <= most)
        blocks_per_sm, smem = 16 // (groups * warps), groups * group_bytes + lists
        p = ExpertsMma(
            name=name, experts=s.n_routed_experts or 0, rows=rows, cols=cols, assignments_per_x_row=per_x_row, warps=warps, groups=groups,
            token_tiles=EXPERT_TOKEN_TILES, row_tiles_at_once=2 if ring.stage_steps % 2 == 0 else 1,
            memory_bound=MEMORY_BOUND_ASSIGNMENTS, cost_per_assignment=COST_PER_ASSIGNMENT, cost_per_pass=COST_PER_PASS,
            stage_steps=ring.stage_steps, slots=ring.slots, step_bytes=form.step_bytes, x_in_registers=held, blocks_per_sm=blocks_per_sm,
            int4=form.name == "int4", half_step=cols % form.step_inputs != 0, out=out, gated=gated, reads_before_wait=gated,
            weight_comment=form.comment,
        )  # fmt: skip
        units = Extent(-(-row_tiles // groups) * top_k, per_tokens=1, per_processor=blocks_per_sm)
        block = groups * warps * 32
        early = (*LISTS, "assignments", "x", "y") if p.reads_before_wait else LISTS
        return Kernel(
            name, "experts_mma.cu.j2", p, block, (units, ONE, ONE), smem, cost, summary, row_tiles, early=early, group="routed experts"
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        c, gated = self.c, self.which == "gate_up"
        x, y = ("hidden", "expert_mlp") if gated else ("expert_mlp", "expert_output")
        return (
            *reads_ints("num_active active_expert active_begin active_end assignments"),
            reads(c.mode.act, "x", buffer(x)),
            stored(self.format.c_type(c.tensor_cores), "weight", layer_weight(f"experts_{self.which}")),
            writes(c.mode.act if gated else "float", "y", buffer(y)),
        )


@dataclass(frozen=True)
class MoeCombineOp(Op):
    """The weighted sum of each row's experts, added to ``target`` where shared experts have left theirs there, or set."""

    target: str = "residual"
    outbox: bool = False

    @property
    def accumulates(self) -> bool:
        return self.c.shard.whole or self.c.spec.shared_intermediate_size > 0

    def kernel(self) -> Kernel:
        s = self.c.spec
        block = block_for(s.hidden_size)
        p = MoeCombine("moe_combine", s.hidden_size, s.num_experts_per_tok, self.accumulates, block)
        cost = Cost(
            bytes_per_row=s.hidden_size * 4 * (s.num_experts_per_tok + 2), operations_per_row=2 * s.hidden_size * s.num_experts_per_tok
        )  # fmt: skip
        grid = (ROW_EXTENT, Extent(-(-s.hidden_size // block)), ONE)
        kernel = Kernel(
            "moe_combine", "moe_combine.cu.j2", p, block, grid, 0, cost, "weighted sum of the chosen experts", early=COUNT,
            group="routed experts",
        )  # fmt: skip
        return outbox_of(kernel, self.c) if self.outbox else kernel

    def arguments(self) -> tuple[Argument, ...]:
        read = (*reads_ints("num_tokens"), *reads_floats("topk_weights expert_output"))
        if not self.outbox:
            return *read, writes("float", "residual" if self.accumulates else "y", buffer(self.target))
        shared = (reads("float", "shared_output", buffer(self.target)),) if self.accumulates else ()
        return *read, *shared, *sends(self.c)
