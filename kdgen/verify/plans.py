"""Which plans of a spec are checked: of each compute type and family of targets, and of ranks; and what is small enough to decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kdgen.backends.base import Backend
from kdgen.plan.attention import mma_obstacles
from kdgen.plan.build import build_plan, own_kernels
from kdgen.plan.ir import Compute, Plan
from kdgen.plan.ops.many_rows import is_twin
from kdgen.plan.shard import EXCHANGES, Shard, part_of, shard_obstacles
from kdgen.spec.model import Spec
from kdgen.verify.kernels import rank_sums
from kdgen.verify.kernels.twins import sends, with_those_held_to
from kdgen.verify.shrink import is_wide, shrink
from kdgen.verify.variants import variants

RANKS = 2  #: of models whose dims they divide
#: Templates of which several ranks have versions of their own.
RANK_TEMPLATES = frozenset({"embed.cu.j2", "moe_combine.cu.j2", "argmax.cu.j2", "draft_context.cu.j2", *rank_sums.CHECKS})
Plans = Sequence[tuple[Spec, Plan]]


def plans_for(specs: Sequence[Spec], compute: Compute | None) -> Plans:
    """The plans for each compute type; a variant that cannot have the one asked for is left out."""
    lenient = {spec.name for spec in variants()}
    return [
        (spec, plan)
        for spec in specs
        for dtype in computes_of(spec, compute)
        if not (dtype == "bf16" and spec.name in lenient and mma_obstacles(spec))
        for plan in plans_of(spec, dtype)
    ]


def that_run(backend: Backend, plans: Plans) -> Plans:
    """A CPU runs every plan, a GPU those for its own targets."""
    return [(spec, plan) for spec, plan in plans if plan.family in ("generic", backend.family) or backend.name != "cuda"]


def plans_of(spec: Spec, compute: Compute) -> list[Plan]:
    """The plan for all targets, and those for some, with the kernels alone that they have of their own and those that these are held to."""
    plan = build_plan(spec, compute)
    return [plan, *(own_and_decode(each, plan) for each in plan.special)]


def own_and_decode(special: Plan, plan: Plan) -> Plan:
    """``special`` with the kernels alone that ``plan`` does not have, and those whose bits these must give."""
    return replace(special, kernels=with_those_held_to(special.kernels, own_kernels(special, plan).kernels))


def title_of(spec: Spec, plan: Plan) -> str:
    return spec.name if plan.family == "generic" else f"{spec.name}, {plan.family}"


def small_of(spec: Spec, plan: Plan) -> tuple[Spec, Plan]:
    """What a CPU can decode of it: the same, or the spec shrunk and its plan."""
    if not is_wide(spec):
        return spec, plan
    small = shrink(spec, plan.family)
    return small, next(each for each in plans_of(small, plan.compute) if each.family == plan.family)


def run_whole(others: Plans) -> list[tuple[Spec, Plan]]:
    """The plans of ``others`` that decode. A model that is among them for the plans of some targets decodes with these alone, because other
    models run the templates of its plan for all targets, in both types."""
    made_for_some = {spec.name for spec, plan in others if plan.family != "generic"}
    return [(spec, plan) for spec, plan in others if plan.family != "generic" or spec.name not in made_for_some]


def computes_of(spec: Spec, compute: Compute | None) -> tuple[Compute, ...]:
    if compute is not None:
        return (compute,)
    if is_wide(spec):
        return (build_plan(spec).compute,)
    return ("f32",) if mma_obstacles(spec) else ("f32", "bf16")


def can_share(spec: Spec, compute: Compute) -> bool:
    """Whether two ranks can have the model in this compute type."""
    return not shard_obstacles(spec, RANKS) and not (compute == "bf16" and mma_obstacles(part_of(spec, RANKS)))


def shared_plans(spec: Spec, plan: Plan) -> list[Plan]:
    """Plans of one of two ranks, by exchange, with the kernels alone that one rank does not have and that are not just narrower, and
    those that these are held to; and those for some targets, whose attention has other tiles for a rank's heads."""
    if not can_share(spec, plan.compute):
        return []
    found: list[Plan] = []
    seen = list(plan.kernels)
    for exchange in EXCHANGES:
        shared = build_plan(spec, plan.compute, shard=Shard(RANKS, 1, exchange))
        own = [each for each in shared.kernels if each not in seen and (each.template in RANK_TEMPLATES or sends(each))]
        seen += own
        found.append(replace(shared, kernels=with_those_held_to(shared.kernels, own)))
    known = [kernel for special in plan.special for kernel in special.kernels]
    for special in shared.special:
        own = [each for each in own_kernels(special, shared).kernels if each not in known and not is_twin(each)]
        found.append(replace(special, kernels=with_those_held_to(special.kernels, own)))
    return found
