"""The router: logits of every expert, the choice among them, and the lists of what each chosen expert gets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

from kdgen.plan.expert_tiling import SORT_BYTES, choice_smem, has_bf16_router
from kdgen.plan.ir import ONE, Cost, Extent, Kernel
from kdgen.plan.ops.dense import LinearMma, LinearOp
from kdgen.plan.ops.op import (
    COUNT,
    ROW_EXTENT,
    Argument,
    Context,
    Op,
    layer_weight,
    reads,
    reads_ints,
    stored,
    writes,
    writes_ints,
)
from kdgen.plan.tuning import CHUNK_STEPS, GENERIC_TOKENS, ROUTER_CHUNKS_AHEAD, TOKEN_TILES, CType, block_for, mma_warps, register_steps

LINEAR_AND_ROUTER = "shared_gate_up_proj_and_router"
LINEAR_AND_CHOICE = "shared_down_proj_and_choice"


@dataclass(frozen=True)
class RouterLogits:
    """Context of router_logits.cu.j2."""

    name: str
    hidden: int
    experts: int
    tokens: int
    block_experts: int
    vector: int
    act: CType


@dataclass(frozen=True)
class RouterLogitsMma:
    """Context of router_logits_mma.cu.j2."""

    name: str
    hidden: int
    experts: int
    warps: int
    register_steps: int
    max_tokens: int


@dataclass(frozen=True)
class RouterPhase:
    """Context of router_logits.cuh.j2, the phase of a kernel for few rows."""

    hidden: int
    experts: int
    warps: int
    register_steps: int
    max_tokens: int
    chunk_steps: int
    chunks_ahead: int


@dataclass(frozen=True)
class LinearAndRouter:
    """Context of linear_and_router.cu.j2."""

    name: str
    linear: LinearMma
    router: RouterPhase


@dataclass(frozen=True)
class RouterTopK:
    """Context of router_topk.cu.j2."""

    name: str
    experts: int
    top_k: int
    groups: int
    topk_group: int
    group_top2: bool
    softmax: bool
    has_bias: bool
    normalise: bool
    routed_scaling: float
    scoring_comment: str


@dataclass(frozen=True)
class MoeSort:
    """Context of moe_sort.cu.j2."""

    name: str
    experts: int
    top_k: int
    block: int


@dataclass(frozen=True)
class LinearAndChoice:
    """Context of linear_and_choice.cu.j2."""

    name: str
    linear: LinearMma
    choice: RouterTopK
    sort: MoeSort


def fuses_routing(c: Context) -> bool:
    """Whether forwards of few rows route beside the shared experts, in launches of both."""
    return c.tensor_cores and c.spec.has_moe and c.spec.shared_intermediate_size > 0


@dataclass(frozen=True)
class RouterLogitsOp(Op):
    """Float32 logits of every expert, [rows, n_routed_experts]."""

    def kernel(self) -> Kernel:
        s, experts, mode = self.c.spec, self.c.spec.n_routed_experts or 0, self.c.mode
        if has_bf16_router(s, mode):
            warps = mma_warps(s.hidden_size)
            held = register_steps(s.hidden_size // 16 // warps, 8)
            mma = RouterLogitsMma("router_logits", s.hidden_size, experts, warps, held, TOKEN_TILES * 8)
            cost = Cost(
                bytes_fixed=experts * s.hidden_size * 2, bytes_per_row=s.hidden_size * 2 + experts * 4,
                operations_per_row=2 * experts * s.hidden_size,
            )  # fmt: skip
            grid = (Extent(-(-experts // 16)), Extent(per_tokens=TOKEN_TILES * 8), ONE)
            return Kernel(
                "router_logits", "router_logits_mma.cu.j2", mma, warps * 32, grid, 0, cost, "router logits in float32",
                group="routed experts",
            )  # fmt: skip
        block_experts, vector = 2, 4 if s.hidden_size % 4 == 0 else 1
        p = RouterLogits("router_logits", s.hidden_size, experts, GENERIC_TOKENS, block_experts, vector, mode.act)
        cost = Cost(
            bytes_fixed=experts * s.hidden_size * 4, bytes_per_row=s.hidden_size * mode.act_bytes + experts * 4,
            operations_per_row=2 * experts * s.hidden_size,
        )  # fmt: skip
        grid = (Extent(-(-experts // block_experts)), Extent(per_tokens=GENERIC_TOKENS), ONE)
        return Kernel("router_logits", "router_logits.cu.j2", p, 256, grid, 0, cost, "router logits in float32", group="routed experts")

    def arguments(self) -> tuple[Argument, ...]:
        return *reads_ints("num_tokens"), reads(self.c.mode.act, "hidden"), _router(self.c, "weight"), writes("float", "logits", _LOGITS)


_LOGITS = reads("float", "router_logits").value


def _router(c: Context, name: str) -> Argument:
    return stored("bf16" if has_bf16_router(c.spec, c.mode) else "float", name, layer_weight("router"))


@dataclass(frozen=True)
class RouterTopKOp(Op):
    """The chosen experts of each row and their weights, [rows, num_experts_per_tok]."""

    def kernel(self) -> Kernel:
        s, experts = self.c.spec, self.c.spec.n_routed_experts or 0
        softmax = s.scoring_func == "softmax"
        comment = "Scores are a softmax over the experts." if softmax else "Scores are sigmoids."
        if s.has_router_bias:
            comment += " The bias corrects the choice only; weights are the scores themselves."
        p = RouterTopK(
            name="router_topk", experts=experts, top_k=s.num_experts_per_tok, groups=1 if s.topk_method == "greedy" else s.n_group,
            topk_group=s.topk_group, group_top2=s.topk_method == "noaux_tc", softmax=softmax, has_bias=s.has_router_bias,
            normalise=s.norm_topk_prob, routed_scaling=s.routed_scaling_factor, scoring_comment=comment,
        )  # fmt: skip
        cost = Cost(bytes_fixed=experts * 4, bytes_per_row=experts * 4 + s.num_experts_per_tok * 8, operations_per_row=experts * 8)
        return Kernel(
            "router_topk", "router_topk.cu.j2", p, 32, (ROW_EXTENT, ONE, ONE), 0, cost, "expert choice and weights", group="routed experts"
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        return *reads_ints("num_tokens"), *self.choosing("logits")

    def choosing(self, logits: str) -> tuple[Argument, ...]:
        """All but the number of rows; ``logits`` is the name of the parameter of the router's logits."""
        bias = (stored("float", "correction_bias", layer_weight("router_bias")),) if self.c.spec.has_router_bias else ()
        return reads("float", logits, _LOGITS), *bias, writes("int", "topk_experts"), writes("float", "topk_weights")


@dataclass(frozen=True)
class MoeSortOp(Op):
    """The rows' assignments grouped by expert, and the list of experts that have any."""

    def kernel(self) -> Kernel:
        experts, top_k = self.c.spec.n_routed_experts or 0, self.c.spec.num_experts_per_tok
        block = block_for(experts, min(512, SORT_BYTES // (experts * 4) * 32))
        p = MoeSort("moe_sort", experts, top_k, block)
        return Kernel(
            "moe_sort", "moe_sort.cu.j2", p, block, (ONE, ONE, ONE), 0, Cost(bytes_per_row=top_k * 8), "assignments grouped by expert",
            group="routed experts",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        return *reads_ints("num_tokens topk_experts"), *_LISTS


_LISTS = writes_ints("num_active active_expert active_begin active_end assignments")


@dataclass(frozen=True)
class LinearAndRouterOp(Op):
    """The shared experts' gate_up projection and the router's logits, dealt out over all blocks, for few rows."""

    gate_up: LinearOp

    def kernel(self) -> Kernel:
        gate_up, router = self.gate_up.kernel(), RouterLogitsOp(self.c).kernel()
        logits = cast(RouterLogitsMma, router.params)
        steps = logits.hidden // 16 // logits.warps  # all of them, where there are registers: they are on their way before it waits
        held = register_steps(steps, 28 if logits.warps >= 8 else 12)
        chunk = math.gcd(held, CHUNK_STEPS)
        ahead = min(ROUTER_CHUNKS_AHEAD, steps // chunk)
        phase = RouterPhase(logits.hidden, logits.experts, logits.warps, held, logits.max_tokens, chunk, ahead)
        p = LinearAndRouter(LINEAR_AND_ROUTER, cast(LinearMma, gate_up.params), phase)
        summary = f"{gate_up.summary}; beside it, {router.summary}"
        return replace(gate_up, name=p.name, template="linear_and_router.cu.j2", params=p, cost=gate_up.cost + router.cost, summary=summary)

    def arguments(self) -> tuple[Argument, ...]:
        return *self.gate_up.arguments(), _router(self.c, "router_weight"), writes("float", "router_logits")


@dataclass(frozen=True)
class LinearAndChoiceOp(Op):
    """The shared experts' down projection, and in a block of its own the choice of routed experts and their lists, for few rows."""

    down: LinearOp

    def kernel(self) -> Kernel:
        down, topk, sort = self.down.kernel(), RouterTopKOp(self.c).kernel(), MoeSortOp(self.c).kernel()
        linear, choice = cast(LinearMma, down.params), cast(RouterTopK, topk.params)
        lists = replace(cast(MoeSort, sort.params), block=down.block)
        smem = choice_smem(choice.experts, choice.top_k, choice.groups, linear.warps)
        p = LinearAndChoice(LINEAR_AND_CHOICE, linear, choice, lists)
        tiles, tokens, batch = down.grid
        grid = (replace(tiles, times=tiles.times + 1), tokens, batch)
        cost, summary = down.cost + topk.cost + sort.cost, f"{down.summary}; beside it, expert choice and assignments by expert"
        smem = max(down.smem, smem)
        return Kernel(
            p.name, "linear_and_choice.cu.j2", p, down.block, grid, smem, cost, summary, down.row_tiles, early=COUNT, group=down.group
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        return *self.down.arguments(), *RouterTopKOp(self.c).choosing("router_logits"), *_LISTS
