"""The ``config.json`` that hubs publish for a Spec, the inverse of ``kdgen.spec.published``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kdgen.errors import SpecError
from kdgen.spec.fields import keys
from kdgen.spec.model import Quantization, Spec
from kdgen.spec.published import MOE_KEYS, parse_config


def published_quantization(quantization: Quantization, plain_too: Sequence[str] = ()) -> dict[str, Any]:
    """The ``quantization_config`` of ``quantization``, as hubs publish it. ``plain_too`` are further modules that are not quantized."""
    weights = quantization.model_dump() | {"type": "int", "strategy": "group", "dynamic": False, "actorder": None}
    plain = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": [*plain, *plain_too],
        "config_groups": {"group_0": group},
    }


def published_config(spec: Spec) -> dict[str, Any]:
    """The ``config.json`` of a model folder of ``spec``: what ``load_config`` reads back as the same spec, but for name and drafter.

    Raises ValueError for a combination that the spec's model type cannot publish (a V3 with softmax scores, say).
    """
    spec = spec.with_draft(None)  # a drafter has a folder of its own
    values = spec.essential(exclude={"name", "quantization", "rope_scaling", "rope_theta", "draft", "router_dtype"})
    scaling = spec.rope_scaling.given() if spec.rope_scaling else {}
    values["rope_parameters"] = {**scaling, "rope_theta": spec.rope_theta, "rope_type": scaling.pop("type", "default")}
    if not spec.has_moe:
        for key in MOE_KEYS | keys("n_group topk_group topk_method scoring_func"):
            del values[key]
    values["num_key_value_heads"] = spec.num_attention_heads
    if spec.quantization is not None:
        values["quantization_config"] = published_quantization(spec.quantization)
    try:
        same = parse_config(json.dumps(values), spec.name).sha256 == spec.sha256
    except SpecError as error:
        raise ValueError(f"not a model that {spec.model_type} can publish: {error}") from None
    if not same:
        raise ValueError(f"not a model that {spec.model_type} can publish: its config reads back as another spec")
    return values
