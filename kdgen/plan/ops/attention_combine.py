"""The splits of attention joined, alone or in one launch with w_uv."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from kdgen.plan.attention import (
    ATTENTION_ROWS,
    COMBINE_TOKENS,
    COMBINE_WARPS,
    attention_splits,
    blocks_of_head,
)
from kdgen.plan.ir import ONE, Cost, Extent, Group, Kernel
from kdgen.plan.key_splits import Splits
from kdgen.plan.ops.attention_schedule import EVERY_ROW, RowGroup
from kdgen.plan.ops.dense import LinearMma, LinearOp
from kdgen.plan.ops.op import (
    PLACES,
    ROW_EXTENT,
    Argument,
    Context,
    Op,
    layer_weight,
    number,
    reads,
    reads_floats,
    stored,
    writes,
)
from kdgen.plan.ops.same_bits import SameBits
from kdgen.plan.tuning import CType, Mode, block_for
from kdgen.spec.model import Spec

COMBINE_AND_HEADS = "mla_combine_and_w_uv"


def max_splits(c: Context) -> int:
    return attention_splits(c.spec, c.mode).count(c.limits.capacity)


@dataclass(frozen=True)
class MlaCombine:
    """Context of mla_combine.cu.j2."""

    name: str
    heads: int
    kv_lora: int
    split: int
    vector: int
    act: CType
    block: int

    @property
    def splits(self) -> Splits:
        return Splits.growing((0, self.split))


@dataclass(frozen=True)
class MlaCombineWgmma:
    """Context of mla_combine_wgmma.cu.j2."""

    name: str
    heads: int
    kv_lora: int
    splits: Splits


@dataclass(frozen=True)
class CombineAndHeads(SameBits):
    """Context of combine_and_heads.cu.j2."""

    name: str
    combine: str
    linear: str
    heads: int
    kv_lora: int
    splits: Splits
    rows: int
    ranges: int
    range_steps: int
    block: int
    cluster: int
    block_tiles: int
    warp_tiles: int
    max_tokens: int

    @property
    def same_bits_as(self) -> tuple[str, ...]:
        return self.combine, self.linear


def fuses_combine_and_w_uv(spec: Spec, mode: Mode) -> bool:
    """Whether forwards of few rows join attention's splits in one launch with w_uv: a block alone could not hold a head's weights. K2.6, µs
    behind attention, as two launches or one (H200, 2026-11-30): 1 row 5.2 or 5.4, 8 rows 6.9 or 4.5, 16 rows 11.9 or 9.7, 64 rows 37 or 32
    at 4,096 keys; 1 row 9.9 or 6.5 at 32,768. Whole steps of 1, 8 and 16 rows became 20, 17 and 19 µs shorter, over 8 layers.
    """
    return mode.wgmma and blocks_of_head(spec) > 1


def _joined(c: Context, group: RowGroup) -> tuple[Argument, ...]:
    """What the joining of a group's splits reads."""
    values = reads("bf16" if c.mode.wgmma else "float", "split_values")
    return group.count(), reads("int", "row_position", group.at("row_position")), values, *reads_floats("split_max split_sum")


@dataclass(frozen=True)
class MlaCombineOp(Op):
    """The splits of each row and head joined, in the order of their keys: [heads, kv_lora_rank] a row."""

    group: RowGroup = EVERY_ROW

    @property
    def row_groups(self) -> int:
        return self.group.groups

    def kernel(self) -> Kernel:
        s, mode = self.c.spec, self.c.mode
        vector = 4 if s.kv_lora_rank % 4 == 0 else 1
        block = block_for(s.kv_lora_rank // vector, 128)
        width, splits = s.num_attention_heads * s.kv_lora_rank, attention_splits(s, mode)
        grid, summary = (ROW_EXTENT, Extent(s.num_attention_heads), ONE), "joins the splits"
        group: Group = "attention over the cache"
        if mode.wgmma:
            # 8 heads and 64 columns a block
            columns = Extent(s.num_attention_heads // 8 * s.kv_lora_rank // 64)
            grid = (Extent(per_tokens=1, cap=ATTENTION_ROWS[s.kv_lora_rank]), columns, ONE)
            fragments = MlaCombineWgmma("mla_combine", s.num_attention_heads, s.kv_lora_rank, splits)
            cost = Cost(bytes_per_row=width * (2 + mode.act_bytes), operations_per_row=2 * width)
            return Kernel("mla_combine", "mla_combine_wgmma.cu.j2", fragments, 256, grid, 0, cost, summary, early=PLACES, group=group)
        p = MlaCombine("mla_combine", s.num_attention_heads, s.kv_lora_rank, splits.shortest, vector, mode.act, block)
        cost = Cost(bytes_per_row=width * (4 + mode.act_bytes), operations_per_row=2 * width)
        return Kernel("mla_combine", "mla_combine.cu.j2", p, block, grid, 0, cost, summary, group=group)

    def arguments(self) -> tuple[Argument, ...]:
        c = self.c
        target = self.group.at("latent", c.spec.num_attention_heads * c.spec.kv_lora_rank * c.mode.act_bytes)
        return *_joined(c, self.group), writes(c.mode.act, "output", target), number("max_splits", max_splits(c))


@dataclass(frozen=True)
class CombineAndHeadsOp(Op):
    """The joining of splits with w_uv behind it, for few rows: a head's latents stay in shared memory."""

    w_uv: LinearOp
    group: RowGroup = EVERY_ROW

    @property
    def row_groups(self) -> int:
        return self.group.groups

    def kernel(self) -> Kernel:
        s, layer, combine, many = self.c.spec, self.w_uv.layer, MlaCombineOp(self.c).kernel(), self.w_uv.kernel()
        linear, cluster = cast(LinearMma, many.params), blocks_of_head(s)
        warps, tokens = COMBINE_WARPS[s.kv_lora_rank], COMBINE_TOKENS[s.kv_lora_rank]
        tiles, range_steps = -(-layer.rows // (16 * cluster)), layer.cols // 16 // linear.warps
        smem = tokens * (s.kv_lora_rank + 16) * 2 + tiles * linear.warps * 512 + 8  # latents, partial sums, a barrier
        p = CombineAndHeads(
            name=COMBINE_AND_HEADS, combine=combine.name, linear=many.name, heads=s.num_attention_heads, kv_lora=s.kv_lora_rank,
            splits=cast(Any, combine.params).splits, rows=layer.rows, ranges=linear.warps, range_steps=range_steps, block=warps * 32,
            cluster=cluster, block_tiles=tiles, warp_tiles=-(-tiles * linear.warps * cluster // warps), max_tokens=tokens,
        )  # fmt: skip
        between = 2 * layer.batch * s.kv_lora_rank * self.c.mode.act_bytes  # what two kernels write and read
        cost = combine.cost + many.cost + Cost(bytes_per_row=-between)
        grid = (Extent(layer.batch), Extent(per_tokens=p.max_tokens), ONE)
        summary = f"{combine.summary}; behind that, {many.summary}, for few rows"
        return Kernel(
            p.name, "combine_and_heads.cu.j2", p, p.block, grid, smem, cost, summary, cluster=cluster, early=PLACES, group=many.group
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        c, group = self.c, self.group
        target = group.at("attention", c.spec.num_attention_heads * c.spec.v_head_dim * c.mode.act_bytes)
        return (
            *_joined(c, group),
            stored("uint4", "weight", layer_weight(self.w_uv.layer.name)),
            writes("bf16", "y", target),
            number("max_splits", max_splits(c)),
            number("max_rows", c.limits.max_rows - group.first),
        )
