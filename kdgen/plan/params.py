"""The templates' contexts: one frozen dataclass a template, whose fields are exactly the names the template uses as ``p.<field>``.

``act`` is the C++ type of activations and cache rows (``float`` or ``bf16``), ``weight`` that of the stored weights, ``out``
that of a kernel's output. Sizes are in elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kdgen.plan.key_splits import Splits

CType = Literal["float", "bf16"]


@dataclass(frozen=True)
class Outbox:
    """The memory of every rank, where results go that are a rank's part of a sum. A row has ``width`` words and ``counters`` rounds."""

    ranks: int
    width: int
    counters: int


@dataclass(frozen=True)
class Embed:
    name: str
    hidden: int
    weight: CType
    rows: int
    sharded: bool
    block: int
    outbox: Outbox | None = None


@dataclass(frozen=True)
class RmsNorm:
    name: str
    width: int
    x_stride: int
    eps: float
    act: CType
    block: int
    vector: int
    rows_are_old: bool
    chosen: bool
    cluster: int = 0


@dataclass(frozen=True)
class LinearF32:
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
class LinearMma:
    name: str
    rows: int
    cols: int
    x_stride: int
    x_batch_stride: int
    y_stride: int
    y_batch_stride: int
    warps: int
    max_tokens: int
    together: int
    stage_steps: int
    slots: int
    smem_comment: str
    blocks_per_sm: int
    chunk_steps: int
    chunks_ahead: int
    lines_from: int
    rows_are_old: bool
    out: CType
    gated: bool
    bias: bool
    accumulate: bool
    epilogue_comment: str
    outbox: Outbox | None = None


@dataclass(frozen=True)
class LinearWgmma:
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
    smem_comment: str
    out: CType
    gated: bool
    bias: bool
    accumulate: bool
    epilogue_comment: str


@dataclass(frozen=True)
class RopeCache:
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
    name: str
    norm: RmsNorm
    cache: RopeCache


@dataclass(frozen=True)
class LinearHeads:
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
class MlaAttentionF32:
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
    name: str
    heads: int
    kv_lora: int
    row: int
    max_path: int
    splits: Splits
    group: int
    visits: int
    scale_log2: float
    slack: int
    act: CType
    tiled: bool
    smem_comment: str


@dataclass(frozen=True)
class MlaCombine:
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
    name: str
    heads: int
    kv_lora: int
    splits: Splits


@dataclass(frozen=True)
class MlaCombineRows:
    name: str
    decode: str
    heads: int
    kv_lora: int
    splits: Splits
    warps: int
    batch: int
    blocks_per_sm: int


@dataclass(frozen=True)
class CombineAndHeads:
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
class AttentionShares:
    name: str
    splits: Splits
    group: int
    start_tiles: int
    split_tiles: int
    most_parts: int
    visits: int


@dataclass(frozen=True)
class RowGroups:
    name: str
    rows: int


@dataclass(frozen=True)
class RouterLogits:
    name: str
    hidden: int
    experts: int
    tokens: int
    block_experts: int
    vector: int
    act: CType


@dataclass(frozen=True)
class RouterLogitsMma:
    name: str
    hidden: int
    experts: int
    warps: int
    held_steps: int
    max_tokens: int


@dataclass(frozen=True)
class RouterPhase:
    """The same as a phase of a kernel for few rows."""

    hidden: int
    experts: int
    warps: int
    held_steps: int
    max_tokens: int
    chunk_steps: int
    chunks_ahead: int


@dataclass(frozen=True)
class LinearAndRouter:
    name: str
    linear: LinearMma
    router: RouterPhase


@dataclass(frozen=True)
class RouterTopK:
    name: str
    experts: int
    top_k: int
    groups: int
    topk_group: int
    group_top2: bool
    softmax: bool
    has_bias: bool
    normalise: bool
    routed_scaling: float
    scoring_comment: str


@dataclass(frozen=True)
class MoeSort:
    name: str
    experts: int
    top_k: int
    block: int


@dataclass(frozen=True)
class LinearAndChoice:
    name: str
    linear: LinearMma
    choice: RouterTopK
    sort: MoeSort
    choice_comment: str


@dataclass(frozen=True)
class ExpertsF32:
    name: str
    rows: int
    cols: int
    assignments_per_x_row: int
    slices: int
    tokens: int
    weight: Literal["float", "bf16", "unsigned char"]
    int4: bool
    group_size: int
    gated: bool
    weight_comment: str


@dataclass(frozen=True)
class ExpertsMma:
    name: str
    experts: int
    rows: int
    cols: int
    assignments_per_x_row: int
    warps: int
    groups: int
    token_tiles: int
    side_by_side: int
    even: int
    more_cost: int
    reading_cost: int
    stage_steps: int
    slots: int
    smem_comment: str
    x_in_registers: bool
    blocks_per_sm: int
    int4: bool
    out: CType
    gated: bool
    inputs_are_old: bool
    weight_comment: str


@dataclass(frozen=True)
class ExpertsWgmma:
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
    smem_comment: str
    int4: bool
    out: CType
    gated: bool
    weight_comment: str


@dataclass(frozen=True)
class MoeCombine:
    name: str
    hidden: int
    top_k: int
    accumulate: bool
    block: int
    outbox: Outbox | None = None


#: What can have an outbox.
Sending = Embed | LinearF32 | LinearMma | MoeCombine


@dataclass(frozen=True)
class Argmax:
    name: str
    vocab: int
    sharded: bool
    block: int
    vector: int
    cluster: int


@dataclass(frozen=True)
class Sample:
    name: str
    vocab: int
    block: int


@dataclass(frozen=True)
class TopKParts:
    name: str
    vocab: int
    max_path: int
    max_candidates: int
    lane_tokens: int
    block: int


@dataclass(frozen=True)
class TopK:
    name: str
    vocab: int
    max_path: int
    max_candidates: int
    parts: int
    block: int
    smem_comment: str


@dataclass(frozen=True)
class ChainRows:
    name: str
    block: int


@dataclass(frozen=True)
class LogitRows:
    name: str
    block: int


@dataclass(frozen=True)
class Advance:
    name: str


@dataclass(frozen=True)
class TreeBuild:
    name: str
    max_nodes: int
    max_path: int
    max_candidates: int


@dataclass(frozen=True)
class TreeRows:
    name: str
    max_nodes: int
    max_path: int
    block: int


@dataclass(frozen=True)
class TreeAccept:
    name: str
    max_nodes: int
    max_path: int


@dataclass(frozen=True)
class KvCompact:
    name: str
    row: int
    max_path: int
    act: CType
    tiled: bool
    block: int


# ---- ranks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankSum:
    name: str
    width: int
    ranks: int
    bias: bool
    block: int


@dataclass(frozen=True)
class PeerSum:
    name: str
    width: int
    ranks: int
    direct_rows: int
    bias: bool
    block: int


@dataclass(frozen=True)
class PeerSumNorm:
    name: str
    sum: str
    norm: RmsNorm
    ranks: int
    counters: int
    bias: bool


@dataclass(frozen=True)
class PeerArgmax:
    name: str
    part: Argmax
    ranks: int


@dataclass(frozen=True)
class PeerGather:
    name: str
    width: int
    ranks: int
    block: int


@dataclass(frozen=True)
class RankChoice:
    name: str
    vocab: int
    ranks: int
    block: int


@dataclass(frozen=True)
class RankLogits:
    name: str
    vocab: int
    ranks: int
    block: int


# ---- drafter ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftCapture:
    name: str
    hidden: int
    width: int
    act: CType
    block: int


@dataclass(frozen=True)
class DraftContext:
    name: str
    width: int
    hidden: int
    sharded: bool
    max_path: int
    columns: int
    act: CType
    block: int


@dataclass(frozen=True)
class DraftBlock:
    name: str
    mask_token: int
    block: int


@dataclass(frozen=True)
class DraftHeads:
    name: str
    queries: bool
    query_heads: int
    key_heads: int
    head: int
    eps: float
    act: CType
    block: int
    blocks_per_sm: int


@dataclass(frozen=True)
class GqaAttention:
    name: str
    heads: int
    key_heads: int
    group: int
    head: int
    split: int
    rows: int
    row_tiles: int
    scale: float
    causal: bool
    act: CType
    block: int
    blocks_per_sm: int
    mask_comment: str
    smem_comment: str


@dataclass(frozen=True)
class GqaCombine:
    name: str
    heads: int
    head: int
    split: int
    act: CType
    block: int
