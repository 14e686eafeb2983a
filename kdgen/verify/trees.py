"""Checks of the integer kernels around the model: row metadata, greedy choice, candidates, tree building, walk and compaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import DeviceArray
from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES, MAX_PATH
from kdgen.reference import ops
from kdgen.reference import tree as reference
from kdgen.verify import tolerances
from kdgen.verify.bench import Bench, Registry, check_rows, for_template, guard, poison, split_guard

Array = NDArray[Any]

CHECKS: Registry = {}
SEQUENCES = 3


def _lengths(bench: Bench) -> NDArray[np.int32]:
    return bench.rng.integers(0, 100, SEQUENCES).astype(np.int32)


@for_template(CHECKS, ["chain_rows.cu.j2"])
def check_chain_rows(bench: Bench) -> None:
    lengths, roots = _lengths(bench), bench.rng.integers(0, 1000, SEQUENCES).astype(np.int32)
    for count in bench.tokens:
        for sequence, from_root in ((count % SEQUENCES, 0), ((count + 1) % SEQUENCES, 1)):
            rows = 1 if from_root else count
            tokens = bench.rng.integers(0, 1000, count).astype(np.int32)
            number, ids = bench.integer(-5 if from_root else count), bench.input(tokens)
            outputs = [bench.poisoned("i32", guard(rows)) for _ in range(4)]
            bench.launch(number, ids, bench.input(lengths), bench.input(roots), *outputs, sequence, from_root)
            position = lengths[sequence] + np.arange(rows)
            expected = {
                "row_sequence": np.full(rows, sequence),
                "row_position": position,
                "row_prefix": position + 1,
                "row_slot": position,
            }
            for (name, values), array in zip(expected.items(), outputs, strict=True):
                bench.findings.equal(name, split_guard(bench, name, bench.read(array), rows), values)
            tokens[:1] = roots[sequence] if from_root else tokens[:1]
            bench.findings.equal("tokens", bench.read(ids), tokens)
            bench.findings.equal("num_tokens", bench.read(number), np.array([rows]))
            bench.release()


@for_template(CHECKS, ["advance.cu.j2"])
def check_advance(bench: Bench) -> None:
    for count in bench.tokens:
        lengths, roots, sequence = _lengths(bench), np.full(SEQUENCES, 7, np.int32), count % SEQUENCES
        choices = bench.rng.integers(0, 1000, count).astype(np.int32)
        length, root = bench.input(lengths), bench.input(roots)
        bench.launch(bench.integer(count), bench.input(choices), length, root, sequence)
        lengths[sequence] += count
        roots[sequence] = choices[-1]
        bench.findings.equal("sequence_length", bench.read(length), lengths)
        bench.findings.equal("root_token", bench.read(root), roots)
        bench.release()


# ---- choices ------------------------------------------------------------------------------------------------------------


def _coarse_logits(bench: Bench, rows: int, vocab: int) -> NDArray[np.float32]:
    """Logits [rows, vocab] with many equal values, the largest among them; one row equal throughout, one with −inf, one random."""
    logits = (bench.rng.integers(-64, 65, (rows, vocab)) / 16).astype(np.float32)
    logits[0] = 0.5
    if rows > 1:
        logits[1] = -np.inf
        logits[1, bench.rng.permutation(vocab)[: max(1, vocab // 3)]] = -3.25
    if rows > 2:
        logits[2] = bench.random("f32", vocab, scale=4.0)
        logits[2, -1] = 40.0
    return logits


@for_template(CHECKS, ["argmax.cu.j2"])
def check_argmax(bench: Bench) -> None:
    p = bench.p
    most = max(bench.tokens)
    logits = _coarse_logits(bench, most, p.vocab)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        chosen = bench.poisoned("i32", guard(count))
        bench.launch(bench.integer(count), bench.input(logits[rows]), chosen, tokens=count)
        return {"next_token": split_guard(bench, "next_token", bench.read(chosen), count)}

    check_rows(bench, run, {"next_token": (ops.argmax(logits), np.zeros(1))})


@for_template(CHECKS, ["top_k.cu.j2"])
def check_top_k(bench: Bench) -> None:
    """Tokens exactly, ties included; log-probabilities over the whole vocabulary."""
    p, most = bench.p, min(MAX_PATH - 1, max(bench.tokens))
    logits = _coarse_logits(bench, most, p.vocab)
    finite = int(np.isfinite(logits).sum(axis=1).min())  # beyond these a row's candidates are impossible tokens, in any order
    for count in sorted({min(wanted, finite) for wanted in (1, 2, 10, MAX_CANDIDATES)}):
        tokens, log_probs = ops.top_k_log_probs(logits, count)
        for rows in {1, most}:
            ids, probs = bench.poisoned("i32", guard(rows), p.max_candidates), bench.poisoned("f32", guard(rows), p.max_candidates)
            shape = bench.input(np.array([rows, count, 60], np.int32))
            bench.launch(shape, bench.input(logits[:rows]), ids, probs, tokens=rows)
            got_ids = split_guard(bench, "candidate_tokens", bench.read(ids), rows)
            got = split_guard(bench, "candidate_log_probs", bench.read(probs), rows)
            bench.findings.equal("candidate_tokens", got_ids[:, :count], tokens[:rows])
            largest = np.abs(logits[:rows].max(axis=1, keepdims=True))
            error = tolerances.formula(np.abs(log_probs[:rows]) + largest) + tolerances.positive_sum(np.ones(1), p.vocab)
            bench.findings.close("candidate_log_probs", got[:, :count], log_probs[:rows], error)
            bench.findings.untouched("candidates beyond the last", got[:, count:])
            bench.findings.untouched("candidates beyond the last", got_ids[:, count:])
            bench.release()


# ---- trees --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """What tree_build works from: candidates [depths, ranks], best first, and a budget."""

    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    budget: int


def random_draft(rng: np.random.Generator, kind: str) -> Draft:
    """``plain``: any log-probabilities; ``ties``: multiples of a quarter, equal ones and equal sums abound; ``impossible``: −inf tails."""
    depths, ranks = int(rng.integers(1, MAX_PATH)), int(rng.integers(1, MAX_CANDIDATES + 1))
    log_probs = -np.sort(rng.exponential(rng.choice([0.2, 1.0, 4.0]), (depths, ranks)), axis=1)
    if kind == "ties":
        log_probs = -np.ceil(-log_probs * 4) / 4
    if kind == "impossible":
        log_probs[np.arange(ranks) >= rng.integers(0, ranks + 1, (depths, 1))] = -np.inf
    tokens = np.stack([rng.permutation(1000)[:ranks] for _ in range(depths)]).astype(np.int32)
    return Draft(tokens, log_probs.astype(np.float32), int(rng.integers(0, MAX_NODES)))


def launch_tree_build(bench: Bench, draft: Draft, root: int = 5, sequence: int = 1) -> list[Array]:
    """(size, tokens, parents, depths) as the kernel leaves them, each MAX_NODES long, poison beyond the tree."""
    depths, ranks = draft.tokens.shape
    ids, probs = poison("i32", MAX_PATH, MAX_CANDIDATES), poison("f32", MAX_PATH, MAX_CANDIDATES)
    ids[:depths, :ranks], probs[:depths, :ranks] = draft.tokens, draft.log_probs
    shape = bench.input(np.array([depths, ranks, draft.budget], np.int32))
    roots = np.full(SEQUENCES, -9, np.int32)
    roots[sequence] = root
    outputs: list[DeviceArray] = [bench.poisoned("i32", 1), *(bench.poisoned("i32", MAX_NODES) for _ in range(3))]
    bench.launch(shape, bench.input(ids), bench.input(probs), bench.input(roots), *outputs, sequence)
    results = [bench.read(array) for array in outputs]
    bench.release()
    return results


def compare_tree(bench: Bench, what: str, got: list[Array], tokens: Array, parents: Array, depths: Array, root: int = 5) -> None:
    """``tokens`` and ``depths`` without the root, ``parents`` with it."""
    size, got_tokens, got_parents, got_depths = got
    nodes = len(tokens) + 1
    bench.findings.equal(f"tree_size of {what}", size, np.array([nodes]))
    bench.findings.equal(f"tree_token of {what}", got_tokens[:nodes], np.array([root, *tokens]))
    bench.findings.equal(f"tree_parent of {what}", got_parents[:nodes], parents)
    bench.findings.equal(f"tree_depth of {what}", got_depths[:nodes], np.array([0, *depths]))
    for values in got[1:]:
        bench.findings.untouched(f"tree of {what} beyond its last node", values[nodes:])


@for_template(CHECKS, ["tree_build.cu.j2"])
def check_tree_build(bench: Bench) -> None:
    for kind in ("plain", "ties", "impossible"):
        for i in range(8):
            draft = random_draft(bench.rng, kind)
            expected = reference.build_tree(draft.tokens, draft.log_probs, draft.budget)
            compare_tree(bench, f"{kind} draft {i}", launch_tree_build(bench, draft), expected.tokens, expected.parents, expected.depths)
    nothing = Draft(np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32), 8)
    compare_tree(bench, "no draft", launch_tree_build(bench, nothing), np.zeros(0), np.array([-1]), np.zeros(0))
    full = Draft(np.arange(15 * 64, dtype=np.int32).reshape(15, 64), np.zeros((15, 64), np.float32), MAX_NODES - 1)
    expected = reference.build_tree(full.tokens, full.log_probs, full.budget)
    compare_tree(bench, "a draft of equals", launch_tree_build(bench, full), expected.tokens, expected.parents, expected.depths)


def _random_tree(bench: Bench, nodes: int) -> reference.Tree:
    """Any tree: parents before children, siblings with different tokens, no deeper than MAX_PATH."""
    parents, depths, tokens = [-1], [0], [0]
    for node in range(1, nodes):
        shallow = [n for n in range(node) if depths[n] < MAX_PATH - 1]
        parent = int(bench.rng.choice(shallow[-4:] if bench.rng.random() < 0.6 else shallow))
        taken = {tokens[n] for n in range(1, node) if parents[n] == parent}
        tokens.append(int(bench.rng.choice([t for t in range(node + 3) if t not in taken])))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return reference.Tree(np.array(tokens[1:], np.int64), np.array(depths[1:], np.int64), np.zeros(nodes - 1), np.array(parents, np.int32))


def _padded(values: Array, length: int = MAX_NODES) -> NDArray[np.int32]:
    memory = poison("i32", length)
    memory[: len(values)] = values
    return memory


TREE_SIZES = (1, 2, 31, 32, 33, 64)


@for_template(CHECKS, ["tree_rows.cu.j2"])
def check_tree_rows(bench: Bench) -> None:
    for nodes in TREE_SIZES:
        tree, lengths, sequence = _random_tree(bench, nodes), _lengths(bench), nodes % SEQUENCES
        depths, tokens = np.array([0, *tree.depths]), np.array([77, *tree.tokens])
        inputs = [bench.integer(nodes), *(bench.input(_padded(values)) for values in (tokens, tree.parents, depths)), bench.input(lengths)]
        number, *columns = (bench.poisoned("i32", n) for n in (1, *[guard(nodes)] * 5))
        path = bench.poisoned("i32", guard(nodes), MAX_PATH)
        bench.launch(*inputs, number, *columns, path, sequence)
        length = lengths[sequence]
        expected = {
            "tokens": tokens,
            "row_sequence": np.full(nodes, sequence),
            "row_position": length + depths,
            "row_prefix": np.full(nodes, length),
            "row_slot": length + np.arange(nodes),
        }
        for (name, values), array in zip(expected.items(), columns, strict=True):
            bench.findings.equal(name, split_guard(bench, name, bench.read(array), nodes), values)
        bench.findings.equal("num_tokens", bench.read(number), np.array([nodes]))
        got = split_guard(bench, "row_path", bench.read(path), nodes)
        wanted = np.full((nodes, MAX_PATH), -1)  # which is what poison reads as: nothing behind a path's end is written
        wanted[:, : tree.paths.shape[1]] = tree.paths
        bench.findings.equal("row_path", got, wanted)
        bench.release()


def launch_tree_accept(bench: Bench, tree: reference.Tree, posterior: Array, length: int = 40, sequence: int = 2) -> list[Array]:
    """(count, nodes, tokens, sequence_length, root_token) as the kernel leaves them."""
    nodes = tree.size + 1
    inputs = [bench.input(_padded(values)) for values in (np.array([77, *tree.tokens]), tree.parents, posterior)]
    outputs = [bench.poisoned("i32", 1), bench.poisoned("i32", MAX_PATH), bench.poisoned("i32", MAX_PATH)]
    state = [bench.input(np.full(SEQUENCES, value, np.int32)) for value in (length, -9)]
    bench.launch(bench.integer(nodes), *inputs, *outputs, *state, sequence)
    results = [bench.read(array) for array in (*outputs, *state)]
    bench.release()
    return results


def compare_walk(
    bench: Bench, what: str, got: list[Array], tokens: Array, accepted: Array, following: int, length: int = 40, sequence: int = 2
) -> None:
    """``tokens`` of all nodes, root included; ``accepted`` nodes, root first; ``following`` is the target's token after the last."""
    count, nodes, taken, lengths, roots = got
    number = len(accepted)
    bench.findings.equal(f"accepted_count of {what}", count, np.array([number]))
    bench.findings.equal(f"accepted_nodes of {what}", nodes[:number], accepted)
    bench.findings.equal(f"accepted_tokens of {what}", taken[:number], tokens[accepted])
    bench.findings.untouched(f"accepted nodes of {what} beyond the last", nodes[number:])
    bench.findings.untouched(f"accepted tokens of {what} beyond the last", taken[number:])
    changed = np.arange(SEQUENCES) == sequence
    bench.findings.equal(f"sequence_length of {what}", lengths, np.where(changed, length + number, length))
    bench.findings.equal(f"root_token of {what}", roots, np.where(changed, following, -9))


@for_template(CHECKS, ["tree_accept.cu.j2"])
def check_tree_accept(bench: Bench) -> None:
    for nodes in TREE_SIZES:
        for walk in range(3):
            tree = _random_tree(bench, nodes)
            posterior = bench.rng.integers(0, nodes + 3, nodes)
            for node in range(1, nodes):  # lead most walks on
                if bench.rng.random() < 0.8:
                    posterior[tree.parents[node]] = tree.tokens[node - 1]
            accepted, following = reference.walk(tree, posterior)
            got = launch_tree_accept(bench, tree, posterior)
            compare_walk(bench, f"walk {walk} over {nodes} nodes", got, np.array([77, *tree.tokens]), np.array(accepted), following)


@for_template(CHECKS, ["kv_compact.cu.j2"])
def check_kv_compact(bench: Bench) -> None:
    """Accepted rows move to their positions in every layer; all else keeps its bits."""
    p, layers, sequences, capacity = bench.p, bench.few(bench.kernel.grid[0].times), SEQUENCES, 90
    for nodes in TREE_SIZES:
        tree = _random_tree(bench, nodes)
        deepest = int(np.argmax([0, *tree.depths]))
        for node in {0, deepest, int(bench.rng.integers(0, nodes))}:
            accepted, prefix, sequence = tree.path(node), int(bench.rng.integers(0, capacity - MAX_NODES)), nodes % sequences
            cache = bench.random(bench.act, layers, sequences, capacity, p.row)
            device = bench.input(cache)
            meta = [np.array([len(accepted)]), _padded(np.array(accepted), MAX_PATH), np.full(nodes, sequence), np.full(nodes, prefix)]
            bench.launch(*(bench.input(values.astype(np.int32)) for values in meta), device, capacity, sequences, grid={0: layers})
            expected = cache.copy()
            kept = reference.compact(cache[:, sequence], prefix, accepted)
            expected[:, sequence, : kept.shape[1]] = kept
            bench.findings.same_bits(f"kv_cache with nodes {accepted} of {nodes}", bench.read(device), expected)
            bench.release()
