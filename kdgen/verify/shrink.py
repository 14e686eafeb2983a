"""A spec too wide for a CPU, made small by rule: the same structure, so the same kernels and templates, decoded in seconds.

The rule, field by field:

- every width becomes the smaller of itself and a width of its own below (all different, so that no two can be mixed up unseen). It
  stays a multiple of 16 if it was one and none if it was none, for that decides between tensor cores and the generic path; INT4
  inputs become the smallest multiple of 64 and of their group size;
- one dense layer stays of several, two MoE layers of many (two layers in all of a model that has one kind);
- up to 18 heads, more than the 16 of an attention tile; up to 12 experts, or 4 groups of 4 of which as large a part is kept; up to 4
  experts a token, and all of them only where it was all;
- for a plan that uses wgmma, heads, latents and the rotary part stay what its tiles need: 64, 128 and 64;
- a drafter keeps two layers, one that slides if any does, up to two key heads of up to four query heads each, and as many of the
  target's layers as are left;
- the vocabulary is cut to 512, and the ids of special tokens to its end.

Branches, scales, epsilons and RoPE (YaRN included) stay. What shrinking loses, the full-size kernels' slices check: long reductions,
many row tiles, and splits of 128 keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kdgen.plan.attention import WGMMA_LATENTS, WGMMA_TILE
from kdgen.plan.ir import Family
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.model import Spec

#: Parameters that the CPU emulator decodes within seconds.
CPU_PARAMETERS = 20_000_000
WIDTHS = {
    "q_lora_rank": 80,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "hidden_size": 128,
}
DRAFT_HEAD, DRAFT_MLP, DRAFT_WINDOW = 32, 160, 24
HEADS, EXPERTS, GROUPS, EXPERTS_A_GROUP, CHOSEN, VOCAB = 18, 12, 4, 4, 4, 512


def parameters(spec: Spec) -> int:
    """Elements of all tensors, eight to a packed word."""
    per_item = {"packed": 8, "shape": 0}
    return sum(math.prod(group.shape) * group.count * times * per_item.get(group.kind, 1) for group, times in spec.tensor_kinds())


def is_wide(spec: Spec) -> bool:
    """Whether a CPU needs ``spec`` shrunk before it decodes."""
    return parameters(spec) > CPU_PARAMETERS


def shrink(spec: Spec, family: Family = "generic") -> Spec:
    """``spec`` by the rule above, called ``<name>-shrunk``, for a plan of ``family``."""
    values: dict[str, Any] = spec.model_dump(mode="json")
    for key, width in WIDTHS.items():
        if values[key]:
            values[key] = _width(values[key], width)
    if spec.quantization is not None:
        step = math.lcm(64, spec.quantization.group_size)
        for key in ("hidden_size", "moe_intermediate_size"):
            values[key] = min(getattr(spec, key), step * (2 if key == "hidden_size" else 1))
    if family == "sm_90a":
        values |= {"num_attention_heads": WGMMA_TILE, "kv_lora_rank": min(WGMMA_LATENTS), "qk_rope_head_dim": WGMMA_TILE}
    else:
        values["num_attention_heads"] = _heads(spec, values["v_head_dim"])
    values |= _layers(spec)
    if spec.has_moe:
        values |= _routing(spec)
    values["vocab_size"] = vocab = min(spec.vocab_size, VOCAB)
    # the ids keep their order and stay apart as long as the vocabulary has room
    special = sorted({*spec.eos_token_id, *([] if spec.bos_token_id is None else [spec.bos_token_id])})
    moved = {token: token if token < vocab - len(special) else max(0, vocab - len(special) + place) for place, token in enumerate(special)}
    values["eos_token_id"] = [moved[token] for token in spec.eos_token_id]
    values["bos_token_id"] = None if spec.bos_token_id is None else moved[spec.bos_token_id]
    values["draft"] = None if spec.draft is None else _drafter(spec.draft, values)
    values["name"] = f"{spec.name[:56]}-shrunk"
    # model_dump writes all fields out; those that a dense model must not have keep their defaults either way
    return Spec.from_mapping(values, spec.name)


def _drafter(draft: DraftSpec, target: Mapping[str, Any]) -> dict[str, Any]:
    """The drafter of a shrunk ``target``."""
    key_heads = min(draft.num_key_value_heads, 2)
    kinds = sorted(set(draft.layer_types), reverse=True)  # sliding attention first
    layers = len(kinds) if kinds else min(draft.num_hidden_layers, 2)
    read = min(len(draft.target_layer_ids), target["num_hidden_layers"])
    return draft.model_dump(mode="json") | {
        "hidden_size": target["hidden_size"],
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "sliding_window": draft.sliding_window and min(draft.sliding_window, DRAFT_WINDOW),
        "num_key_value_heads": key_heads,
        "num_attention_heads": key_heads * min(draft.group_heads, 4),
        "head_dim": _width(draft.head_dim, DRAFT_HEAD),
        "intermediate_size": _width(draft.intermediate_size, DRAFT_MLP),
        "mask_token_id": min(draft.mask_token_id, target["vocab_size"] - 1),
        "target_layer_ids": [place * target["num_hidden_layers"] // read for place in range(read)],
    }


def _width(width: int, target: int) -> int:
    """At most ``target``; a multiple of 16 exactly where ``width`` is one, and even where it is even."""
    if width <= target:
        return width
    return target if width % 16 == 0 else target - 16 + width % 16


def _heads(spec: Spec, v_head_dim: int) -> int:
    """At most HEADS, such that heads · v_head_dim is a multiple of 16 exactly where it was one."""
    whole = spec.num_attention_heads * spec.v_head_dim % 16 == 0
    fitting = [heads for heads in range(1, min(HEADS, spec.num_attention_heads) + 1) if (heads * v_head_dim % 16 == 0) == whole]
    return fitting[-1]


def _layers(spec: Spec) -> dict[str, int]:
    layers, dense = spec.num_hidden_layers, spec.first_k_dense_replace
    if not spec.has_moe:
        return {"num_hidden_layers": min(layers, 2), "first_k_dense_replace": min(layers, 2)}
    dense = min(dense, 1)
    return {"num_hidden_layers": dense + min(layers - spec.first_k_dense_replace, 2), "first_k_dense_replace": dense}


def _routing(spec: Spec) -> dict[str, int]:
    experts = spec.n_routed_experts or 0
    if spec.n_group == 1:
        groups, kept, experts = 1, 1, min(experts, EXPERTS)
    else:
        groups, each = min(spec.n_group, GROUPS), min(experts // spec.n_group, EXPERTS_A_GROUP)
        kept = max(1, spec.topk_group * groups // spec.n_group)  # all of them only where it was all
        experts = groups * each
    choosable = experts // groups * kept
    all_chosen = spec.num_experts_per_tok == spec.n_routed_experts
    chosen = choosable if all_chosen else min(spec.num_experts_per_tok, CHOSEN, choosable)
    return {
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": chosen,
        "n_shared_experts": min(spec.n_shared_experts, 2),
    }
