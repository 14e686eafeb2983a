"""Models and numbers of ranks in every combination that changes what the ranks compute."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Plan
from kdgen.plan.shard import EXCHANGES, Exchange, Shard
from kdgen.spec.model import Spec, load_spec
from kdgen.verify.decoding.rank_observations import BLOCK
from kdgen.verify.kernels.rank_sums import CHECKS
from kdgen.verify.kernels.twins import with_those_held_to
from kdgen.weights.random import random_weights

Array = NDArray[Any]
_DRAFT = {
    "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 16,
    "intermediate_size": 192, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "block_size": BLOCK, "mask_token_id": 5, "target_layer_ids": [0, 1],
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20,
}  # fmt: skip
_BOTH = {
    "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "intermediate_size": 192, "moe_intermediate_size": 384, "max_position_embeddings": 128,
}  # fmt: skip
#: Dims that 1 to 4 ranks divide, with a vocabulary of which three ranks have odd parts.
_BIASED = _BOTH | {
    "name": "ranks-int4", "vocab_size": 564, "attention_bias": True, "draft": _DRAFT | {"attention_bias": True},
    "quantization": {"num_bits": 4, "group_size": 32, "symmetric": True},
}  # fmt: skip
#: Neither bias nor shared expert, a drafter that no two ranks can share, and a head that is the embedding.
_PLAIN = _BOTH | {
    "name": "ranks-tied", "vocab_size": 540, "tie_word_embeddings": True, "model_type": "deepseek_v2", "scoring_func": "softmax",
    "topk_method": "group_limited_greedy", "norm_topk_prob": False, "n_routed_experts": 12, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 4, "q_lora_rank": None, "n_shared_experts": 0, "moe_intermediate_size": 192,
    "draft": _DRAFT | {"num_key_value_heads": 1},
}  # fmt: skip


def rank_specs() -> tuple[Spec, Spec]:
    """A model with whatever ranks can cut wrongly, and one with what they must not add twice."""
    base = load_spec("tiny").model_dump(mode="json")
    biased, plain = (Spec.from_mapping(base | changes) for changes in (_BIASED, _PLAIN))
    return biased, plain


@dataclass(frozen=True)
class Case:
    """One model on some ranks. ``ties``: its head has equal rows on all ranks. ``processes``: by which exchanges it is processes, too."""

    spec: Spec
    compute: Compute
    ranks: int
    ties: bool = False
    processes: tuple[Exchange, ...] = ()

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} of {self.spec.name}"
        return f"{ranks}, a head of equal rows" if self.ties else ranks

    def weights(self) -> dict[str, Array]:
        """Checkpoint tensors by published key."""
        weights = dict(random_weights(self.spec, 11))
        if self.ties:  # each row so often that every rank has it
            weights["lm_head.weight"] = np.tile(weights["lm_head.weight"][: self.spec.vocab_size // 12], (12, 1))
        return weights


def cases() -> tuple[Case, ...]:
    """Few at a time: whatever depends on the number of ranks, on the type or on the exchange is in one of them."""
    biased, plain = rank_specs()
    return (
        Case(biased, "f32", 1),
        Case(biased, "f32", 2, processes=EXCHANGES),
        Case(plain, "bf16", 2),
        Case(biased, "f32", 3, ties=True, processes=("peer",)),
        Case(biased, "bf16", 4, ties=True, processes=("peer",)),
        Case(plain, "f32", 4, processes=("peer",)),
    )


def join_plans() -> list[tuple[Spec, Plan]]:
    """The kernels that put three and four ranks' parts together, by either exchange, with those that these are held to."""
    spec, _ = rank_specs()
    found = []
    for ranks, exchange in itertools.product((3, 4), EXCHANGES):
        plan = build_plan(spec, "f32", shard=Shard(ranks, 1, exchange))
        joins = [each for each in plan.kernels if each.template in CHECKS]
        found.append((spec, replace(plan, kernels=with_those_held_to(plan.kernels, joins))))
    return found
