"""From ops to kernels, programs and collectives: whatever the ops name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kdgen.plan.draft_step import Drafter
from kdgen.plan.ir import MAX_NODES, Gather, Kernel, Launch, Program, Stage
from kdgen.plan.ops.attention_schedule import RowGroupsOp
from kdgen.plan.ops.many_rows import twin_name
from kdgen.plan.ops.op import Context, Op
from kdgen.plan.ops.ranks import GatherOp
from kdgen.plan.ops.rows import AdvanceOp, ChainRowsOp, LogitRowsOp
from kdgen.plan.passes import (
    capture_features,
    fuse_for_few_rows,
    in_row_groups,
    of_logit_rows,
    only_rows_with_logits,
    shard,
    tile_for_many_rows,
)
from kdgen.plan.step import Ops, choices, commit_tree, model, top_k, tree_rows


@dataclass(frozen=True)
class OpProgram:
    """A program, as ops."""

    name: str
    stages: tuple[Ops, ...]

    def ops(self) -> Iterator[Op]:
        for stage in self.stages:
            yield from stage.ops


def op_programs(c: Context) -> tuple[OpProgram, ...]:
    """Every program. ``prefill`` takes tokens that the host wrote, ``decode`` the sequences' root tokens, ``verify`` drafted trees; each
    has a version ``_sampled`` where drawing tokens takes more than choosing the best, and ``prefill`` one for many rows, ``_tiled``. A
    drafter adds to them, and has ``draft``. ``draft_top_k`` finds the candidates of logits that the host wrote.
    """
    drafter, sequences = Drafter.of(c), c.limits.max_sequences
    many = only_rows_with_logits(shard(model(c), c))
    few = fuse_for_few_rows(shard(model(c), c), c)
    prefill = in_row_groups((ChainRowsOp(c, from_root=False), LogitRowsOp(c)), many, c, c.limits.max_tokens)
    decode = in_row_groups((ChainRowsOp(c, from_root=True),), few, c, sequences)
    verify = in_row_groups(tree_rows(c), few, c, sequences * MAX_NODES)
    if drafter:
        prefill, decode, verify = (capture_features(each, drafter.c, drafter.draft) for each in (prefill, decode, verify))
    found: list[OpProgram] = []
    for suffix, choose in choices(c):
        for name, stages, end in (
            ("prefill", prefill, (*of_logit_rows(choose), AdvanceOp(c, "logit_begin"))),
            ("decode", decode, (*choose, AdvanceOp(c, "step_begin"))),
            ("verify", verify, (*choose, *commit_tree(c))),
        ):
            context = drafter.context(from_tree=name == "verify") if drafter else ()
            found.append(OpProgram(name + suffix, (*stages, Ops(end), *context)))
    found.append(OpProgram("draft_top_k", (Ops(top_k(c)),)))
    if drafter:
        found.append(OpProgram("draft", drafter.pass_over_blocks()))
    if c.mode.wgmma:
        prefills = [each for each in found if each.name.startswith("prefill")]
        found += [OpProgram(twin_name(each.name), tile_for_many_rows(each.stages)) for each in prefills]
    return tuple(found)


@dataclass(frozen=True)
class Derived:
    """What the ops of some programs name."""

    kernels: tuple[Kernel, ...]
    programs: tuple[Program, ...]
    gathers: tuple[Gather, ...]
    buffers: frozenset[str]


def of_larger_limits(c: Context) -> tuple[Op, ...]:
    """Ops that programs have where limits are larger: a plan has their kernels at any limits."""
    return (RowGroupsOp(c, 1),) if c.mode.wgmma else ()


def derive(programs: Sequence[OpProgram], besides: Sequence[Op] = ()) -> Derived:
    """Kernels in the order in which the programs first launch them, and those of ``besides``. Raises ValueError where two ops have
    different kernels of one name."""
    kernels: dict[str, Kernel] = {}
    gathers: dict[str, Gather] = {}
    buffers: set[str] = set()

    def launch(op: Op) -> Launch:
        kernel, launched = op.lowered()
        if kernel is not None and kernels.setdefault(kernel.name, kernel) != kernel:
            raise ValueError(f"two ops have a kernel {kernel.name}, and they differ: {kernels[kernel.name]} and {kernel}")
        gather = _gather(op)
        if gather is not None:
            gathers[gather.name] = gather
            buffers.update((gather.source, gather.target))
        buffers.update(bound.arg.name for bound in launched.args if bound.arg.kind in ("buffer", "layer_buffer", "ranks"))
        return launched

    lowered: dict[int, Stage] = {}  # by identity, for programs share stages

    def lower(stage: Ops) -> Stage:
        if id(stage) not in lowered:
            lowered[id(stage)] = Stage(tuple(map(launch, stage.ops)), stage.layers)
        return lowered[id(stage)]

    found = tuple(Program(program.name, tuple(map(lower, program.stages))) for program in programs)
    for op in besides:
        kernel, _ = op.lowered()
        if kernel is not None:
            kernels.setdefault(kernel.name, kernel)
    return Derived(tuple(kernels.values()), found, tuple(gathers.values()), frozenset(buffers))


def _gather(op: Op) -> Gather | None:
    inner = getattr(op, "op", op)
    return inner.gather() if isinstance(inner, GatherOp) else None
