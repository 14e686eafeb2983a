"""What the fields of a spec must fulfil together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from kdgen.spec.drafter import target_contradictions
from kdgen.spec.fields import (
    MAX_DIM,
)


def contradictions(v: Mapping[str, Any], given: Set[str]) -> Iterator[tuple[str, str]]:
    """(key, reason) for every rule broken by the fields in ``v``; rules about fields that are not there are left out."""

    def known(*keys: str) -> bool:
        return all(key in v for key in keys)

    if known("qk_rope_head_dim") and v["qk_rope_head_dim"] % 2:
        yield "qk_rope_head_dim", "must be even: RoPE rotates pairs"
    for other in ("qk_rope_head_dim", "v_head_dim"):
        parts = ("num_attention_heads", "qk_nope_head_dim", other)
        if known(*parts) and v["num_attention_heads"] * (v["qk_nope_head_dim"] + v[other]) > MAX_DIM:
            yield "num_attention_heads", f"times (qk_nope_head_dim + {other}) is more than 2^31 - 1 rows"
    if known("bos_token_id", "vocab_size") and v["bos_token_id"] is not None and v["bos_token_id"] >= v["vocab_size"]:
        yield "bos_token_id", f"is not below vocab_size {v['vocab_size']}"
    if known("eos_token_id", "vocab_size") and any(token >= v["vocab_size"] for token in v["eos_token_id"]):
        yield "eos_token_id", f"is not below vocab_size {v['vocab_size']}"
    if known("rope_scaling", "rope_theta") and v["rope_scaling"] is not None and v["rope_theta"] <= 1:
        yield "rope_theta", "must exceed 1 with YaRN, which divides by its logarithm"
    if known("draft") and v["draft"] is not None:
        yield from target_contradictions(v["draft"], v)
    if not known("first_k_dense_replace", "num_hidden_layers", "n_routed_experts"):
        return
    dense, layers, experts = v["first_k_dense_replace"], v["num_hidden_layers"], v["n_routed_experts"]
    if dense > layers:
        yield "first_k_dense_replace", f"is more than num_hidden_layers {layers}"
    elif experts is None and dense < layers:
        yield "first_k_dense_replace", f"must be num_hidden_layers {layers} when n_routed_experts is null (a dense model)"
    if dense >= layers:
        if known("quantization") and v["quantization"] is not None:
            yield "quantization", "applies to routed experts, of which this model has none"
    elif experts is not None:
        yield from _moe_contradictions(v, given, experts)


def _moe_contradictions(v: Mapping[str, Any], given: Set[str], experts: int) -> Iterator[tuple[str, str]]:
    def known(*keys: str) -> bool:
        return all(key in v for key in keys)

    for key in ("moe_intermediate_size", "num_experts_per_tok", "scoring_func", "norm_topk_prob", "routed_scaling_factor"):
        if key not in given:
            yield key, "missing, and a model with routed experts needs it"
        elif known(key) and v[key] == 0 and v[key] is not False:
            yield key, "must be positive in a model with routed experts"
    top_k = v.get("num_experts_per_tok", 0)
    if top_k > experts:
        yield "num_experts_per_tok", f"is more than n_routed_experts {experts}"
    if known("n_shared_experts", "moe_intermediate_size") and v["n_shared_experts"] * v["moe_intermediate_size"] > MAX_DIM:
        yield "n_shared_experts", "times moe_intermediate_size is more than 2^31 - 1 rows"
    if known("n_group", "topk_group"):
        groups, kept = v["n_group"], v["topk_group"]
        if kept > groups:
            yield "topk_group", f"is more than n_group {groups}"
        if experts % groups:
            yield "n_group", f"does not divide n_routed_experts {experts}"
        elif kept <= groups and top_k <= experts and top_k > kept * (experts // groups):
            yield "num_experts_per_tok", f"is more than the {kept * (experts // groups)} experts of topk_group {kept} groups"
        method = v.get("topk_method")
        if method == "noaux_tc" and groups > 1 and experts // groups < 2:
            yield "n_group", "leaves fewer than 2 experts a group, and noaux_tc ranks groups by the sum of their best 2"
        if method == "greedy" and groups > 1:
            yield "n_group", "must be 1 with topk_method greedy, which knows no groups"
    quantization = v.get("quantization")
    if quantization is not None:
        for key in ("hidden_size", "moe_intermediate_size"):
            if known(key) and v[key] % quantization.group_size:
                yield "quantization.group_size", f"does not divide {key} {v[key]}"
