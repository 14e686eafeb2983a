"""Two placements of routed experts on N ranks: a part of each expert on every rank, as in the plan, or each expert whole on one rank.

In both, every rank has all tokens and the ranks' results are summed, so they differ only in the bytes that a rank moves. Whole experts load
the ranks unevenly, and a step waits for the rank with most. This is computed from random routing, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Plan
from kdgen.plan.ops.experts import MoeCombine
from kdgen.spec.model import Spec

ROWS = (1, 8, 64, 512)
DRAWN_ROWS, FEWEST_DRAWS = 1600, 16  #: tokens that are drawn for each number of rows, with uniformly random experts


@dataclass(frozen=True)
class Placement:
    """Bytes that one rank moves for the experts of a layer, averaged over draws of ``rows`` tokens, which hit ``experts`` distinct experts.

    ``shared_bytes`` is for parts of experts. With whole experts, ``fullest`` is the number of hit experts on the rank that has most, and
    ``whole_bytes`` its bytes.
    """

    rows: int
    experts: float
    fullest: float
    shared_bytes: float
    whole_bytes: float


def placements(spec: Spec, compute: Compute, shared: Plan, seed: int = 0) -> tuple[Placement, ...]:
    """Placements for steps of several sizes of ``spec``; ``shared`` is a rank's plan. Empty for one rank, or without MoE layers."""
    ranks, experts = shared.shard.ranks, spec.n_routed_experts or 0
    if not spec.has_moe or ranks == 1:
        return ()
    whole = build_plan(spec, compute)
    rng = np.random.default_rng(seed)
    return tuple(_placement(spec.num_experts_per_tok, experts, ranks, rows, _bytes(shared), _bytes(whole), rng) for rows in ROWS)


def _bytes(plan: Plan) -> tuple[float, float]:
    """Bytes of an expert's weights, and of a token's activations at one expert."""
    launched = {launch.kernel for launch, _ in plan.program("prefill").launches()}
    kernels = [kernel for kernel in plan.kernels if kernel.name in launched]
    (chosen,) = (kernel.params.top_k for kernel in kernels if isinstance(kernel.params, MoeCombine))
    costs = [kernel.cost for kernel in kernels if kernel.cost.bytes_per_expert or isinstance(kernel.params, MoeCombine)]
    return float(sum(cost.bytes_per_expert for cost in costs)), sum(cost.bytes_per_row for cost in costs) / chosen


def _placement(
    chosen: int, experts: int, ranks: int, rows: int, shared: tuple[float, float], whole: tuple[float, float], rng: np.random.Generator
) -> Placement:
    hit, fullest, moved = [], [], []
    owner = np.arange(experts) % ranks
    for _ in range(max(FEWEST_DRAWS, DRAWN_ROWS // rows)):
        tokens = np.argpartition(rng.random((rows, experts)), chosen - 1, axis=1)[:, :chosen]
        counts = np.bincount(tokens.reshape(-1), minlength=experts)
        of_rank = np.bincount(owner, weights=counts > 0, minlength=ranks)
        at_rank = np.bincount(owner, weights=counts, minlength=ranks)
        hit.append(int((counts > 0).sum()))
        fullest.append(float(of_rank.max()))
        moved.append(float((of_rank * whole[0] + at_rank * whole[1]).max()))
    shared_bytes = float(np.mean(hit)) * shared[0] + rows * chosen * shared[1]
    return Placement(rows, float(np.mean(hit)), float(np.mean(fullest)), shared_bytes, float(np.mean(moved)))
