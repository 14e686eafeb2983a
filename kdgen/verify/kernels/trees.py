"""Checks of draft trees: building them, their token rows, the walk that accepts nodes, and the cache rows of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import DeviceArray
from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES, MAX_PATH
from kdgen.reference import tree as reference
from kdgen.verify.kernels.harness import (
    Grid,
    Harness,
    Registry,
    for_template,
    guard,
    poison,
    split_guard,
)
from kdgen.verify.kernels.paged import PagedCache
from kdgen.verify.kernels.step_rows import CROWD, SEQUENCES, drawn_lengths, small_steps

Array = NDArray[Any]
CHECKS: Registry = {}


@dataclass(frozen=True)
class Draft:
    """What tree_build works from: candidates [depths, ranks], best first, and a budget."""

    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    budget: int


def random_draft(rng: np.random.Generator, kind: str) -> Draft:
    """``plain``: any log-probabilities; ``ties``: multiples of a quarter, equal ones and equal sums abound; ``close``: those and a few last
    bits, which sums in float32 would round away; ``impossible``: −inf tails."""
    depths, ranks = int(rng.integers(1, MAX_PATH)), int(rng.integers(1, MAX_CANDIDATES + 1))
    log_probs = -np.sort(rng.exponential(rng.choice([0.2, 1.0, 4.0]), (depths, ranks)), axis=1)
    if kind in ("ties", "close"):
        log_probs = -np.ceil(-log_probs * 4) / 4
    if kind == "close":
        log_probs = -np.sort(
            -log_probs.astype(np.float32) * (1 + rng.integers(0, 4, log_probs.shape).astype(np.float32) * 2.0**-23), axis=1
        )
    if kind == "impossible":
        log_probs[np.arange(ranks) >= rng.integers(0, ranks + 1, (depths, 1))] = -np.inf
    tokens = np.stack([rng.permutation(1000)[:ranks] for _ in range(depths)]).astype(np.int32)
    return Draft(tokens, log_probs.astype(np.float32), int(rng.integers(0, MAX_NODES)))


def launch_tree_build(harness: Harness, draft: Draft, root: int = 5, places: int = 1, place: int = 0) -> list[Array]:
    """(size, tokens, parents, depths) as the kernel leaves them, each MAX_NODES long, poison beyond the tree.

    The draft stands at ``place`` of a step of ``places``; the others draft nothing.
    """
    depths, ranks = draft.tokens.shape
    # beyond the draft's own rows and ranks lies what an earlier one left: candidates that are certain
    ids, probs = np.full((places, MAX_PATH, MAX_CANDIDATES), 9999, np.int32), np.zeros((places, MAX_PATH, MAX_CANDIDATES), np.float32)
    ids[place, :depths, :ranks], probs[place, :depths, :ranks] = draft.tokens, draft.log_probs
    shape = np.zeros((places, 4), np.int32)
    shape[place] = depths, ranks, draft.budget, 0
    step = harness.rng.permutation(SEQUENCES)[:places].astype(np.int32)
    roots = np.full(SEQUENCES, -9, np.int32)
    roots[step[place]] = root
    outputs = {name: harness.poisoned("i32", places, MAX_NODES) for name in ("tree_token", "tree_parent", "tree_depth")}
    outputs = {"tree_size": harness.poisoned("i32", places), **outputs}
    harness.launch(
        Grid(sequences=places),
        step_count=harness.integer(places),
        step_sequence=harness.input(step),
        draft_shape=harness.input(shape),
        candidate_tokens=harness.input(ids),
        candidate_log_probs=harness.input(probs),
        root_token=harness.input(roots),
        **outputs,
    )
    results = [harness.read(array)[place] for array in outputs.values()]
    results[0] = results[0].reshape(1)
    harness.release()
    return results


def compare_tree(harness: Harness, what: str, got: list[Array], tokens: Array, parents: Array, depths: Array, root: int = 5) -> None:
    """``tokens`` and ``depths`` without the root, ``parents`` with it."""
    size, got_tokens, got_parents, got_depths = got
    nodes = len(tokens) + 1
    harness.findings.equal(f"tree_size of {what}", size, np.array([nodes]))
    harness.findings.equal(f"tree_token of {what}", got_tokens[:nodes], np.array([root, *tokens]))
    harness.findings.equal(f"tree_parent of {what}", got_parents[:nodes], parents)
    harness.findings.equal(f"tree_depth of {what}", got_depths[:nodes], np.array([0, *depths]))
    for values in got[1:]:
        harness.findings.untouched(f"tree of {what} beyond its last node", values[nodes:])


@for_template(CHECKS, ["tree_build.cu.j2"])
def check_tree_build(harness: Harness) -> None:
    for kind in ("plain", "ties", "close", "impossible"):
        for i in range(8):
            draft = random_draft(harness.rng, kind)
            expected = reference.build_tree(draft.tokens, draft.log_probs, draft.budget)
            places = 1 + i % SEQUENCES
            got = launch_tree_build(harness, draft, places=places, place=i % places)
            compare_tree(harness, f"{kind} draft {i}", got, expected.tokens, expected.parents, expected.depths)
    nothing = Draft(np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32), 8)
    compare_tree(harness, "no draft", launch_tree_build(harness, nothing), np.zeros(0), np.array([-1]), np.zeros(0))
    full = Draft(np.arange(15 * 64, dtype=np.int32).reshape(15, 64), np.zeros((15, 64), np.float32), MAX_NODES - 1)
    expected = reference.build_tree(full.tokens, full.log_probs, full.budget)
    compare_tree(harness, "a draft of equals", launch_tree_build(harness, full), expected.tokens, expected.parents, expected.depths)


def _random_tree(harness: Harness, nodes: int) -> reference.Tree:
    """Any tree: parents before children, siblings with different tokens, no deeper than MAX_PATH."""
    parents, depths, tokens = [-1], [0], [0]
    for node in range(1, nodes):
        shallow = [n for n in range(node) if depths[n] < MAX_PATH - 1]
        parent = int(harness.rng.choice(shallow[-4:] if harness.rng.random() < 0.6 else shallow))
        taken = {tokens[n] for n in range(1, node) if parents[n] == parent}
        tokens.append(int(harness.rng.choice([t for t in range(node + 3) if t not in taken])))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return reference.Tree(np.array(tokens[1:], np.int64), np.array(depths[1:], np.int64), np.zeros(nodes - 1), np.array(parents, np.int32))


def _padded(values: Array, length: int = MAX_NODES) -> NDArray[np.int32]:
    memory = poison("i32", length)
    memory[: len(values)] = values
    return memory


TREE_SIZES = (1, 2, 31, 32, 33, 64)


def _trees(harness: Harness, trees: list[reference.Tree]) -> dict[str, DeviceArray]:
    """Arguments by parameter name: sizes, tokens, parents and depths of a step's trees, one padded row a place."""
    columns: dict[str, list[Any]] = {
        "tree_token": [[77, *tree.tokens] for tree in trees],
        "tree_parent": [tree.parents for tree in trees],
        "tree_depth": [[0, *tree.depths] for tree in trees],
    }
    padded = {name: np.stack([_padded(np.array(values)) for values in column]) for name, column in columns.items()}
    return harness.inputs({"tree_size": np.array([tree.size + 1 for tree in trees], np.int32), **padded})


@for_template(CHECKS, ["tree_rows.cu.j2"])
def check_tree_rows(harness: Harness) -> None:
    for step in (*small_steps(harness), *small_steps(harness), *small_steps(harness), harness.rng.permutation(CROWD)[:9].astype(np.int32)):
        trees = [_random_tree(harness, int(harness.rng.choice(TREE_SIZES))) for _ in step]
        lengths, nodes = drawn_lengths(harness, CROWD), [tree.size + 1 for tree in trees]
        rows, begins = sum(nodes), np.cumsum([0, *nodes])
        begin, number = harness.poisoned("i32", len(step) + 1), harness.poisoned("i32", 1)
        names = ("tokens", "row_sequence", "row_position", "row_prefix", "row_slot")
        columns = {name: harness.poisoned("i32", guard(rows)) for name in names}
        path = harness.poisoned("i32", guard(rows), MAX_PATH)
        harness.launch(
            Grid(sequences=len(step)),
            step_count=harness.integer(len(step)),
            step_sequence=harness.input(step),
            step_begin=begin,
            sequence_length=harness.input(lengths),
            num_tokens=number,
            row_path=path,
            **_trees(harness, trees),
            **columns,
        )
        sequence = np.repeat(step, nodes)
        expected = {
            "tokens": np.concatenate([[77, *tree.tokens] for tree in trees]),
            "row_sequence": sequence,
            "row_position": lengths[sequence] + np.concatenate([[0, *tree.depths] for tree in trees]),
            "row_prefix": lengths[sequence],
            "row_slot": lengths[sequence] + np.concatenate([np.arange(count) for count in nodes]),
        }
        for name, values in expected.items():
            harness.findings.equal(name, split_guard(harness, name, harness.read(columns[name]), rows), values)
        harness.findings.equal("num_tokens", harness.read(number), np.array([rows]))
        harness.findings.equal("step_begin", harness.read(begin), begins)
        got = split_guard(harness, "row_path", harness.read(path), rows)
        wanted = np.full((rows, MAX_PATH), -1)  # which is what poison reads as: nothing behind a path's end is written
        for first, tree in zip(begins, trees, strict=False):
            wanted[first : first + tree.size + 1, : tree.paths.shape[1]] = tree.paths
        harness.findings.equal("row_path", got, wanted)
        harness.release()


def launch_tree_accept(
    harness: Harness, tree: reference.Tree, posterior: Array, length: int = 40, sequence: int = 2, after: int = 0
) -> list[Array]:
    """(count, nodes, tokens, sequence_length, root_token) as the kernel leaves them.

    ``after`` puts the tree at the step's second place, behind a root alone with that many rows before the tree's.
    """
    place = 1 if after else 0
    trees = [reference.Tree(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.array([-1], np.int32)), tree][1 - place :]
    step = np.array([(sequence + 1) % SEQUENCES, sequence], np.int32)[1 - place :]
    begins = np.array([0, after, after + tree.size + 1][1 - place :], np.int32)
    begins[0] = 0
    given = _trees(harness, trees)
    del given["tree_depth"]
    chosen = harness.input(np.concatenate([np.full(after, -5), posterior]).astype(np.int32))
    outputs = {
        "accepted_count": harness.poisoned("i32", place + 1),
        "accepted_nodes": harness.poisoned("i32", place + 1, MAX_PATH),
        "accepted_tokens": harness.poisoned("i32", place + 1, MAX_PATH),
        "sequence_length": harness.input(np.full(SEQUENCES, length, np.int32)),
        "root_token": harness.input(np.full(SEQUENCES, -9, np.int32)),
    }
    harness.launch(
        Grid(sequences=place + 1),
        step_count=harness.integer(place + 1),
        step_sequence=harness.input(step),
        step_begin=harness.input(begins),
        next_token=chosen,
        **given,
        **outputs,
    )
    count, nodes, taken, lengths, roots = (harness.read(array) for array in outputs.values())
    if after:  # the root alone: one more token, and its choice
        harness.findings.equal("sequence_length of a root alone", lengths[step[0]], np.array(length + 1))
        harness.findings.equal("root_token of a root alone", roots[step[0]], np.array(-5))
        lengths[step[0]], roots[step[0]] = length, -9
    harness.release()
    return [count[place].reshape(1), nodes[place], taken[place], lengths, roots]


def compare_walk(
    harness: Harness, what: str, got: list[Array], tokens: Array, accepted: Array, following: int, length: int = 40, sequence: int = 2
) -> None:
    """``tokens`` of all nodes, root included; ``accepted`` nodes, root first; ``following`` is the target's token after the last."""
    count, nodes, taken, lengths, roots = got
    number = len(accepted)
    harness.findings.equal(f"accepted_count of {what}", count, np.array([number]))
    harness.findings.equal(f"accepted_nodes of {what}", nodes[:number], accepted)
    harness.findings.equal(f"accepted_tokens of {what}", taken[:number], tokens[accepted])
    harness.findings.untouched(f"accepted nodes of {what} beyond the last", nodes[number:])
    harness.findings.untouched(f"accepted tokens of {what} beyond the last", taken[number:])
    changed = np.arange(SEQUENCES) == sequence
    harness.findings.equal(f"sequence_length of {what}", lengths, np.where(changed, length + number, length))
    harness.findings.equal(f"root_token of {what}", roots, np.where(changed, following, -9))


@for_template(CHECKS, ["tree_accept.cu.j2"])
def check_tree_accept(harness: Harness) -> None:
    for nodes in TREE_SIZES:
        for walk in range(3):
            tree = _random_tree(harness, nodes)
            posterior = harness.rng.integers(0, nodes + 3, nodes)
            for node in range(1, nodes):  # lead most walks on
                if harness.rng.random() < 0.8:
                    posterior[tree.parents[node]] = tree.tokens[node - 1]
            accepted, following = reference.walk(tree, posterior)
            got = launch_tree_accept(harness, tree, posterior, after=walk)
            compare_walk(harness, f"walk {walk} over {nodes} nodes", got, np.array([77, *tree.tokens]), np.array(accepted), following)


@for_template(CHECKS, ["kv_compact.cu.j2"])
def check_kv_compact(harness: Harness) -> None:
    """Accepted rows move to their positions in every layer; all else keeps its bits."""
    p, layers, capacity = harness.p, harness.few(harness.kernel.grid[0].times), 90
    for nodes in TREE_SIZES:
        for step in small_steps(harness):
            trees = [_random_tree(harness, nodes) for _ in step]
            deepest = [int(np.argmax([0, *tree.depths])) for tree in trees]
            ends = [int(harness.rng.choice([0, deep, int(harness.rng.integers(0, nodes))])) for deep in deepest]
            accepted = [tree.path(end) for tree, end in zip(trees, ends, strict=True)]
            prefixes = harness.rng.integers(0, capacity - MAX_NODES, len(step))
            cache = harness.random(harness.act, layers, SEQUENCES, capacity, p.row)
            paged = PagedCache(harness, cache, p.tiled)
            meta = {
                "step_count": np.array([len(step)]),
                "step_begin": np.arange(len(step) + 1) * nodes,
                "accepted_count": np.array([len(path) for path in accepted]),
                "accepted_nodes": np.stack([_padded(np.array(path), MAX_PATH) for path in accepted]),
                "row_sequence": np.repeat(paged.sequences[step], nodes),
                "row_prefix": np.repeat(prefixes, nodes),
            }
            harness.launch(
                Grid(sequences=len(step), replaced={0: layers}),
                kv_cache=paged.device,
                layer_pages=paged.layer_pages,
                **paged.arguments,
                **harness.inputs({name: values.astype(np.int32) for name, values in meta.items()}),
            )
            expected = cache.copy()
            for sequence, prefix, path in zip(step, prefixes, accepted, strict=True):
                kept = reference.compact(cache[:, sequence], int(prefix), path)
                expected[:, sequence, : kept.shape[1]] = kept
            got = paged.read()[:, :, :capacity]
            harness.findings.same_bits(f"kv_cache with nodes {accepted} of {nodes}", got, expected)
            harness.release()
