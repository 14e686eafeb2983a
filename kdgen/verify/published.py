"""Compares the numbers with which the engine computes with those of the reference's own reader of the same keys. This finds an error in a
property that both sides would otherwise share, and a changed default of a key that a file leaves out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from kdgen.errors import SpecError
from kdgen.plan.attention import mma_obstacles
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Kernel, Plan
from kdgen.plan.ops.attention import MlaAttentionF32, MlaAttentionMma, MlaAttentionWgmma, NormAndCache, RopeCache
from kdgen.plan.ops.dense import LinearHeads
from kdgen.plan.ops.drafter import DraftHeads, GqaAttention
from kdgen.plan.ops.norm import RmsNorm
from kdgen.plan.ops.ranks import PeerSumNorm
from kdgen.plan.ops.router import LinearAndChoice, RouterLogits, RouterLogitsMma, RouterTopK
from kdgen.reference.model import ReferenceModel
from kdgen.reference.published import Published, Router, read
from kdgen.spec.model import Spec
from kdgen.spec.published import parse_config
from kdgen.verify.kernels.harness import Findings
from kdgen.verify.kernels.rope_tables import check_tables

#: Relative; numbers go through float32 text at most.
ROUNDING = 1e-7


def raw(spec: Spec) -> dict[str, Any]:
    """The spec as its file has it, every key written out."""
    return spec.model_dump(mode="json")


def reference_of(spec: Spec, weights: Mapping[str, NDArray[Any]]) -> ReferenceModel:
    return ReferenceModel(raw(spec), weights)


def router_of(spec: Spec) -> Router:
    """Raises ValueError for a dense model."""
    router = read(raw(spec)).router
    if router is None:
        raise ValueError(f"{spec.name} has no router")
    return router


# ---- configs as they are published --------------------------------------------------------------------------------------

_NEEDED: Mapping[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 16, "intermediate_size": 48, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-3, "rope_theta": 5e4, "max_position_embeddings": 32768,
}  # fmt: skip
_YARN: Mapping[str, Any] = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}


@dataclass(frozen=True)
class Config:
    """A config's mapping, and what is special about it."""

    name: str
    values: Mapping[str, Any]


def configs() -> tuple[Config, ...]:
    """Configs that leave out, or have null for, each key that may be left out, and RoPE in each of its forms."""
    v3 = {**_NEEDED, "model_type": "deepseek_v3"}
    glm = {key: value for key, value in v3.items() if key not in ("first_k_dense_replace", "n_group", "topk_group")}
    v2 = {**glm, "model_type": "deepseek_v2", "first_k_dense_replace": 1}
    stretched: tuple[Mapping[str, Any], ...] = (
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
        {"mscale": 0.7},
        {"mscale_all_dim": 0.7, "beta_fast": None, "attention_factor": None},
        {"attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"original_max_position_embeddings": 163840},  # no pair is stretched whole: the ramp ends behind the last
        {},
    )
    return (
        Config("deepseek_v3", v3),
        Config("deepseek_v3, nulls", {**v3, "rope_scaling": None, "q_lora_rank": None, "n_shared_experts": None, "topk_method": None}),
        Config("deepseek_v3, all given", {**v3, "attention_bias": True, "rope_interleave": False, "tie_word_embeddings": True}),
        Config("deepseek_v3, groups", {**v3, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
        Config("kimi_k2", {**v3, "model_type": "kimi_k2"}),
        Config("kimi_k25", {"model_type": "kimi_k25", "text_config": {**v3, "model_type": "kimi_k2"}, "tie_word_embeddings": False}),
        Config("kimi_k25, its own head", {"model_type": "kimi_k25", "text_config": {**v3, "model_type": "kimi_k2"}}),
        Config("deepseek_v2", v2),
        Config("deepseek_v2, groups", {**v2, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}),
        Config("deepseek_v2, groups that greedy ignores", {**v2, "n_group": 2, "topk_group": 1}),
        Config("glm4_moe_lite", {**glm, "model_type": "glm4_moe_lite"}),
        Config("glm4_moe_lite, kinds", {**glm, "model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "dense", "sparse"]}),
        *(Config(f"deepseek_v3, YaRN {extra}", {**v3, "rope_scaling": {**_YARN, **extra}}) for extra in stretched),
        Config("deepseek_v3, rope_parameters", {**v3, "rope_parameters": {**_YARN, "rope_type": "yarn", "type": None, "rope_theta": 5e4}}),
        Config("deepseek_v3, dense", {**v3, "n_routed_experts": None}),
    )


def check_config(config: Config) -> Findings:
    """A published config as the engine plans it, and as the reference reads it."""
    try:
        spec = parse_config(json.dumps(config.values))
    except SpecError as error:
        return Findings([str(error)])
    return check_numbers(spec, config.values)


# ---- numbers ------------------------------------------------------------------------------------------------------------


def check_numbers(spec: Spec, config: Mapping[str, Any] | None = None) -> Findings:
    """RoPE's tables, the parameters of every kernel of ``spec``'s plans and the layers that they run in, against the numbers of ``config``
    (None: of the spec's own keys)."""
    findings, published = check_tables(spec, config), read(raw(spec) if config is None else config)
    for compute in ("f32", "bf16"):
        if compute == "bf16" and mma_obstacles(spec):
            continue
        plan = build_plan(spec, compute)
        for each in (plan, *plan.special):
            for problem in _problems(each, spec, published):
                findings.problem(f"{each.family} {compute}: {problem}")
    return findings


def _problems(plan: Plan, spec: Spec, published: Published) -> Iterator[str]:
    for kernel in plan.kernels:
        for what, got, expected in _numbers(kernel, kernel.params, spec, published):
            if isinstance(expected, bool) or isinstance(got, bool):
                same = got is expected
            else:
                same = abs(got - expected) <= ROUNDING * abs(expected)
            if not same:
                yield f"{kernel.name} has {what} {got}, where the config's keys give {expected}"
    kernels = {kernel.name: kernel for kernel in plan.kernels}
    launched = [(kernels[launch.kernel], layer) for launch, layer in plan.program("prefill").launches()]
    routed = [layer for kernel, layer in launched if isinstance(kernel.params, RouterLogits | RouterLogitsMma)]
    if routed != (wanted := list(range(published.dense_layers, published.layers))):
        yield f"the layers with routed experts are {routed} instead of {wanted}"
    biased = any(weight.name == "o_proj_bias" for weight in plan.weights)
    if biased != published.biased:
        yield f"projections of attention have {'a' if biased else 'no'} bias"
    if spec.tie_word_embeddings != published.tied:
        yield f"the head is {'the embedding' if spec.tie_word_embeddings else 'a matrix of its own'}"
    shared = any(kernel.group == "shared experts" for kernel, _ in launched)
    if shared != bool(published.shared_width):
        yield f"there are {'' if shared else 'no '}shared experts"


def _epsilon(kernel: Kernel, norm: RmsNorm, spec: Spec, published: Published) -> float:
    """The epsilon of a norm: the drafter's own, that of norms within attention, whose inputs are columns of wider rows, or the model's."""
    if spec.draft and kernel.group == "drafter":
        return spec.draft.rms_norm_eps
    return published.inner_eps if norm.x_stride > norm.width else published.eps


def _numbers(kernel: Kernel, p: object, spec: Spec, published: Published) -> Iterator[tuple[str, Any, Any]]:
    """(what, as the kernel has it, as the reference has it)."""
    if isinstance(p, MlaAttentionF32 | MlaAttentionMma):
        yield "the softmax scale", p.scale, published.softmax_scale
    elif isinstance(p, MlaAttentionWgmma):
        yield "the softmax scale, times log2 e", p.scale_log2, published.softmax_scale / math.log(2)
    elif isinstance(p, GqaAttention):
        yield "the softmax scale", p.scale, p.head**-0.5
    elif isinstance(p, RmsNorm):
        yield "the epsilon", p.eps, _epsilon(kernel, p, spec, published)
    elif isinstance(p, DraftHeads) and spec.draft:
        yield "the epsilon", p.eps, spec.draft.rms_norm_eps
    elif isinstance(p, RopeCache):
        yield "the epsilon", p.eps, published.inner_eps
        yield "interleaved pairs", p.interleave, published.interleaved
    elif isinstance(p, LinearHeads):
        yield "interleaved pairs", p.interleave, published.interleaved
    elif isinstance(p, NormAndCache):
        yield from _numbers(kernel, p.norm, spec, published)
        yield from _numbers(kernel, p.cache, spec, published)
    elif isinstance(p, PeerSumNorm):
        yield from _numbers(kernel, p.norm, spec, published)
    elif isinstance(p, LinearAndChoice):
        yield from _numbers(kernel, p.choice, spec, published)
    elif isinstance(p, RouterTopK) and published.router:
        router = published.router
        yield "experts", p.experts, router.experts
        yield "chosen experts", p.top_k, router.chosen
        yield "a softmax", p.softmax, router.softmax
        yield "a bias of the choice", p.has_bias, router.bias
        yield "normalised weights", p.normalise, router.normalise
        yield "the factor of the weights", p.routed_scaling, router.factor
        yield "groups", p.groups, router.groups
        if router.best:
            yield "groups that are kept", p.topk_group, router.kept_groups
            yield "groups ranked by their best two", p.group_top2, router.best == 2
