"""Memory and lower bounds for the times of steps, computed from the plan alone.

A step's floor is the bytes that it must move divided by the bandwidth that a reading kernel reaches, plus the times of its collectives.
docs/performance.md says how much longer measured steps take. ``Forecast.assumptions`` lists the assumptions.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kdgen.errors import KdgenError
from kdgen.forecast.expert_placement import Placement, placements
from kdgen.forecast.gpus import READ_FRACTION, RESERVED_BYTES, GpuModel
from kdgen.plan.build import buffers_at, build_plan
from kdgen.plan.floors import draft_bytes, expected_experts, workload
from kdgen.plan.ir import MAX_NODES, Compute, Family, Group, Kernel, Limits, Plan
from kdgen.plan.ops.ranks import PeerArgmax, PeerGather, PeerSum, PeerSumNorm
from kdgen.plan.shard import MAX_RANKS, Exchange, Shard, part_of, shard_obstacles
from kdgen.spec.model import Spec

BLOCK_SIZE = 8  #: rows of a draft block if the spec has no drafter: the root and seven depths
_CACHES = ("kv_cache", "draft_cache")


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. ``longest_context`` is the longest context that fits, up to the model's positions; 0 if none does."""

    weights: int
    draft_weights: int
    cache: int
    buffers: int
    reserved: int
    total: int
    of_gpu: int
    fits: bool
    longest_context: int


@dataclass(frozen=True)
class Part:
    """The kernels of one group in a step, on one rank."""

    name: str
    launches: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Step:
    """A step over ``rows`` token rows. ``seconds`` is its floor, ``experts`` the distinct experts that a layer is expected to read."""

    rows: int
    experts: float
    bytes: int
    collectives: int  #: a sum over many rows counts as two
    collective_bytes: int  #: bytes that one rank sends
    collective_seconds: float
    seconds: float
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Tree:
    """A round with a draft tree of ``nodes``: its floor in ``seconds``, the draft's included, its expected tokens, and the speed-up over
    plain decoding."""

    nodes: int
    tokens: float
    seconds: float
    speedup: float


@dataclass(frozen=True)
class Forecast:
    spec: str
    compute: Compute
    gpu: GpuModel
    ranks: int
    exchange: Exchange
    context: int
    acceptance: float
    depths: int  #: depths of a draft
    memory: Memory
    fewest_ranks: int  #: the fewest ranks whose memory is enough for this context; 0 if no number is
    decode: Step
    verify: Step
    draft_seconds: float
    trees: tuple[Tree, ...]  #: for every number of nodes from 0
    best: Tree
    placements: tuple[Placement, ...]  #: empty for one rank
    assumptions: tuple[str, ...]


def forecast(
    spec: Spec, gpu: GpuModel, ranks: int = 1, context: int = 4096, nodes: int = 15, acceptance: float = 0.8, compute: Compute | None = None
) -> Forecast:
    """A forecast for ``spec`` on ``ranks`` GPUs, with trees of ``nodes`` and a draft whose best token has probability ``acceptance``.

    Raises KdgenError when the ranks cannot share the model, or when nodes, context or acceptance are out of range.
    """
    if not 0 <= nodes < MAX_NODES:
        raise KdgenError(f"a tree has 0 to {MAX_NODES - 1} nodes, not {nodes}")
    if not 0 <= acceptance < 1:
        raise KdgenError(f"the acceptance must be at least 0 and below 1, not {acceptance}")
    plan = _plan(spec, compute, ranks, context, gpu.target.family)
    draft_seconds = _draft_seconds(spec, plan, gpu, context)
    steps = [_step(spec, plan, gpu, context, count + 1) for count in range(MAX_NODES)]
    depths = (spec.draft.block_size if spec.draft else BLOCK_SIZE) - 1
    gains = expected_tokens(acceptance, depths, MAX_NODES - 1)
    trees = []
    for count, (step, tokens) in enumerate(zip(steps, gains, strict=True)):
        seconds = step.seconds + (draft_seconds if count else 0.0)
        trees.append(Tree(count, tokens, seconds, tokens * steps[0].seconds / seconds))
    return Forecast(
        spec=spec.name,
        compute=plan.compute,
        gpu=gpu,
        ranks=ranks,
        exchange=plan.shard.exchange,
        context=context,
        acceptance=acceptance,
        depths=depths,
        memory=_memory(spec, plan, gpu),
        fewest_ranks=_fewest_ranks(spec, compute, gpu, context),
        decode=steps[0],
        verify=steps[nodes],
        draft_seconds=draft_seconds,
        trees=tuple(trees),
        best=max(trees, key=lambda tree: tree.speedup),
        placements=placements(spec, plan.compute, plan),
        assumptions=_assumptions(spec, gpu, ranks, depths),
    )


def expected_tokens(acceptance: float, depths: int, most: int) -> list[float]:
    """The expected tokens of a round for each number of nodes up to ``most``, including the token that every step gives.

    At each depth, the target's token is the draft's choice number r with probability a (1 - a)^(r - 1), independent of other depths. A node
    at depth d whose ranks r add up to d + s is accepted with probability a^d (1 - a)^s. A tree has the most probable nodes.
    """
    likely = []
    for depth in range(1, depths + 1):
        for beyond in range(most + 1):
            chance = acceptance**depth * (1 - acceptance) ** beyond
            likely += [chance] * min(most, math.comb(beyond + depth - 1, depth - 1))
            if chance == 0:
                break
    likely = sorted(likely, reverse=True)[:most]
    tokens = [1.0]
    for place in range(most):
        tokens.append(tokens[-1] + (likely[place] if place < len(likely) else 0.0))
    return tokens


# ---- memory -------------------------------------------------------------------------------------------------------------


def _plan(spec: Spec, compute: Compute | None, ranks: int, context: int, family: Family) -> Plan:
    return build_plan(spec, compute, Limits(max_context=context), Shard(ranks, 0, "peer" if ranks > 1 else "gather")).on(family)


def _memory(spec: Spec, plan: Plan, gpu: GpuModel) -> Memory:
    weights = sum(weight.total_bytes for weight in plan.weights)
    draft_weights = sum(weight.total_bytes for weight in plan.draft_weights)
    cache = sum(buffer.bytes for buffer in plan.buffers if buffer.name in _CACHES)
    buffers = sum(buffer.bytes for buffer in plan.buffers if buffer.name not in _CACHES)
    total = weights + draft_weights + cache + buffers + RESERVED_BYTES
    room = gpu.memory_bytes - weights - draft_weights - RESERVED_BYTES
    longest = _longest_context(spec, plan, room)
    return Memory(weights, draft_weights, cache, buffers, RESERVED_BYTES, total, gpu.memory_bytes, total <= gpu.memory_bytes, longest)


def _longest_context(spec: Spec, plan: Plan, room: int) -> int:
    """The longest context whose buffers take at most ``room`` bytes; 0 if none does."""

    def too_long(context: int) -> bool:
        return sum(buffer.bytes for buffer in buffers_at(plan, spec, context)) > room

    return bisect.bisect_left(range(1, spec.max_position_embeddings + 1), True, key=too_long)


def _fewest_ranks(spec: Spec, compute: Compute | None, gpu: GpuModel, context: int) -> int:
    for ranks in range(1, MAX_RANKS + 1):
        if shard_obstacles(spec, ranks):
            continue
        try:
            plan = _plan(spec, compute, ranks, context, gpu.target.family)
        except KdgenError:  # a part too narrow for tensor cores
            continue
        tensors = (*plan.weights, *plan.draft_weights)
        if sum(each.total_bytes for each in tensors) + sum(each.bytes for each in plan.buffers) + RESERVED_BYTES <= gpu.memory_bytes:
            return ranks
    return 0


# ---- steps --------------------------------------------------------------------------------------------------------------


def experts_hit(spec: Spec, rows: int) -> float:
    """The expected number of distinct experts of a layer that ``rows`` tokens choose, uniformly and independently."""
    return expected_experts(spec.n_routed_experts or 0, spec.num_experts_per_tok, rows) if spec.has_moe else 0.0


def _step(spec: Spec, plan: Plan, gpu: GpuModel, context: int, rows: int) -> Step:
    program = plan.program("decode" if rows == 1 else "verify")
    kernels = {kernel.name: kernel for kernel in plan.kernels}
    launched: dict[str, int] = {}
    for launch, _ in program.launches():
        launched[launch.kernel] = launched.get(launch.kernel, 0) + 1
    hit = experts_hit(spec, rows)
    work = workload(spec, rows, context, hit)
    moved: dict[str, tuple[int, int]] = {}
    collectives = sent = 0
    for name, count in launched.items():
        part = part_of_step(kernels[name].group)
        launches, total = moved.get(part, (0, 0))
        moved[part] = launches + count, total + count * kernels[name].cost.bytes(work)
        exchanges, copied = _exchanges(plan, kernels[name], rows)
        collectives += count * exchanges
        sent += count * copied
    bandwidth = gpu.bandwidth * READ_FRACTION
    collective_seconds = collectives * gpu.collective_seconds + sent / gpu.link_bandwidth
    parts = tuple(Part(name, launches, total, total / bandwidth) for name, (launches, total) in moved.items())
    total = sum(part.bytes for part in parts)
    return Step(rows, hit, total, collectives, sent, collective_seconds, total / bandwidth + collective_seconds, parts)


def part_of_step(group: Group) -> str:
    """The title under which a forecast shows a group; small groups share one."""
    match group:
        case "norms and rows" | "tree" | "accept":
            return "norms, rows, trees"
        case "drafter" | "draft context":
            return "drafter's features"
        case _:
            return group


def _exchanges(plan: Plan, kernel: Kernel, rows: int) -> tuple[int, int]:
    """How often a kernel waits for other ranks, and the bytes that one rank sends: 8 for each word, because the round is sent with it."""
    ranks, p = plan.shard.ranks, kernel.params
    if isinstance(p, PeerGather) or (isinstance(p, PeerSum) and rows <= p.direct_rows):
        return 1, 8 * p.width * rows * (ranks - 1)
    if isinstance(p, PeerArgmax):
        return 1, 8 * 2 * rows * (ranks - 1)
    if isinstance(p, PeerSumNorm):
        return 1, 8 * p.norm.width * rows * (ranks - 1)
    if isinstance(p, PeerSum):  # sends parts to the ranks that sum them, then sums to all
        return 2, 2 * 8 * p.width * rows * (ranks - 1) // ranks
    return 0, 0


def _draft_seconds(spec: Spec, plan: Plan, gpu: GpuModel, context: int) -> float:
    """The floor of a block of the drafter: its weights, the head, its cache and its collectives; 0 without a drafter."""
    draft = part_of(spec, plan.shard.ranks).draft
    if draft is None:
        return 0.0
    exchanges = [_exchanges(plan, plan.kernel(launch.kernel), draft.block_size) for launch, _ in plan.program("draft").launches()]
    collectives, sent = sum(count for count, _ in exchanges), sum(copied for _, copied in exchanges)
    moved = draft_bytes(plan, draft, context) / (gpu.bandwidth * READ_FRACTION)
    return moved + collectives * gpu.collective_seconds + sent / gpu.link_bandwidth


def _assumptions(spec: Spec, gpu: GpuModel, ranks: int, depths: int) -> tuple[str, ...]:
    found = [
        f"{gpu.title}: {gpu.memory_bytes / 1e9:.0f} GB and {gpu.bandwidth / 1e12:.2f} TB/s by its data sheet, of which a reading kernel"
        f" reaches {READ_FRACTION:.0%}",
        "a floor is bytes divided by bandwidth, without gaps between kernels; docs/performance.md has measured steps",
        f"{RESERVED_BYTES / 2**30:.1f} GiB of each GPU are for the driver",
    ]
    if ranks > 1:
        micro = gpu.collective_seconds * 1e6
        found.append(
            f"{gpu.link} between all {ranks} GPUs, as in one host, {gpu.link_bandwidth / 1e9:.0f} GB/s out of each by its data sheet;"
            f" {micro:.0f} µs for each collective"
        )
    if spec.has_moe:
        found.append("each token chooses among all experts with equal probability; real routing hits fewer")
    found.append(
        f"the draft's choice number r is accepted with probability a (1 - a)^(r - 1) at each of {depths} depths; a is the acceptance"
        + ("" if spec.draft else "; the spec has no drafter, so drafting takes no time")
    )
    return tuple(found)


def budgets_shown(trees: Sequence[Tree], nodes: int, best: int) -> list[Tree]:
    """The trees that a table shows: common budgets, ``nodes``, and the best."""
    return [tree for tree in trees if tree.nodes in {0, 3, 7, 15, 31, 63, nodes, best}]
