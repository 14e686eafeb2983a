"""The best-first builder against enumerating every prefix, and walks against following the path by hand."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import draft_rows

from kdgen.reference.tree import build_tree, walk

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
