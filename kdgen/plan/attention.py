"""What a model's attention needs and how it is tiled: splits of the keys, rows and heads of a tile, what few rows have in one launch."""

from __future__ import annotations

from kdgen.plan.arch import smem_limit
from kdgen.plan.key_splits import Splits
from kdgen.plan.tuning import CLUSTER, SMS, Mode
from kdgen.spec.model import Spec


def mma_obstacles(spec: Spec) -> tuple[str, ...]:
    """Why the tensor-core path cannot serve this spec; empty when it can. An MMA step is 16 inputs wide."""
    widths = {
        "hidden_size": spec.hidden_size,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_nope_head_dim": spec.qk_nope_head_dim,
        "kv_lora_rank + qk_rope_head_dim": spec.cache_row_dim,
        "num_attention_heads * v_head_dim": spec.num_attention_heads * spec.v_head_dim,
    }
    if spec.q_lora_rank is not None:
        widths["q_lora_rank"] = spec.q_lora_rank
    if spec.first_k_dense_replace:
        widths["intermediate_size"] = spec.intermediate_size
    if spec.has_moe:
        widths["moe_intermediate_size"] = spec.moe_intermediate_size
    if spec.draft is not None:
        for name in ("query_width", "intermediate_size", "feature_width"):
            widths[f"draft.{name}"] = getattr(spec.draft, name)
    found = [f"{name} {width} is no multiple of 16" for name, width in widths.items() if width % 16]
    if attention_smem(spec) > (most := smem_limit("generic")):
        found.append(f"attention tiles need {attention_smem(spec)} bytes of shared memory, more than {most}")
    return tuple(found)


def attention_smem(spec: Spec) -> int:
    """Bytes of mla_attention_mma's ``struct Shared``: 16 query rows, 2 stages of 32 key rows, probabilities, scores, rescale."""
    shared_row = (spec.cache_row_dim + 8) * 2
    return (16 + 2 * 32) * shared_row + 16 * (32 + 8) * 2 + 16 * (32 + 1) * 4 + 16 * 4


WGMMA_TILE = 64  # heads, keys and columns of mla_attention_wgmma's tiles
WGMMA_LATENTS = (128, 512)  # of which half are the columns of one of its value MMAs
#: Most blocks, by latent: one on each of an H200's multiprocessors. Small models have few, so that their tests give a block several
#: rows and splits.
WGMMA_BLOCKS = {128: 4, 512: SMS}
#: Token rows of one attention launch, by latent, for the sake of the memory that partial values take: at K2.6's width and 32,768 keys
#: 5 MiB a row. Four for each of an H200's multiprocessors; small models have few, so that their tests cross them.
ATTENTION_ROWS = {128: 40, 512: 4 * SMS}
#: What the start of another tile of heads costs, in tiles of keys. On an H200 a row takes 20 µs with splits of 256 keys and 28 with 512,
#: the combine included: 2 µs a tile of 64 keys, and 7 or so before and after them.
WGMMA_START_TILES = 4
#: What the end of a split costs, in the same: its partial values are stored while no tile is multiplied.
WGMMA_SPLIT_TILES = 1
#: While a split's scores stay within this power of 2 of an older largest one, probabilities are left relative to that: 8 is what
#: FlashAttention-4 takes, and bfloat16 and float32 lose nothing by.
SOFTMAX_SLACK = 8


def has_wgmma_shapes(spec: Spec) -> bool:
    """Whether mla_attention_wgmma can serve this spec, which tensor cores can: tiles that are full of heads, of one token row or of a
    group of them, and a rotary part as wide as a tile.
    """
    heads = spec.num_attention_heads
    full = heads % WGMMA_TILE == 0 or (WGMMA_TILE % heads == 0 and heads % 8 == 0)
    return full and spec.qk_rope_head_dim == WGMMA_TILE and spec.kv_lora_rank in WGMMA_LATENTS and not mma_obstacles(spec)


def wgmma_group(spec: Spec) -> int:
    """Token rows whose heads fill a tile."""
    return max(1, WGMMA_TILE // spec.num_attention_heads)


def wgmma_blocks(spec: Spec) -> int:
    """Most blocks of an attention launch for each tile of a row's heads."""
    return max(1, WGMMA_BLOCKS[spec.kv_lora_rank] // max(1, spec.num_attention_heads // WGMMA_TILE))


def wgmma_splits(spec: Spec) -> Splits:
    """Of mla_attention_wgmma, where a split costs a block's start and its partial values' way through memory: they grow with the position.

    On an H200, µs of attention and combine at K2.6's width for 1 and 8 rows (2026-11-30): at 4,096 keys 20 and 22 with splits of 256, 28
    and 31 of 512; at 32,768 keys 35 and 132 of 256, 32 and 104 of 512, 48 and 92 of 1,024, 83 and 86 of 2,048. One row comes first.

    Where a group of rows shares tiles, 32 heads at 4,096 keys take 26 and 20 with splits of 256, 19 and 24 of 128, 16 and 27 of 64; at
    32,768 keys 35 and 60, 37 and 69, 43 and 114. One row comes first here, too.
    """
    if spec.kv_lora_rank < 256:
        return Splits.growing((0, 64), (128, 128))
    short = ((0, 128), (4096, 256)) if wgmma_group(spec) > 1 else ((0, 256),)
    return Splits.growing(*short, (8192, 512), (65536, 1024))


def max_work_items(spec: Spec) -> int:
    """Most work items of a block of an attention launch. A block that has several groups of rows has an item for what each group shares and
    one for each of its rows; a block among several of one group has an item for each length of splits of these. A block that is left over
    has an item for each row that it helps, and takes no more rows than this.
    """
    group = wgmma_group(spec)
    lists = group + 1 if group > 1 else 1
    groups, lengths = -(-ATTENTION_ROWS[spec.kv_lora_rank] // group), len(wgmma_splits(spec).ranges) + 1  # a row's last split is cut
    return max(8, -(-groups // wgmma_blocks(spec)) * lists, lengths * lists)


def schedule_bytes(spec: Spec) -> int:
    """Bytes of ``struct Schedule``, which says what one block of an attention launch works on: a count, and items of 32 bytes."""
    return 16 + 32 * max_work_items(spec)


def wgmma_smem(spec: Spec) -> int:
    """Bytes of mla_attention_wgmma's ``struct Shared``: a query tile, 2 stages of a key tile and of rescale, 22 barriers."""
    return 3 * WGMMA_TILE * spec.cache_row_dim * 2 + 128 * (64 + 8) + 4 * WGMMA_TILE * 4 + 22 * 8


def attention_splits(spec: Spec, mode: Mode) -> Splits:
    """Small models split early so that their tests cross split bounds."""
    if mode.wgmma:
        return wgmma_splits(spec)
    return Splits.growing((0, 64 if mode.compute == "f32" or spec.kv_lora_rank < 256 else 128))


#: Warps of the cluster that has a head, and token rows whose latents its blocks hold, by latent. Small models have few, so that their
#: tests cross them.
COMBINE_WARPS = {128: 8, 512: 32}
COMBINE_TOKENS = {128: 16, 512: 64}


def blocks_of_head(spec: Spec) -> int:
    """Blocks of the cluster that joins a head's splits and multiplies: as many as let all heads' run at once on an H200."""
    most = min(CLUSTER, SMS // spec.num_attention_heads, spec.kv_lora_rank // 64)
    return next((blocks for blocks in (8, 4, 2) if blocks <= most), 1)
