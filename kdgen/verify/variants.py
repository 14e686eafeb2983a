"""Small models with what the tiny specs lack, so that ``kdgen verify`` runs every branch of every template.

Together with tiny and tiny2 they have: INT4 experts in whole and half steps of 64 inputs, groups of experts, sigmoid and softmax routing,
biases and drafters (of a model that two ranks can share, too), both RoPE pairings, YaRN, queries with and without a low-rank form, more
heads than an attention tile, latents wide enough for splits of 128 keys, the whole tiles of heads and latents that wgmma needs, tied
embeddings, an epsilon far from the inner norms', float32 weights, dimensions that are odd or 1, and both masks of a drafter. A test sees
to it that no branch is left out.
"""

from __future__ import annotations

from typing import Any

from kdgen.spec.model import Spec, load_spec

_YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
_INT4 = {"num_bits": 4, "group_size": 32, "symmetric": True}
_GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}

_DRAFT = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "block_size": 8, "mask_token_id": 5, "target_layer_ids": [0, 1],
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20,
}  # fmt: skip
_ODD_DRAFT = _DRAFT | {
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 22, "intermediate_size": 33, "block_size": 16,
    "sliding_mask": "symmetric", "attention_bias": True, "rope_scaling": _YARN, "dtype": "float32",
}  # fmt: skip

_CHANGES: dict[str, dict[str, Any]] = {
    "tiny-int4": {
        "hidden_size": 96, "moe_intermediate_size": 160, "quantization": _INT4, "q_lora_rank": None, "attention_bias": True,
        "num_attention_heads": 18, "v_head_dim": 16, "rope_interleave": False, "rope_scaling": _YARN, "tie_word_embeddings": True,
        "num_hidden_layers": 2, "vocab_size": 257, "rms_norm_eps": 0.01, "draft": _DRAFT | {"hidden_size": 96}, **_GROUPS,
    },
    "tiny-v2": {
        "model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "group_limited_greedy", "norm_topk_prob": False,
        "kv_lora_rank": 256, "hidden_size": 128, "num_attention_heads": 6, "v_head_dim": 16, "attention_bias": True, "n_shared_experts": 2,
        "num_hidden_layers": 2, "intermediate_size": 96, "moe_intermediate_size": 1152, "router_dtype": "float32",
        "quantization": _INT4 | {"group_size": 64},
        "draft": _DRAFT | {"hidden_size": 128, "intermediate_size": 64}, **_GROUPS,
    },
    "tiny-wgmma": {
        "num_attention_heads": 64, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 16, "hidden_size": 64,
        "q_lora_rank": 192, "num_hidden_layers": 2, "intermediate_size": 64, "moe_intermediate_size": 256, "n_routed_experts": 40,
        "n_shared_experts": 0, "vocab_size": 128, "rope_scaling": _YARN,
    },
    "tiny-wgmma-8": {
        "num_attention_heads": 8, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16, "hidden_size": 64,
        "q_lora_rank": 32, "num_hidden_layers": 2, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 128,
    },
    "tiny-wgmma-int4": {
        "num_attention_heads": 64, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16, "hidden_size": 96,
        "q_lora_rank": 80, "num_hidden_layers": 2, "intermediate_size": 48, "moe_intermediate_size": 2048, "n_routed_experts": 6,
        "vocab_size": 130, "attention_bias": True, "quantization": _INT4, "draft": _DRAFT | {"hidden_size": 96},
    },
    "tiny-odd": {
        "hidden_size": 65, "num_hidden_layers": 2, "num_attention_heads": 3, "q_lora_rank": 31, "kv_lora_rank": 33, "qk_nope_head_dim": 9,
        "qk_rope_head_dim": 6, "v_head_dim": 7, "intermediate_size": 97, "moe_intermediate_size": 1, "n_routed_experts": 3,
        "num_experts_per_tok": 3, "n_shared_experts": 0, "norm_topk_prob": False, "rope_interleave": False, "vocab_size": 67,
        "dtype": "float32", "attention_bias": True, "rms_norm_eps": 0.01, "draft": _ODD_DRAFT | {"hidden_size": 65},
    },
}  # fmt: skip


def variants() -> tuple[Spec, ...]:
    base = load_spec("tiny").model_dump(mode="json")
    return tuple(Spec.from_mapping(base | changes | {"name": name}, name) for name, changes in _CHANGES.items())
