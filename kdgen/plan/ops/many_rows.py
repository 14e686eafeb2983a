"""Forwards of many token rows: twins of the matrix kernels that use a reading of the weights for a whole tile of rows, on asynchronous
tensor cores, and of the joining of attention's splits.

A twin gives the bits of its kernel for few rows: it is made from that kernel's context, whose chains of MMA steps, ranges of inputs and
order of sums it keeps. The number of rows chooses between the two, so a prompt's chunks may use both. Rows that have logits are few, and
their head has no twin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kdgen.plan.formats import Format
from kdgen.plan.ir import ONE, Extent, Kernel, Parameter
from kdgen.plan.key_splits import Splits
from kdgen.plan.ops.attention_combine import MlaCombineWgmma
from kdgen.plan.ops.dense import LinearMma
from kdgen.plan.ops.experts import ExpertsMma, ExpertsOp
from kdgen.plan.ops.op import Argument, Op
from kdgen.plan.ops.router import RouterLogitsMma
from kdgen.plan.ops.same_bits import Twin
from kdgen.plan.tuning import CType

SUFFIX = "_tiled"
#: Token rows from which on a forward uses the twins, by latent as in WGMMA_BLOCKS: small models have few, so that their tests cross it.
TILED_ROWS = {128: 12, 512: 256}
#: Prompt tokens of a forward where there are twins: K2.6's experts are read once a chunk, 9.5 GB a layer, and have 43 tokens each.
CHUNK_TOKENS = 2048
WARPS = 16  #: a tile of 16 weight rows each
LINEAR_TOKENS = 128  #: of a block: as many as its registers can hold sums of
SMALL_WARPS, SMALL_TOKENS = 8, 64  #: the same of small blocks, of which several share an SM
EXPERT_TOKENS = 64  #: of an expert, of a block at a time
SLOTS = 4  #: stages of inputs in shared memory
EXPERT_SLOTS = 3  #: stages of an expert's weights and inputs in shared memory
BARRIER_BYTES = 8


@dataclass(frozen=True)
class LinearWgmma(Twin):
    """Context of linear_wgmma.cu.j2."""

    name: str
    decode: str
    rows: int
    cols: int
    x_stride: int
    x_batch_stride: int
    y_stride: int
    y_batch_stride: int
    ranges: int
    stage_steps: int
    tokens: int
    warps: int
    slots: int
    blocks_per_sm: int
    row_major: bool
    piece: int
    out: CType
    gated: bool
    bias: bool
    accumulate: bool
    epilogue_comment: str


@dataclass(frozen=True)
class ExpertsWgmma(Twin):
    """Context of experts_wgmma.cu.j2."""

    name: str
    decode: str
    rows: int
    cols: int
    assignments_per_x_row: int
    ranges: int
    warps: int
    tokens: int
    stage_steps: int
    slots: int
    step_bytes: int
    int4: bool
    half_step: bool
    out: CType
    gated: bool
    weight_comment: str


@dataclass(frozen=True)
class MlaCombineRows(Twin):
    """Context of mla_combine_rows.cu.j2."""

    name: str
    decode: str
    heads: int
    kv_lora: int
    splits: Splits
    warps: int
    batch: int
    blocks_per_sm: int


def twin_name(name: str) -> str:
    return name + SUFFIX


def is_twin(kernel: Kernel) -> bool:
    return isinstance(kernel.params, Twin)


def twin_of(kernel: Kernel, kernels: Sequence[Kernel]) -> Kernel | None:
    """The twin of ``kernel`` among ``kernels``, if it is there."""
    return next((each for each in kernels if each.name == twin_name(kernel.name)), None)


@dataclass(frozen=True)
class ManyRowsOp(Op):
    """What ``op`` does, for many rows."""

    op: Op

    def kernel(self) -> Kernel:
        twin = _twin(self.op)
        assert twin is not None
        return twin

    @property
    def row_groups(self) -> int:
        return self.op.row_groups

    def arguments(self) -> tuple[Argument, ...]:
        found = self.op.arguments()
        if isinstance(self.op.kernel().params, RouterLogitsMma):  # which is a linear layer here
            names = "num_tokens", "x", "weight", "y"
            renamed = zip(found, names, strict=True)
            found = tuple(replace(each, parameter=Parameter(each.parameter.type, name)) for each, name in renamed)
        return found


def for_many_rows(op: Op) -> Op:
    """``op`` for many rows where its kernel has a twin, else ``op`` itself."""
    has_kernel, _ = op.lowered()
    return op if has_kernel is None or op.rows == "logits" or _twin(op) is None else ManyRowsOp(op.c, op)


def _twin(op: Op) -> Kernel | None:
    kernel = op.kernel()
    if isinstance(kernel.params, LinearMma):
        return _linear(kernel, kernel.params)
    if isinstance(kernel.params, RouterLogitsMma):
        return _router(kernel, kernel.params)
    if isinstance(op, ExpertsOp) and isinstance(kernel.params, ExpertsMma):
        return _experts(kernel, kernel.params, op.format)
    if isinstance(kernel.params, MlaCombineWgmma):
        return _combine(kernel, kernel.params)
    return None


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a tiled matrix kernel: what each takes of the work, and its memory."""

    tokens: int
    warps: int
    per_sm: int
    stage_steps: int
    slots: int
    smem: int

    def kernel(self, of: Kernel, twin: LinearWgmma, row_tiles: int) -> Kernel:
        grid = (Extent(per_tokens=self.tokens), Extent(-(-row_tiles // self.warps)), of.grid[2])
        summary = f"{of.summary}, for many rows"
        return Kernel(twin.name, "linear_wgmma.cu.j2", twin, self.warps * 32, grid, self.smem, of.cost, summary, row_tiles, group=of.group)


def _blocks(cols: int, ranges: int, per_sm: int = 1) -> _Blocks:
    """128 tokens by 256 weight rows: 0.006 bytes of weights and inputs an operation, where L2 gives 5.5 TB/s and tensor cores want less
    than half of what they do at 0.01. Sums take half a thread's registers, so the ranges' total is in shared memory. Where several blocks
    are to share an SM they have 64 tokens and 128 rows.
    """
    warps, tokens = (WARPS, LINEAR_TOKENS) if per_sm == 1 else (SMALL_WARPS, SMALL_TOKENS)
    range_steps = cols // 16 // ranges
    stage_steps = next(n for n in (4, 2, 1) if range_steps % n == 0)
    slots = max(min(SLOTS, cols // 16 // stage_steps), warps // 4)  # outputs go through them, too
    totals = tokens // 8 * warps * 32 * 16 if ranges > 1 else 0
    return _Blocks(tokens, warps, per_sm, stage_steps, slots, slots * tokens * 128 + totals + slots * BARRIER_BYTES)


def _linear(kernel: Kernel, p: LinearMma) -> Kernel:
    """A layer of each head has few rows or few inputs: its blocks are small, for one works where others begin or end. K2.6's w_uk and w_uv
    for 2,048 rows, µs (H200, 2026-11-30): 132 and 109 with 3 small blocks an SM, 153 and 119 with 2, 136 and 136 with a large one.
    """
    blocks = _blocks(p.cols, p.warps, per_sm=1 if kernel.grid[2] == ONE else 3)
    outputs = p.rows // 2 if p.gated else p.rows
    twin = LinearWgmma(
        name=twin_name(p.name), decode=p.name, rows=p.rows, cols=p.cols, x_stride=p.x_stride, x_batch_stride=p.x_batch_stride,
        y_stride=p.y_stride, y_batch_stride=p.y_batch_stride, ranges=p.warps, stage_steps=blocks.stage_steps, tokens=blocks.tokens,
        warps=blocks.warps, slots=blocks.slots, blocks_per_sm=blocks.per_sm, row_major=False,
        piece=math.gcd(outputs, p.y_stride, p.y_batch_stride, 8), out=p.out, gated=p.gated,
        bias=p.bias, accumulate=p.accumulate, epilogue_comment=p.epilogue_comment,
    )  # fmt: skip
    return blocks.kernel(kernel, twin, kernel.row_tiles or 0)


def _router(kernel: Kernel, p: RouterLogitsMma) -> Kernel:
    """The router is a linear layer whose weights are as the checkpoint has them. It has so few rows that large blocks leave most SMs idle:
    2,048 tokens of K2.6 take 123 µs with small blocks, 155 with large ones (H200, 2026-11-30)."""
    blocks = _blocks(p.hidden, p.warps, per_sm=2)
    twin = LinearWgmma(
        name=twin_name(p.name), decode=p.name, rows=p.experts, cols=p.hidden, x_stride=p.hidden, x_batch_stride=0, y_stride=p.experts,
        y_batch_stride=0, ranges=p.warps, stage_steps=blocks.stage_steps, tokens=blocks.tokens, warps=blocks.warps, slots=blocks.slots,
        blocks_per_sm=blocks.per_sm, row_major=True, piece=1, out="float", gated=False, bias=False,
        accumulate=False, epilogue_comment="Logits of every expert.",
    )  # fmt: skip
    return blocks.kernel(kernel, twin, -(-p.experts // 16))


def _experts(kernel: Kernel, p: ExpertsMma, form: Format) -> Kernel:
    """64 of an expert's tokens by 256 weight rows. A thread's registers hold a range's sums and a group's; the ranges' total is in shared
    memory, and so are the weights of a few stages, which have a long way from memory."""
    range_steps = form.steps(p.cols) // p.warps
    stage_steps = next(n for n in form.stage_steps if range_steps % n == 0)
    inputs = -(-stage_steps * form.step_inputs // 64) * 64 * EXPERT_TOKENS * 2  # as they come, and as tensor cores read them
    stages = EXPERT_SLOTS * (2 * inputs + WARPS * stage_steps * form.step_bytes + BARRIER_BYTES)
    smem = -(-(stages + EXPERT_TOKENS // 8 * WARPS * 32 * 16) // 16) * 16
    twin = ExpertsWgmma(
        name=twin_name(p.name), decode=p.name, rows=p.rows, cols=p.cols, assignments_per_x_row=p.assignments_per_x_row, ranges=p.warps,
        warps=WARPS, tokens=EXPERT_TOKENS, stage_steps=stage_steps, slots=EXPERT_SLOTS, step_bytes=form.step_bytes, int4=p.int4,
        half_step=p.half_step, out=p.out, gated=p.gated, weight_comment=p.weight_comment,
    )  # fmt: skip
    units = Extent(times=kernel.grid[0].times, per_tokens=1, per_processor=1)
    summary = f"{kernel.summary}, for many rows"
    return Kernel(
        twin.name, "experts_wgmma.cu.j2", twin, WARPS * 32, (units, ONE, ONE), smem, kernel.cost, summary, kernel.row_tiles,
        group=kernel.group,
    )  # fmt: skip


def _combine(kernel: Kernel, p: MlaCombineWgmma) -> Kernel:
    """8 heads of a row, for whole lines of memory, where a row alone wants many small blocks. More blocks on an SM serve better than more
    values on their way in each: a launch for 528 of 2,048 rows behind 2,048 keys takes 134 µs (H200, 2026-11-30), 165 with 8 values and
    registers spilt for 3 blocks, 162 with 8 and 2 blocks, 168 with 16 and 2, 147 with 4 and 4; 100 are what its bytes take."""
    warps = p.kv_lora // 64  # two groups of 32 columns each
    twin = MlaCombineRows(
        name=twin_name(p.name), decode=p.name, heads=p.heads, kv_lora=p.kv_lora, splits=p.splits, warps=warps,
        batch=4, blocks_per_sm=3,
    )  # fmt: skip
    rows, _, _ = kernel.grid
    grid = (Extent(p.heads // 8), rows, ONE)
    summary = f"{kernel.summary}, for many rows"
    return Kernel(
        twin.name, "mla_combine_rows.cu.j2", twin, warps * 32, grid, 0, kernel.cost, summary, early=kernel.early, group=kernel.group
    )  # fmt: skip
