"""``kdgen verify``: makes the tasks of the named specs, runs them, and reports what they found and what did not run."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from kdgen.backends.base import Backend
from kdgen.backends.gpu import cuda_unusable
from kdgen.plan.ir import Compute, Plan
from kdgen.spec.model import Spec
from kdgen.verify.kernels import full_size
from kdgen.verify.kernels.harness import SLICE_TILES
from kdgen.verify.oracles.models import model_cases
from kdgen.verify.report.checks import Report, make_report
from kdgen.verify.shrink import is_wide, shrink
from kdgen.verify.task_runner import Progress, Silent, one_by_one, open_tasks, side_by_side
from kdgen.verify.tasks import DEFAULT_SPECS, prepare
from kdgen.verify.variants import variants
from kdgen.verify.workers import Workers, cpus, threads_each


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
    prepared = prepare(names, backend_name, compute, None)
    backend, plans, others = prepared.backend, prepared.plans, prepared.others
    jobs = 1 if backend.name == "cuda" else jobs or cpus()
    heard = progress or Silent()
    if jobs == 1:
        checks = one_by_one(prepared.tasks(), heard, fail_fast)
    else:
        with Workers(open_tasks, (tuple(names), backend_name, compute, threads_each(jobs)), jobs) as workers:
            checks = side_by_side(prepared.tasks(), workers, heard, fail_fast)
    notes = [_wide_note(spec, plan, compute) for spec, plan in plans if is_wide(spec) and plan.family == "generic"]
    if others:
        notes.append(f"{full_size.MODEL}'s kernels without a matrix ran in full size, and slices of some others")
    notes.append(f"kernels and decodes ran on: {backend.description}{_no_gpu(backend, backend_name)}")
    if others:
        names_of_others = ", ".join(spec.name for spec in variants())
        notes.append(f"{names_of_others}: small models with the structures that {' and '.join(DEFAULT_SPECS)} lack")
    if not model_cases():
        notes.append("no oracle cases were found: logits are compared with the float64 reference (KDGEN_ORACLE_DIR names a folder)")
    return make_report(checks, notes, perf_counter() - began)


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
