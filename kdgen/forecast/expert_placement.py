"""Where routed experts could be: an N-th of each on every rank, as the plan has them, or each whole on one of N ranks.

Either way every rank has all tokens, and its results are summed with the others', so only what a rank moves differs. Whole experts load
the ranks unevenly, and a step waits for the fullest. Arithmetic over drawn routing, nothing measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Plan
from kdgen.plan.ops.experts import MoeCombine
from kdgen.spec.model import Spec

ROWS = (1, 8, 64, 512)
DRAWN_ROWS, FEWEST_DRAWS = 1600, 16  #: tokens drawn for a number of rows, each token's experts uniform among all


@dataclass(frozen=True)
class Placement:
    """Bytes that experts make one rank move in a layer, the mean over draws: of ``rows`` tokens that hit ``experts`` distinct experts.

    ``fullest`` is the most experts that one rank has of those where each is whole on one; ``whole_bytes`` that rank's.
    """

    rows: int
    experts: float
    fullest: float
    shared_bytes: float
    whole_bytes: float


def placements(spec: Spec, compute: Compute, shared: Plan, seed: int = 0) -> tuple[Placement, ...]:
    """For steps of several sizes of ``spec``, whose part ``shared`` is; empty where none of its layers has experts, or for one rank."""
    ranks, experts = shared.shard.ranks, spec.n_routed_experts or 0
    if not spec.has_moe or ranks == 1:
        return ()
    whole = build_plan(spec, compute)
    rng = np.random.default_rng(seed)
    return tuple(_placement(spec.num_experts_per_tok, experts, ranks, rows, _bytes(shared), _bytes(whole), rng) for rows in ROWS)


def _bytes(plan: Plan) -> tuple[float, float]:
    """Of an expert's weights, and of a token's activations at one expert."""
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
