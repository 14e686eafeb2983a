"""The DDTree reference's trees and walks, by the tree kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from kdgen.backends.base import Backend
from kdgen.errors import BackendError
from kdgen.plan.ir import MAX_NODES, Plan
from kdgen.reference.tree import Tree, ranked_rows
from kdgen.spec.model import Spec
from kdgen.verify.kernels.check import load_kernels
from kdgen.verify.kernels.harness import Harness
from kdgen.verify.kernels.trees import Draft, compare_tree, compare_walk, launch_tree_accept, launch_tree_build
from kdgen.verify.oracles.models import TreeCase, tree_cases
from kdgen.verify.report.checks import Check, Say, Status


def reference_trees(backend: Backend, spec: Spec, plan: Plan, say: Say) -> Iterator[Check]:
    """The DDTree reference's trees and walks, by the tree kernels, which are the same for every spec."""
    say("trees of the DDTree reference")
    cases = tree_cases()
    began = perf_counter()
    compared_by = {"tree_build.cu.j2": _compare_trees, "tree_accept.cu.j2": _compare_walks}
    kernels = tuple(kernel for kernel in plan.kernels if kernel.template in compared_by)
    if not cases:
        for kernel in kernels:
            why = "no oracle cases were found"
            yield Check(spec.name, plan.compute, "trees", kernel.name, backend.description, "skipped", why=why)
        return
    load_kernels(backend, replace(plan, kernels=kernels))
    for kernel in kernels:
        name, compare = kernel.name, compared_by[kernel.template]
        with Harness(backend, spec, plan, kernel, np.random.default_rng(0)) as harness:
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
