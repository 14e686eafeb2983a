"""The list of ``kdgen verify``'s tasks: which checks a spec gets, on which backend.

To add a family of checks: write a generator of ``Check``s in ``kdgen.verify.parts``, each yielded as soon as it is known, and a line in
``tasks``, which makes it a ``Task``: a part of the report that runs by itself, in any process, and finds the same wherever that is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kdgen.backends import open_backend
from kdgen.backends.base import Backend
from kdgen.errors import KdgenError
from kdgen.plan.ir import Compute, Plan
from kdgen.spec.model import Spec, load_spec
from kdgen.verify.decoding import rank_cases
from kdgen.verify.decoding.decodes import FEW_SITUATIONS, SITUATIONS
from kdgen.verify.decoding.programs import models
from kdgen.verify.kernels import full_size
from kdgen.verify.kernels.harness import TOKENS
from kdgen.verify.parts.decodes import decodes_of, decodes_of_oracle, named_models, other_oracles, programs, requests_together
from kdgen.verify.parts.kernels import kernels_alone, kernels_under_checker
from kdgen.verify.parts.ranks import programs_of_ranks, rank_matrix_of, ranks_of
from kdgen.verify.parts.trees import reference_trees
from kdgen.verify.parts.without_backend import config_numbers, generated_files, primitives, rope_tables
from kdgen.verify.plans import Plans, plans_for, run_whole, shared_plans, small_of, that_run, title_of
from kdgen.verify.report.checks import Check, Say
from kdgen.verify.rounds.checks import check_shipped_rounds, check_small_rounds
from kdgen.verify.shrink import is_wide
from kdgen.verify.variants import variants

DEFAULT_SPECS = ("tiny", "tiny2")
#: Some checks decode as much, two chains of 9 rows, however few positions a model has.
LEAST_POSITIONS = 32


@dataclass(frozen=True)
class Task:
    """A part of the report: checks that are made one after another in one process. ``make`` calls its argument with what runs now.

    ``seconds`` are about what it takes on a core: where several processes share the work, the longest tasks begin first.
    """

    title: str
    make: Callable[[Say], Iterator[Check]]
    seconds: float = 1.0


@dataclass(frozen=True)
class Prepared:
    """What a process needs to do tasks."""

    backend: Backend
    specs: Sequence[Spec]
    plans: Plans
    others: Plans

    def tasks(self) -> list[Task]:
        full_sized = tuple(full_size.groups()) if self.others else ()
        return tasks(self.backend, self.specs, self.plans, self.others, full_sized)


def prepare(names: Sequence[str], backend_name: str | None, compute: Compute | None, threads: int | None) -> Prepared:
    specs = [load_spec(name) for name in names or DEFAULT_SPECS]
    for spec in specs:
        if (most := spec.max_position_embeddings) < LEAST_POSITIONS:
            raise KdgenError(f"{spec.name}: checks need a context of {LEAST_POSITIONS}, more than its max_position_embeddings {most}")
    backend = open_backend(backend_name, threads=threads)
    plans = that_run(backend, plans_for(specs, compute))
    return Prepared(backend, specs, plans, [] if names else that_run(backend, plans_for(variants(), compute)))


def tasks(backend: Backend, specs: Sequence[Spec], plans: Plans, others: Plans, full_sized: Sequence[full_size.Group] = ()) -> list[Task]:
    """Primitives and kernels first, for they are quick and say where a fault is; then the checker, generated text, trees and decodes.

    ``others`` are models of the default command alone, and so are those whose kernels run in full size.
    """
    found: list[Task] = []

    def add(title: str, family: Callable[..., Iterator[Check]], *arguments: object, seconds: float = 5.0) -> None:
        found.append(Task(title, lambda say: family(*arguments, say), seconds))

    whole = [(spec, plan) for spec, plan in (*plans, *others) if plan.family == "generic"]
    shared = that_run(backend, [(spec, shared) for spec, plan in whole for shared in shared_plans(spec, plan)])
    if others:
        shared = [*shared, *that_run(backend, rank_cases.join_plans())]
        add("primitives", primitives, seconds=2.0)
    for spec, plan in (*plans, *others, *shared):
        size = "slice" if is_wide(spec) else "full"
        add(f"{_part(spec, plan)}, kernels", kernels_alone, backend, spec, plan, size, TOKENS, seconds=_about(1.5, plan))
    for group in full_sized:
        for spec, plan in that_run(backend, [(group.spec, group.plan)]):
            add(f"{_part(spec, plan)}, kernels in full size", kernels_alone, backend, spec, plan, group.size, group.tokens, seconds=2.5)
    described = tuple(dict.fromkeys(spec for spec, _ in (*plans, *others)))
    add("tables", rope_tables, described, seconds=0.1)
    add("numbers of the config", config_numbers, described, bool(others), seconds=1.0)
    add("trees of the DDTree reference", reference_trees, backend, *plans[0], seconds=0.3)
    for spec, plan in (*plans, *others):
        add(f"{_part(spec, plan)}, kernels under the checker", kernels_under_checker, *small_of(spec, plan), seconds=_about(6.0, plan))
    for spec, plan in shared:
        if not is_wide(spec):
            add(f"{_part(spec, plan)}, kernels under the checker", kernels_under_checker, spec, plan, seconds=_about(4.0, plan))
    for model in models() if others else named_models(plans):
        seconds = 25.0 if model.family == "generic" else 50.0
        add(f"{model.title} {model.compute}, programs", programs, model, seconds=seconds)
    if others:
        add("programs of ranks", programs_of_ranks, seconds=35.0)
    for spec, plan in plans:
        if plan.family == "generic":
            add(f"{_part(spec, plan)}, generated files", generated_files, spec, plan, seconds=0.5)
    for spec, plan in (*run_whole(others), *plans):
        small = small_of(spec, plan)
        add(f"{_part(spec, plan)}, requests together", requests_together, backend, title_of(spec, plan), *small, seconds=_about(3.0, plan))
    decoded_before: list[Spec] = []
    for spec, plan in plans:
        if plan.family == "generic":  # of other plans requests together were as each alone
            # a spec's second type has the same host, whose trees and prefills the first one has had in every situation
            situations = FEW_SITUATIONS if spec in decoded_before else SITUATIONS
            add(f"{_part(spec, plan)}, decodes", decodes_of, backend, spec, plan, situations, seconds=_about(8.0, plan))
            decoded_before.append(spec)
    if others:
        add("rounds of every kind", check_small_rounds, backend, seconds=15.0)
        add("rounds of the shipped model", check_shipped_rounds, backend, seconds=15.0)
    decoded = [spec for spec, _ in shared if not is_wide(spec)]
    if decoded and not others:
        add(f"{decoded[0].name}, ranks", ranks_of, decoded[0], seconds=15.0)
    for ranks, of_so_many in itertools.groupby(rank_cases.cases() if others else (), lambda case: case.ranks):
        add(f"{ranks} rank{'s' if ranks > 1 else ''}", rank_matrix_of, tuple(of_so_many), seconds=12.0 * ranks)
    if others:
        for case, spec in other_oracles(specs):
            add(f"{case.name} f32, decodes", decodes_of_oracle, backend, case, spec, seconds=8.0)
    return found


def _about(seconds: float, plan: Plan) -> float:
    """Seconds of what takes as many for a float32 plan of 40 kernels: a CPU computes an MMA product by product."""
    slower = 5.0 if plan.family != "generic" else 2.0 if plan.compute == "bf16" else 1.0
    return seconds * slower * len(plan.kernels) / 40


def _part(spec: Spec, plan: Plan) -> str:
    ranks = "" if plan.shard.whole else f", {plan.shard.ranks} ranks by {plan.shard.exchange}"
    return f"{title_of(spec, plan)} {plan.compute}{ranks}"
