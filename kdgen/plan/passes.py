"""Passes: rewrites of lists of ops. Sharding over ranks, fusing neighbours for few rows, rows that have logits, capturing a drafter's
features, tiled kernels for many rows. What is fused, and when, is decided here and nowhere else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kdgen.plan.expert_tiling import has_bf16_router
from kdgen.plan.ops.attention import MlaAttentionOp, NormAndCacheOp, RopeCacheOp, attention_rows, fuses_norm_and_cache
from kdgen.plan.ops.attention_combine import CombineAndHeadsOp, MlaCombineOp, fuses_combine_and_w_uv
from kdgen.plan.ops.attention_schedule import AttentionScheduleOp, RowGroup, RowGroupsOp
from kdgen.plan.ops.dense import HeadsOp, LinearOp, Sublayer, heads_fit_registers
from kdgen.plan.ops.drafter import DraftCaptureOp
from kdgen.plan.ops.experts import MoeCombineOp
from kdgen.plan.ops.logits import OfLogitRowsOp
from kdgen.plan.ops.many_rows import for_many_rows
from kdgen.plan.ops.norm import RmsNormOp
from kdgen.plan.ops.op import Context, Op, buffer, layer_weight
from kdgen.plan.ops.ranks import RankSumOp, SumAndNormOp, summed
from kdgen.plan.ops.router import LinearAndChoiceOp, LinearAndRouterOp, MoeSortOp, RouterLogitsOp, RouterTopKOp, fuses_routing
from kdgen.plan.ops.rows import EmbedOp
from kdgen.plan.step import Ops
from kdgen.spec.drafter import DraftSpec


def rewritten(ops: Sequence[Op], kinds: Sequence[type[Op]], by: Callable[..., tuple[Op, ...] | None]) -> tuple[Op, ...]:
    """``ops`` with every run of neighbours of these kinds replaced by what ``by`` makes of them; None leaves a run as it is."""
    found: list[Op] = []
    at = 0
    while at < len(ops):
        run = ops[at : at + len(kinds)]
        made = by(*run) if len(run) == len(kinds) and all(map(isinstance, run, kinds)) else None
        found += [ops[at]] if made is None else made
        at += 1 if made is None else len(kinds)
    return tuple(found)


def every(stages: Sequence[Ops], pass_: Callable[[tuple[Op, ...]], tuple[Op, ...]]) -> tuple[Ops, ...]:
    """A pass over the ops of each stage."""
    return tuple(replace(stage, ops=pass_(stage.ops)) for stage in stages)


# ---- several ranks --------------------------------------------------------------------------------------------------


def shard(stages: Sequence[Ops], c: Context) -> tuple[Ops, ...]:
    """What adds to the residual leaves a rank's part instead, and the ranks' parts are summed behind the last op that has one."""
    return tuple(stages) if c.shard.whole else every(stages, lambda ops: _sharded(ops, c))


def _sharded(ops: Sequence[Op], c: Context) -> tuple[Op, ...]:
    found: list[Op] = []
    for place, op in enumerate(ops):
        part = _part(op)
        if part is None:
            found.append(op)
            continue
        found.append(_as_part(op, part))
        if part not in map(_part, ops[place + 1 :]):
            found += summed(c, part, op.bias if isinstance(op, LinearOp) else None, _count(op))
    return tuple(found)


def _part(op: Op) -> Sublayer | None:
    if isinstance(op, LinearOp):
        return op.adds_to
    return "mlp" if isinstance(op, EmbedOp | MoeCombineOp) else None


def _count(op: Op) -> str:
    return op.count if isinstance(op, LinearOp) else "num_tokens"


def _as_part(op: Op, part: Sublayer) -> Op:
    if isinstance(op, MoeCombineOp):
        return replace(op, target=f"{part}_part")
    if isinstance(op, LinearOp):
        summary = f"a rank's part of the {op.layer.summary.removesuffix(' added to the residual')}"
        layer = replace(op.layer, summary=summary if op.accumulate else op.layer.summary, bias=False, out_float=True)
        return replace(op, layer=layer, y=buffer(f"{part}_part"), accumulate=False)
    return op


# ---- few rows -------------------------------------------------------------------------------------------------------


def fuse_for_few_rows(stages: Sequence[Ops], c: Context) -> tuple[Ops, ...]:
    """Neighbours in one launch, where few rows leave most of a GPU idle. The bits are the same."""
    if c.few_rows_sum_norms:
        stages = _norms_behind_sums(stages, c)
    return every(stages, lambda ops: _fused(ops, c))


def _fused(ops: tuple[Op, ...], c: Context) -> tuple[Op, ...]:
    if fuses_norm_and_cache(c):
        ops = rewritten(
            ops,
            (RmsNormOp, LinearOp, RopeCacheOp, LinearOp),
            lambda _, q_b, __, w_uk: (NormAndCacheOp(c), q_b, HeadsOp(c, w_uk, rotates=True)),
        )
    if fuses_combine_and_w_uv(c.spec, c.mode):
        ops = rewritten(ops, (MlaCombineOp, LinearOp), lambda _, w_uv: (CombineAndHeadsOp(c, w_uv),))
    if heads_fit_registers(c):
        ops = rewritten(ops, (LinearOp,), lambda op: (HeadsOp(c, op),) if op.layer.of_each_head else None)
    if fuses_routing(c):
        ops = rewritten(ops, (RouterLogitsOp, RouterTopKOp, MoeSortOp, LinearOp, LinearOp), _routed_beside)
    return ops


def _routed_beside(logits: RouterLogitsOp, _: Op, __: Op, gate_up: LinearOp, down: LinearOp) -> tuple[Op, ...]:
    c = logits.c
    first: tuple[Op, ...] = (logits, gate_up)
    if has_bf16_router(c.spec, c.mode):
        first = (LinearAndRouterOp(c, gate_up),)
    return *first, LinearAndChoiceOp(c, down)


def _norms_behind_sums(stages: Sequence[Ops], c: Context) -> tuple[Ops, ...]:
    """Every sum over ranks has the norm behind it in its launch. A layer's last sum is normalised for the next layer, or for the head, so
    each layer's first norm moves to the end of what stands before it."""
    embed, *layers, end = stages
    first_norm, last = layers[0].ops[0], c.spec.num_hidden_layers - 1
    assert isinstance(first_norm, RmsNormOp)
    following = replace(first_norm, gain=layer_weight(first_norm.gain.name, ahead=1))
    found = [Ops((*embed.ops, first_norm))]
    for stage in layers:
        first, stop = stage.layers or (0, 0)
        if first < min(stop, last):
            found.append(Ops((*stage.ops[1:], following), (first, min(stop, last))))
        if stop > last:
            found.append(Ops((*stage.ops[1:], end.ops[0]), (last, stop)))
    return every([*found, Ops(end.ops[1:])], lambda ops: rewritten(ops, (Op, RankSumOp, RmsNormOp), _sent_and_normed))


def _sent_and_normed(computes: Op, added: RankSumOp, norm: RmsNormOp) -> tuple[Op, ...]:
    assert isinstance(computes, EmbedOp | LinearOp | MoeCombineOp)
    return replace(computes, outbox=True), SumAndNormOp(added.c, added, norm)


# ---- rows -----------------------------------------------------------------------------------------------------------


def only_rows_with_logits(stages: Sequence[Ops]) -> tuple[Ops, ...]:
    """The head over the rows alone that the host wants logits of, which it finds in the residual."""
    *before, end = stages
    norm, *rest = end.ops
    assert isinstance(norm, RmsNormOp)
    chosen = replace(norm, name="rmsnorm_logits", chosen=True)
    return *before, replace(end, ops=(chosen, *of_logit_rows(rest)))


def of_logit_rows(ops: Sequence[Op]) -> tuple[Op, ...]:
    return tuple(OfLogitRowsOp(op.c, op) for op in ops)


def in_row_groups(start: Sequence[Op], stages: Sequence[Ops], c: Context, rows: int) -> tuple[Ops, ...]:
    """``start`` and the model behind it, with attention in as many launches as ``rows`` rows take, and what tells wgmma's blocks what they
    work on, once a step."""
    most = attention_rows(c)
    count = -(-rows // most)
    groups = tuple(RowGroup(index if count > 1 else None, most, count) for index in range(count))
    begin: list[Op] = [*start]
    if count > 1:
        begin.append(RowGroupsOp(c, count))
    if c.mode.wgmma:
        begin += [AttentionScheduleOp(c, group) for group in groups]

    def divided(first: MlaAttentionOp, second: MlaCombineOp | CombineAndHeadsOp) -> tuple[Op, ...]:
        return tuple(replace(op, group=group) for group in groups for op in (first, second))

    def attend(ops: tuple[Op, ...]) -> tuple[Op, ...]:
        for joins in (MlaCombineOp, CombineAndHeadsOp):
            ops = rewritten(ops, (MlaAttentionOp, joins), divided)
        return ops

    return Ops(tuple(begin)), *every(stages, attend)


def tile_for_many_rows(stages: Sequence[Ops]) -> tuple[Ops, ...]:
    """The kernels for many rows in place of those that have such a twin."""
    return every(stages, lambda ops: tuple(map(for_many_rows, ops)))


# ---- a drafter ------------------------------------------------------------------------------------------------------


def capture_features(stages: Sequence[Ops], c: Context, draft: DraftSpec) -> tuple[Ops, ...]:
    """Stages cut behind each layer whose output the drafter reads, which is kept there. ``c`` is the drafter's."""
    return tuple(itertools.chain.from_iterable(_captured(stage, c, draft) for stage in stages))


def _captured(stage: Ops, c: Context, draft: DraftSpec) -> Iterator[Ops]:
    if stage.layers is None:
        yield stage
        return
    first, stop = stage.layers
    for place, layer in enumerate(draft.target_layer_ids):
        if first <= layer < stop:
            yield Ops(stage.ops, (first, layer + 1))
            yield Ops((DraftCaptureOp(c, draft, place),))
            first = layer + 1
    if first < stop:
        yield Ops(stage.ops, (first, stop))
