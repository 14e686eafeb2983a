"""Which device tensors the kernels read, what checkpoint tensors each is made of and how it is laid out."""

from __future__ import annotations

from kdgen.plan.draft_step import own_shard
from kdgen.plan.expert_tiling import has_bf16_router
from kdgen.plan.ir import ITEM_BYTES, Assembly, Compute, DType, Layout, Part, Weight
from kdgen.plan.shard import Shard, part_of
from kdgen.plan.tuning import Mode, mode_of
from kdgen.spec.model import Spec


def stored_bytes(layout: Layout, dtype: DType, logical: tuple[int, int, int], group_size: int) -> int:
    """Packed size of a [batch, rows, cols] matrix. MMA layouts pad rows to 16; INT4 ones also pad inputs to 64."""
    batch, rows, cols = logical
    if layout == "mma_a":
        return batch * -(-rows // 16) * 16 * cols * 2
    if layout == "int4_mma_a":
        return batch * -(-rows // 16) * -(-cols // 64) * 576
    if layout == "int4_k_major":
        return batch * (cols // 8 * rows * 4 + cols // group_size * rows * 2)
    return batch * rows * cols * ITEM_BYTES[dtype]


def weights(whole: Spec, mode: Mode, shard: Shard) -> tuple[Weight, ...]:
    """Every device tensor of a rank's part of ``whole`` in ``mode``."""
    spec = part_of(whole, shard.ranks)
    rows_part, cols_part = (None, None) if shard.whole else (Part(0, shard.rank, shard.ranks), Part(1, shard.rank, shard.ranks))
    fast = mode.compute == "bf16"
    matrix_layout: Layout = "mma_a" if fast else "k_major"
    matrix_dtype: DType = "f32" if mode.weight == "float" else "bf16"
    every, dense, moe = (0, spec.num_hidden_layers), (0, spec.first_k_dense_replace), spec.moe_layers
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    found: list[Weight] = []

    def add(
        name: str, assembly: Assembly, layout: Layout, dtype: DType, logical: tuple[int, int, int], *sources: str,
        layers: tuple[int, int] | None = None, gate_up_tile: int = 0, group_size: int = 0, part: Part | None = None,
    ) -> None:  # fmt: skip
        size = stored_bytes(layout, dtype, logical, group_size)
        found.append(Weight(name, dtype, logical, assembly, layout, sources, size, layers, gate_up_tile, group_size, part))

    def vector(name: str, width: int, *sources: str, layers: tuple[int, int] | None = None) -> None:
        add(name, "concat" if len(sources) > 1 else "single", "row_major", "f32", (1, 1, width), *sources, layers=layers)

    def matrix(
        name: str, rows: int, cols: int, *sources: str, layers: tuple[int, int] | None = None, part: Part | None = None
    ) -> None:  # fmt: skip
        assembly: Assembly = "concat" if len(sources) > 1 else "single"
        add(name, assembly, matrix_layout, matrix_dtype, (1, rows, cols), *sources, layers=layers, part=part)

    def swiglu(prefix: str, key: str, width: int, layers: tuple[int, int]) -> None:
        gate, up, down = (f"model.layers.{{i}}.mlp.{key}{part}_proj.weight" for part in ("gate", "up", "down"))
        tile = 8 if fast else width
        logical = (1, 2 * width, hidden)
        add(
            f"{prefix}gate_up_proj", "gate_up", matrix_layout, matrix_dtype, logical, gate, up, layers=layers, gate_up_tile=tile,
            part=rows_part,
        )  # fmt: skip
        matrix(f"{prefix}down_proj", hidden, width, down, layers=layers, part=cols_part)

    embed = "model.embed_tokens.weight"
    embed_dtype: DType = "f32" if spec.dtype == "float32" else "bf16"
    add("embed_tokens", "single", "row_major", embed_dtype, (1, spec.vocab_size, hidden), embed, part=rows_part)
    vector("norm", hidden, "model.norm.weight")
    matrix("lm_head", spec.vocab_size, hidden, embed if spec.tie_word_embeddings else "lm_head.weight", part=rows_part)

    layer, attn = "model.layers.{i}.", "model.layers.{i}.self_attn."
    vector("input_layernorm", hidden, f"{layer}input_layernorm.weight", layers=every)
    vector("post_attention_layernorm", hidden, f"{layer}post_attention_layernorm.weight", layers=every)
    vector("kv_a_layernorm", spec.kv_lora_rank, f"{attn}kv_a_layernorm.weight", layers=every)
    kv_a, kv_b = f"{attn}kv_a_proj_with_mqa", f"{attn}kv_b_proj.weight"
    if spec.q_lora_rank is None:
        matrix("q_proj", heads * spec.qk_head_dim, hidden, f"{attn}q_proj.weight", layers=every, part=rows_part)
        matrix("kv_a_proj", spec.cache_row_dim, hidden, f"{kv_a}.weight", layers=every)
        if spec.attention_bias:
            vector("kv_a_proj_bias", spec.cache_row_dim, f"{kv_a}.bias", layers=every)
    else:
        rows = spec.q_lora_rank + spec.cache_row_dim
        vector("q_a_layernorm", spec.q_lora_rank, f"{attn}q_a_layernorm.weight", layers=every)
        matrix("q_a_kv_a_proj", rows, hidden, f"{attn}q_a_proj.weight", f"{kv_a}.weight", layers=every)
        matrix("q_b_proj", heads * spec.qk_head_dim, spec.q_lora_rank, f"{attn}q_b_proj.weight", layers=every, part=rows_part)
        if spec.attention_bias:
            vector("q_a_kv_a_proj_bias", rows, f"{attn}q_a_proj.bias", f"{kv_a}.bias", layers=every)
    uk, uv = (heads, spec.kv_lora_rank, spec.qk_nope_head_dim), (heads, spec.v_head_dim, spec.kv_lora_rank)
    add("w_uk_absorb", "w_uk", matrix_layout, matrix_dtype, uk, kv_b, layers=every, part=rows_part)
    add("w_uv_absorb", "w_uv", matrix_layout, matrix_dtype, uv, kv_b, layers=every, part=rows_part)
    matrix("o_proj", hidden, heads * spec.v_head_dim, f"{attn}o_proj.weight", layers=every, part=cols_part)
    if spec.attention_bias:
        vector("o_proj_bias", hidden, f"{attn}o_proj.bias", layers=every)

    if spec.first_k_dense_replace:
        swiglu("", "", spec.intermediate_size, dense)
    if spec.has_moe:
        experts, width = spec.n_routed_experts or 0, spec.moe_intermediate_size
        router_dtype: DType = "bf16" if has_bf16_router(spec, mode) else "f32"
        add("router", "single", "row_major", router_dtype, (1, experts, hidden), f"{layer}mlp.gate.weight", layers=moe)
        if spec.has_router_bias:
            vector("router_bias", experts, f"{layer}mlp.gate.e_score_correction_bias", layers=moe)
        group = spec.quantization.group_size if spec.quantization else 0
        layout: Layout = ("int4_mma_a" if fast else "int4_k_major") if group else matrix_layout
        dtype: DType = "u8" if group else matrix_dtype
        gate, up, down = (f"{layer}mlp.experts.{{e}}.{part}_proj.weight" for part in ("gate", "up", "down"))
        add(
            "experts_gate_up", "experts_gate_up", layout, dtype, (experts, 2 * width, hidden), gate, up, layers=moe,
            gate_up_tile=8 if fast else width, group_size=group, part=rows_part,
        )  # fmt: skip
        add("experts_down", "experts", layout, dtype, (experts, hidden, width), down, layers=moe, group_size=group, part=cols_part)
        if spec.shared_intermediate_size:
            swiglu("shared_", "shared_experts.", spec.shared_intermediate_size, moe)
    return tuple(found)


def draft_weights(spec: Spec, compute: Compute, shard: Shard) -> tuple[Weight, ...]:
    """The drafter's device tensors, or a rank's part of them; ``sources`` are keys of its own checkpoint."""
    d = part_of(spec, shard.ranks).draft
    if d is None:
        return ()
    mode, own = mode_of(d, compute), own_shard(spec, shard)
    rows_part, cols_part = (None, None) if own.whole else (Part(0, own.rank, own.ranks), Part(1, own.rank, own.ranks))
    fast, every, hidden, width = mode.compute == "bf16", (0, d.num_hidden_layers), d.hidden_size, d.intermediate_size
    layout: Layout = "mma_a" if fast else "k_major"
    dtype: DType = "f32" if mode.weight == "float" else "bf16"
    layer, attn, mlp = "layers.{i}.", "layers.{i}.self_attn.", "layers.{i}.mlp."

    def matrix(
        name: str, rows: int, cols: int, *sources: str, part: Part | None, layers: tuple[int, int] | None = every, gate_up_tile: int = 0
    ) -> Weight:
        assembly: Assembly = "gate_up" if gate_up_tile else "concat" if len(sources) > 1 else "single"
        logical = (1, rows, cols)
        size = stored_bytes(layout, dtype, logical, 0)
        return Weight(name, dtype, logical, assembly, layout, sources, size, layers, gate_up_tile, part=part)

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
