"""Tensor parallelism: which part of a model each of N ranks holds.

A rank's part is itself a model of the same structure, with an N-th of the heads, of every MLP's and expert's inner width, and of the
vocabulary. Norms, the latent projections, the router and the cache are the same on every rank. Kernels are then planned for that
smaller model; what is summed over ranks is in kdgen.plan.passes. A drafter is shared in the same way where its dims allow it, its
cache by key heads; else each rank has it whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kdgen.errors import KdgenError, RanksError
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.model import Spec

#: How partial results reach the other ranks: an all-gather, or kernels that read the other ranks' memory.
Exchange = Literal["gather", "peer"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)

MAX_RANKS = 64


@dataclass(frozen=True)
class Shard:
    """The place of a plan among ``ranks`` plans that run one model together."""

    ranks: int = 1
    rank: int = 0
    exchange: Exchange = "gather"

    @property
    def whole(self) -> bool:
        return self.ranks == 1


WHOLE = Shard()


def part_of(spec: Spec, ranks: int) -> Spec:
    """The model that one of ``ranks`` ranks computes; ``spec`` itself for one rank. Call ``check_shard`` before."""
    if ranks == 1:
        return spec
    return spec.model_copy(
        update={
            "vocab_size": spec.vocab_size // ranks,
            "num_attention_heads": spec.num_attention_heads // ranks,
            "intermediate_size": spec.intermediate_size // ranks,
            "moe_intermediate_size": spec.moe_intermediate_size // ranks,
            "draft": _draft_part(spec.draft, ranks) if spec.draft and shares_draft(spec, ranks) else spec.draft,
        }
    )


def _draft_part(draft: DraftSpec, ranks: int) -> DraftSpec:
    return draft.model_copy(
        update={
            "num_attention_heads": draft.num_attention_heads // ranks,
            "num_key_value_heads": draft.num_key_value_heads // ranks,
            "intermediate_size": draft.intermediate_size // ranks,
        }
    )


def shares_draft(spec: Spec, ranks: int) -> bool:
    """Whether the ranks share the drafter: they divide its dims, and leave those that tensor cores need multiples of 16 so."""
    draft = spec.draft
    if draft is None or ranks == 1 or draft.num_key_value_heads % ranks:
        return False
    widths = (draft.query_width, draft.intermediate_size, draft.feature_width)
    return all(width % ranks == 0 and (width % 16 != 0 or width // ranks % 16 == 0) for width in widths)


def shard_obstacles(spec: Spec, ranks: int) -> tuple[str, ...]:
    """Why ``ranks`` ranks cannot share ``spec`` evenly; empty when they can."""
    widths = {"vocab_size": spec.vocab_size, "num_attention_heads": spec.num_attention_heads}
    if spec.first_k_dense_replace:
        widths["intermediate_size"] = spec.intermediate_size
    if spec.has_moe:
        widths["moe_intermediate_size"] = spec.moe_intermediate_size
    found = [f"{name} {width} is no multiple of {ranks}" for name, width in widths.items() if width % ranks]
    group = spec.quantization.group_size if spec.quantization else 0
    if group and not spec.moe_intermediate_size % ranks and spec.moe_intermediate_size // ranks % group:
        found.append(f"a rank's {spec.moe_intermediate_size // ranks} of moe_intermediate_size are no whole groups of {group} INT4 weights")
    return tuple(found)


def check_shard(spec: Spec, shard: Shard) -> None:
    """Raises RanksError when the ranks cannot share the model, naming the dims and the numbers that can, KdgenError for no such rank."""
    if not 1 <= shard.ranks <= MAX_RANKS:
        raise RanksError(f"{spec.name}: {shard.ranks} ranks; 1 to {MAX_RANKS} can share a model")
    if not 0 <= shard.rank < shard.ranks:
        raise KdgenError(f"{spec.name}: there is no rank {shard.rank} among {shard.ranks}")
    if obstacles := shard_obstacles(spec, shard.ranks):
        possible = ", ".join(str(n) for n in range(1, MAX_RANKS + 1) if not shard_obstacles(spec, n))
        raise RanksError(f"{spec.name}: {shard.ranks} ranks cannot share it: {'; '.join(obstacles)}. Numbers that can: {possible}")
