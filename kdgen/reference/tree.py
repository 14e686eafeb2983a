"""Draft trees as the DDTree reference has them (github.com/liranringel/ddtree, arXiv 2604.12989): build, walk, compact.

A tree hangs below the root, node 0, the last committed token; nodes 1… follow in the order in which best-first search takes
them. A step lays its rows out in that order behind the committed cache, root first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.reference.ops import top_k

Array = NDArray[Any]


@dataclass(frozen=True)
class Tree:
    """n nodes below a root. Arrays of length n describe node i at index i − 1; ``parents`` has the root first, with parent −1."""

    tokens: NDArray[np.int64]
    depths: NDArray[np.int64]
    log_probs: NDArray[np.float64]
    parents: NDArray[np.int32]

    @property
    def size(self) -> int:
        """Nodes, the root not counted."""
        return len(self.tokens)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        path = [node]
        while path[-1] > 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    @property
    def paths(self) -> NDArray[np.int32]:
        """[n + 1, deepest + 1]: each node's path from the root, itself last, then −1."""
        paths = np.full((self.size + 1, int(self.depths.max(initial=0)) + 1), -1, np.int32)
        for node in range(self.size + 1):
            path = self.path(node)
            paths[node, : len(path)] = path
        return paths

    @property
    def visibility(self) -> NDArray[np.bool_]:
        """[n + 1, n + 1]: whether row i sees row j, that is j is i or an ancestor of it."""
        seen = np.zeros((self.size + 1, self.size + 1), bool)
        for node in range(self.size + 1):
            seen[node, self.path(node)] = True
        return seen

    def step(self, root_token: int, committed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """(tokens, positions, visible) of the verify forward after ``committed`` cache rows: root and nodes see all of those."""
        tokens = np.concatenate([[root_token], self.tokens]).astype(np.int64)
        positions = committed + np.concatenate([[0], self.depths]).astype(np.int64)
        return tokens, positions, np.concatenate([np.ones((self.size + 1, committed), bool), self.visibility], axis=1)


def ranked_rows(logits: Array, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k best tokens of each row of logits [h, V] and their log-probabilities in float32: ([h, k], [h, k]), best first.

    The lower token id precedes an equal one. The log-sum-exp runs over the whole vocabulary, in float32, as the reference's.
    """
    x = logits.astype(np.float32)
    tokens = top_k(x, min(k, x.shape[1]))
    top = x.max(axis=1, keepdims=True, initial=-np.inf)
    log_sum = top + np.log(np.exp(x - top).sum(axis=1, keepdims=True, dtype=np.float32))
    return tokens, np.take_along_axis(x, tokens, axis=1) - log_sum


def build_tree(tokens: Array, log_probs: Array, budget: int) -> Tree:
    """The ``budget`` most probable prefixes under independent per-depth distributions, best first.

    ``tokens`` and ``log_probs`` [h, k]: row d − 1 holds the candidates at depth d, best first. Path scores are float64 sums of
    float32 log-probabilities, added in the reference's order: a child's is its parent's plus its own, a sibling's is the last
    sibling's minus that one's own plus its own. Equal scores: the lexicographically smaller tuple of ranks first. A candidate of
    probability zero is never added. Raises ValueError for a NaN.
    """
    scores = np.asarray(log_probs, np.float32).astype(np.float64)
    if np.isnan(scores).any():
        raise ValueError("draft log-probabilities hold a NaN")
    depth, width = scores.shape
    found_tokens: list[int] = []
    depths: list[int] = []
    found_scores: list[float] = []
    parents = [-1]
    heap: list[tuple[float, tuple[int, ...], int]] = []

    def push(score: float, ranks: tuple[int, ...], parent: int) -> None:
        if score > -np.inf:
            heapq.heappush(heap, (-score, ranks, parent))

    if depth and width:
        push(float(scores[0, 0]), (0,), 0)
    while heap and len(found_tokens) < budget:
        negative, ranks, parent = heapq.heappop(heap)
        score, d, rank = -negative, len(ranks), ranks[-1]
        found_tokens.append(int(tokens[d - 1, rank]))
        found_scores.append(score)
        depths.append(d)
        parents.append(parent)
        node = len(found_tokens)
        if rank + 1 < width:
            push(score - float(scores[d - 1, rank]) + float(scores[d - 1, rank + 1]), (*ranks[:-1], rank + 1), parent)
        if d < depth:
            push(score + float(scores[d, 0]), (*ranks, 0), node)
    return Tree(
        np.array(found_tokens, np.int64), np.array(depths, np.int64), np.array(found_scores, np.float64), np.array(parents, np.int32)
    )


def walk(tree: Tree, posterior: Sequence[int] | Array) -> tuple[list[int], int]:
    """(accepted nodes from the root, the target's token after the last): ``posterior`` [n + 1] is the target's token after each node."""
    children = {(int(parent), int(token)): node for node, (parent, token) in enumerate(zip(tree.parents[1:], tree.tokens, strict=True), 1)}
    accepted = [0]
    while (child := children.get((accepted[-1], int(posterior[accepted[-1]])))) is not None:
        accepted.append(child)
    return accepted, int(posterior[accepted[-1]])


def compact(cache: Array, committed: int, accepted: Sequence[int]) -> Array:
    """The cache [layers, committed + n + 1, row] of a verify step cut to its accepted rows, in path order, behind the committed ones."""
    keep = [*range(committed), *(committed + node for node in accepted)]
    return cache[:, keep]
