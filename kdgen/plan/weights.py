"""Which device tensors the kernels read, what checkpoint tensors each is made of and how it is laid out."""

from __future__ import annotations

from dataclasses import replace

from kdgen.plan.draft_step import own_shard
from kdgen.plan.expert_tiling import has_bf16_router
from kdgen.plan.formats import expert_format, format_of, plain_format
from kdgen.plan.ir import Assembly, Compute, DType, Part, Weight
from kdgen.plan.shard import Shard, part_of
from kdgen.plan.tuning import Mode, mode_of
from kdgen.spec.model import Spec

Layers = tuple[int, int] | None  #: the first layer that has a tensor, and the one behind the last; None: the model has one
LAYER, ATTENTION = "model.layers.{i}.", "model.layers.{i}.self_attn."  #: how checkpoint keys of a layer begin


def sized(weight: Weight) -> Weight:
    """``weight`` with the packed size that its format gives it."""
    batch, rows, cols = weight.logical
    return replace(weight, stored_bytes=batch * format_of(weight).matrix_bytes(weight.layout, rows, cols))


class _Table:
    """The target's tensors as they are listed: how each kind of matrix is stored in one mode, and which part of it a rank takes."""

    def __init__(self, spec: Spec, mode: Mode, shard: Shard) -> None:
        self.spec, self.mode, self.found = spec, mode, list[Weight]()
        self.rows_part = None if shard.whole else Part(0, shard.rank, shard.ranks)
        self.cols_part = None if shard.whole else Part(1, shard.rank, shard.ranks)
        self.fast = mode.compute == "bf16"
        self.format = plain_format(mode)
        self.dtype, self.layout = self.format.dtype, self.format.layout(self.fast)

    def add(self, weight: Weight) -> None:
        self.found.append(sized(weight))

    def stored(
        self, name: str, assembly: Assembly, dtype: DType, logical: tuple[int, int, int], source: str,
        layers: Layers = None, part: Part | None = None,
    ) -> None:  # fmt: skip
        """A matrix as the checkpoint has it, row by row."""
        self.add(Weight(name, dtype, logical, assembly, "row_major", (source,), 0, layers, part=part))

    def vector(self, name: str, width: int, *sources: str, layers: Layers = None) -> None:
        self.add(Weight(name, "f32", (1, 1, width), "concat" if len(sources) > 1 else "single", "row_major", sources, 0, layers))

    def matrix(self, name: str, rows: int, cols: int, *sources: str, layers: Layers = None, part: Part | None = None) -> None:
        assembly: Assembly = "concat" if len(sources) > 1 else "single"
        self.add(Weight(name, self.dtype, (1, rows, cols), assembly, self.layout, sources, 0, layers, part=part))

    def per_head(self, name: str, assembly: Assembly, logical: tuple[int, int, int], layers: Layers) -> None:
        """One matrix a head, cut out of kv_b_proj."""
        source = f"{ATTENTION}kv_b_proj.weight"
        self.add(Weight(name, self.dtype, logical, assembly, self.layout, (source,), 0, layers, part=self.rows_part))

    def swiglu(self, prefix: str, key: str, width: int, layers: Layers) -> None:
        gate, up, down = (f"{LAYER}mlp.{key}{part}_proj.weight" for part in ("gate", "up", "down"))
        logical, tile = (1, 2 * width, self.spec.hidden_size), 8 if self.fast else width
        self.add(
            Weight(
                f"{prefix}gate_up_proj", self.dtype, logical, "gate_up", self.layout, (gate, up), 0, layers, tile, part=self.rows_part,
            )
        )  # fmt: skip
        self.matrix(f"{prefix}down_proj", self.spec.hidden_size, width, down, layers=layers, part=self.cols_part)

    def experts(self, layers: Layers) -> None:
        spec, experts, width = self.spec, self.spec.n_routed_experts or 0, self.spec.moe_intermediate_size
        form = expert_format(spec, self.mode)
        dtype, layout, group = form.dtype, form.layout(self.fast), form.group_size
        gate, up, down = (f"{LAYER}mlp.experts.{{e}}.{part}_proj.weight" for part in ("gate", "up", "down"))
        both, tile = (experts, 2 * width, spec.hidden_size), 8 if self.fast else width
        self.add(Weight("experts_gate_up", dtype, both, "experts_gate_up", layout, (gate, up), 0, layers, tile, group, self.rows_part))
        back = experts, spec.hidden_size, width
        self.add(Weight("experts_down", dtype, back, "experts", layout, (down,), 0, layers, 0, group, self.cols_part))


def weights(whole: Spec, mode: Mode, shard: Shard) -> tuple[Weight, ...]:
    """Every device tensor of a rank's part of ``whole`` in ``mode``."""
    spec = part_of(whole, shard.ranks)
    table, embed = _Table(spec, mode, shard), "model.embed_tokens.weight"
    embed_dtype: DType = "f32" if spec.dtype == "float32" else "bf16"
    table.stored("embed_tokens", "single", embed_dtype, (1, spec.vocab_size, spec.hidden_size), embed, part=table.rows_part)
    table.vector("norm", spec.hidden_size, "model.norm.weight")
    head = embed if spec.tie_word_embeddings else "lm_head.weight"
    table.matrix("lm_head", spec.vocab_size, spec.hidden_size, head, part=table.rows_part)
    _attention(table)
    if spec.first_k_dense_replace:
        table.swiglu("", "", spec.intermediate_size, (0, spec.first_k_dense_replace))
    if spec.has_moe:
        _moe(table)
    return tuple(table.found)


def _attention(table: _Table) -> None:
    spec, every = table.spec, (0, table.spec.num_hidden_layers)
    hidden, heads, rows_part = spec.hidden_size, spec.num_attention_heads, table.rows_part
    table.vector("input_layernorm", hidden, f"{LAYER}input_layernorm.weight", layers=every)
    table.vector("post_attention_layernorm", hidden, f"{LAYER}post_attention_layernorm.weight", layers=every)
    table.vector("kv_a_layernorm", spec.kv_lora_rank, f"{ATTENTION}kv_a_layernorm.weight", layers=every)
    q_a, kv_a = f"{ATTENTION}q_a_proj", f"{ATTENTION}kv_a_proj_with_mqa"
    if spec.q_lora_rank is None:
        table.matrix("q_proj", heads * spec.qk_head_dim, hidden, f"{ATTENTION}q_proj.weight", layers=every, part=rows_part)
        table.matrix("kv_a_proj", spec.cache_row_dim, hidden, f"{kv_a}.weight", layers=every)
        if spec.attention_bias:
            table.vector("kv_a_proj_bias", spec.cache_row_dim, f"{kv_a}.bias", layers=every)
    else:
        rows = spec.q_lora_rank + spec.cache_row_dim
        table.vector("q_a_layernorm", spec.q_lora_rank, f"{ATTENTION}q_a_layernorm.weight", layers=every)
        table.matrix("q_a_kv_a_proj", rows, hidden, f"{q_a}.weight", f"{kv_a}.weight", layers=every)
        table.matrix("q_b_proj", heads * spec.qk_head_dim, spec.q_lora_rank, f"{ATTENTION}q_b_proj.weight", layers=every, part=rows_part)
        if spec.attention_bias:
            table.vector("q_a_kv_a_proj_bias", rows, f"{q_a}.bias", f"{kv_a}.bias", layers=every)
    table.per_head("w_uk_absorb", "w_uk", (heads, spec.kv_lora_rank, spec.qk_nope_head_dim), every)
    table.per_head("w_uv_absorb", "w_uv", (heads, spec.v_head_dim, spec.kv_lora_rank), every)
    table.matrix("o_proj", hidden, heads * spec.v_head_dim, f"{ATTENTION}o_proj.weight", layers=every, part=table.cols_part)
    if spec.attention_bias:
        table.vector("o_proj_bias", hidden, f"{ATTENTION}o_proj.bias", layers=every)


def _moe(table: _Table) -> None:
    spec, layers, experts = table.spec, table.spec.moe_layers, table.spec.n_routed_experts or 0
    router_dtype: DType = "bf16" if has_bf16_router(spec, table.mode) else "f32"
    table.stored("router", "single", router_dtype, (1, experts, spec.hidden_size), f"{LAYER}mlp.gate.weight", layers=layers)
    if spec.has_router_bias:
        table.vector("router_bias", experts, f"{LAYER}mlp.gate.e_score_correction_bias", layers=layers)
    table.experts(layers)
    if spec.shared_intermediate_size:
        table.swiglu("shared_", "shared_experts.", spec.shared_intermediate_size, layers)


def draft_weights(spec: Spec, compute: Compute, shard: Shard) -> tuple[Weight, ...]:
    """The drafter's device tensors, or a rank's part of them; ``sources`` are keys of its own checkpoint."""
    d = part_of(spec, shard.ranks).draft
    if d is None:
        return ()
    mode, own = mode_of(d, compute), own_shard(spec, shard)
    rows_part, cols_part = (None, None) if own.whole else (Part(0, own.rank, own.ranks), Part(1, own.rank, own.ranks))
    fast, every, hidden, width = mode.compute == "bf16", (0, d.num_hidden_layers), d.hidden_size, d.intermediate_size
    form = plain_format(mode)
    layer, attn, mlp = "layers.{i}.", "layers.{i}.self_attn.", "layers.{i}.mlp."

    def matrix(
        name: str, rows: int, cols: int, *sources: str, part: Part | None, layers: tuple[int, int] | None = every, gate_up_tile: int = 0
    ) -> Weight:
        assembly: Assembly = "gate_up" if gate_up_tile else "concat" if len(sources) > 1 else "single"
        layout = form.layout(tensor_cores=fast)
        return sized(Weight(name, form.dtype, (1, rows, cols), assembly, layout, sources, 0, layers, gate_up_tile, part=part))

    def vector(name: str, length: int, *sources: str, layers: tuple[int, int] | None = every, part: Part | None = None) -> Weight:
        assembly: Assembly = "concat" if len(sources) > 1 else "single"
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
