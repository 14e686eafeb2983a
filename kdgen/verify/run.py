"""``kdgen verify``: which checks a spec gets, on which backend, and what does not run and why.

To add a family of checks: write a generator of ``Check``s, each yielded as soon as it is known, and a line in ``tasks``, which makes it a
``Task``: a part of the report that runs by itself, in any process, and finds the same wherever that is. The report has the tasks' checks
in the order of that list, however many processes did them.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol

import numpy as np

from kdgen.backends import open_backend
from kdgen.backends.base import Backend
from kdgen.backends.gpu import cuda_unusable
from kdgen.codegen.folders import check as check_folders
from kdgen.errors import BackendError, KdgenError, SpecError
from kdgen.files.resources import checkout_folder
from kdgen.plan.attention import WGMMA_TILE, mma_obstacles
from kdgen.plan.build import build_plan, own_kernels
from kdgen.plan.ir import MAX_NODES, Compute, Family, Kernel, Plan
from kdgen.plan.ops.attention import CombineAndHeads
from kdgen.plan.ops.many_rows import is_twin, twin_of
from kdgen.plan.ops.outbox import unsent
from kdgen.plan.ops.ranks import PeerSumNorm
from kdgen.plan.shard import EXCHANGES, Shard, part_of, shard_obstacles
from kdgen.reference.tree import Tree, ranked_rows
from kdgen.spec.model import Spec, load_spec, shipped_specs
from kdgen.spec.published import load_config
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding import rank_matrix
from kdgen.verify.decoding.decodes import FEW_SITUATIONS, SITUATIONS, check_decodes, oracle_subject, random_subject
from kdgen.verify.decoding.decodes import Situation as DecodeSituation
from kdgen.verify.decoding.draw import RequestDraw, Situation
from kdgen.verify.decoding.exact import check_exactness
from kdgen.verify.decoding.programs import CONTEXT as PROGRAM_CONTEXT
from kdgen.verify.decoding.programs import Model, check_programs, model_of_ranks, models
from kdgen.verify.decoding.ranks import check_ranks
from kdgen.verify.decoding.rounds import check_shipped_rounds, check_small_rounds
from kdgen.verify.kernels import full_size
from kdgen.verify.kernels import rank_sums as joins
from kdgen.verify.kernels.check import KernelCheck, check_kernel, load_kernels
from kdgen.verify.kernels.harness import SLICE_TILES, TOKENS, Findings, Harness, Size
from kdgen.verify.kernels.rope_tables import check_tables
from kdgen.verify.kernels.text_rules import text_problems
from kdgen.verify.kernels.trees import Draft, compare_tree, compare_walk, launch_tree_accept, launch_tree_build
from kdgen.verify.oracles.models import ModelCase, TreeCase, model_cases, tree_cases
from kdgen.verify.ptx.checks import check_primitives
from kdgen.verify.published import check_config, check_numbers, configs
from kdgen.verify.report.checks import Check, Report, Status, finite, make_report
from kdgen.verify.shrink import is_wide, shrink
from kdgen.verify.variants import variants
from kdgen.verify.workers import Workers, cpus, threads_each

DEFAULT_SPECS = ("tiny", "tiny2")
CHECKER = "cpu-checker"
CHECKER_TOKENS = (1, 9)
RANKS = 2  #: of models whose dims they divide
#: Templates of which several ranks have versions of their own.
RANK_TEMPLATES = frozenset({"embed.cu.j2", "moe_combine.cu.j2", "argmax.cu.j2", "draft_context.cu.j2", *joins.CHECKS})
#: The situation that every model is put in: four requests over three slabs, full to the last token, across a split of 64 keys.
TOGETHER = Situation(
    weights_seed=1, slots=3, spare=0, max_tokens=13,
    requests=(
        RequestDraw(1, 58, 10, 9, "replay", 0.2, 31, 8, None, Sampling(1.0, seed=3), joins=0),
        RequestDraw(2, 5, 14, 64, "none", 0.0, 0, 2, None, GREEDY, joins=1),
        RequestDraw(3, 3, 9, 2, "random", 0.0, 7, 4, 6, Sampling(0.7, top_k=20, top_p=0.9, min_p=0.01, seed=2**63 + 1), joins=1),
        RequestDraw(4, 33, 6, 8, "replay", 0.0, 15, 16, 2, GREEDY, joins=3),
    ),
)  # fmt: skip
#: The latent width from which attention splits are of 128 keys, long enough that both of its stages are loaded again, and the one of
#: published models, for wgmma's larger shape.
WIDE_LATENTS: dict[Family, int] = {"generic": 256, "sm_90a": 512}

#: Some checks decode as much, two chains of 9 rows, however few positions a model has.
LEAST_POSITIONS = 32

Say = Callable[[str], None]
Plans = Sequence[tuple[Spec, Plan]]


class Progress(Protocol):
    """Who hears how far ``verify`` is."""

    def doing(self, what: str) -> None:
        """What runs now."""

    def failed(self, check: Check) -> None:
        """A check has just failed."""

    def ended(self, part: str, checks: Sequence[Check]) -> None:
        """A part of the report has ended, with these checks."""


class Silent:
    """A Progress that nobody sees."""

    def doing(self, what: str) -> None:
        """Nobody is told."""

    def failed(self, check: Check) -> None:
        """Nobody is told."""

    def ended(self, part: str, checks: Sequence[Check]) -> None:
        """Nobody is told."""


@dataclass(frozen=True)
class Task:
    """A part of the report: checks that are made one after another in one process. ``make`` is given whom to tell what it does.

    ``seconds`` are about what it takes on a core: where several processes share the work, the longest tasks begin first.
    """

    title: str
    make: Callable[[Say], Iterator[Check]]
    seconds: float = 1.0


@dataclass(frozen=True)
class _Prepared:
    """What a process needs to do tasks."""

    backend: Backend
    specs: Sequence[Spec]
    plans: Plans
    others: Plans

    def tasks(self) -> list[Task]:
        full_sized = tuple(full_size.groups()) if self.others else ()
        return tasks(self.backend, self.specs, self.plans, self.others, full_sized)


def _prepare(names: Sequence[str], backend_name: str | None, compute: Compute | None, threads: int | None) -> _Prepared:
    specs = [load_spec(name) for name in names or DEFAULT_SPECS]
    for spec in specs:
        if (most := spec.max_position_embeddings) < LEAST_POSITIONS:
            raise KdgenError(f"{spec.name}: checks need a context of {LEAST_POSITIONS}, more than its max_position_embeddings {most}")
    backend = open_backend(backend_name, threads=threads)
    plans = _that_run(backend, plans_for(specs, compute))
    return _Prepared(backend, specs, plans, [] if names else _that_run(backend, plans_for(variants(), compute)))


def verify(
    names: Sequence[str],
    backend_name: str | None = None,
    compute: Compute | None = None,
    progress: Progress | None = None,
    fail_fast: bool = False,
    jobs: int | None = None,
) -> Report:
    """Everything that can be checked of the named specs (tiny and tiny2, and what they lack, when there are none) here.

    ``compute`` None stands for both types where the dims allow tensor cores, and for the spec's own where the spec is wide.
    ``fail_fast`` ends it with the first check that fails, in the report's order. On a CPU the work is shared by ``jobs`` processes, as
    many as there are processors without it; the report is the same for any number but for its seconds. Raises SpecError, or KdgenError
    for a type or backend that is not to be had, and where a process is killed.
    """
    began = perf_counter()
    prepared = _prepare(names, backend_name, compute, None)
    backend, plans, others = prepared.backend, prepared.plans, prepared.others
    jobs = 1 if backend.name == "cuda" else jobs or cpus()
    heard = progress or Silent()
    if jobs == 1:
        checks = _one_by_one(prepared.tasks(), heard, fail_fast)
    else:
        with Workers(_open_tasks, (tuple(names), backend_name, compute, threads_each(jobs)), jobs) as workers:
            checks = _side_by_side(prepared.tasks(), workers, heard, fail_fast)
    notes = [_wide_note(spec, plan, compute) for spec, plan in plans if is_wide(spec) and plan.family == "generic"]
    if others:
        notes.append(f"{full_size.MODEL}'s kernels without a matrix ran in full size, and slices of some others")
    notes.append(f"kernels and decodes ran on: {backend.description}{_no_gpu(backend, backend_name)}")
    if others:
        names_of_others = ", ".join(spec.name for spec in variants())
        notes.append(f"{names_of_others}: small models with the structures that {' and '.join(DEFAULT_SPECS)} lack")
    if not model_cases():
        notes.append("no oracle cases were found: logits are held against the float64 reference (KDGEN_ORACLE_DIR names a folder)")
    return make_report(checks, notes, perf_counter() - began)


def _one_by_one(all_tasks: Sequence[Task], progress: Progress, fail_fast: bool) -> list[Check]:
    checks: list[Check] = []
    for task in all_tasks:
        first = len(checks)
        for check in task.make(progress.doing):
            checks.append(check)
            if check.status == "failed":
                progress.failed(check)
                if fail_fast:
                    return checks
        progress.ended(task.title, checks[first:])
    return checks


def _open_tasks(names: Sequence[str], backend_name: str | None, compute: Compute | None, threads: int) -> Callable[[int], Iterator[Check]]:
    """What a worker process does with a task's place in the list, over a backend of its own."""
    all_tasks = _prepare(names, backend_name, compute, threads).tasks()
    return lambda place: all_tasks[place].make(lambda _: None)


def _side_by_side(all_tasks: Sequence[Task], workers: Workers[int, Check], progress: Progress, fail_fast: bool) -> list[Check]:
    """The tasks' checks in the order of the list.

    With ``fail_fast`` tasks begin in that order. Once a check fails, what stands behind it is dropped and what stands before it is still
    finished, so that the report ends with the same check as one process's.
    """
    found: list[list[Check]] = [[] for _ in all_tasks]
    ended = 0
    for event in workers.each(range(len(all_tasks)), lambda place: 0.0 if fail_fast else -all_tasks[place].seconds):
        title, check = all_tasks[event.place].title, event.answer or _died(all_tasks[event.place], event.died)
        if check is not None:
            found[event.place].append(check)
            if check.status == "failed":
                progress.failed(check)
                if fail_fast:
                    workers.need_before(event.place)
        if event.answer is None:
            ended += 1
            progress.ended(title, found[event.place])
            progress.doing(f"{ended} of {len(all_tasks)} parts have ended")
    checks = [check for each in found for check in each]
    first = next((place for place, check in enumerate(checks) if check.status == "failed"), len(checks))
    return checks[: first + 1] if fail_fast else checks


def _died(task: Task, how: str) -> Check | None:
    """A crash is a finding. Raises KdgenError where somebody else has ended the process: the machine for lack of memory, or a person."""
    if not how:
        return None
    if how.endswith(("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")):
        raise KdgenError(f"the process that made the checks of {task.title} was {how}: --jobs 1 takes less memory, if that was short")
    return Check(
        task.title, "", "process", task.title, "cpu", "failed", why=f"the process that made these checks was {how}: a kernel crashed"
    )


def plans_for(specs: Sequence[Spec], compute: Compute | None) -> Plans:
    """The plans for each compute type; a variant that cannot have the one asked for is left out."""
    lenient = {spec.name for spec in variants()}
    return [
        (spec, plan)
        for spec in specs
        for dtype in _computes(spec, compute)
        if not (dtype == "bf16" and spec.name in lenient and mma_obstacles(spec))
        for plan in _plans_of(spec, dtype)
    ]


def _that_run(backend: Backend, plans: Plans) -> Plans:
    """A CPU runs every plan, a GPU those for its own targets."""
    return [(spec, plan) for spec, plan in plans if plan.family in ("generic", backend.family) or backend.name != "cuda"]


def _plans_of(spec: Spec, compute: Compute) -> list[Plan]:
    """The plan for all targets, and those for some, with the kernels alone that they have of their own and those that these are held to."""
    plan = build_plan(spec, compute)
    return [plan, *(own_and_decode(each, plan) for each in plan.special)]


def own_and_decode(special: Plan, plan: Plan) -> Plan:
    """``special`` with the kernels alone that ``plan`` does not have, and those whose bits these must give."""
    return replace(special, kernels=with_those_held_to(special.kernels, own_kernels(special, plan).kernels))


def with_those_held_to(kernels: Sequence[Kernel], wanted: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """``wanted`` and, of ``kernels``, those whose bits these must give: for few rows, or in launches of their own."""
    joined = {name for each in wanted if isinstance(each.params, CombineAndHeads) for name in (each.params.combine, each.params.linear)}
    return tuple(each for each in kernels if each in wanted or twin_of(each, wanted) or each.name in joined)


def _title(spec: Spec, plan: Plan) -> str:
    return spec.name if plan.family == "generic" else f"{spec.name}, {plan.family}"


def _small(spec: Spec, plan: Plan) -> tuple[Spec, Plan]:
    """What a CPU can decode of it: the same, or the spec shrunk and its plan."""
    if not is_wide(spec):
        return spec, plan
    small = shrink(spec, plan.family)
    return small, next(each for each in _plans_of(small, plan.compute) if each.family == plan.family)


def tasks(backend: Backend, specs: Sequence[Spec], plans: Plans, others: Plans, full_sized: Sequence[full_size.Group] = ()) -> list[Task]:
    """Primitives and kernels first, for they are quick and say where a fault is; then the checker, generated text, trees and decodes.

    ``others`` are models of the default command alone, and so are those whose kernels run in full size.
    """
    found: list[Task] = []

    def add(title: str, family: Callable[..., Iterator[Check]], *arguments: object, seconds: float = 5.0) -> None:
        found.append(Task(title, lambda say: family(*arguments, say), seconds))

    whole = [(spec, plan) for spec, plan in (*plans, *others) if plan.family == "generic"]
    shared = _that_run(backend, [(spec, shared) for spec, plan in whole for shared in shared_plans(spec, plan)])
    if others:
        shared = [*shared, *_that_run(backend, rank_matrix.join_plans())]
        add("primitives", _primitives, seconds=2.0)
    for spec, plan in (*plans, *others, *shared):
        size = "slice" if is_wide(spec) else "full"
        add(f"{_part(spec, plan)}, kernels", _kernels, backend, spec, plan, size, TOKENS, seconds=_about(1.5, plan))
    for group in full_sized:
        for spec, plan in _that_run(backend, [(group.spec, group.plan)]):
            add(f"{_part(spec, plan)}, kernels in full size", _kernels, backend, spec, plan, group.size, group.tokens, seconds=2.5)
    described = tuple(dict.fromkeys(spec for spec, _ in (*plans, *others)))
    add("tables", _all_tables, described, seconds=0.1)
    add("numbers of the config", _all_numbers, described, bool(others), seconds=1.0)
    add("trees of the DDTree reference", _trees, backend, *plans[0], seconds=0.3)
    for spec, plan in (*plans, *others):
        add(f"{_part(spec, plan)}, kernels under the checker", _under_checker, *_small(spec, plan), seconds=_about(6.0, plan))
    for spec, plan in shared:
        if not is_wide(spec):
            add(f"{_part(spec, plan)}, kernels under the checker", _under_checker, spec, plan, seconds=_about(4.0, plan))
    for model in models() if others else _named_models(plans):
        seconds = 25.0 if model.family == "generic" else 50.0
        add(f"{model.title} {model.compute}, programs", _programs, model, seconds=seconds)
    if others:
        add("programs of ranks", _programs_of_ranks, seconds=35.0)
    for spec, plan in plans:
        if plan.family == "generic":
            add(f"{_part(spec, plan)}, generated files", _drift, spec, plan, seconds=0.5)
    for spec, plan in (*_run_whole(others), *plans):
        small = _small(spec, plan)
        add(f"{_part(spec, plan)}, requests together", _together, backend, _title(spec, plan), *small, seconds=_about(3.0, plan))
    decoded_before: list[Spec] = []
    for spec, plan in plans:
        if plan.family == "generic":  # of other plans requests together were as each alone
            # a spec's second type has the same host, whose trees and prefills the first one has had in every situation
            situations = FEW_SITUATIONS if spec in decoded_before else SITUATIONS
            add(f"{_part(spec, plan)}, decodes", _decodes_of, backend, spec, plan, situations, seconds=_about(8.0, plan))
            decoded_before.append(spec)
    if others:
        add("rounds of every kind", check_small_rounds, backend, seconds=15.0)
        add("rounds of the shipped model", check_shipped_rounds, backend, seconds=15.0)
    decoded = [spec for spec, _ in shared if not is_wide(spec)]
    if decoded and not others:
        add(f"{decoded[0].name}, ranks", _ranks, decoded[0], seconds=15.0)
    for ranks, of_so_many in itertools.groupby(rank_matrix.cases() if others else (), lambda case: case.ranks):
        add(f"{ranks} rank{'s' if ranks > 1 else ''}", _rank_matrix, tuple(of_so_many), seconds=12.0 * ranks)
    if others:
        for case, spec in _other_oracles(specs):
            add(f"{case.name} f32, decodes", _decodes_of_oracle, backend, case, spec, seconds=8.0)
    return found


def _run_whole(others: Plans) -> list[tuple[Spec, Plan]]:
    """``others``, of which models that are here for the plans of some targets run these alone: the templates of their plans for all targets
    are run by other models, in both types."""
    made_for_some = {spec.name for spec, plan in others if plan.family != "generic"}
    return [(spec, plan) for spec, plan in others if plan.family != "generic" or spec.name not in made_for_some]


def _about(seconds: float, plan: Plan) -> float:
    """Seconds of what takes as many for a float32 plan of 40 kernels: a CPU computes an MMA product by product."""
    slower = 5.0 if plan.family != "generic" else 2.0 if plan.compute == "bf16" else 1.0
    return seconds * slower * len(plan.kernels) / 40


def _part(spec: Spec, plan: Plan) -> str:
    ranks = "" if plan.shard.whole else f", {plan.shard.ranks} ranks by {plan.shard.exchange}"
    return f"{_title(spec, plan)} {plan.compute}{ranks}"


def _primitives(say: Say) -> Iterator[Check]:
    say("primitives, by their PTX")
    yield from check_primitives()


def _all_tables(specs: Sequence[Spec], say: Say) -> Iterator[Check]:
    say("tables")
    for spec in specs:
        yield _tables(spec)


def _all_numbers(specs: Sequence[Spec], all_of_them: bool, say: Say) -> Iterator[Check]:
    """What kernels are given, by the reference's reading of the keys; of the shipped specs and of published forms of configs, too."""
    say("numbers of the config")
    shipped = [spec for name in (shipped_specs() if all_of_them else ()) if (spec := load_spec(name)) not in specs]
    for spec in (*specs, *shipped):
        yield _of_findings(spec.name, "numbers", "kernels' numbers", "text", check_numbers(spec))
    for config in configs() if all_of_them else ():
        yield _of_findings(config.name, "numbers", "kernels' numbers of a config.json", "text", check_config(config))


def _decodes_of(backend: Backend, spec: Spec, plan: Plan, situations: Sequence[DecodeSituation], say: Say) -> Iterator[Check]:
    small, _ = _small(spec, plan)
    case = _case_of(spec)
    subject = oracle_subject(spec, plan.compute, case) if case is not None else random_subject(small, plan.compute)
    yield from _decodes(plan.compute, subject.title, check_decodes(backend, subject, situations), say)


def _decodes_of_oracle(backend: Backend, case: ModelCase, spec: Spec, say: Say) -> Iterator[Check]:
    yield from _decodes("f32", case.name, check_decodes(backend, oracle_subject(spec, "f32", case), FEW_SITUATIONS), say)


def _tables(spec: Spec) -> Check:
    return _of_findings(spec.name, "tables", "cos and sin of RoPE", "NumPy", check_tables(spec))


def _of_findings(title: str, part: str, name: str, backend: str, found: Findings) -> Check:
    status: Status = "failed" if found.problems else "ok"
    figures: tuple[float | None, float | None] = (finite(found.error), found.tolerance) if found.tolerance else (None, None)
    return Check(title, "f32", part, name, backend, status, *figures, why="; ".join(found.problems[:3]))


def _situation(spec: Spec, plan: Plan) -> Situation:
    """TOGETHER; with trees of more rows than an attention launch takes, where a plan has several launches for them and few heads, with
    which they are quick.
    """
    if plan.family == "generic" or spec.num_attention_heads >= WGMMA_TILE:
        return TOGETHER
    return replace(TOGETHER, requests=tuple(replace(each, budget=each.budget and MAX_NODES - 1) for each in TOGETHER.requests))


def _together(backend: Backend, title: str, spec: Spec, plan: Plan, say: Say) -> Iterator[Check]:
    """L1 to L5 in a drawn situation: several requests with drafters, chunks and samplings of their own, joining and leaving."""
    if spec.max_position_embeddings < TOGETHER.context:
        return
    compute = plan.compute
    say(f"{title} {compute}: requests joining and leaving")
    began = perf_counter()
    try:
        found = check_exactness(backend, spec, compute, _situation(spec, plan), bf16_too=True, family=plan.family)
        detail = f"{found.requests} as each alone, logits and cache rows by bits (L1 to L5); {found.accepted} drafts accepted"
        figures: tuple[float | None, float | None] = finite(found.error), found.tolerance
        problem, bits = found.problem, found.bits
    except BackendError as error:
        detail, figures, problem, bits = "", (None, None), str(error), 0
    status: Status = "failed" if problem else "ok"
    name, seconds = "requests that join and leave", perf_counter() - began
    yield Check(title, compute, "together", name, backend.description, status, *figures, "" if problem else detail, problem, seconds, bits)


def _computes(spec: Spec, compute: Compute | None) -> tuple[Compute, ...]:
    if compute is not None:
        return (compute,)
    if is_wide(spec):
        return (build_plan(spec).compute,)
    return ("f32",) if mma_obstacles(spec) else ("f32", "bf16")


def _no_gpu(backend: Backend, asked: str | None) -> str:
    if backend.name == "cuda":
        return ""
    reason = cuda_unusable() if asked is None else f"--backend {asked}"
    return f"; nothing ran on a GPU: {reason}" if reason else ""


def _wide_note(spec: Spec, plan: Plan, compute: Compute | None) -> str:
    small = shrink(spec)
    other = "" if compute else f" Only {plan.compute}, its own type, was checked; --dtype chooses another."
    return (
        f"{spec.name} is too wide to decode here. Its own kernels ran on slices: {SLICE_TILES} row tiles, experts, heads (16 on tensor"
        f" cores) or layers over full-length inputs. Decodes and the checker took {small.name}: the same kernels, made for hidden"
        f" {small.hidden_size}, {small.num_hidden_layers} layers, {small.num_attention_heads} heads,"
        f" {small.n_routed_experts or 'no'} experts.{other}"
    )


def _decodes(compute: Compute, title: str, found: Iterator[Check], say: Say) -> Iterator[Check]:
    for check in found:
        say(f"{title} {compute}: {check.name}")
        yield check


# ---- ranks --------------------------------------------------------------------------------------------------------------


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
        sends = {each for each in shared.kernels if each.name != unsent(each.name)}
        kernels = tuple(each for each in shared.kernels if each not in seen and (each.template in RANK_TEMPLATES or each in sends))
        seen += kernels
        held_to = {each.params.norm.name for each in kernels if isinstance(each.params, PeerSumNorm)}
        held_to |= {unsent(each.name) for each in sends}
        found.append(replace(shared, kernels=tuple(each for each in shared.kernels if each in kernels or each.name in held_to)))
    known = [kernel for special in plan.special for kernel in special.kernels]
    for special in shared.special:
        own = tuple(each for each in own_kernels(special, shared).kernels if each not in known and not is_twin(each))
        found.append(replace(special, kernels=with_those_held_to(special.kernels, own)))
    return found


def _ranks(spec: Spec, say: Say) -> Iterator[Check]:
    """Processes that share ``spec``, on this machine's CPU wherever the other checks ran: bits among themselves, and an oracle's tokens."""
    case = _case_of(spec)
    for exchange, situations in zip(EXCHANGES, (2, 1), strict=True):
        say(f"{spec.name} f32: {RANKS} ranks, {exchange}")
        began = perf_counter()
        try:
            yield from check_ranks(spec, "f32", RANKS, case.name if case else "", situations=situations, exchange=exchange)
        except KdgenError as error:
            why, seconds = str(error), perf_counter() - began
            yield Check(spec.name, "f32", "ranks", f"{RANKS} ranks, {exchange}", "cpu", "failed", why=why, seconds=seconds)


def _rank_matrix(wanted: Sequence[rank_matrix.Case], say: Say) -> Iterator[Check]:
    """Small models on each number of ranks, in one process and as processes of this machine's CPU."""
    for case in wanted:
        say(f"{case} {case.compute}")
    yield from rank_matrix.check_rank_matrix(wanted)


def _named_models(plans: Plans) -> list[Model]:
    """One for each spec: its last plan, the one that has most of its own."""
    last = {spec.name: (spec, plan) for spec, plan in plans}
    return [Model(_small(spec, plan)[0], plan.compute, plan.family, complete=False) for spec, plan in last.values()]


def _programs(model: Model, say: Say) -> Iterator[Check]:
    """Whole programs of a model where launches overlap as they may on a GPU."""
    if model.spec.max_position_embeddings >= PROGRAM_CONTEXT:
        say(f"{model.title} {model.compute}: programs under the checker")
        yield check_programs(model)


def _programs_of_ranks(say: Say) -> Iterator[Check]:
    """The same of two ranks, which exchange through each other's memory."""
    model = model_of_ranks()
    say(f"{model.title} {model.compute}: programs of {RANKS} ranks under the checker")
    began = perf_counter()
    try:
        yield from check_ranks(model.spec, model.compute, RANKS, backend=CHECKER, exchange="peer", programs=True)
    except KdgenError as error:
        name, seconds = f"programs of {RANKS} ranks", perf_counter() - began
        yield Check(model.title, model.compute, "ranks", name, CHECKER, "failed", why=str(error), seconds=seconds)


# ---- kernels ------------------------------------------------------------------------------------------------------------


def _kernels(backend: Backend, spec: Spec, plan: Plan, size: Size, tokens: Sequence[int], say: Say) -> Iterator[Check]:
    title = _title(spec, plan)
    say(f"{title} {plan.compute}: compiling {len(plan.kernels)} kernels")
    problems = text_problems(load_kernels(backend, plan))
    status: Status = "failed" if problems else "ok"
    detail = "" if problems else "nothing atomic, no inexact function"
    yield Check(title, plan.compute, "kernel", "texts", "text", status, detail=detail, why="; ".join(problems[:3]))
    for kernel in plan.kernels:
        say(f"{title} {plan.compute}: kernel {kernel.name}")
        began = perf_counter()
        found = check_kernel(backend, spec, plan, kernel, _inputs(0, kernel), size, tokens)
        ranks = "" if plan.shard.whole else f", {plan.shard.ranks} ranks"
        detail = f"{kernel.template}{', a slice' if found.sliced else ''}{ranks}"
        yield _as_check(title, plan.compute, "kernel", backend, found, detail, perf_counter() - began)


def _inputs(seed: int, kernel: Kernel) -> np.random.Generator:
    """Random inputs that depend on the kernel's name, not on what other kernels there are."""
    return np.random.default_rng([seed, zlib.crc32(kernel.name.encode())])


def _as_check(title: str, compute: str, part: str, backend: Backend, found: KernelCheck, detail: str, seconds: float) -> Check:
    measured = found.ran and found.tolerance > 0
    figure, tolerance = (finite(found.error), found.tolerance) if measured else (None, None)
    status: Status = "ok" if found.ok else "failed" if found.ran else "skipped"
    return Check(title, compute, part, found.kernel, backend.description, status, figure, tolerance, detail, found.why, seconds, found.bits)


def _under_checker(spec: Spec, plan: Plan, say: Say) -> Iterator[Check]:
    """Every kernel once where races, stray accesses and missing waits are seen; a line each only for those that fail."""
    title = _title(spec, plan)
    say(f"{title} {plan.compute}: compiling {len(plan.kernels)} kernels for the checker")
    began = perf_counter()
    backend: Backend | None = None
    try:
        backend = open_backend(CHECKER, seed=1)
        found = _checked(backend, spec, plan, say)
        if plan.compute == "bf16" and plan.shard.whole and spec.kv_lora_rank < WIDE_LATENTS[plan.family]:
            wide = spec.model_copy(update={"kv_lora_rank": WIDE_LATENTS[plan.family]})
            wide_plan = build_plan(wide, plan.compute).on(plan.family)
            attention = tuple(kernel for kernel in wide_plan.kernels if kernel.name == "mla_attention")
            found += _checked(backend, wide, replace(wide_plan, kernels=attention), say)
    except BackendError as error:
        where = backend.description if backend else CHECKER
        yield Check(title, plan.compute, "checker", "all kernels", where, "skipped", why=str(error), seconds=perf_counter() - began)
        return
    seconds = perf_counter() - began
    bad = [check for check in found if not check.ok]
    for check in bad:
        yield _as_check(title, plan.compute, "checker", backend, check, check.template, seconds / len(bad))
    if not bad:
        ranks = "" if plan.shard.whole else f" of {plan.shard.ranks} ranks"
        detail = f"{len(found)} kernels{ranks}: no race, no uninitialised, misaligned or stray access, no missing wait; results as above"
        bits = sum(check.bits for check in found)
        yield Check(title, plan.compute, "checker", "all kernels", backend.description, "ok", detail=detail, seconds=seconds, bits=bits)


def _checked(backend: Backend, spec: Spec, plan: Plan, say: Say) -> list[KernelCheck]:
    load_kernels(backend, plan)
    found = []
    for kernel in plan.kernels:
        say(f"{spec.name} {plan.compute}: kernel {kernel.name} under the checker")
        found.append(check_kernel(backend, spec, plan, kernel, _inputs(1, kernel), tokens=_checker_tokens(kernel)))
    return found


def _checker_tokens(kernel: Kernel) -> tuple[int, ...]:
    """Few and many; where a kernel brings its inputs another way from some number of tokens on, that number, too."""
    linear = getattr(kernel.params, "linear", kernel.params)
    return tuple(sorted({*CHECKER_TOKENS, getattr(linear, "lines_from", CHECKER_TOKENS[0])}))


# ---- trees --------------------------------------------------------------------------------------------------------------


def _trees(backend: Backend, spec: Spec, plan: Plan, say: Say) -> Iterator[Check]:
    """The DDTree reference's trees and walks, by the tree kernels, which are the same for every spec."""
    say("trees of the DDTree reference")
    cases = tree_cases()
    began = perf_counter()
    wanted = ("tree_build", "tree_accept")
    if not cases:
        for name in wanted:
            why = "no oracle cases were found"
            yield Check(spec.name, plan.compute, "trees", name, backend.description, "skipped", why=why)
        return
    load_kernels(backend, replace(plan, kernels=tuple(kernel for kernel in plan.kernels if kernel.name in wanted)))
    for name, compare in zip(wanted, (_compare_trees, _compare_walks), strict=True):
        with Harness(backend, spec, plan, plan.kernel(name), np.random.default_rng(0)) as harness:
            try:
                detail = compare(harness, cases)
                problem = "; ".join(harness.findings.problems[:2])
            except BackendError as error:
                detail, problem = "", str(error)
        now = perf_counter()
        status: Status = "failed" if problem else "ok"
        yield Check(
            spec.name, plan.compute, "trees", name, backend.description, status, detail=detail, why=problem, seconds=now - began
        )  # fmt: skip
        began = now


def _compare_trees(harness: Harness, cases: Sequence[TreeCase]) -> str:
    """The first nodes of a tree with a larger budget are the tree of a smaller one."""
    for case in cases:
        tokens, log_probs = ranked_rows(case.logits, MAX_NODES)
        budget = min(case.budget, MAX_NODES - 1)
        got = launch_tree_build(harness, Draft(tokens.astype(np.int32), log_probs, budget))
        compare_tree(harness, f"case {case.name}", got, case.tokens[:budget], case.parents[: budget + 1], case.depths[:budget])
    larger = sum(case.budget >= MAX_NODES for case in cases)
    return f"{len(cases)} trees, {larger} of them cut to {MAX_NODES - 1} nodes"


def _compare_walks(harness: Harness, cases: Sequence[TreeCase]) -> str:
    walks = 0
    for case in (case for case in cases if len(case.tokens) < MAX_NODES):
        tree = Tree(case.tokens, case.depths, np.zeros(len(case.tokens)), case.parents)
        for posterior, accepted, following in zip(case.posterior, case.accepted, case.next_token, strict=True):
            got = launch_tree_accept(harness, tree, posterior)
            compare_walk(harness, f"case {case.name}", got, np.array([77, *case.tokens]), np.array(accepted), int(following))
            walks += 1
    return f"{walks} walks"


# ---- generated text and oracles -----------------------------------------------------------------------------------------


def _drift(spec: Spec, plan: Plan, say: Say) -> Iterator[Check]:
    """generated/ of a source checkout, for shipped specs, against what the plan renders now."""
    say(f"{spec.name} {plan.compute}: generated files")
    began = perf_counter()

    def check(ok: bool, ran: bool, detail: str = "", why: str = "") -> Check:
        status: Status = "ok" if ok else "failed" if ran else "skipped"
        seconds = perf_counter() - began
        return Check(
            spec.name, plan.compute, "drift", f"generated/{plan.directory}", "text", status, detail=detail, why=why, seconds=seconds
        )

    root = checkout_folder("generated")
    if root is None:
        yield check(False, False, why="no source checkout, neither around the package nor in the working directory")
        return
    try:
        shipped = load_spec(spec.name)
    except SpecError:
        yield check(False, False, why="no shipped spec, so nothing is committed")
        return
    if shipped != spec or not (root / plan.directory).is_dir():
        yield check(False, False, why="not committed under generated/")
        return
    found = check_folders([plan], out=root, compile=False)
    different = ", ".join(f"{difference.file} ({difference.kind})" for difference in found.differences[:3])
    why = f"{len(found.differences)} files differ: {different}; kdgen build {spec.name} writes them" if found.differences else ""
    yield check(not found.differences, True, f"{found.files} files", why)


def _case_of(spec: Spec) -> ModelCase | None:
    """An oracle's run of this very model."""
    return next((case for case in model_cases() if load_config(case.folder).sha256 == spec.sha256), None)


def _other_oracles(specs: Sequence[Spec]) -> Iterator[tuple[ModelCase, Spec]]:
    """Oracle cases that are no shipped specs: other structures, decoded in fewer situations, and in float32, which is held to the oracle
    element by element. Variants with these structures have their bf16 kernels, programs and requests checked."""
    seen = {spec.sha256 for spec in specs}
    for case in model_cases():
        spec = load_config(case.folder)
        if spec.sha256 not in seen:
            yield case, spec
