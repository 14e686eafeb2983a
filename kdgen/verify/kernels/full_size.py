"""Kernels whose loops and indices small models do not exercise: K2.6's small kernels at full size, and shapes that no shipped model has.

In a small model one block holds everything: its loops have one pass, its threads one round, its lists one part. K2.6 has more: a vocabulary
that a block reads in four passes, norms with two vectors for each thread, 384 experts, candidates of 64 parts. Where K2.6 also has only one
pass, an artificial shape has several. The checks are those of ``kdgen.verify.kernels.check``, over full shapes. A kernel whose check would
need memory for a whole table or cache, or multiply whole matrices, runs on a slice. A test counts the passes of loops (tests/loops.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kdgen.plan.build import build_plan
from kdgen.plan.ir import Kernel, Plan
from kdgen.plan.shard import EXCHANGES, Shard
from kdgen.spec.model import Spec, load_spec
from kdgen.verify.kernels.harness import Size
from kdgen.verify.kernels.twins import with_those_held_to

MODEL = "k26"
#: Ranks of which each sums over several others.
RANKS = 4
#: Templates of K2.6's kernels without a weight matrix, which run over their whole shape; and of those that only ranks have.
SMALL = (
    "advance", "argmax", "attention_schedule", "chain_rows", "draft_block", "draft_capture", "draft_context", "draft_heads",
    "gqa_combine", "logit_rows", "mla_combine", "mla_combine_wgmma", "moe_combine", "moe_sort", "norm_and_cache", "rmsnorm",
    "rope_cache", "router_topk", "row_groups", "sample", "top_k", "top_k_parts", "tree_accept", "tree_build", "tree_rows",
)  # fmt: skip
JOINING = (
    "argmax", "draft_context", "moe_combine", "peer_argmax", "peer_gather", "peer_sum", "peer_sum_norm", "rank_choice", "rank_logits",
    "rank_sum",
)  # fmt: skip
#: Templates whose kernels' checks would take gigabytes or minutes.
SLICED = (
    "combine_and_heads", "embed", "experts_mma", "experts_wgmma", "gqa_attention", "kv_compact", "linear_and_choice",
    "linear_and_router", "mla_attention_wgmma", "router_logits_mma",
)  # fmt: skip

#: Changes to tiny: more experts than a block has threads, in more groups than a warp has lanes, more chosen of them.
CROWDED: dict[str, Any] = {
    "model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "group_limited_greedy", "norm_topk_prob": False,
    "n_routed_experts": 600, "n_group": 40, "topk_group": 10, "num_experts_per_tok": 40, "moe_intermediate_size": 16,
}  # fmt: skip
#: A latent and a drafter's heads beyond a block's threads, which vectors do not divide, and more rotary pairs than a cache row's block has
#: threads.
ODD_WIDTHS: dict[str, Any] = {
    "kv_lora_rank": 131, "q_lora_rank": 32, "qk_rope_head_dim": 80,
    "draft": {
        "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 136,
        "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "block_size": 8, "mask_token_id": 5, "target_layer_ids": [0],
    },
}  # fmt: skip
#: K2.6 with heads so wide that a head's block adds its warps' sums in two rounds, and more inputs than a warp of the router holds weights.
WIDER: dict[str, Any] = {"v_head_dim": 256, "hidden_size": 8192}


@dataclass(frozen=True)
class Group:
    """Some kernels of a plan, with those whose bits they must have; how much of each runs, and with how many token rows."""

    spec: Spec
    plan: Plan
    size: Size
    tokens: tuple[int, ...] = (1, 3, 9)

    def of(self, template: str) -> Group:
        """Those of ``template`` alone."""
        return replace(_group(self.spec, self.plan, [template.removesuffix(".cu.j2")], self.size), tokens=self.tokens)


def groups() -> Iterator[Group]:
    """All that is checked in full size."""
    model = load_spec(MODEL)
    whole, seen = build_plan(model), list[Kernel]()
    shared = [build_plan(model, shard=Shard(RANKS, 1, exchange)) for exchange in EXCHANGES]
    for plan in (whole, *whole.special, *shared):
        small, sliced = (SMALL, SLICED) if plan.shard.whole else (JOINING, ("embed",))
        found = [_group(model, plan, small, "full", seen), _group(model, plan, sliced, "slice", seen)]
        seen += [kernel for group in found for kernel in group.plan.kernels]
        yield from found
    yield _group(model, shared[-1].on("sm_90a"), ["attention_schedule_of_groups"], "full")
    yield _group(model, build_plan(model, "f32"), ["router_logits", "experts_f32"], "slice")
    wider = _changed(model, "k26-wider", WIDER)
    yield _group(wider, build_plan(wider), ["linear_and_router"], "slice")
    yield _group(wider, build_plan(wider).on("sm_90a"), ["combine_and_heads"], "slice")
    tiny = load_spec("tiny")
    crowded, odd = _changed(tiny, "tiny-crowded", CROWDED), _changed(tiny, "tiny-odd-widths", ODD_WIDTHS)
    many = _group(crowded, build_plan(crowded, "bf16"), ["router_topk", "moe_sort", "linear_and_choice", "experts_mma"], "full")
    yield replace(many, tokens=(1, 33))  # more than 1,024 assignments
    narrow = _changed(crowded, "tiny-narrow", {"hidden_size": 64})  # a block's groups of warps pass over experts
    yield _group(narrow, build_plan(narrow, "bf16"), ["experts_mma"], "full")
    yield _group(odd, build_plan(odd, "f32"), ["gqa_attention", "gqa_combine", "mla_combine", "rope_cache"], "full")


def _changed(spec: Spec, name: str, changes: dict[str, Any]) -> Spec:
    """``spec`` with other values and without its drafter, as one that is read is checked."""
    return Spec.from_mapping(spec.model_dump(mode="json") | {"draft": None} | changes | {"name": name}, name)


def _group(spec: Spec, plan: Plan, templates: Sequence[str], size: Size, seen: Sequence[Kernel] = ()) -> Group:
    wanted = [kernel for kernel in plan.kernels if kernel.template.removesuffix(".cu.j2") in templates and kernel not in seen]
    return Group(spec, replace(plan, kernels=with_those_held_to(plan.kernels, wanted)), size)
