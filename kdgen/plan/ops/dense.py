"""Dense layers: one matrix times every token row, for whole layers and for the layers that each head has."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from kdgen.plan.ir import Arg, Cost, Extent, Group, Kernel
from kdgen.plan.ops.op import (
    COUNT,
    Argument,
    Context,
    Op,
    buffer,
    layer_weight,
    reads,
    stored,
    writes,
)
from kdgen.plan.ops.outbox import TO_RANKS, Outbox, Sender, outbox_of, sends
from kdgen.plan.tuning import (
    CHUNK_STEPS,
    CHUNKS_AHEAD,
    GENERIC_TOKENS,
    HEAD_WARPS,
    MIN_TOKENS_FOR_LINES,
    ROW_TILES_AT_ONCE,
    TOKEN_TILES,
    WEIGHT_STEPS_IN_REGISTERS,
    CType,
    blocks_per_sm,
    dense_ring,
    input_slices,
    mma_warps,
)

FEW_ROWS = "_few"  #: suffix of a layer's kernel for few rows


@dataclass(frozen=True)
class LinearF32(Sender):
    """Context of linear_f32.cu.j2. Sizes are elements."""

    name: str
    rows: int
    cols: int
    x_stride: int
    x_batch_stride: int
    y_stride: int
    y_batch_stride: int
    slices: int
    tokens: int
    weight: CType
    gated: bool
    bias: bool
    accumulate: bool
    epilogue_comment: str
    outbox: Outbox | None = None


@dataclass(frozen=True)
class LinearMma(Sender):
    """Context of linear_mma.cu.j2."""

    name: str
    rows: int
    cols: int
    x_stride: int
    x_batch_stride: int
    y_stride: int
    y_batch_stride: int
    warps: int
    max_tokens: int
    row_tiles_at_once: int
    stage_steps: int
    slots: int
    smem_comment: str
    blocks_per_sm: int
    chunk_steps: int
    chunks_ahead: int
    min_tokens_for_lines: int
    row_count_ready_before_wait: bool
    out: CType
    gated: bool
    bias: bool
    accumulate: bool
    epilogue_comment: str
    outbox: Outbox | None = None


@dataclass(frozen=True)
class LinearHeads:
    """Context of linear_heads.cu.j2."""

    name: str
    rows: int
    x_stride: int
    x_batch_stride: int
    y_stride: int
    y_batch_stride: int
    splits: int
    split_steps: int
    warps: int
    warp_tiles: int
    max_tokens: int
    blocks_per_sm: int
    act: CType
    rotates: bool
    rope: int
    interleave: bool
    epilogue_comment: str


@dataclass(frozen=True)
class Layer:
    """A dense layer's shape, before it is decided which kernel runs it. Strides of 0 follow from the widths."""

    name: str
    group: Group
    summary: str
    rows: int
    cols: int
    batch: int = 1
    x_stride: int = 0  # 0: cols * batch
    x_batch_stride: int = 0
    y_stride: int = 0  # 0: outputs * batch
    y_batch_stride: int = 0
    gated: bool = False
    bias: bool = False
    out_float: bool = False

    @property
    def of_each_head(self) -> bool:
        """Whether there is one such layer a head; a rank may have one head."""
        return self.x_batch_stride > 0

    @property
    def outputs(self) -> int:
        return self.rows // 2 if self.gated else self.rows


#: The sublayer whose output belongs to the residual: each rank has a part of it.
Sublayer = Literal["attention", "mlp"]


@dataclass(frozen=True)
class LinearOp(Op):
    """``y = layer(x)``, or ``y += layer(x)`` with ``accumulate``, whose y is the float32 residual.

    ``adds_to`` is set where the outputs belong to the residual. ``outbox``: they are sent to all ranks. ``count`` is the buffer that says
    how many rows there are; ``count_is_ready``: it was written before anything that this may overlap.
    """

    layer: Layer
    x: Arg
    y: Arg
    accumulate: bool = False
    adds_to: Sublayer | None = None
    count: str = "num_tokens"
    count_is_ready: bool = True
    layered: bool = True
    outbox: bool = False

    @property
    def name(self) -> str:
        return self.layer.name + (TO_RANKS if self.outbox else "")

    @property
    def bias(self) -> Arg | None:
        return layer_weight(f"{self.layer.name}_bias") if self.layer.bias else None

    def kernel(self) -> Kernel:
        layer, mode = self.layer, self.c.mode
        layer = replace(layer, x_stride=layer.x_stride or layer.cols * layer.batch, y_stride=layer.y_stride or layer.outputs * layer.batch)
        out: CType = "float" if self.accumulate or layer.out_float else mode.act
        out_bytes = 4 if out == "float" else 2
        summary = layer.summary[0].upper() + layer.summary[1:] + "."
        epilogue = "The result is added to the float32 residual." if self.accumulate else summary
        cost = Cost(
            bytes_fixed=layer.batch * layer.rows * layer.cols * mode.weight_bytes,
            bytes_per_row=layer.batch * (layer.cols * mode.act_bytes + layer.outputs * out_bytes * (2 if self.accumulate else 1)),
            operations_per_row=2 * layer.batch * layer.rows * layer.cols,
        )
        kernel = self._mma(layer, out, cost, epilogue) if self.c.tensor_cores else self._f32(layer, cost, epilogue)
        return outbox_of(kernel, self.c) if self.outbox else kernel

    def _f32(self, layer: Layer, cost: Cost, epilogue: str) -> Kernel:
        slices = input_slices(layer.cols)
        p = LinearF32(
            name=layer.name, rows=layer.rows, cols=layer.cols, x_stride=layer.x_stride, x_batch_stride=layer.x_batch_stride,
            y_stride=layer.y_stride, y_batch_stride=layer.y_batch_stride, slices=slices, tokens=GENERIC_TOKENS,
            weight=self.c.mode.weight, gated=layer.gated, bias=layer.bias, accumulate=self.accumulate, epilogue_comment=epilogue,
        )  # fmt: skip
        grid = (Extent(-(-layer.outputs // 32)), Extent(per_tokens=GENERIC_TOKENS), Extent(layer.batch))
        return Kernel(layer.name, "linear_f32.cu.j2", p, slices * 32, grid, 0, cost, layer.summary, group=layer.group)

    def _mma(self, layer: Layer, out: CType, cost: Cost, epilogue: str) -> Kernel:
        warps, ready = mma_warps(layer.cols), self.count_is_ready
        warp_steps, row_tiles = layer.cols // 16 // warps, -(-layer.rows // 16)
        ring = dense_ring(warp_steps)
        p = LinearMma(
            name=layer.name, rows=layer.rows, cols=layer.cols, x_stride=layer.x_stride, x_batch_stride=layer.x_batch_stride,
            y_stride=layer.y_stride, y_batch_stride=layer.y_batch_stride, warps=warps, max_tokens=TOKEN_TILES * 8,
            row_tiles_at_once=ROW_TILES_AT_ONCE if ready else 1, stage_steps=ring.stage_steps, slots=ring.slots, smem_comment=ring.comment,
            blocks_per_sm=blocks_per_sm(warps), chunk_steps=math.gcd(warp_steps, CHUNK_STEPS), chunks_ahead=CHUNKS_AHEAD,
            min_tokens_for_lines=MIN_TOKENS_FOR_LINES, row_count_ready_before_wait=ready, out=out, gated=layer.gated,
            bias=layer.bias, accumulate=self.accumulate, epilogue_comment=epilogue,
        )  # fmt: skip
        smem = warps * ring.bytes + warps * TOKEN_TILES * 4 * 32 * 4  # the rings and the warps' partial sums
        grid = (Extent(row_tiles, per_processor=blocks_per_sm(warps)), Extent(per_tokens=TOKEN_TILES * 8), Extent(layer.batch))
        early = COUNT if ready else ()
        return Kernel(
            layer.name, "linear_mma.cu.j2", p, warps * 32, grid, smem, cost, layer.summary, row_tiles, early=early, group=layer.group
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        mode, name = self.c.mode, self.layer.name
        out: CType = "float" if self.accumulate or self.layer.out_float else mode.act
        matrix = Arg("layer_weight" if self.layered else "weight", name)
        bias = (stored("float", "bias", self.bias),) if self.bias else ()
        end = sends(self.c) if self.outbox else (writes(out, "y", self.y),)
        return (
            reads("int", "num_tokens", buffer(self.count)),
            reads(mode.act, "x", self.x),
            stored("uint4" if self.c.tensor_cores else mode.weight, "weight", matrix),
            *bias,
            *end,
        )


@dataclass(frozen=True)
class HeadsOp(Op):
    """A layer that each head has, for few rows, its weights in registers; ``rotates``: the queries' rotary parts in blocks beside it."""

    many: LinearOp
    rotates: bool = False

    def kernel(self) -> Kernel:
        s, layer, many = self.c.spec, self.many.layer, self.many.kernel()
        linear, row_tiles = many.params, -(-layer.rows // 16)
        assert isinstance(linear, LinearMma)
        steps = layer.cols // 16 // linear.warps
        warps = max(HEAD_WARPS, linear.warps)
        tiles = max(1, min(4, WEIGHT_STEPS_IN_REGISTERS // steps, -(-row_tiles * linear.warps // warps)))
        p = LinearHeads(
            name=layer.name + FEW_ROWS, rows=layer.rows, x_stride=linear.x_stride, x_batch_stride=linear.x_batch_stride,
            y_stride=linear.y_stride, y_batch_stride=linear.y_batch_stride, splits=linear.warps, split_steps=steps, warps=warps,
            warp_tiles=tiles, max_tokens=linear.max_tokens, blocks_per_sm=max(1, 16 // warps), act=self.c.mode.act, rotates=self.rotates,
            rope=s.qk_rope_head_dim, interleave=s.rope_interleave, epilogue_comment=linear.epilogue_comment,
        )  # fmt: skip
        parts = -(-row_tiles // (warps // linear.warps * tiles))
        grid = (Extent(parts + self.rotates), Extent(per_tokens=linear.max_tokens), Extent(layer.batch))
        turned = 2 * layer.batch * s.qk_rope_head_dim * self.c.mode.act_bytes if self.rotates else 0
        summary = f"{layer.summary}, for few rows" + ("; beside it, queries' rotary parts" if self.rotates else "")
        return Kernel(
            p.name, "linear_heads.cu.j2", p, warps * 32, grid, 0, many.cost + Cost(bytes_per_row=turned), summary, early=COUNT,
            group=layer.group,
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        *inputs, target = self.many.arguments()
        turning = (reads("int", "row_position"), stored("float", "cos_table"), stored("float", "sin_table")) if self.rotates else ()
        return *inputs, *turning, target


def heads_fit_registers(c: Context) -> bool:
    """Whether forwards of few rows hold the weights of the layers that each head has in registers."""
    widths = (c.spec.qk_nope_head_dim, c.spec.kv_lora_rank)
    return c.tensor_cores and all(width // 16 // mma_warps(width) <= WEIGHT_STEPS_IN_REGISTERS for width in widths)
