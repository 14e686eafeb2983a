"""Multi-head latent attention: cache rows and rotated queries, attention over the cache and the draft tree, the joining of its splits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from kdgen.plan.attention import (
    ATTENTION_ROWS,
    SOFTMAX_SLACK,
    WGMMA_TILE,
    attention_smem,
    attention_splits,
    max_work_items,
    schedule_bytes,
    wgmma_group,
    wgmma_smem,
)
from kdgen.plan.ir import MAX_PATH, ONE, Cost, Extent, Group, Kernel
from kdgen.plan.key_splits import Splits
from kdgen.plan.ops.attention_combine import max_splits
from kdgen.plan.ops.attention_schedule import EVERY_ROW, RowGroup, attention_blocks
from kdgen.plan.ops.dense import heads_fit_registers
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
    page_table,
    reads,
    reads_ints,
    stored,
    writes,
)
from kdgen.plan.tuning import CType, block_for
from kdgen.spec.model import LORA_NORM_EPS, Spec

NORM_AND_CACHE = "rmsnorm_q_a_and_cache"


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


def kv_a_stride(spec: Spec) -> int:
    """Width of the fused [q_a | kv_a] projection's output; kv_a alone when queries have no low-rank form."""
    return (spec.q_lora_rank or 0) + spec.cache_row_dim


def fuses_norm_and_cache(c: Context) -> bool:
    """Whether forwards of few rows write cache rows beside the low-rank query's norm, and rotate queries beside w_uk."""
    return heads_fit_registers(c) and c.spec.q_lora_rank is not None


def attention_rows(c: Context) -> int:
    """Token rows of one attention launch; a step with more has several, one after another over the same partial values."""
    return min(c.limits.max_rows, ATTENTION_ROWS[c.spec.kv_lora_rank]) if c.mode.wgmma else c.limits.max_rows


def norm_q_a(c: Context) -> RmsNormOp:
    """The norm of the low-rank query, which stands before the cache row in one projection's output."""
    s = c.spec
    gain = layer_weight("q_a_layernorm")
    return RmsNormOp(c, "rmsnorm_q_a", s.q_lora_rank or 0, LORA_NORM_EPS, "kv_a", gain, "q_a", x_stride=kv_a_stride(s))


def _kv_cache(c: Context, reading: bool = False) -> Argument:
    return (reads if reading else writes)(c.mode.act, "kv_cache", layer_buffer("kv_cache"))


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
            *page_table(self.c.limits),
        )


@dataclass(frozen=True)
class NormAndCacheOp(Op):
    """The low-rank query's norm and the cache row, which read one projection, each in a block of its own, for few rows."""

    def kernel(self) -> Kernel:
        s, norm, cache = self.c.spec, norm_q_a(self.c).kernel(), RopeCacheOp(self.c).kernel()
        p = NormAndCache(NORM_AND_CACHE, cast(RmsNorm, norm.params), cast(RopeCache, cache.params))
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
            *page_table(self.c.limits),
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
            )  # fmt: skip
            grid, early = (attention_blocks(self.c), Extent(head_tiles), ONE), ("schedules", "kv_cache")
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
            scale=s.softmax_scale,
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
            *page_table(c.limits),
            number("max_splits", max_splits(c)),
        )
