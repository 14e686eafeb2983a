"""The drafter's ops: features of the target's layers, keys and values of committed tokens, and a pass over a block [root, mask, …].

In every program the outputs of the target's layers that the drafter reads are kept for each token row. When a step has committed its
tokens, their features become keys and values in the drafter's cache, at the tokens' own positions: the cache is always as long as
its sequence. A draft then is one pass over a block behind it. The block's own keys and values stand in the slots that the next committed
tokens overwrite, so that none survives.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.plan.ir import MAX_PATH, ONE, Cost, Extent, Kernel, Limits
from kdgen.plan.ops.op import (
    ROW_EXTENT,
    Argument,
    Op,
    buffer,
    layer_buffer,
    layer_weight,
    number,
    page_table,
    reads,
    reads_floats,
    reads_ints,
    stored,
    writes,
    writes_ints,
)
from kdgen.plan.tuning import CType, block_for
from kdgen.spec.drafter import DraftSpec

_TILE = 32  #: keys of an attention tile, one a lane
_HEADS_PER_BLOCK = 4  #: a warp each


def split_keys(draft: DraftSpec) -> int:
    """Keys of an attention split. Small drafters split early so that their tests cross split bounds."""
    return 64 if draft.head_dim < 64 else 256


def query_rows(draft: DraftSpec) -> int:
    """Query rows of an attention tile: what a block has for one key head, up to where values and tiles take too much room."""
    most = 16 if draft.head_dim > 256 else 32
    return next(rows for rows in (8, 16, 32) if rows == most or rows >= draft.block_size * draft.group_heads)


def attention_block(draft: DraftSpec) -> int:
    """Threads of an attention block: a value column each, in 1, 2 or 4 warps, for each takes as many of the query rows."""
    return next(block for block in (32, 64, 128) if block == 128 or block >= draft.head_dim)


def attention_smem(draft: DraftSpec) -> int:
    """Bytes of gqa_attention's ``struct Shared``: query rows, probabilities, rescale, a tile of keys."""
    rows, head = query_rows(draft), draft.head_dim
    return 4 * (head * rows + _TILE * rows + rows + _TILE * (head + 1))


@dataclass(frozen=True)
class DraftCapture:
    """Context of draft_capture.cu.j2."""

    name: str
    hidden: int
    width: int
    act: CType
    block: int


@dataclass(frozen=True)
class DraftContext:
    """Context of draft_context.cu.j2."""

    name: str
    width: int
    hidden: int
    sharded: bool
    max_path: int
    columns: int
    block: int


@dataclass(frozen=True)
class DraftBlock:
    """Context of draft_block.cu.j2."""

    name: str
    mask_token: int
    block: int


@dataclass(frozen=True)
class DraftHeads:
    """Context of draft_heads.cu.j2."""

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
    """Context of gqa_attention.cu.j2."""

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


@dataclass(frozen=True)
class GqaCombine:
    """Context of gqa_combine.cu.j2."""

    name: str
    heads: int
    head: int
    split: int
    act: CType
    block: int


def draft_splits(draft: DraftSpec, limits: Limits) -> int:
    return -(-limits.capacity // split_keys(draft))


@dataclass(frozen=True)
class _DraftOp(Op):
    """An op of a drafter, or of a rank's part of it."""

    draft: DraftSpec

    def cache(self, reading: bool = False) -> Argument:
        return (reads if reading else writes)(self.c.mode.act, "draft_cache", layer_buffer("draft_cache"))


@dataclass(frozen=True)
class DraftCaptureOp(_DraftOp):
    """A target layer's output among each row's features, at ``place``."""

    place: int

    def kernel(self) -> Kernel:
        d, mode = self.draft, self.c.mode
        block = block_for(d.hidden_size)
        p = DraftCapture("draft_capture", d.hidden_size, d.feature_width, mode.act, block)
        cost = Cost(bytes_per_row=d.hidden_size * (4 + mode.act_bytes))
        grid = (ROW_EXTENT, Extent(-(-d.hidden_size // block)), ONE)
        return Kernel(p.name, "draft_capture.cu.j2", p, block, grid, 0, cost, "a layer's output among the features", group="drafter")

    def arguments(self) -> tuple[Argument, ...]:
        features = writes(self.c.mode.act, "features")
        return *reads_ints("num_tokens"), *reads_floats("residual"), features, number("place", self.place)


@dataclass(frozen=True)
class DraftContextOp(_DraftOp):
    """The features of the tokens that a step committed, one after another; ``from_tree``: an accepted path. Where ranks share the drafter
    the residual is cleared, too, for a sum over them goes there."""

    from_tree: bool

    def kernel(self) -> Kernel:
        d, mode, block = self.draft, self.c.mode, 256
        columns = 8 * block
        p = DraftContext("draft_context", d.feature_width, d.hidden_size, not self.c.shard.whole, MAX_PATH, columns, block)
        cost = Cost(bytes_per_row=2 * d.feature_width * mode.act_bytes)
        grid = (ROW_EXTENT, Extent(-(-d.feature_width // columns)), ONE)
        return Kernel(
            p.name, "draft_context.cu.j2", p, block, grid, 0, cost, "features of the tokens that a step committed", group="draft context",
            timing="in steps",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        act, residual = self.c.mode.act, () if self.c.shard.whole else (writes("float", "residual"),)
        return (
            *reads_ints("step_count step_sequence step_begin accepted_count accepted_nodes sequence_length"),
            reads(act, "features"),
            writes(act, "context_features"),
            *writes_ints("context_count context_sequence context_position"),
            *residual,
            number("from_tree", int(self.from_tree)),
        )


@dataclass(frozen=True)
class DraftBlockOp(_DraftOp):
    """Where the rows of the step's draft blocks stand, which are those of the verify step's trees."""

    def kernel(self) -> Kernel:
        p = DraftBlock("draft_block", self.draft.mask_token_id, 128)
        return Kernel(
            p.name, "draft_block.cu.j2", p, p.block, (ONE, ONE, ONE), 0, Cost(bytes_per_row=12), "row metadata of draft blocks",
            group="drafter", timing="in steps",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        read = reads_ints("step_count step_sequence draft_begin sequence_length root_token")
        return *read, *writes_ints("num_tokens tokens row_sequence row_position row_last")


@dataclass(frozen=True)
class DraftHeadsOp(_DraftOp):
    """Normalised and rotated keys, and values, into the draft cache: of a block's rows, with its queries, or of committed tokens."""

    queries: bool

    def kernel(self) -> Kernel:
        d, mode, name = self.draft, self.c.mode, "draft_block_heads" if self.queries else "draft_context_heads"
        heads = d.num_key_value_heads + (d.num_attention_heads if self.queries else 0)
        p = DraftHeads(
            name=name, queries=self.queries, query_heads=d.num_attention_heads, key_heads=d.num_key_value_heads, head=d.head_dim,
            eps=d.rms_norm_eps, act=mode.act, block=_HEADS_PER_BLOCK * 32, blocks_per_sm=8,
        )  # fmt: skip
        width = 2 * d.key_width + (d.query_width if self.queries else 0)
        cost = Cost(bytes_per_row=width * (4 + mode.act_bytes), operations_per_row=10 * width)
        grid = (ROW_EXTENT, Extent(-(-heads // _HEADS_PER_BLOCK)), ONE)
        summary = "a block's keys, values and queries" if self.queries else "keys and values of committed tokens"
        return Kernel(name, "draft_heads.cu.j2", p, p.block, grid, 0, cost, summary, group="drafter")

    def arguments(self) -> tuple[Argument, ...]:
        count, sequence, position = "num_tokens", "row_sequence", "row_position"
        if not self.queries:
            count, sequence, position = "context_count", "context_sequence", "context_position"
        q = (reads("float", "q", buffer("draft_q")), stored("float", "q_norm", layer_weight("draft_q_norm"))) if self.queries else ()
        query = (writes(self.c.mode.act, "query", buffer("draft_query")),) if self.queries else ()
        return (
            reads("int", "num_tokens", buffer(count)),
            reads("int", "row_sequence", buffer(sequence)),
            reads("int", "row_position", buffer(position)),
            reads("float", "kv", buffer("draft_kv")),
            *q,
            stored("float", "k_norm", layer_weight("draft_k_norm")),
            stored("float", "cos_table", buffer("draft_cos_table")),
            stored("float", "sin_table", buffer("draft_sin_table")),
            self.cache(),
            *query,
            *page_table(self.c.limits),
        )


@dataclass(frozen=True)
class GqaAttentionOp(_DraftOp):
    """Grouped-query attention of a block over its sequence's draft cache and itself, for every split of the keys; ``window`` 0: of all."""

    window: int

    def kernel(self) -> Kernel:
        d, rows, smem = self.draft, query_rows(self.draft), attention_smem(self.draft)
        row_tiles = -(-d.block_size * d.group_heads // rows)
        mask = {
            "causal": "With a window, a row sees so many keys before itself, itself included.",
            "symmetric": "With a window, a row sees the keys that are closer than that, on either side.",
            "none": "No layer has a window.",
        }[d.sliding_mask]
        p = GqaAttention(
            name="draft_attention", heads=d.num_attention_heads, key_heads=d.num_key_value_heads, group=d.group_heads, head=d.head_dim,
            split=split_keys(d), rows=rows, row_tiles=row_tiles, scale=d.head_dim**-0.5, causal=d.sliding_mask == "causal",
            act=self.c.mode.act, block=attention_block(d),
            blocks_per_sm=4 if attention_block(d) == 128 else 6, mask_comment=mask,
        )  # fmt: skip
        cost = Cost(bytes_per_draft_key=2 * d.key_width * self.c.mode.act_bytes, operations_per_row_and_key=4 * d.query_width)
        grid = (Extent(row_tiles, per_sequence=True), Extent(d.num_key_value_heads), Extent(per_context=p.split))
        summary = "a block over its sequence's draft cache; bytes and operations per key"
        return Kernel(p.name, "gqa_attention.cu.j2", p, p.block, grid, smem, cost, summary, group="drafter")

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("step_count step_sequence draft_begin sequence_length"),
            reads(self.c.mode.act, "query", buffer("draft_query")),
            self.cache(reading=True),
            *(writes("float", f"split_{what}", buffer(f"draft_{what}")) for what in ("values", "max", "sum")),
            *page_table(self.c.limits),
            number("max_splits", draft_splits(self.draft, self.c.limits)),
            number("window", self.window),
        )


@dataclass(frozen=True)
class GqaCombineOp(_DraftOp):
    """The splits of each row and head of a block joined, in the order of their keys."""

    window: int

    def kernel(self) -> Kernel:
        d, mode, block = self.draft, self.c.mode, block_for(self.draft.head_dim, 128)
        p = GqaCombine("draft_combine", d.num_attention_heads, d.head_dim, split_keys(d), mode.act, block)
        cost = Cost(bytes_per_row=d.query_width * (4 + mode.act_bytes), operations_per_row=2 * d.query_width)
        grid = (ROW_EXTENT, Extent(d.num_attention_heads), ONE)
        return Kernel(p.name, "gqa_combine.cu.j2", p, block, grid, 0, cost, "joins the splits of a draft block", group="drafter")

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("num_tokens row_sequence row_last sequence_length"),
            *(reads("float", f"split_{what}", buffer(f"draft_{what}")) for what in ("values", "max", "sum")),
            writes(self.c.mode.act, "output", buffer("draft_attended")),
            number("max_splits", draft_splits(self.draft, self.c.limits)),
            number("window", self.window),
        )
