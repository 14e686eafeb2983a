"""The drafter's part of a plan: its kernels, weights and buffers, and what it adds to the target's programs.

In every program the outputs of the target's layers that the drafter reads are kept for each token row. When a step has committed its
tokens, their features become keys and values in the drafter's cache, at the tokens' own positions: the cache is always as long as
its sequence. A draft then is one pass over a block [root, mask, …] behind it. The block's own keys and values stand in the slots
that the next committed tokens overwrite, so that none survives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from kdgen.plan import ir, params
from kdgen.plan.ir import MAX_PATH, ONE, Arg, Buffer, Compute, Cost, DType, Extent, Kernel, Launch, Limits, Program, Stage, Weight
from kdgen.plan.kernels import ROW_EXTENT, Catalogue, Linear
from kdgen.plan.programs import buffer, embedding, integer, joined_logits, launch, layer_weight, summed, top_k_launches, weight
from kdgen.plan.shard import WHOLE, Shard, part_of, shares_draft
from kdgen.plan.tuning import Mode, block_for, mode_of
from kdgen.plan.weights import stored_bytes
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.model import Spec

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


def own_shard(spec: Spec, shard: Shard) -> Shard:
    """The drafter's place among ``shard``'s ranks: one of its own where they do not share it."""
    return shard if shares_draft(spec, shard.ranks) else WHOLE


def kernels(spec: Spec, compute: Compute, shard: Shard) -> tuple[Kernel, ...]:
    """The drafter's kernels, in the order in which a round runs them; none for a spec without one."""
    part = part_of(spec, shard.ranks).draft
    if part is None:
        return ()
    return _DraftCatalogue(spec, part, mode_of(part, compute), own_shard(spec, shard).ranks).all()


class _DraftCatalogue(Catalogue):
    """Builds the drafter's kernels with the target's ways of making dense layers and norms."""

    rows_are_old = False  # some are of context tokens, which the kernel right before them counts

    def __init__(self, spec: Spec, draft: DraftSpec, mode: Mode, ranks: int) -> None:
        super().__init__(spec, mode, ranks)
        self.draft = draft  # a rank's part

    def all(self) -> tuple[Kernel, ...]:
        d, hidden, bias = self.draft, self.draft.hidden_size, self.draft.attention_bias
        return (
            self._capture(),
            self._context(),
            self._linear(
                Linear(
                    "draft_fc",
                    "a token's features to the drafter's width",
                    hidden,
                    d.feature_width // self.ranks,
                    x_stride=d.feature_width,
                    out_float=True,
                )
            ),
            self._norm("draft_norm", hidden, eps=d.rms_norm_eps),
            self._linear(Linear("draft_kv_proj", "[keys | values]", 2 * d.key_width, hidden, bias=bias, out_float=True)),
            self._heads("draft_context_heads", queries=False),
            self._block(),
            self._linear(Linear("draft_q_proj", "queries of the block", d.query_width, hidden, bias=bias, out_float=True)),
            self._heads("draft_block_heads", queries=True),
            self._attend(),
            self._join(),
            self._linear(
                self._into_residual(Linear("draft_o_proj", "attention output added to the residual", hidden, d.query_width, bias=bias))
            ),
            *(self._linear(layer) for layer in self.swiglu("draft_", d.intermediate_size)),
        )

    def _capture(self) -> Kernel:
        d, act = self.draft, self.mode.act
        block = block_for(d.hidden_size)
        p = params.DraftCapture("draft_capture", d.hidden_size, d.feature_width, act, block)
        cost = Cost(0, d.hidden_size * (4 + self.mode.act_bytes), 0)
        grid = (ROW_EXTENT, Extent(-(-d.hidden_size // block)), ONE)
        return Kernel(p.name, "draft_capture.cu.j2", p, block, grid, 0, cost, "a layer's output among the features")

    def _context(self) -> Kernel:
        d, block = self.draft, 256
        columns = 8 * block
        p = params.DraftContext("draft_context", d.feature_width, d.hidden_size, self.ranks > 1, MAX_PATH, columns, self.mode.act, block)
        cost = Cost(0, 2 * d.feature_width * self.mode.act_bytes, 0)
        grid = (ROW_EXTENT, Extent(-(-d.feature_width // columns)), ONE)
        return Kernel(p.name, "draft_context.cu.j2", p, block, grid, 0, cost, "features of the tokens that a step committed")

    def _block(self) -> Kernel:
        p = params.DraftBlock("draft_block", self.draft.mask_token_id, 128)
        return Kernel(p.name, "draft_block.cu.j2", p, p.block, (ONE, ONE, ONE), 0, Cost(0, 12, 0), "row metadata of draft blocks")

    def _heads(self, name: str, queries: bool) -> Kernel:
        d, act_bytes = self.draft, self.mode.act_bytes
        heads = d.num_key_value_heads + (d.num_attention_heads if queries else 0)
        p = params.DraftHeads(
            name=name, queries=queries, query_heads=d.num_attention_heads, key_heads=d.num_key_value_heads, head=d.head_dim,
            eps=d.rms_norm_eps, act=self.mode.act, block=_HEADS_PER_BLOCK * 32, blocks_per_sm=8,
        )  # fmt: skip
        width = 2 * d.key_width + (d.query_width if queries else 0)
        cost = Cost(0, width * (4 + act_bytes), 10 * width)
        grid = (ROW_EXTENT, Extent(-(-heads // _HEADS_PER_BLOCK)), ONE)
        summary = "a block's keys, values and queries" if queries else "keys and values of committed tokens"
        return Kernel(name, "draft_heads.cu.j2", p, p.block, grid, 0, cost, summary)

    def _attend(self) -> Kernel:
        d, rows, smem = self.draft, query_rows(self.draft), attention_smem(self.draft)
        row_tiles = -(-d.block_size * d.group_heads // rows)
        mask = {
            "causal": "With a window, a row sees so many keys before itself, itself included.",
            "symmetric": "With a window, a row sees the keys that are closer than that, on either side.",
            "none": "No layer has a window.",
        }[d.sliding_mask]
        p = params.GqaAttention(
            name="draft_attention", heads=d.num_attention_heads, key_heads=d.num_key_value_heads, group=d.group_heads, head=d.head_dim,
            split=split_keys(d), rows=rows, row_tiles=row_tiles, scale=d.head_dim**-0.5, causal=d.sliding_mask == "causal",
            act=self.mode.act, block=attention_block(d),
            blocks_per_sm=4 if attention_block(d) == 128 else 6, mask_comment=mask, smem_comment=f"{smem} bytes",
        )  # fmt: skip
        cost = Cost(0, 2 * d.key_width * self.mode.act_bytes, 4 * d.block_size * d.query_width)
        grid = (Extent(row_tiles, per_sequence=True), Extent(d.num_key_value_heads), Extent(per_context=p.split))
        summary = "a block over its sequence's draft cache; bytes and operations per key"
        return Kernel(p.name, "gqa_attention.cu.j2", p, p.block, grid, smem, cost, summary)

    def _join(self) -> Kernel:
        d, block = self.draft, block_for(self.draft.head_dim, 128)
        p = params.GqaCombine("draft_combine", d.num_attention_heads, d.head_dim, split_keys(d), self.mode.act, block)
        cost = Cost(0, d.query_width * (4 + self.mode.act_bytes), 2 * d.query_width)
        grid = (ROW_EXTENT, Extent(d.num_attention_heads), ONE)
        return Kernel(p.name, "gqa_combine.cu.j2", p, block, grid, 0, cost, "joins the splits of a draft block")


# ---- weights ------------------------------------------------------------------------------------------------------------


def weights(spec: Spec, compute: Compute, shard: Shard) -> tuple[Weight, ...]:
    """The drafter's device tensors, or a rank's part of them; ``sources`` are keys of its own checkpoint."""
    d = part_of(spec, shard.ranks).draft
    if d is None:
        return ()
    mode, own = mode_of(d, compute), own_shard(spec, shard)
    rows_part, cols_part = (None, None) if own.whole else (ir.Part(0, own.rank, own.ranks), ir.Part(1, own.rank, own.ranks))
    fast, every, hidden, width = mode.compute == "bf16", (0, d.num_hidden_layers), d.hidden_size, d.intermediate_size
    layout: ir.Layout = "mma_a" if fast else "k_major"
    dtype: DType = "f32" if mode.weight == "float" else "bf16"
    layer, attn, mlp = "layers.{i}.", "layers.{i}.self_attn.", "layers.{i}.mlp."

    def matrix(
        name: str, rows: int, cols: int, *sources: str, part: ir.Part | None, layers: tuple[int, int] | None = every, gate_up_tile: int = 0
    ) -> Weight:
        assembly: ir.Assembly = "gate_up" if gate_up_tile else "concat" if len(sources) > 1 else "single"
        logical = (1, rows, cols)
        size = stored_bytes(layout, dtype, logical, 0)
        return Weight(name, dtype, logical, assembly, layout, sources, size, layers, gate_up_tile, part=part)

    def vector(name: str, length: int, *sources: str, layers: tuple[int, int] | None = every, part: ir.Part | None = None) -> Weight:
        assembly: ir.Assembly = "concat" if len(sources) > 1 else "single"
        return Weight(name, "f32", (1, 1, length), assembly, "row_major", sources, 4 * length, layers, part=part)

    found = [
        matrix("draft_fc", hidden, d.feature_width // own.ranks, "fc.weight", part=cols_part, layers=None),
        vector("draft_hidden_norm", hidden, "hidden_norm.weight", layers=None),
        vector("draft_final_norm", hidden, "norm.weight", layers=None),
        vector("draft_input_layernorm", hidden, f"{layer}input_layernorm.weight"),
        vector("draft_post_attention_layernorm", hidden, f"{layer}post_attention_layernorm.weight"),
        vector("draft_q_norm", d.head_dim, f"{attn}q_norm.weight"),
        vector("draft_k_norm", d.head_dim, f"{attn}k_norm.weight"),
        matrix("draft_q_proj", d.query_width, hidden, f"{attn}q_proj.weight", part=rows_part),
        matrix("draft_kv_proj", 2 * d.key_width, hidden, f"{attn}k_proj.weight", f"{attn}v_proj.weight", part=rows_part),
        matrix("draft_o_proj", hidden, d.query_width, f"{attn}o_proj.weight", part=cols_part),
        matrix(
            "draft_gate_up_proj",
            2 * width,
            hidden,
            f"{mlp}gate_proj.weight",
            f"{mlp}up_proj.weight",
            part=rows_part,
            gate_up_tile=8 if fast else width,
        ),
        matrix("draft_down_proj", hidden, width, f"{mlp}down_proj.weight", part=cols_part),
    ]
    if d.attention_bias:
        found += [
            vector("draft_q_proj_bias", d.query_width, f"{attn}q_proj.bias", part=rows_part),
            vector("draft_kv_proj_bias", 2 * d.key_width, f"{attn}k_proj.bias", f"{attn}v_proj.bias", part=rows_part),
            vector("draft_o_proj_bias", hidden, f"{attn}o_proj.bias"),
        ]
    return tuple(found)


# ---- buffers and programs -----------------------------------------------------------------------------------------------


def buffers(spec: Spec, mode: Mode, limits: Limits) -> tuple[Buffer, ...]:
    """Device memory that the drafter adds. Its passes use the target's residual and hidden buffers, which are dead by then."""
    if spec.draft is None:
        return ()
    d, rows, sequences = spec.draft, limits.max_rows, limits.max_sequences
    act: DType = "bf16" if mode.compute == "bf16" else "f32"
    block_rows, splits = sequences * d.block_size, _max_splits(d, limits)

    def state(name: str, dtype: DType, *shape: int) -> Buffer:
        return Buffer(name, dtype, shape, "state")

    def work(name: str, dtype: DType, *shape: int) -> Buffer:
        return Buffer(name, dtype, shape, "workspace")

    return (
        state("draft_begin", "i32", sequences + 1),
        state("context_count", "i32", 1),
        state("context_sequence", "i32", rows),
        state("context_position", "i32", rows),
        state("row_last", "i32", block_rows),
        state("draft_cos_table", "f32", limits.capacity, d.head_dim // 2),
        state("draft_sin_table", "f32", limits.capacity, d.head_dim // 2),
        state("draft_cache", act, d.num_hidden_layers, sequences, limits.capacity, 2 * d.key_width),
        work("features", act, rows, d.feature_width),
        work("context_features", act, rows, d.feature_width),
        work("draft_kv", "f32", rows, 2 * d.key_width),
        work("draft_q", "f32", block_rows, d.query_width),
        work("draft_query", act, block_rows, d.query_width),
        work("draft_values", "f32", block_rows, splits, d.num_attention_heads, d.head_dim),
        work("draft_max", "f32", block_rows, splits, d.num_attention_heads),
        work("draft_sum", "f32", block_rows, splits, d.num_attention_heads),
        work("draft_attended", act, block_rows, d.query_width),
        work("draft_mlp", act, block_rows, d.intermediate_size),
    )


def _max_splits(draft: DraftSpec, limits: Limits) -> int:
    return -(-limits.capacity // split_keys(draft))


def programs(target: tuple[Program, ...], spec: Spec, act_bytes: int, limits: Limits, shard: Shard) -> tuple[Program, ...]:
    """The target's programs with what the drafter adds to them, and ``draft``, which proposes candidates for the step's sequences."""
    part = part_of(spec, shard.ranks)
    if part.draft is None:
        return target
    own, extended = own_shard(spec, shard), []
    for program in target:
        captured = tuple(itertools.chain.from_iterable(_captured(stage, part.draft) for stage in program.stages))
        forwards = captured != program.stages
        context = context_stages(part.draft, limits, program.name.startswith("verify"), own, act_bytes) if forwards else ()
        extended.append(replace(program, stages=captured + context))
    return (*extended, Program("draft", _draft_stages(part, part.draft, limits, shard, own)))


def _named(names: str) -> tuple[Arg, ...]:
    return tuple(buffer(name) for name in names.split())


def _captured(stage: Stage, draft: DraftSpec) -> Iterator[Stage]:
    """A target's stage, cut behind each layer whose output is kept."""
    if stage.layers is None:
        yield stage
        return
    first, stop = stage.layers
    for place, layer in enumerate(draft.target_layer_ids):
        if first <= layer < stop:
            yield Stage(stage.launches, (first, layer + 1))
            yield Stage((launch("draft_capture", *_named("num_tokens residual features"), integer(place)),))
            first = layer + 1
    if first < stop:
        yield Stage(stage.launches, (first, stop))


def context_stages(draft: DraftSpec, limits: Limits, from_tree: bool, own: Shard = WHOLE, act_bytes: int = 0) -> tuple[Stage, ...]:
    """From the features of what a step committed to rows of the draft cache. ``draft`` is a rank's part, ``own`` its place, and
    ``act_bytes`` the size of a feature, where ranks share it."""
    step = "step_count step_sequence step_begin accepted_count accepted_nodes sequence_length features context_features"
    rows = "context_count context_sequence context_position"
    if own.whole:
        project_features: tuple[Launch, ...] = (
            launch("draft_context", *_named(f"{step} {rows}"), integer(int(from_tree))),
            launch("draft_fc", *_named("context_count context_features"), weight("draft_fc"), buffer("residual")),
        )
    else:  # each rank takes some of the features
        first = own.rank * (draft.feature_width // own.ranks) * act_bytes
        features = Arg("buffer", "context_features", first)
        project_features = (
            launch("draft_context", *_named(f"{step} {rows} residual"), integer(int(from_tree))),
            launch("draft_fc", buffer("context_count"), features, weight("draft_fc"), buffer("mlp_part")),
            *summed("mlp", limits, own, count="context_count"),
        )
    start = (*project_features, _norm(weight("draft_hidden_norm"), "context_count"))
    heads = launch(
        "draft_context_heads", *_named(f"{rows} draft_kv"), layer_weight("draft_k_norm"), *_named("draft_cos_table draft_sin_table"),
        _CACHE, integer(limits.capacity),
    )  # fmt: skip
    project = _linear(draft, "draft_kv_proj", "hidden", "draft_kv", biased=True, count="context_count")
    return Stage(start), Stage((project, heads), (0, draft.num_hidden_layers))


_CACHE = Arg("layer_buffer", "draft_cache")


def _linear(draft: DraftSpec, name: str, x: str, y: str, biased: bool = False, count: str = "num_tokens") -> Launch:
    bias = (layer_weight(f"{name}_bias"),) if biased and draft.attention_bias else ()
    return launch(name, *_named(f"{count} {x}"), layer_weight(name), *bias, buffer(y))


def _into_residual(draft: DraftSpec, name: str, x: str, what: str, limits: Limits, own: Shard, biased: bool = False) -> tuple[Launch, ...]:
    """A projection whose outputs are added to the residual; where ranks share it, their parts are."""
    if own.whole:
        return (_linear(draft, name, x, "residual", biased),)
    bias = layer_weight(f"{name}_bias") if biased and draft.attention_bias else None
    return _linear(draft, name, x, f"{what}_part"), *summed(what, limits, own, bias)


def _norm(gain: Arg, count: str = "num_tokens") -> Launch:
    return launch("draft_norm", *_named(f"{count} residual"), gain, buffer("hidden"))


def _draft_stages(spec: Spec, draft: DraftSpec, limits: Limits, shard: Shard, own: Shard) -> tuple[Stage, ...]:
    """One pass over the blocks of the step's sequences, up to the candidates of each depth. Row 0, the root's own, proposes nothing.

    Its rows stand where the verify step's will.
    """
    step, rows = "step_count step_sequence draft_begin sequence_length", "num_tokens row_sequence row_position"
    begin = (
        launch("draft_block", *_named(f"{step} root_token num_tokens tokens row_sequence row_position row_last")),
        *embedding(spec, limits, shard),
    )
    end = (
        _norm(weight("draft_final_norm")),
        launch("lm_head", *_named("num_tokens hidden"), weight("lm_head"), buffer("draft_logits" if shard.whole else "logits")),
        *(() if shard.whole else joined_logits("draft_logits", limits.max_logits, shard)),
        *top_k_launches(),
    )
    splits, capacity = integer(_max_splits(draft, limits)), integer(limits.capacity)
    heads = launch(
        "draft_block_heads", *_named(f"{rows} draft_kv draft_q"), layer_weight("draft_q_norm"), layer_weight("draft_k_norm"),
        *_named("draft_cos_table draft_sin_table"), _CACHE, buffer("draft_query"), capacity,
    )  # fmt: skip

    def layers(window: int) -> tuple[Launch, ...]:
        split = _named("draft_values draft_max draft_sum")
        attend = launch("draft_attention", *_named(f"{step} draft_query"), _CACHE, *split, capacity, splits, integer(window))
        seen = _named("num_tokens row_sequence row_last sequence_length")
        return (
            _norm(layer_weight("draft_input_layernorm")),
            _linear(draft, "draft_q_proj", "hidden", "draft_q", biased=True),
            _linear(draft, "draft_kv_proj", "hidden", "draft_kv", biased=True),
            heads,
            attend,
            launch("draft_combine", *seen, *split, buffer("draft_attended"), splits, integer(window)),
            *_into_residual(draft, "draft_o_proj", "draft_attended", "attention", limits, own, biased=True),
            _norm(layer_weight("draft_post_attention_layernorm")),
            _linear(draft, "draft_gate_up_proj", "hidden", "draft_mlp"),
            *_into_residual(draft, "draft_down_proj", "draft_mlp", "mlp", limits, own),
        )

    runs = itertools.groupby(range(draft.num_hidden_layers), key=draft.window)
    alike = [(window, list(members)) for window, members in runs]
    return Stage(begin), *(Stage(layers(window), (run[0], run[-1] + 1)) for window, run in alike), Stage(end)
