"""How routed experts are tiled, what their tiles cost, and what is launched beside the shared experts."""

from __future__ import annotations

from kdgen.plan.tuning import Mode, Ring
from kdgen.spec.model import Spec

EXPERT_TOKEN_TILES = 2  # of 8 assignments of an expert
#: Up to so many assignments of an expert, a row tile's weights take longer to read than to multiply, and it costs 16. Each further one of
#: the first 8 costs COST_PER_ASSIGNMENT more. With more than 8, each pass over the weights, for 16, costs COST_PER_PASS.
#: H200, µs of a tile of K2.6's gate_up (2026-11-30): for 1 to 4 assignments 7.4, 6 10.2, 8 11.5; the first tiles of an expert take longer.
#: In a step of 16 rows, blocks that had experts of 8 ended 50 % late while all of up to 8 cost the same, and 13 % late with 24 for 8.
MEMORY_BOUND_ASSIGNMENTS = 4
COST_PER_ASSIGNMENT = 3
COST_PER_PASS = 24
SORT_BYTES = 40 * 1024  # of moe_sort's counts, in static shared memory


def has_bf16_router(spec: Spec, mode: Mode) -> bool:
    """Whether the router's weights are bf16 and read by tensor cores; their bits are the checkpoint's."""
    return mode.compute == "bf16" and (spec.router_dtype or spec.dtype) == "bfloat16"


def choice_smem(experts: int, top_k: int, groups: int, warps: int) -> int:
    """Bytes of linear_and_choice's ``struct Choice``: 1,024 assignments, a sum a warp, and each warp's scores."""
    scores = 2 * experts + top_k + (groups if groups > 1 else 0)
    return -(-(1024 + warps + warps * scores) // 4) * 16


def expert_split(steps: int, step_bytes: int, registers: int, wgmma: bool) -> tuple[int, bool, Ring]:
    """(warps that split the inputs of an expert's row tile, whether their inputs stay in registers, how each streams its weights).

    ``registers``: of a lane for a step's inputs of 8 tokens. More warps a tile make tiles end sooner, so that all SMs end together, and
    leave fewer inputs for each, but the ends of a tile cost each of them the same. H200, µs of K2.6's experts for 8 rows (2026-11-30):
    gate_up and down of 60 experts with 16 warps on 16 tiles 388, groups of 2 warps 360, of 4 363, of 8 400; down of 48 experts in groups
    of 4 120, of 8 whose inputs stay in registers 105.
    """
    most_warps, most_steps = (8, 4) if wgmma else (4, 2)  # other targets have less shared memory, and sm_120 spills at 4 steps
    ways = [w for w in (8, 4, 2, 1) if w <= most_warps and steps % w == 0 and (steps // w >= 4 or w == 1)]
    held = next((w for w in ways if steps // w * registers <= 56), 0)
    warps = held or next(w for w in ways if w <= 4)
    stage_steps = max(n for n in (4, 3, 2, 1) if n <= most_steps and steps // warps % n == 0)
    slots = 12 // stage_steps  # two stages of 4 steps on their way and one in use, or as much in smaller ones
    return warps, held > 0, Ring(stage_steps, slots, stage_steps * slots * step_bytes)
