"""The best-first builder against enumerating every prefix, walks against following the path by hand, and the kernels against both."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import draft_rows

from kdgen.backends.base import Backend
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Plan
from kdgen.reference.tree import build_tree, walk
from kdgen.spec.model import load_spec
from kdgen.verify.kernels.check import load_kernels
from kdgen.verify.kernels.harness import Harness
from kdgen.verify.kernels.trees import Draft, compare_tree, compare_walk, launch_tree_accept, launch_tree_build

Rows = tuple[NDArray[np.int64], NDArray[np.float32]]


@given(draft_rows(), st.integers(0, 40))
def test_builder_takes_the_most_probable_prefixes(rows: Rows, budget: int) -> None:
    tokens, log_probs = rows
    depth, width = tokens.shape
    everything = []
    for d in range(1, depth + 1):
        for ranks in itertools.product(range(width), repeat=d):
            score = float(sum(log_probs[i, rank].astype(np.float64) for i, rank in enumerate(ranks)))
            if score > -np.inf:
                everything.append((-score, ranks))
    best = sorted(everything)[:budget]
    tree = build_tree(tokens, log_probs, budget)
    assert [-score for score, _ in best] == tree.log_probs.tolist()
    index = {(): 0} | {ranks: i for i, (_, ranks) in enumerate(best, 1)}
    assert tree.tokens.tolist() == [int(tokens[len(ranks) - 1, ranks[-1]]) for _, ranks in best]
    assert tree.depths.tolist() == [len(ranks) for _, ranks in best]
    assert tree.parents.tolist() == [-1, *(index[ranks[:-1]] for _, ranks in best)]


@given(draft_rows(), st.integers(0, 40), st.data())
def test_a_walk_follows_the_target_as_far_as_the_tree_goes(rows: Rows, budget: int, data: st.DataObject) -> None:
    tree = build_tree(*rows, budget)
    posterior = data.draw(st.lists(st.integers(0, 4), min_size=tree.size + 1, max_size=tree.size + 1))
    accepted, following = walk(tree, posterior)
    assert accepted == tree.path(accepted[-1])
    assert [int(tree.tokens[node - 1]) for node in accepted[1:]] == [posterior[node] for node in accepted[:-1]]
    assert following == posterior[accepted[-1]]
    children = [node for node in range(1, tree.size + 1) if tree.parents[node] == accepted[-1]]
    assert following not in [int(tree.tokens[node - 1]) for node in children]


@given(draft_rows(), st.integers(0, 40))
def test_paths_and_visibility_say_the_same(rows: Rows, budget: int) -> None:
    tree = build_tree(*rows, budget)
    for node, path in enumerate(tree.paths):
        steps = [int(n) for n in path if n >= 0]
        assert steps[-1] == node
        assert np.flatnonzero(tree.visibility[node]).tolist() == sorted(steps)
        assert [-1, *steps[:-1]] == [int(tree.parents[n]) for n in steps]


# ---- the kernels --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree_plan(cpu_backend: Backend) -> Plan:
    plan = build_plan(load_spec("tiny"), "f32")
    plan = replace(plan, kernels=tuple(kernel for kernel in plan.kernels if kernel.name in ("tree_build", "tree_accept")))
    load_kernels(cpu_backend, plan)
    return plan


@given(rows=draft_rows(max_depth=15, max_width=6), budget=st.integers(0, 63))
def test_the_kernel_builds_the_references_tree(cpu_backend: Backend, tree_plan: Plan, rows: Rows, budget: int) -> None:
    tree = build_tree(*rows, budget)
    with Harness(cpu_backend, load_spec("tiny"), tree_plan, tree_plan.kernel("tree_build"), np.random.default_rng(0)) as harness:
        got = launch_tree_build(harness, Draft(rows[0].astype(np.int32), rows[1], budget))
        compare_tree(harness, "the draft", got, tree.tokens, tree.parents, tree.depths)
        assert not harness.findings.problems


@given(rows=draft_rows(max_depth=15, max_width=6), budget=st.integers(0, 63), seed=st.integers(0, 2**32 - 1))
def test_the_kernel_walks_as_the_reference(cpu_backend: Backend, tree_plan: Plan, rows: Rows, budget: int, seed: int) -> None:
    tree, rng = build_tree(*rows, budget), np.random.default_rng(seed)
    posterior = rng.integers(0, 8, tree.size + 1)
    for node in range(1, tree.size + 1):  # lead most walks on
        if rng.random() < 0.7:
            posterior[tree.parents[node]] = tree.tokens[node - 1]
    accepted, following = walk(tree, posterior)
    with Harness(cpu_backend, load_spec("tiny"), tree_plan, tree_plan.kernel("tree_accept"), rng) as harness:
        got = launch_tree_accept(harness, tree, posterior)
        compare_walk(harness, "the walk", got, np.array([77, *tree.tokens]), np.array(accepted), following)
        assert not harness.findings.problems
