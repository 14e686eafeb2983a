"""Which kernels a model needs and how each is tiled. Everything here depends on the spec and the compute dtype alone.

The exactness contract lives here too: whatever splits a reduction (``slices``, ``warps``, ``split``) is a function of the
layer's shape, never of how many token rows a launch has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

from kdgen.plan import params
from kdgen.plan.attention import (
    ATTENTION_ROWS,
    CACHE_BESIDE,
    COMBINE_BESIDE,
    COMBINE_TOKENS,
    COMBINE_WARPS,
    HELD_STEPS,
    SOFTMAX_SLACK,
    WGMMA_SPLIT_TILES,
    WGMMA_START_TILES,
    WGMMA_TILE,
    attention_smem,
    attention_splits,
    attention_visits,
    blocks_of_head,
    caches_beside,
    combines_beside,
    holds_heads,
    wgmma_blocks,
    wgmma_group,
    wgmma_smem,
)
from kdgen.plan.expert_tiling import (
    CHOICE_BESIDE,
    EVEN_ASSIGNMENTS,
    EXPERT_TOKEN_TILES,
    MORE_COST,
    READING_COST,
    ROUTER_BESIDE,
    SORT_BYTES,
    choice_smem,
    expert_split,
    expert_step,
    has_bf16_router,
    routes_beside,
)
from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES, MAX_PATH, ONE, Cost, Extent, Kernel
from kdgen.plan.shard import Exchange, part_of, shares_draft
from kdgen.plan.tuning import (
    SMEM_LIMIT,
    WGMMA_SMEM_LIMIT,
    Mode,
    block_for,
    blocks_per_sm,
    cluster_of,
    column_blocks,
    dense_ring,
    held_steps,
    input_slices,
    mma_warps,
)
from kdgen.spec.model import LORA_NORM_EPS, Spec

TOKEN_TILES = 4  # of 8 tokens: 32 tokens share one reading of the weights; more accumulators gain nothing at decode
#: Row tiles of a block that a reading of 9 to 32 tokens' inputs is for, which of 32 are twice a tile's weights. H200, µs of K2.6's o_proj
#: and lm_head, 1 or 4 tiles (2026-11-30): 16 rows 40 or 33, 679 or 553; 32 rows 68 or 37, 1,189 or 604; for 8 rows and fewer 1 to 3 % more.
TILES_TOGETHER = 4
#: Tokens from which on a dense layer's inputs are loaded by lines. H200, a step of K2.6 cut to 5 layers, µs, by fragments or lines
#: (2026-11-30): 1 row 1,444 or 1,459, 5 rows 2,059 or 2,044, 8 rows 2,568 or 2,527.
LINES_FROM = 4
CHUNK_STEPS = 4  # of 8 tokens' inputs that are loaded together: whole lines of 128 bytes
CHUNKS_AHEAD = 3  # of them, on their way; with 2 or 4, or the loop over them unrolled, a step takes the same or 10 µs more
ROUTER_CHUNKS_AHEAD = 4  # beside weights in registers; with 2 the layer takes the same, with 7 registers spill
GENERIC_TOKENS = 8
#: Copies of a row that a rank may send in one exchange before summing on fewer ranks is quicker: where sending the rest takes as long
#: as another delay. By the bandwidth and the delay that kdgen.forecast.gpus has of NVLink; not measured.
DIRECT_COPIES = 28
ROW_EXTENT = Extent(per_tokens=1)
SEQUENCE_EXTENT = Extent(per_sequence=True)


def top_k_part(vocab: int) -> tuple[int, int]:
    """Threads of a block of top_k_parts, and tokens of each. Small vocabularies have small parts, so that their tests see several; the
    largest have 128, whose candidates fit a block's shared memory."""
    return (256, max(10, -(-vocab // (256 * 128)))) if vocab >= 8192 else (64, 2)


def top_k_part_size(vocab: int) -> int:
    block, lane_tokens = top_k_part(vocab)
    return block * lane_tokens


def top_k_parts(vocab: int) -> int:
    return -(-vocab // top_k_part_size(vocab))


HEAD_WARPS = 8  # of a block that holds row tiles of a head's weights
FEW = "_few"  #: suffix of a layer's kernel for few rows


#: Most ranks whose sums few rows have in one launch with the norm behind them, to which every rank sends all of its part, 57 KB a row of
#: K2.6. With eight, 8 rows are 3.2 MB, which take longer than the rounds about it, by which a rank sums an eighth of the columns for all;
#: two ranks are measured, more are arithmetic.
NORMED_RANKS = 4
NORMED = "_norm"  #: suffix of a sum over ranks with the norm behind it
SENT = "_to_ranks"  #: suffix of a kernel that sends its part of such a sum to all ranks


def unsent(name: str) -> str:
    """The kernel that leaves in a buffer what the named one sends."""
    return name.removesuffix(SENT)


def norms_sums(ranks: int, exchange: Exchange) -> bool:
    """Whether forwards of few rows normalise in the launch that sums over ranks."""
    return exchange == "peer" and 1 < ranks <= NORMED_RANKS


def sums_biases(whole: Spec, ranks: int) -> bool:
    """Whether some projection whose outputs are summed over ranks has a bias."""
    return whole.attention_bias or bool(whole.draft and whole.draft.attention_bias and shares_draft(whole, ranks))


@dataclass(frozen=True)
class Linear:
    """A dense layer, before it is decided which kernel runs it."""

    name: str
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
    accumulate: bool = False  # y is the float32 residual
    out_float: bool = False


#: Parameters that are old before the embedding lets any kernel start: how many token rows a step has, and where.
COUNT, PLACES = ("num_tokens",), ("num_tokens", "row_position")
#: The routed experts by their assignments, which the kernel that makes them hands over to those behind it.
LISTS = ("num_active", "active_expert", "active_begin", "active_end")


class Catalogue:
    """Builds the kernels of one spec in one mode, for one of ``ranks`` ranks: ``spec`` then is its part, ``whole`` the model."""

    #: How many token rows there are was said before the embedding, which every kernel of a step comes after.
    rows_are_old = True

    def __init__(self, whole: Spec, mode: Mode, ranks: int = 1, exchange: Exchange = "gather") -> None:
        spec = part_of(whole, ranks)
        self.whole, self.spec, self.ranks, self.exchange = whole, spec, ranks, exchange
        self.mode = mode
        self.fast = mode.compute == "bf16"
        self.splits = attention_splits(spec, mode)

    def all(self) -> tuple[Kernel, ...]:
        """Every kernel, in the order in which a step runs them."""
        spec = self.spec
        found = [self._chain_rows(), self._logit_rows(), self._tree_build(), self._tree_rows(), self._embed()]
        found.append(self._norm("rmsnorm_hidden", spec.hidden_size))
        found += [self._linear(layer) for layer in self.attention_linears()[:-2]]
        if spec.q_lora_rank is not None:
            found.append(self._norm_q_a())
        found.append(self._rope_cache())
        if caches_beside(spec, self.mode):
            found.append(self._norm_and_cache())
        absorb, values, o_proj = self.attention_linears()[-3:]
        if holds_heads(spec, self.mode):
            found.append(self._linear_heads(absorb, rotates=caches_beside(spec, self.mode)))
        found += [*self._shares(), self._attention(), self._combine(), self._linear(values)]
        if combines_beside(spec, self.mode):
            found.append(self._combine_and_heads(values))
        elif holds_heads(spec, self.mode):
            found.append(self._linear_heads(values))
        found.append(self._linear(o_proj))
        if spec.first_k_dense_replace:
            found += [self._linear(layer) for layer in self.swiglu("", spec.intermediate_size)]
        if spec.has_moe:
            found += [self._router_logits(), self._router_topk(), self._moe_sort()]
            if spec.shared_intermediate_size:
                found += [self._linear(layer) for layer in self.swiglu("shared_", spec.shared_intermediate_size)]
            if routes_beside(spec, self.mode):
                found += [self._gate_up_and_router()] if has_bf16_router(spec, self.mode) else []
                found.append(self._down_and_choice())
            found += [*self._experts(), self._moe_combine()]
        head = Linear("lm_head", "logits", spec.vocab_size, spec.hidden_size, out_float=True)
        found += [self._norm_logits(), self._linear(head), self._choice(), self._sample(), self._advance()]
        if norms_sums(self.ranks, self.exchange):
            adds = {"embed", "o_proj", "down_proj", "moe_combine"}
            found += [self._sent(kernel) for kernel in found if kernel.name in adds]
        if self.ranks > 1:
            found += self._joins()
        found += [self._tree_accept(), self._kv_compact(), *self._top_k()]
        return tuple(found)

    # ---- shapes that programs and buffers need too ------------------------------------------------------------------

    @property
    def kv_a_stride(self) -> int:
        """Width of the fused [q_a | kv_a] projection's output; kv_a alone when queries have no low-rank form."""
        return (self.spec.q_lora_rank or 0) + self.spec.cache_row_dim

    def attention_linears(self) -> tuple[Linear, ...]:
        """The attention block's dense layers in order; the last two come after attention itself."""
        s = self.spec
        heads, row = s.num_attention_heads, s.cache_row_dim
        q_width = heads * s.qk_head_dim
        if s.q_lora_rank is None:
            first = (
                Linear("q_proj", "queries", q_width, s.hidden_size),
                Linear("kv_a_proj", "[c_kv | k_rope]", row, s.hidden_size, bias=s.attention_bias, out_float=True),
            )
        else:
            summary = "[q_a | c_kv | k_rope] in one reading of h"
            first = (
                Linear("q_a_kv_a_proj", summary, self.kv_a_stride, s.hidden_size, bias=s.attention_bias, out_float=True),
                Linear("q_b_proj", "queries from their low-rank form", q_width, s.q_lora_rank),
            )
        absorb = Linear(
            "w_uk_absorb", "per head, q_nope into the latent space", s.kv_lora_rank, s.qk_nope_head_dim, batch=heads,
            x_stride=q_width, x_batch_stride=s.qk_head_dim, y_stride=heads * row, y_batch_stride=row,
        )  # fmt: skip
        values = Linear(
            "w_uv_absorb", "per head, attention output out of the latent space", s.v_head_dim, s.kv_lora_rank, batch=heads,
            x_batch_stride=s.kv_lora_rank, y_batch_stride=s.v_head_dim,
        )  # fmt: skip
        o_proj = Linear("o_proj", "attention output added to the residual", s.hidden_size, heads * s.v_head_dim, bias=s.attention_bias)
        return (*first, absorb, values, self._into_residual(o_proj))

    def swiglu(self, prefix: str, width: int) -> tuple[Linear, Linear]:
        """gate_up (with SiLU) and down of a dense or shared MLP."""
        h = self.spec.hidden_size
        down = Linear(f"{prefix}down_proj", "MLP output added to the residual", h, width)
        return Linear(f"{prefix}gate_up_proj", "SwiGLU: silu(gate) * up", 2 * width, h, gated=True), self._into_residual(down)

    def _into_residual(self, layer: Linear) -> Linear:
        """``layer``, whose outputs belong to the residual: added to it, or left for the sum over ranks, which adds the bias as well."""
        if self.ranks == 1:
            return replace(layer, accumulate=True)
        return replace(
            layer, summary=f"a rank's part of the {layer.summary.removesuffix(' added to the residual')}", bias=False, out_float=True
        )

    # ---- dense layers -----------------------------------------------------------------------------------------------

    def _linear(self, layer: Linear) -> Kernel:
        outputs = layer.rows // 2 if layer.gated else layer.rows
        layer = replace(layer, x_stride=layer.x_stride or layer.cols * layer.batch, y_stride=layer.y_stride or outputs * layer.batch)
        out: params.CType = "float" if layer.accumulate or layer.out_float else self.mode.act
        out_bytes = 4 if out == "float" else 2
        summary = layer.summary[0].upper() + layer.summary[1:] + "."
        epilogue = "The result is added to the float32 residual." if layer.accumulate else summary
        cost = Cost(
            bytes_fixed=layer.batch * layer.rows * layer.cols * self.mode.weight_bytes,
            bytes_per_token=layer.batch * (layer.cols * self.mode.act_bytes + outputs * out_bytes * (2 if layer.accumulate else 1)),
            flops_per_token=2 * layer.batch * layer.rows * layer.cols,
        )
        if not self.fast:
            slices = input_slices(layer.cols)
            generic = params.LinearF32(
                name=layer.name, rows=layer.rows, cols=layer.cols, x_stride=layer.x_stride, x_batch_stride=layer.x_batch_stride,
                y_stride=layer.y_stride, y_batch_stride=layer.y_batch_stride, slices=slices, tokens=GENERIC_TOKENS,
                weight=self.mode.weight, gated=layer.gated, bias=layer.bias, accumulate=layer.accumulate, epilogue_comment=epilogue,
            )  # fmt: skip
            grid = (Extent(-(-outputs // 32)), Extent(per_tokens=GENERIC_TOKENS), Extent(layer.batch))
            return Kernel(layer.name, "linear_f32.cu.j2", generic, slices * 32, grid, 0, cost, layer.summary)
        warps = mma_warps(layer.cols)
        warp_steps, row_tiles = layer.cols // 16 // warps, -(-layer.rows // 16)
        ring = dense_ring(warp_steps)
        chunk = math.gcd(warp_steps, CHUNK_STEPS)
        mma = params.LinearMma(
            name=layer.name, rows=layer.rows, cols=layer.cols, x_stride=layer.x_stride, x_batch_stride=layer.x_batch_stride,
            y_stride=layer.y_stride, y_batch_stride=layer.y_batch_stride, warps=warps, max_tokens=TOKEN_TILES * 8,
            together=TILES_TOGETHER if self.rows_are_old else 1, stage_steps=ring.stage_steps, slots=ring.slots,
            smem_comment=ring.comment, blocks_per_sm=blocks_per_sm(warps),
            chunk_steps=chunk, chunks_ahead=CHUNKS_AHEAD, lines_from=LINES_FROM, rows_are_old=self.rows_are_old, out=out,
            gated=layer.gated, bias=layer.bias, accumulate=layer.accumulate, epilogue_comment=epilogue,
        )  # fmt: skip
        smem = warps * ring.bytes + warps * TOKEN_TILES * 4 * 32 * 4  # the rings and the warps' partial sums
        grid = (Extent(row_tiles, per_processor=blocks_per_sm(warps)), Extent(per_tokens=TOKEN_TILES * 8), Extent(layer.batch))
        early = COUNT if self.rows_are_old else ()
        return Kernel(layer.name, "linear_mma.cu.j2", mma, warps * 32, grid, smem, cost, layer.summary, row_tiles, early=early)

    # ---- attention --------------------------------------------------------------------------------------------------

    def _norm(self, name: str, width: int, x_stride: int = 0, eps: float | None = None) -> Kernel:
        stride, eps = x_stride or width, self.spec.rms_norm_eps if eps is None else eps
        vector = 1 if width % 4 or stride % 4 else 4
        block = block_for(width // vector, 1024)
        p = params.RmsNorm(name, width, stride, eps, self.mode.act, block, vector, self.rows_are_old, chosen=False)
        cost = Cost(width * 4, width * (4 + self.mode.act_bytes), 4 * width)
        summary = "RMSNorm of the low-rank query" if x_stride else "RMSNorm of the residual"
        early = COUNT if self.rows_are_old else ()
        return Kernel(name, "rmsnorm.cu.j2", p, block, (ROW_EXTENT, ONE, ONE), 0, cost, summary, early=early)

    def _norm_logits(self) -> Kernel:
        """The norm before the head, of the rows that have logits where not all of a step's do."""
        every = self._norm("rmsnorm_hidden", self.spec.hidden_size)
        p = replace(cast(params.RmsNorm, every.params), name="rmsnorm_logits", chosen=True)
        return replace(every, name=p.name, params=p, summary=f"{every.summary}, of rows that have logits")

    def _norm_and_cache(self) -> Kernel:
        """The low-rank query's norm and the cache row, which read one projection, each in a block of its own."""
        norm, cache = self._norm_q_a(), self._rope_cache()
        p = params.NormAndCache(CACHE_BESIDE, cast(params.RmsNorm, norm.params), cast(params.RopeCache, cache.params))
        row = self.spec.cache_row_dim
        cost = norm.cost + Cost(self.spec.kv_lora_rank * 4, row * (4 + self.mode.act_bytes), 6 * row)
        grid, summary = (ROW_EXTENT, Extent(2), ONE), f"{norm.summary}; beside it, the cache row [c_kv | k_rope]"
        early = (*PLACES, "row_sequence", "row_slot")
        return Kernel(p.name, "norm_and_cache.cu.j2", p, norm.block, grid, 0, cost, summary, early=early)

    def _linear_heads(self, layer: Linear, rotates: bool = False) -> Kernel:
        """A layer of each head for few rows, its weights in registers; ``rotates``: queries' rotary parts in blocks beside it."""
        s, many = self.spec, self._linear(layer)
        linear, row_tiles = cast(params.LinearMma, many.params), -(-layer.rows // 16)
        steps = layer.cols // 16 // linear.warps
        warps = max(HEAD_WARPS, linear.warps)
        tiles = max(1, min(4, HELD_STEPS // steps, -(-row_tiles * linear.warps // warps)))
        p = params.LinearHeads(
            name=layer.name + FEW, rows=layer.rows, x_stride=linear.x_stride, x_batch_stride=linear.x_batch_stride,
            y_stride=linear.y_stride, y_batch_stride=linear.y_batch_stride, splits=linear.warps, split_steps=steps, warps=warps,
            warp_tiles=tiles, max_tokens=linear.max_tokens, blocks_per_sm=max(1, 16 // warps), act=self.mode.act, rotates=rotates,
            rope=s.qk_rope_head_dim, interleave=s.rope_interleave, epilogue_comment=linear.epilogue_comment,
        )  # fmt: skip
        parts = -(-row_tiles // (warps // linear.warps * tiles))
        grid = (Extent(parts + rotates), Extent(per_tokens=linear.max_tokens), Extent(layer.batch))
        turned = 2 * layer.batch * s.qk_rope_head_dim * self.mode.act_bytes if rotates else 0
        summary = f"{layer.summary}, for few rows" + ("; beside it, queries' rotary parts" if rotates else "")
        return Kernel(p.name, "linear_heads.cu.j2", p, warps * 32, grid, 0, many.cost + Cost(0, turned), summary, early=COUNT)

    def _norm_q_a(self) -> Kernel:
        return self._norm("rmsnorm_q_a", self.spec.q_lora_rank or 0, x_stride=self.kv_a_stride, eps=LORA_NORM_EPS)

    def _rope_cache(self) -> Kernel:
        s, act = self.spec, self.mode.act
        block = block_for(max(s.kv_lora_rank, s.num_attention_heads * s.qk_rope_head_dim // 2))
        if s.q_lora_rank is not None:  # a row's sum of squares is split alike in the launch that it shares with that norm
            block = self._norm_q_a().block
        pairing = (
            "Pairs are interleaved, (x0, x1), (x2, x3), ..." if s.rope_interleave else "Pairs are half a head apart, (x_i, x_(i + d/2))."
        )
        p = params.RopeCache(
            name="rope_cache", heads=s.num_attention_heads, kv_lora=s.kv_lora_rank, rope=s.qk_rope_head_dim, qk_head=s.qk_head_dim,
            row=s.cache_row_dim, kv_a_stride=self.kv_a_stride, kv_a_offset=s.q_lora_rank or 0,
            eps=LORA_NORM_EPS, interleave=s.rope_interleave, act=act, tiled=self.mode.wgmma, block=block, pairing_comment=pairing,
        )  # fmt: skip
        rope_bytes = 2 * s.num_attention_heads * s.qk_rope_head_dim * self.mode.act_bytes
        cost = Cost(s.kv_lora_rank * 4, s.cache_row_dim * (4 + self.mode.act_bytes) + rope_bytes, 6 * s.cache_row_dim)
        summary = "cache row [c_kv | k_rope], rotated queries"
        return Kernel("rope_cache", "rope_cache.cu.j2", p, block, (ROW_EXTENT, ONE, ONE), 0, cost, summary)

    def _attention(self) -> Kernel:
        s, heads = self.spec, self.spec.num_attention_heads
        row, latent = s.cache_row_dim, s.kv_lora_rank
        # per key; the plan's costs are for one key, reports multiply by the context
        cost = Cost(0, row * self.mode.act_bytes, 2 * heads * (row + latent))
        summary = "absorbed MLA over the cache and the draft tree; bytes and operations per key"
        split = self.splits.shortest
        splits = Extent(per_context=split)
        if self.mode.wgmma:
            smem, head_tiles, blocks = wgmma_smem(s), max(1, heads // WGMMA_TILE), self._attention_blocks()
            p = params.MlaAttentionWgmma(
                name="mla_attention", heads=heads, kv_lora=latent, row=row, max_path=MAX_PATH, splits=self.splits, group=wgmma_group(s),
                visits=attention_visits(s),
                scale_log2=s.softmax_scale * math.log2(math.e), slack=SOFTMAX_SLACK, act="bf16", tiled=True,
                smem_comment=f"{smem} bytes, of the 227 KiB that sm_90a has",
            )  # fmt: skip
            grid, early = (blocks, Extent(head_tiles), ONE), ("shares", "kv_cache")
            return Kernel("mla_attention", "mla_attention_wgmma.cu.j2", p, 384, grid, smem, cost, summary, early=early)
        if not self.fast:
            generic = params.MlaAttentionF32(
                name="mla_attention", heads=heads, kv_lora=latent, row=row, max_path=MAX_PATH, split=split, tile=32,
                scale=s.softmax_scale, block=block_for(latent, 128), blocks_per_sm=4,
            )  # fmt: skip
            grid = (ROW_EXTENT, Extent(heads), splits)
            return Kernel("mla_attention", "mla_attention_f32.cu.j2", generic, generic.block, grid, 0, cost, summary)
        smem = attention_smem(s)
        mma = params.MlaAttentionMma(
            name="mla_attention", heads=heads, kv_lora=latent, row=row, max_path=MAX_PATH, split=split, blocks_per_sm=2,
            scale=s.softmax_scale, smem_comment=f"{smem} bytes: 2 stages of 32 keys are what fits the 99 KiB that every target has",
        )  # fmt: skip
        grid = (ROW_EXTENT, Extent(-(-heads // 16)), splits)
        return Kernel("mla_attention", "mla_attention_mma.cu.j2", mma, 128, grid, smem, cost, summary)

    def _attention_blocks(self) -> Extent:
        """Of a launch on wgmma: no more than there are splits."""
        return Extent(per_tokens=1, per_context=self.splits.shortest, cap=wgmma_blocks(self.spec))

    def _shares(self) -> tuple[Kernel, ...]:
        """What goes before attention on wgmma, once a step."""
        if not self.mode.wgmma:
            return ()
        group = wgmma_group(self.spec)
        rows = params.RowGroups("row_groups", ATTENTION_ROWS[self.spec.kv_lora_rank])
        shares = params.AttentionShares(
            "attention_shares",
            self.splits,
            group,
            WGMMA_START_TILES if group > 1 else 0,
            WGMMA_SPLIT_TILES,
            wgmma_blocks(self.spec),
            attention_visits(self.spec),
        )
        grid = (self._attention_blocks(), ONE, ONE)
        return (
            Kernel("row_groups", "row_groups.cu.j2", rows, 32, (ONE, ONE, ONE), 0, Cost(), "token rows of each attention launch"),
            Kernel("attention_shares", "attention_shares.cu.j2", shares, 32, grid, 0, Cost(), "rows and splits of each attention block"),
        )

    def _combine(self) -> Kernel:
        s = self.spec
        vector = 4 if s.kv_lora_rank % 4 == 0 else 1
        block = block_for(s.kv_lora_rank // vector, 128)
        width = s.num_attention_heads * s.kv_lora_rank
        grid, summary = (ROW_EXTENT, Extent(s.num_attention_heads), ONE), "joins the splits"
        if self.mode.wgmma:
            # 8 heads and 64 columns a block
            grid = (
                Extent(per_tokens=1, cap=ATTENTION_ROWS[s.kv_lora_rank]),
                Extent(s.num_attention_heads // 8 * s.kv_lora_rank // 64),
                ONE,
            )
            fragments = params.MlaCombineWgmma("mla_combine", s.num_attention_heads, s.kv_lora_rank, self.splits)
            cost = Cost(0, width * (2 + self.mode.act_bytes), 2 * width)
            return Kernel("mla_combine", "mla_combine_wgmma.cu.j2", fragments, 256, grid, 0, cost, summary, early=PLACES)
        p = params.MlaCombine("mla_combine", s.num_attention_heads, s.kv_lora_rank, self.splits.shortest, vector, self.mode.act, block)
        cost = Cost(0, width * (4 + self.mode.act_bytes), 2 * width)
        return Kernel("mla_combine", "mla_combine.cu.j2", p, block, grid, 0, cost, summary)

    def _combine_and_heads(self, layer: Linear) -> Kernel:
        """The joining of splits with ``layer``, each head's, behind it, for few rows: a head's latents stay in shared memory."""
        combine, many = self._combine(), self._linear(layer)
        s, linear, cluster = self.spec, cast(params.LinearMma, many.params), blocks_of_head(self.spec)
        warps, tokens = COMBINE_WARPS[s.kv_lora_rank], COMBINE_TOKENS[s.kv_lora_rank]
        tiles, range_steps = -(-layer.rows // (16 * cluster)), layer.cols // 16 // linear.warps
        smem = tokens * (s.kv_lora_rank + 16) * 2 + tiles * linear.warps * 512 + 8  # latents, partial sums, a barrier
        p = params.CombineAndHeads(
            name=COMBINE_BESIDE, combine=combine.name, linear=many.name, heads=s.num_attention_heads, kv_lora=s.kv_lora_rank,
            splits=self.splits, rows=layer.rows, ranges=linear.warps, range_steps=range_steps, block=warps * 32, cluster=cluster,
            block_tiles=tiles, warp_tiles=-(-tiles * linear.warps * cluster // warps), max_tokens=tokens,
            smem_comment=f"{smem} bytes, of the 227 KiB that sm_90a has",
        )  # fmt: skip
        between = 2 * layer.batch * s.kv_lora_rank * self.mode.act_bytes  # what two kernels write and read
        cost = combine.cost + many.cost + Cost(0, -between)
        grid = (Extent(layer.batch), Extent(per_tokens=p.max_tokens), ONE)
        summary = f"{combine.summary}; behind that, {many.summary}, for few rows"
        return Kernel(p.name, "combine_and_heads.cu.j2", p, p.block, grid, smem, cost, summary, cluster=cluster, early=PLACES)

    # ---- mixture of experts -----------------------------------------------------------------------------------------

    def _router_logits(self) -> Kernel:
        s, experts = self.spec, self.spec.n_routed_experts or 0
        if has_bf16_router(s, self.mode):
            warps = mma_warps(s.hidden_size)
            held = held_steps(s.hidden_size // 16 // warps, 8)
            mma = params.RouterLogitsMma("router_logits", s.hidden_size, experts, warps, held, TOKEN_TILES * 8)
            cost = Cost(experts * s.hidden_size * 2, s.hidden_size * 2 + experts * 4, 2 * experts * s.hidden_size)
            grid = (Extent(-(-experts // 16)), Extent(per_tokens=TOKEN_TILES * 8), ONE)
            return Kernel("router_logits", "router_logits_mma.cu.j2", mma, warps * 32, grid, 0, cost, "router logits in float32")
        block_experts, vector = 2, 4 if s.hidden_size % 4 == 0 else 1
        p = params.RouterLogits("router_logits", s.hidden_size, experts, GENERIC_TOKENS, block_experts, vector, self.mode.act)
        cost = Cost(experts * s.hidden_size * 4, s.hidden_size * self.mode.act_bytes + experts * 4, 2 * experts * s.hidden_size)
        grid = (Extent(-(-experts // block_experts)), Extent(per_tokens=GENERIC_TOKENS), ONE)
        return Kernel("router_logits", "router_logits.cu.j2", p, 256, grid, 0, cost, "router logits in float32")

    def _router_topk(self) -> Kernel:
        s, experts = self.spec, self.spec.n_routed_experts or 0
        softmax = s.scoring_func == "softmax"
        comment = "Scores are a softmax over the experts." if softmax else "Scores are sigmoids."
        if s.has_router_bias:
            comment += " The bias corrects the choice only; weights are the scores themselves."
        p = params.RouterTopK(
            name="router_topk", experts=experts, top_k=s.num_experts_per_tok, groups=1 if s.topk_method == "greedy" else s.n_group,
            topk_group=s.topk_group, group_top2=s.topk_method == "noaux_tc", softmax=softmax, has_bias=s.has_router_bias,
            normalise=s.norm_topk_prob, routed_scaling=s.routed_scaling_factor, scoring_comment=comment,
        )  # fmt: skip
        cost = Cost(experts * 4, experts * 4 + s.num_experts_per_tok * 8, experts * 8)
        return Kernel("router_topk", "router_topk.cu.j2", p, 32, (ROW_EXTENT, ONE, ONE), 0, cost, "expert choice and weights")

    def _moe_sort(self) -> Kernel:
        experts, top_k = self.spec.n_routed_experts or 0, self.spec.num_experts_per_tok
        block = block_for(experts, min(512, SORT_BYTES // (experts * 4) * 32))
        p = params.MoeSort("moe_sort", experts, top_k, block)
        return Kernel("moe_sort", "moe_sort.cu.j2", p, block, (ONE, ONE, ONE), 0, Cost(0, top_k * 8, 0), "assignments grouped by expert")

    def _gate_up_and_router(self) -> Kernel:
        """The shared experts' gate_up projection and the router's logits, dealt out over all blocks."""
        gate_up, _ = (self._linear(layer) for layer in self.swiglu("shared_", self.spec.shared_intermediate_size))
        router = self._router_logits()
        logits = cast(params.RouterLogitsMma, router.params)
        steps = logits.hidden // 16 // logits.warps  # all of them, where there are registers: they are on their way before it waits
        held = held_steps(steps, 28 if logits.warps >= 8 else 12)
        chunk = math.gcd(held, CHUNK_STEPS)
        ahead = min(ROUTER_CHUNKS_AHEAD, steps // chunk)
        phase = params.RouterPhase(logits.hidden, logits.experts, logits.warps, held, logits.max_tokens, chunk, ahead)
        p = params.LinearAndRouter(ROUTER_BESIDE, cast(params.LinearMma, gate_up.params), phase)
        summary = f"{gate_up.summary}; beside it, {router.summary}"
        return replace(gate_up, name=p.name, template="linear_and_router.cu.j2", params=p, cost=gate_up.cost + router.cost, summary=summary)

    def _down_and_choice(self) -> Kernel:
        """The shared experts' down projection, and in a block of its own the choice of routed experts and their lists."""
        _, down = (self._linear(layer) for layer in self.swiglu("shared_", self.spec.shared_intermediate_size))
        topk, sort = self._router_topk(), self._moe_sort()
        linear, choice = cast(params.LinearMma, down.params), cast(params.RouterTopK, topk.params)
        lists = replace(cast(params.MoeSort, sort.params), block=down.block)
        smem = choice_smem(choice, linear.warps)
        p = params.LinearAndChoice(CHOICE_BESIDE, linear, choice, lists, f"{smem} bytes")
        tiles, tokens, batch = down.grid
        grid = (replace(tiles, times=tiles.times + 1), tokens, batch)
        cost, summary = down.cost + topk.cost + sort.cost, f"{down.summary}; beside it, expert choice and assignments by expert"
        smem = max(down.smem, smem)
        return Kernel(p.name, "linear_and_choice.cu.j2", p, down.block, grid, smem, cost, summary, down.row_tiles, early=COUNT)

    def _experts(self) -> tuple[Kernel, Kernel]:
        s = self.spec
        width, hidden = s.moe_intermediate_size, s.hidden_size
        gate_up = self._expert("experts_gate_up", 2 * width, hidden, s.num_experts_per_tok, True, "routed SwiGLU: silu(gate) * up")
        return gate_up, self._expert("experts_down", hidden, width, 1, False, "routed expert outputs, unweighted")

    def _expert(self, name: str, rows: int, cols: int, per_x_row: int, gated: bool, summary: str) -> Kernel:
        s, top_k = self.spec, self.spec.num_experts_per_tok
        int4 = s.quantization is not None
        outputs = rows // 2 if gated else rows
        weight_bits = 4 + 16 / s.quantization.group_size if s.quantization else 8 * self.mode.weight_bytes
        out: params.CType = self.mode.act if gated else "float"
        cost = Cost(
            bytes_fixed=int(top_k * rows * cols * weight_bits / 8),
            bytes_per_token=top_k * (cols * self.mode.act_bytes + outputs * (4 if out == "float" else 2)),
            flops_per_token=2 * top_k * rows * cols,
        )
        active = Extent(times=top_k, per_tokens=1, cap=s.n_routed_experts or 0)
        comment = f"Weights are {self.mode.weight}."
        if s.quantization:
            comment = f"INT4 weights q * scale, one scale for {s.quantization.group_size} inputs."
        if not self.fast:
            slices = input_slices(cols)
            generic = params.ExpertsF32(
                name=name, rows=rows, cols=cols, assignments_per_x_row=per_x_row, slices=slices, tokens=GENERIC_TOKENS,
                weight="unsigned char" if int4 else self.mode.weight, int4=int4,
                group_size=s.quantization.group_size if s.quantization else 0, gated=gated, weight_comment=comment,
            )  # fmt: skip
            grid = (Extent(-(-outputs // 32)), active, ONE)
            return Kernel(name, "experts_f32.cu.j2", generic, slices * 32, grid, 0, cost, summary)
        step_inputs, step_bytes = expert_step(int4)
        steps, row_tiles = -(-cols // step_inputs), -(-rows // 16)
        warps, held, ring = expert_split(steps, step_bytes, 8 if int4 else 2, self.mode.wgmma)
        group_bytes = warps * ring.bytes + EXPERT_TOKEN_TILES * warps * 512 + (steps * 2 * 32 if int4 else 0)
        lists = -(-3 * 4 * (s.n_routed_experts or 0) // 16) * 16
        groups = next(
            n for n in (8, 4, 2, 1) if n * warps <= 16 and n * group_bytes + lists <= (WGMMA_SMEM_LIMIT if self.mode.wgmma else SMEM_LIMIT)
        )
        blocks_per_sm = 16 // (groups * warps)
        mma = params.ExpertsMma(
            name=name, experts=s.n_routed_experts or 0, rows=rows, cols=cols, assignments_per_x_row=per_x_row, warps=warps, groups=groups,
            token_tiles=EXPERT_TOKEN_TILES, side_by_side=2 if ring.stage_steps % 2 == 0 else 1, even=EVEN_ASSIGNMENTS,
            more_cost=MORE_COST, reading_cost=READING_COST, stage_steps=ring.stage_steps, slots=ring.slots, smem_comment=ring.comment,
            x_in_registers=held, blocks_per_sm=blocks_per_sm, int4=int4, out=out, gated=gated, inputs_are_old=gated,
            weight_comment=comment,
        )  # fmt: skip
        units = Extent(-(-row_tiles // groups) * top_k, per_tokens=1, per_processor=blocks_per_sm)
        block, smem = groups * warps * 32, groups * group_bytes + lists
        early = (*LISTS, "assignments", "x", "y") if mma.inputs_are_old else LISTS
        return Kernel(name, "experts_mma.cu.j2", mma, block, (units, ONE, ONE), smem, cost, summary, row_tiles, early=early)

    def _moe_combine(self) -> Kernel:
        s = self.spec
        block = block_for(s.hidden_size)
        adds = self.ranks == 1 or s.shared_intermediate_size > 0  # to what the shared experts left there
        p = params.MoeCombine("moe_combine", s.hidden_size, s.num_experts_per_tok, adds, block)
        cost = Cost(0, s.hidden_size * 4 * (s.num_experts_per_tok + 2), 2 * s.hidden_size * s.num_experts_per_tok)
        grid = (ROW_EXTENT, Extent(-(-s.hidden_size // block)), ONE)
        return Kernel("moe_combine", "moe_combine.cu.j2", p, block, grid, 0, cost, "weighted sum of the chosen experts", early=COUNT)

    # ---- ends of a step ---------------------------------------------------------------------------------------------

    def _embed(self) -> Kernel:
        s, block = self.spec, block_for(self.spec.hidden_size)
        weight: params.CType = "float" if s.dtype == "float32" else "bf16"
        p = params.Embed("embed", s.hidden_size, weight, s.vocab_size, self.ranks > 1, block)
        grid, cost = (
            (ROW_EXTENT, Extent(column_blocks(s.hidden_size)), ONE),
            Cost(0, s.hidden_size * (4 + (4 if s.dtype == "float32" else 2))),
        )
        return Kernel("embed", "embed.cu.j2", p, block, grid, 0, cost, "token embedding into the residual")

    def _choice(self) -> Kernel:
        """The best token of each row, of all ranks where they reach each other's memory, else of a rank's part."""
        argmax = self._argmax()
        if self.ranks == 1 or self.exchange == "gather":
            return argmax
        p = params.PeerArgmax("rank_argmax", cast(params.Argmax, argmax.params), self.ranks)
        cost, summary = argmax.cost + Cost(0, 2 * (4 + 12 * self.ranks)), "greedy choice over the ranks, through their memory"
        return replace(argmax, name=p.name, template="peer_argmax.cu.j2", params=p, cost=cost, summary=summary)

    def _argmax(self) -> Kernel:
        vocab, block = self.spec.vocab_size, block_for(self.spec.vocab_size // 4, 1024)
        p = params.Argmax("argmax", vocab, self.ranks > 1, block, 1 if vocab % 4 else 4, cluster_of(block))
        grid, cost = (ROW_EXTENT, ONE, ONE), Cost(0, vocab * 4, vocab)
        return Kernel("argmax", "argmax.cu.j2", p, block, grid, 0, cost, "greedy choice", cluster=p.cluster, early=COUNT)

    def _sample(self) -> Kernel:
        vocab, block = self.whole.vocab_size, block_for(self.whole.vocab_size // 4, 1024)
        p = params.Sample("sample", vocab, block)
        cost = Cost(0, 40, 0)  # greedy rows, which return at once; a drawn row reads its logits some 30 times, from L2
        return Kernel("sample", "sample.cu.j2", p, block, (ROW_EXTENT, ONE, ONE), 0, cost, "seeded choice for rows with a temperature")

    def _top_k(self) -> tuple[Kernel, Kernel]:
        vocab, (block, lane_tokens), parts = self.whole.vocab_size, top_k_part(self.whole.vocab_size), top_k_parts(self.whole.vocab_size)
        first = params.TopKParts("top_k_parts", vocab, MAX_PATH, MAX_CANDIDATES, lane_tokens, block)
        smem = (parts * (MAX_CANDIDATES + 1) + MAX_CANDIDATES) * 8
        second = params.TopK("top_k", vocab, MAX_PATH, MAX_CANDIDATES, parts, 256, f"{smem} bytes")
        grid = (ROW_EXTENT, Extent(parts), SEQUENCE_EXTENT)
        part_bytes = parts * (8 * MAX_CANDIDATES + 8)
        return (
            Kernel("top_k_parts", "top_k_parts.cu.j2", first, block, grid, 0, Cost(0, 4 * vocab, 2 * vocab), "candidates of each part"),
            Kernel(
                "top_k", "top_k.cu.j2", second, 256, (ROW_EXTENT, SEQUENCE_EXTENT, ONE), smem, Cost(0, part_bytes),
                "candidates of each draft row",
            ),
        )  # fmt: skip

    # ---- what the ranks have, put together --------------------------------------------------------------------------

    def _joins(self) -> list[Kernel]:
        """Sums, choices and logits of all ranks. A bias that belongs to a sum over ranks is added there, once."""
        sums = [self._rank_sum("rank_sum", bias=False)]
        if sums_biases(self.whole, self.ranks):
            sums.append(self._rank_sum("rank_sum_bias", bias=True))
        found = list(sums)
        if norms_sums(self.ranks, self.exchange):
            used = sums if self.whole.attention_bias else sums[:1]
            found += [self._sum_and_norm(each) for each in used]
        found.append(self._peer_gather("gather_logits", self.spec.vocab_size) if self.exchange == "peer" else self._rank_choice())
        return [*found, self._rank_logits()]

    def _peer_gather(self, name: str, width: int) -> Kernel:
        block = block_for(width)
        p = params.PeerGather(name, width, self.ranks, block)
        grid = (ROW_EXTENT, Extent(column_blocks(width)), ONE)
        cost = Cost(0, width * (4 + 12 * self.ranks))
        return Kernel(name, "peer_gather.cu.j2", p, block, grid, 0, cost, "rows of every rank, through its memory")

    def _rank_sum(self, name: str, bias: bool) -> Kernel:
        width, block = self.spec.hidden_size, block_for(self.spec.hidden_size)
        cost = Cost(width * 4 if bias else 0, width * 4 * (self.ranks + 2), width * self.ranks)
        grid = (ROW_EXTENT, Extent(column_blocks(width)), ONE)
        summary = "the ranks' partial results added to the residual"
        if self.exchange == "peer":
            peer = params.PeerSum(name, width, self.ranks, DIRECT_COPIES // (self.ranks - 1), bias, block)
            return Kernel(name, "peer_sum.cu.j2", peer, block, grid, 0, cost, f"{summary}, through their memory")
        return Kernel(name, "rank_sum.cu.j2", params.RankSum(name, width, self.ranks, bias, block), block, grid, 0, cost, summary)

    def _sum_and_norm(self, added: Kernel) -> Kernel:
        """The sum ``added`` and the norm behind it, for few rows."""
        norm, peer = self._norm("rmsnorm_hidden", self.spec.hidden_size), cast(params.PeerSum, added.params)
        blocks = cluster_of(norm.block)
        normed = replace(cast(params.RmsNorm, norm.params), cluster=blocks)
        p = params.PeerSumNorm(added.name + NORMED, added.name, normed, self.ranks, column_blocks(peer.width), peer.bias)
        cost, summary = added.cost + norm.cost, f"{added.summary}, and its RMSNorm, for few rows"
        early = (*COUNT, "inboxes", "rounds", "residual")
        return Kernel(p.name, "peer_sum_norm.cu.j2", p, norm.block, norm.grid, 0, cost, summary, cluster=blocks, early=early)

    def _sent(self, kernel: Kernel) -> Kernel:
        """``kernel``, whose results are a rank's part of a sum, sending them to all ranks."""
        width = self.spec.hidden_size
        outbox = params.Outbox(self.ranks, width, column_blocks(width))
        p = cast(params.Sending, kernel.params)
        cost = kernel.cost + Cost(0, width * (8 * self.ranks - 4))
        summary = f"{kernel.summary}, sent to all ranks"
        return replace(kernel, name=kernel.name + SENT, params=replace(p, name=p.name + SENT, outbox=outbox), cost=cost, summary=summary)

    def _rank_choice(self) -> Kernel:
        p = params.RankChoice("rank_choice", self.whole.vocab_size, self.ranks, 32)
        cost = Cost(0, 8 * self.ranks + 4, self.ranks)
        return Kernel("rank_choice", "rank_choice.cu.j2", p, 32, (Extent(per_tokens=32), ONE, ONE), 0, cost, "greedy choice over the ranks")

    def _rank_logits(self) -> Kernel:
        vocab, block = self.spec.vocab_size, block_for(self.spec.vocab_size)
        p = params.RankLogits("rank_logits", vocab, self.ranks, block)
        grid = (ROW_EXTENT, Extent(-(-vocab // block)), Extent(self.ranks))
        return Kernel("rank_logits", "rank_logits.cu.j2", p, block, grid, 0, Cost(0, 8 * vocab * self.ranks), "the ranks' logits as rows")

    def _chain_rows(self) -> Kernel:
        p = params.ChainRows("chain_rows", 64)
        return Kernel("chain_rows", "chain_rows.cu.j2", p, 64, (ONE, ONE, ONE), 0, Cost(0, 16, 0), "row metadata of runs of tokens")

    def _logit_rows(self) -> Kernel:
        p = params.LogitRows("logit_rows", 64)
        return Kernel("logit_rows", "logit_rows.cu.j2", p, 64, (ONE, ONE, ONE), 0, Cost(0, 20, 0), "token rows that have logits")

    def _advance(self) -> Kernel:
        return Kernel("advance", "advance.cu.j2", params.Advance("advance"), 32, (ONE, ONE, ONE), 0, Cost(), "commits runs of tokens")

    def _tree_build(self) -> Kernel:
        p = params.TreeBuild("tree_build", MAX_NODES, MAX_PATH, MAX_CANDIDATES)
        return Kernel("tree_build", "tree_build.cu.j2", p, 32, (SEQUENCE_EXTENT, ONE, ONE), 0, Cost(0, 20, 0), "best-first draft tree")

    def _tree_rows(self) -> Kernel:
        p = params.TreeRows("tree_rows", MAX_NODES, MAX_PATH, 64)
        cost = Cost(0, 20 + MAX_PATH * 4, 0)
        return Kernel("tree_rows", "tree_rows.cu.j2", p, 64, (SEQUENCE_EXTENT, ONE, ONE), 0, cost, "row metadata of trees")

    def _tree_accept(self) -> Kernel:
        p = params.TreeAccept("tree_accept", MAX_NODES, MAX_PATH)
        grid = (SEQUENCE_EXTENT, ONE, ONE)
        return Kernel("tree_accept", "tree_accept.cu.j2", p, 32, grid, 0, Cost(0, 12, 0), "greedy walk through each tree")

    def _kv_compact(self) -> Kernel:
        s = self.spec
        block = block_for(s.cache_row_dim, 128)
        p = params.KvCompact("kv_compact", s.cache_row_dim, MAX_PATH, self.mode.act, self.mode.wgmma, block)
        grid = (Extent(s.num_hidden_layers), Extent(-(-s.cache_row_dim // block)), SEQUENCE_EXTENT)
        cost = Cost(0, 2 * s.num_hidden_layers * s.cache_row_dim * self.mode.act_bytes, 0)
        return Kernel("kv_compact", "kv_compact.cu.j2", p, block, grid, 0, cost, "accepted cache rows to their positions")
