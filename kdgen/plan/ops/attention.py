"""Multi-head latent attention: cache rows and rotated queries, attention over the cache and the draft tree, the joining of its splits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from kdgen.plan.attention import (
    ATTENTION_ROWS,
    COMBINE_TOKENS,
    COMBINE_WARPS,
    SOFTMAX_SLACK,
    WGMMA_SPLIT_TILES,
    WGMMA_START_TILES,
    WGMMA_TILE,
    attention_smem,
    attention_splits,
    blocks_of_head,
    max_work_items,
    schedule_bytes,
    wgmma_blocks,
    wgmma_group,
    wgmma_smem,
)
from kdgen.plan.ir import MAX_PATH, ONE, Arg, Cost, Extent, Group, Kernel, Limits
from kdgen.plan.key_splits import Splits
from kdgen.plan.ops.dense import LinearMma, LinearOp, heads_fit_registers
from kdgen.plan.ops.norm import RmsNorm, RmsNormOp
from kdgen.plan.ops.op import (
    PLACES,
    ROW_EXTENT,
    Argument,
    Context,
    Op,
    buffer,
    layer_buffer,
    layer_weight,
    number,
    reads,
    reads_floats,
    reads_ints,
    stored,
    writes,
)
from kdgen.plan.tuning import CType, Mode, block_for
from kdgen.spec.model import LORA_NORM_EPS, Spec

CACHE_BESIDE = "rmsnorm_q_a_and_cache"
COMBINE_BESIDE = "mla_combine_and_w_uv"


@dataclass(frozen=True)
class RopeCache:
    """Context of rope_cache.cu.j2."""

    name: str
    heads: int
    kv_lora: int
    rope: int
    qk_head: int
    row: int
    kv_a_stride: int
    kv_a_offset: int
    eps: float
    interleave: bool
    act: CType
    tiled: bool  #: the cache lies in tiles (kdgen.plan.cache_layout)
    block: int
    pairing_comment: str


@dataclass(frozen=True)
class NormAndCache:
    """Context of norm_and_cache.cu.j2."""

    name: str
    norm: RmsNorm
    cache: RopeCache


@dataclass(frozen=True)
class MlaAttentionF32:
    """Context of mla_attention_f32.cu.j2."""

    name: str
    heads: int
    kv_lora: int
    row: int
    max_path: int
    split: int
    tile: int
    scale: float
    block: int
    blocks_per_sm: int

    @property
    def splits(self) -> Splits:
        return Splits.growing((0, self.split))


@dataclass(frozen=True)
class MlaAttentionMma:
    """Context of mla_attention_mma.cu.j2."""

    name: str
    heads: int
    kv_lora: int
    row: int
    max_path: int
    split: int
    blocks_per_sm: int
    scale: float
    smem_comment: str

    @property
    def splits(self) -> Splits:
        return Splits.growing((0, self.split))


@dataclass(frozen=True)
class MlaAttentionWgmma:
    """Context of mla_attention_wgmma.cu.j2."""

    name: str
    heads: int
    kv_lora: int
    row: int
    max_path: int
    splits: Splits
    group: int
    max_items: int
    schedule_bytes: int
    scale_log2: float
    slack: int
    act: CType
    tiled: bool
    smem_comment: str


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
class CombineAndHeads:
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
    smem_comment: str


@dataclass(frozen=True)
class AttentionSchedule:
    """Context of attention_schedule.cu.j2. Its tiles of heads hold one token row each, whose start costs nothing beside."""

    name: str
    splits: Splits
    split_tiles: int
    max_workers: int
    max_items: int
    schedule_bytes: int

    @property
    def group(self) -> int:
        return 1

    @property
    def start_tiles(self) -> int:
        return 0


@dataclass(frozen=True)
class AttentionScheduleOfGroups:
    """Context of attention_schedule_of_groups.cu.j2."""

    name: str
    splits: Splits
    group: int
    start_tiles: int
    split_tiles: int
    max_workers: int
    max_items: int
    schedule_bytes: int


@dataclass(frozen=True)
class RowGroups:
    """Context of row_groups.cu.j2."""

    name: str
    rows: int


def kv_a_stride(spec: Spec) -> int:
    """Width of the fused [q_a | kv_a] projection's output; kv_a alone when queries have no low-rank form."""
    return (spec.q_lora_rank or 0) + spec.cache_row_dim


def fuses_norm_and_cache(c: Context) -> bool:
    """Whether forwards of few rows write cache rows beside the low-rank query's norm, and rotate queries beside w_uk."""
    return heads_fit_registers(c) and c.spec.q_lora_rank is not None


def fuses_combine_and_w_uv(spec: Spec, mode: Mode) -> bool:
    """Whether forwards of few rows join attention's splits in one launch with w_uv: a block alone could not hold a head's weights. K2.6, µs
    behind attention, as two launches or one (H200, 2026-11-30): 1 row 5.2 or 5.4, 8 rows 6.9 or 4.5, 16 rows 11.9 or 9.7, 64 rows 37 or 32
    at 4,096 keys; 1 row 9.9 or 6.5 at 32,768. Whole steps of 1, 8 and 16 rows became 20, 17 and 19 µs shorter, over 8 layers.
    """
    return mode.wgmma and blocks_of_head(spec) > 1


def cache_slots(mode: Mode, limits: Limits) -> int:
    """Slots of a sequence's part of the cache: whole tiles, where it lies in tiles (``Plan.key_tiles``)."""
    return -(-limits.capacity // WGMMA_TILE) * WGMMA_TILE if mode.wgmma else limits.capacity


def attention_rows(c: Context) -> int:
    """Token rows of one attention launch; a step with more has several, one after another over the same partial values."""
    return min(c.limits.max_rows, ATTENTION_ROWS[c.spec.kv_lora_rank]) if c.mode.wgmma else c.limits.max_rows


def max_splits(c: Context) -> int:
    return attention_splits(c.spec, c.mode).count(c.limits.capacity)


def norm_q_a(c: Context) -> RmsNormOp:
    """The norm of the low-rank query, which stands before the cache row in one projection's output."""
    s = c.spec
    gain = layer_weight("q_a_layernorm")
    return RmsNormOp(c, "rmsnorm_q_a", s.q_lora_rank or 0, LORA_NORM_EPS, "kv_a", gain, "q_a", x_stride=kv_a_stride(s))


def _kv_cache(c: Context, reading: bool = False) -> Argument:
    return (reads if reading else writes)(c.mode.act, "kv_cache", layer_buffer("kv_cache"))


def _capacity(c: Context) -> Argument:
    return number("context_capacity", cache_slots(c.mode, c.limits))


_TABLES = (stored("float", "cos_table"), stored("float", "sin_table"))


@dataclass(frozen=True)
class RopeCacheOp(Op):
    """The cache row [c_kv | k_rope] of each token row, and its queries' rotary parts."""

    def kernel(self) -> Kernel:
        s, mode = self.c.spec, self.c.mode
        block = block_for(max(s.kv_lora_rank, s.num_attention_heads * s.qk_rope_head_dim // 2))
        if s.q_lora_rank is not None:  # a row's sum of squares is split alike in the launch that it shares with that norm
            block = norm_q_a(self.c).kernel().block
        pairing = (
            "Pairs are interleaved, (x0, x1), (x2, x3), ..." if s.rope_interleave else "Pairs are half a head apart, (x_i, x_(i + d/2))."
        )
        p = RopeCache(
            name="rope_cache", heads=s.num_attention_heads, kv_lora=s.kv_lora_rank, rope=s.qk_rope_head_dim, qk_head=s.qk_head_dim,
            row=s.cache_row_dim, kv_a_stride=kv_a_stride(s), kv_a_offset=s.q_lora_rank or 0,
            eps=LORA_NORM_EPS, interleave=s.rope_interleave, act=mode.act, tiled=mode.wgmma, block=block, pairing_comment=pairing,
        )  # fmt: skip
        rope_bytes = 2 * s.num_attention_heads * s.qk_rope_head_dim * mode.act_bytes
        cost = Cost(
            bytes_fixed=s.kv_lora_rank * 4, bytes_per_row=s.cache_row_dim * (4 + mode.act_bytes) + rope_bytes,
            operations_per_row=6 * s.cache_row_dim,
        )  # fmt: skip
        summary = "cache row [c_kv | k_rope], rotated queries"
        group: Group = "attention over the cache"
        return Kernel("rope_cache", "rope_cache.cu.j2", p, block, (ROW_EXTENT, ONE, ONE), 0, cost, summary, group=group)

    def arguments(self) -> tuple[Argument, ...]:
        act = self.c.mode.act
        return (
            *reads_ints("num_tokens row_sequence row_position row_slot"),
            reads("float", "kv_a"),
            stored("float", "norm_weight", layer_weight("kv_a_layernorm")),
            reads(act, "q"),
            *_TABLES,
            _kv_cache(self.c),
            writes(act, "query"),
            _capacity(self.c),
        )


@dataclass(frozen=True)
class NormAndCacheOp(Op):
    """The low-rank query's norm and the cache row, which read one projection, each in a block of its own, for few rows."""

    def kernel(self) -> Kernel:
        s, norm, cache = self.c.spec, norm_q_a(self.c).kernel(), RopeCacheOp(self.c).kernel()
        p = NormAndCache(CACHE_BESIDE, cast(RmsNorm, norm.params), cast(RopeCache, cache.params))
        cost = norm.cost + Cost(
            bytes_fixed=s.kv_lora_rank * 4, bytes_per_row=s.cache_row_dim * (4 + self.c.mode.act_bytes),
            operations_per_row=6 * s.cache_row_dim,
        )  # fmt: skip
        grid, summary = (ROW_EXTENT, Extent(2), ONE), f"{norm.summary}; beside it, the cache row [c_kv | k_rope]"
        early = (*PLACES, "row_sequence", "row_slot")
        return Kernel(p.name, "norm_and_cache.cu.j2", p, norm.block, grid, 0, cost, summary, early=early)

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("num_tokens row_sequence row_position row_slot"),
            reads("float", "q_a_kv_a", buffer("kv_a")),
            stored("float", "q_a_weight", layer_weight("q_a_layernorm")),
            stored("float", "kv_a_weight", layer_weight("kv_a_layernorm")),
            *_TABLES,
            writes(self.c.mode.act, "q_a"),
            _kv_cache(self.c),
            _capacity(self.c),
        )


@dataclass(frozen=True)
class RowGroup:
    """The rows of one attention launch: all of a step's, or the ``index``-th of ``groups`` groups of ``rows``."""

    index: int | None = None
    rows: int = 0
    groups: int = 1

    @property
    def first(self) -> int:
        return (self.index or 0) * self.rows

    def count(self) -> Argument:
        return reads("int", "num_tokens", buffer("num_tokens") if self.index is None else buffer("group_rows", 4 * self.index))

    def at(self, name: str, row_bytes: int = 4) -> Arg:
        """The buffer ``name`` from this group's first row on."""
        return buffer(name, self.first * row_bytes)

    def schedule(self, spec: Spec) -> Arg:
        return buffer("attention_schedule", (self.index or 0) * wgmma_blocks(spec) * schedule_bytes(spec))


EVERY_ROW = RowGroup()


@dataclass(frozen=True)
class RowGroupsOp(Op):
    """How many token rows each attention launch has."""

    groups: int

    def kernel(self) -> Kernel:
        p = RowGroups("row_groups", ATTENTION_ROWS[self.c.spec.kv_lora_rank])
        return Kernel("row_groups", "row_groups.cu.j2", p, 32, (ONE, ONE, ONE), 0, Cost(), "token rows of each attention launch")

    def arguments(self) -> tuple[Argument, ...]:
        return *reads_ints("num_tokens"), writes("int", "group_rows"), number("groups", self.groups)


def _attention_blocks(c: Context) -> Extent:
    """Blocks of a launch on wgmma: no more than there are splits."""
    return Extent(per_tokens=1, per_context=attention_splits(c.spec, c.mode).shortest, cap=wgmma_blocks(c.spec))


@dataclass(frozen=True)
class AttentionScheduleOp(Op):
    """Which rows and splits each block of attention on wgmma works on."""

    group: RowGroup = EVERY_ROW

    def kernel(self) -> Kernel:
        s = self.c.spec
        name, splits, group, workers = "attention_schedule", attention_splits(s, self.c.mode), wgmma_group(s), wgmma_blocks(s)
        grid, summary = (_attention_blocks(self.c), ONE, ONE), "rows and splits of each attention block"
        if group > 1:
            of_groups = AttentionScheduleOfGroups(
                name, splits, group, WGMMA_START_TILES, WGMMA_SPLIT_TILES, workers, max_work_items(s), schedule_bytes(s)
            )
            return Kernel(name, "attention_schedule_of_groups.cu.j2", of_groups, 32, grid, 0, Cost(), summary)
        p = AttentionSchedule(name, splits, WGMMA_SPLIT_TILES, workers, max_work_items(s), schedule_bytes(s))
        return Kernel(name, "attention_schedule.cu.j2", p, 32, grid, 0, Cost(), summary)

    def arguments(self) -> tuple[Argument, ...]:
        group = self.group
        return (
            group.count(),
            *(reads("int", name, group.at(name)) for name in ("row_sequence", "row_position", "row_prefix")),
            writes("Schedule", "schedules", group.schedule(self.c.spec)),
            number("first_row", group.first),
        )


@dataclass(frozen=True)
class MlaAttentionOp(Op):
    """Absorbed attention of a group of rows over the cache and the draft tree: a softmax-weighted sum of latents for every split of the
    keys, with the split's largest score and sum."""

    group: RowGroup = EVERY_ROW

    @property
    def row_groups(self) -> int:
        return self.group.groups

    def kernel(self) -> Kernel:
        s, mode, heads = self.c.spec, self.c.mode, self.c.spec.num_attention_heads
        row, latent, every = s.cache_row_dim, s.kv_lora_rank, attention_splits(s, mode)
        cost = Cost(bytes_per_key=row * mode.act_bytes, operations_per_row_and_key=2 * heads * (row + latent))
        summary = "absorbed MLA over the cache and the draft tree; bytes and operations per key"
        group: Group = "attention over the cache"
        split = every.shortest
        splits = Extent(per_context=split)
        if mode.wgmma:
            smem, head_tiles = wgmma_smem(s), max(1, heads // WGMMA_TILE)
            wgmma = MlaAttentionWgmma(
                name="mla_attention", heads=heads, kv_lora=latent, row=row, max_path=MAX_PATH, splits=every, group=wgmma_group(s),
                max_items=max_work_items(s), schedule_bytes=schedule_bytes(s),
                scale_log2=s.softmax_scale * math.log2(math.e), slack=SOFTMAX_SLACK, act="bf16", tiled=True,
                smem_comment=f"{smem} bytes, of the 227 KiB that sm_90a has",
            )  # fmt: skip
            grid, early = (_attention_blocks(self.c), Extent(head_tiles), ONE), ("schedules", "kv_cache")
            return Kernel("mla_attention", "mla_attention_wgmma.cu.j2", wgmma, 384, grid, smem, cost, summary, early=early, group=group)
        if not self.c.tensor_cores:
            generic = MlaAttentionF32(
                name="mla_attention", heads=heads, kv_lora=latent, row=row, max_path=MAX_PATH, split=split, tile=32,
                scale=s.softmax_scale, block=block_for(latent, 128), blocks_per_sm=4,
            )  # fmt: skip
            grid = (ROW_EXTENT, Extent(heads), splits)
            return Kernel("mla_attention", "mla_attention_f32.cu.j2", generic, generic.block, grid, 0, cost, summary, group=group)
        smem = attention_smem(s)
        mma = MlaAttentionMma(
            name="mla_attention", heads=heads, kv_lora=latent, row=row, max_path=MAX_PATH, split=split, blocks_per_sm=2,
            scale=s.softmax_scale, smem_comment=f"{smem} bytes: 2 stages of 32 keys are what fits the 99 KiB that every target has",
        )  # fmt: skip
        grid = (ROW_EXTENT, Extent(-(-heads // 16)), splits)
        return Kernel("mla_attention", "mla_attention_mma.cu.j2", mma, 128, grid, smem, cost, summary, group=group)

    def arguments(self) -> tuple[Argument, ...]:
        c, group, act = self.c, self.group, self.c.mode.act
        if c.mode.wgmma:
            rows: tuple[Argument, ...] = (reads("Schedule", "schedules", group.schedule(c.spec)),)
        else:
            rows = group.count(), *(reads("int", name, group.at(name)) for name in ("row_sequence", "row_position", "row_prefix"))
        query = group.at("query", c.spec.num_attention_heads * c.spec.cache_row_dim * c.mode.act_bytes)
        return (
            *rows,
            reads("int", "row_path", group.at("row_path", 4 * MAX_PATH)),
            reads(act, "query", query),
            _kv_cache(c, reading=True),
            writes("bf16" if c.mode.wgmma else "float", "split_values"),
            writes("float", "split_max"),
            writes("float", "split_sum"),
            _capacity(c),
            number("max_splits", max_splits(c)),
        )


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
            name=COMBINE_BESIDE, combine=combine.name, linear=many.name, heads=s.num_attention_heads, kv_lora=s.kv_lora_rank,
            splits=cast(Any, combine.params).splits, rows=layer.rows, ranges=linear.warps, range_steps=range_steps, block=warps * 32,
            cluster=cluster, block_tiles=tiles, warp_tiles=-(-tiles * linear.warps * cluster // warps), max_tokens=tokens,
            smem_comment=f"{smem} bytes, of the 227 KiB that sm_90a has",
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
