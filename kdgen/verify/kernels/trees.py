"""Checks of the integer kernels around the model: row metadata, greedy choice, candidates, tree building, walk and compaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import DeviceArray
from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES, MAX_PATH
from kdgen.plan.ops.tree import top_k_part_size, top_k_parts
from kdgen.reference import ops
from kdgen.reference import tree as reference
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.harness import Bench, Registry, check_rows, for_template, guard, in_slots, poison, read_cache, spaced, split_guard

Array = NDArray[Any]

CHECKS: Registry = {}
SEQUENCES = 3
CROWD = 130  #: sequences of a step: more than twice the threads of the kernels that have a place a thread


def _lengths(bench: Bench, sequences: int = SEQUENCES) -> NDArray[np.int32]:
    return bench.rng.integers(0, 100, sequences).astype(np.int32)


def _steps(bench: Bench) -> list[NDArray[np.int32]]:
    """Which sequence stands at each place of a step: one, some, all, in any order."""
    return [bench.rng.permutation(SEQUENCES)[:places].astype(np.int32) for places in range(1, SEQUENCES + 1)]


def crowded_steps(bench: Bench) -> list[NDArray[np.int32]]:
    """Steps of one to a few places, and of a crowd, which takes threads several rounds."""
    return [*_steps(bench), bench.rng.permutation(CROWD).astype(np.int32)]


@for_template(CHECKS, ["chain_rows.cu.j2"])
def check_chain_rows(bench: Bench) -> None:
    for step in crowded_steps(bench):
        for from_root in (0, 1):
            lengths, roots = _lengths(bench, CROWD), bench.rng.integers(0, 1000, CROWD).astype(np.int32)
            counts = np.ones(len(step), np.int32) if from_root else bench.rng.integers(1, 20, len(step)).astype(np.int32)
            begins, rows = np.cumsum([0, *counts], dtype=np.int32), int(counts.sum())
            tokens = bench.rng.integers(0, 1000, rows).astype(np.int32)
            places, number, ids = bench.integer(len(step)), bench.poisoned("i32", 1), bench.input(tokens)
            begin = bench.poisoned("i32", len(step) + 1) if from_root else bench.input(begins)
            outputs = [bench.poisoned("i32", guard(rows)) for _ in range(4)]
            state = bench.input(lengths), bench.input(roots)
            bench.launch(places, bench.input(step), begin, number, ids, *state, *outputs, from_root)
            sequence = np.repeat(step, counts)
            position = lengths[sequence] + np.concatenate([np.arange(count) for count in counts])
            expected = {"row_sequence": sequence, "row_position": position, "row_prefix": position + 1, "row_slot": position}
            for (name, values), array in zip(expected.items(), outputs, strict=True):
                bench.findings.equal(name, split_guard(bench, name, bench.read(array), rows), values)
            bench.findings.equal("tokens", bench.read(ids), roots[step] if from_root else tokens)
            bench.findings.equal("step_begin", bench.read(begin), begins)
            bench.findings.equal("num_tokens", bench.read(number), np.array([rows]))
            bench.release()


@for_template(CHECKS, ["logit_rows.cu.j2"])
def check_logit_rows(bench: Bench) -> None:
    """None, some or all rows of a place, more of them than a block has threads, too."""
    for step in crowded_steps(bench):
        counts = bench.rng.integers(1, 20, len(step)).astype(np.int32)
        counts[0] += 2 * bench.p.block
        wanted = bench.rng.integers(0, counts + 1).astype(np.int32)
        for chosen in (wanted, counts, np.minimum(counts, 1), np.zeros_like(counts)):
            begins, firsts = np.cumsum([0, *counts], dtype=np.int32), np.cumsum([0, *chosen], dtype=np.int32)
            sequence, position = (bench.rng.integers(0, 1000, begins[-1]).astype(np.int32) for _ in range(2))
            rows = np.concatenate([np.arange(end - number, end) for end, number in zip(begins[1:], chosen, strict=True)])
            number, *outputs = bench.poisoned("i32", 1), *(bench.poisoned("i32", guard(len(rows))) for _ in range(3))
            inputs = [bench.input(values) for values in (begins, firsts, sequence, position)]
            bench.launch(bench.integer(len(step)), *inputs, number, *outputs)
            expected = {"logit_row": rows, "logit_sequence": sequence[rows], "logit_position": position[rows]}
            for (name, values), array in zip(expected.items(), outputs, strict=True):
                bench.findings.equal(name, split_guard(bench, name, bench.read(array), len(rows)), values)
            bench.findings.equal("num_logits", bench.read(number), np.array([len(rows)]))
            bench.release()


@for_template(CHECKS, ["advance.cu.j2"])
def check_advance(bench: Bench) -> None:
    for step in crowded_steps(bench):
        lengths, roots = _lengths(bench, CROWD), np.full(CROWD, 7, np.int32)
        counts = bench.rng.integers(1, 20, len(step)).astype(np.int32)
        begins = np.cumsum([0, *counts], dtype=np.int32)
        firsts = np.cumsum([0, *bench.rng.integers(1, counts + 1)], dtype=np.int32)
        choices = bench.rng.integers(0, 1000, firsts[-1]).astype(np.int32)
        length, root = bench.input(lengths), bench.input(roots)
        runs = bench.input(step), bench.input(begins), bench.input(firsts)
        bench.launch(bench.integer(len(step)), *runs, bench.input(choices), length, root)
        lengths[step] += counts
        roots[step] = choices[firsts[1:] - 1]
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
    for row in range(3, most, 2):  # one logit that is not finite, anywhere, beside others that are
        logits[row, bench.rng.integers(p.vocab)] = (np.nan, -np.nan, np.inf, -np.inf)[row // 2 % 4]
    if p.sharded:
        _check_sharded_argmax(bench, logits)
    else:
        _check_whole_argmax(bench, logits)


def _check_whole_argmax(bench: Bench, logits: Array) -> None:
    planted, places = planted_logits(bench, bench.p)

    def run(rows: NDArray[np.int64], logits: Array = logits) -> dict[str, Array]:
        count = len(rows)
        chosen = bench.poisoned("i32", guard(count))
        bench.launch(bench.integer(count), bench.input(logits[rows]), chosen, tokens=count)
        return {"next_token": split_guard(bench, "next_token", bench.read(chosen), count)}

    check_rows(bench, run, {"next_token": (marked(_largest(logits), logits), np.zeros(1))})
    bench.findings.equal("next_token of planted rows", run(np.arange(len(places)), planted)["next_token"], marked(places, planted))
    bench.release()


def marked(tokens: Array, logits: Array) -> Array:
    """``tokens`` [rows], with all bits flipped where a row of ``logits`` [rows, vocab] holds a NaN or an infinity."""
    return np.where(np.isfinite(logits).all(axis=1), tokens, ~tokens)


def _largest(logits: Array) -> Array:
    """The lowest index of each row's largest logit; a NaN is no logit."""
    return ops.argmax(np.where(np.isnan(logits), -np.inf, logits))


def planted_logits(bench: Bench, p: Any) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Logits [rows, vocab] with one largest each, and where it is: the ends of the row, both sides of every bound between the vectors
    that threads load one after another, and a place of each warp. Some rows have a second one, as large, behind the first, in another
    pass or warp; some hold a NaN.
    """
    chunk, vocab = p.block * p.vector, p.vocab  # what all threads load together
    bounds = np.arange(chunk, vocab, chunk)
    warps = np.arange(0, min(vocab, chunk), 32 * p.vector) + bench.rng.integers(0, 32 * p.vector, -(-min(vocab, chunk) // (32 * p.vector)))
    warps += bench.rng.integers(0, len(bounds) + 1, len(warps)) * chunk
    places = np.unique(np.concatenate([[0, vocab - 1], bounds - 1, bounds, warps[warps < vocab]]))
    logits = -np.abs(bench.random("f32", len(places), vocab)) - 1
    logits[np.arange(len(places)), places] = 1
    for row, place in enumerate(places[:-1]):
        if row % 3 == 0:
            logits[row, bench.rng.integers(place + 1, vocab)] = 1
        elif row % 3 == 1:
            logits[row, bench.rng.integers(place + 1, vocab)] = np.nan
    return logits, places


def _check_sharded_argmax(bench: Bench, logits: Array) -> None:
    """A rank's best: its value, and its id among all tokens, of which the rank's begin at ``first``."""
    first = 1000
    logits[-1] = np.nan
    planted, places = planted_logits(bench, bench.p)

    def run(rows: NDArray[np.int64], logits: Array = logits) -> dict[str, Array]:
        count = len(rows)
        choice = bench.poisoned("i32", guard(count), 2)
        bench.launch(bench.integer(count), bench.input(logits[rows]), first, choice, tokens=count)
        values, ids = split_guard(bench, "choice", bench.read(choice), count).T
        return {"value": values, "id": ids}

    best = _largest(logits[:-1])
    values = np.append(logits[np.arange(len(best)), best], np.float32(-np.inf)).view(np.int32)
    ids = marked(np.append(first + best, 2**31 - 1), logits)
    check_rows(bench, run, {"value": (values, np.zeros(1)), "id": (ids, np.zeros(1))})
    bench.findings.equal("ids of planted rows", run(np.arange(len(places)), planted)["id"], marked(first + places, planted))
    bench.release()


@for_template(CHECKS, ["top_k_parts.cu.j2", "top_k.cu.j2"])
def check_top_k(bench: Bench) -> None:
    """Tokens exactly, ties included; log-probabilities over the whole vocabulary, or a part's maximum and sum for them."""
    p, most = bench.p, min(MAX_PATH - 1, max(bench.tokens))
    logits = _coarse_logits(bench, most, p.vocab)
    finite = int(np.isfinite(logits).sum(axis=1).min())  # beyond these a row's candidates are impossible tokens, in any order
    for count in sorted({min(wanted, finite) for wanted in (1, 2, 10, MAX_CANDIDATES)}):
        for rows, place in ((1, 1), (most, 0)):  # the other place drafts nothing
            shape = np.zeros((2, 4), np.int32)
            first = int(bench.rng.integers(0, 2 * MAX_PATH - rows + 1))  # a place's logits may begin at any row
            shape[place] = rows, count, 60, first
            if bench.kernel.template == "top_k_parts.cu.j2":
                drafted = np.full((2 * MAX_PATH, p.vocab), np.nan, np.float32)
                drafted[first : first + rows] = logits[:rows]
                _check_parts(bench, shape, place, drafted, logits[:rows], count)
            else:
                _check_joined(bench, shape, place, logits[:rows], count)
            bench.release()


def _check_parts(bench: Bench, shape: Array, place: int, drafted: Array, logits: Array, count: int) -> None:
    """Each part's candidates in order, and the maximum and the sum of exponentials that its log-sum-exp is made of."""
    size, rows, parts = top_k_part_size(bench.p.vocab), len(logits), top_k_parts(bench.p.vocab)
    found = bench.poisoned("i32", 2, MAX_PATH, parts, MAX_CANDIDATES, 2)
    sums = bench.poisoned("f32", 2, MAX_PATH, parts, 2)
    bench.launch(bench.integer(2), bench.input(shape), bench.input(drafted), found, sums, tokens=rows, sequences=2)
    candidates, both = bench.read(found), bench.read(sums)
    bench.findings.untouched("candidates of a place without draft", candidates[1 - place])
    got = split_guard(bench, "part_candidates", candidates[place], rows)
    got_sums = split_guard(bench, "part_sums", both[place], rows)
    keys, tokens, expected = part_candidates(logits, count, size)
    bench.findings.equal("part_candidates", got[:, :, :count, 0].view(np.uint32), keys)
    bench.findings.equal("tokens of part_candidates", got[:, :, :count, 1], tokens)
    bench.findings.untouched("candidates beyond the last", got[:, :, count:])
    bench.findings.equal("maxima of parts", got_sums[..., 0], expected[..., 0])
    bench.findings.close("sums of parts", got_sums[..., 1], expected[..., 1], tolerances.positive_sum(expected[..., 1], size))


def _check_joined(bench: Bench, shape: Array, place: int, logits: Array, count: int) -> None:
    rows, parts = len(logits), bench.p.parts
    keys, part_tokens, part_sums = part_candidates(logits, count, top_k_part_size(bench.p.vocab))
    candidates = poison("i32", 2, MAX_PATH, parts, MAX_CANDIDATES, 2)
    candidates[place, :rows, :, :count] = np.stack([keys.view(np.int32), part_tokens], axis=-1)
    sums = np.full((2, MAX_PATH, parts, 2), np.nan, np.float32)
    sums[place, :rows] = part_sums
    ids, probs = (bench.poisoned(dtype, 2, MAX_PATH, MAX_CANDIDATES) for dtype in ("i32", "f32"))
    bench.launch(bench.integer(2), bench.input(shape), bench.input(candidates), bench.input(sums), ids, probs, tokens=rows, sequences=2)
    both_ids, both = bench.read(ids), bench.read(probs)
    bench.findings.untouched("candidates of a place without draft", both_ids[1 - place])
    got_ids = split_guard(bench, "candidate_tokens", both_ids[place], rows)
    got = split_guard(bench, "candidate_log_probs", both[place], rows)
    tokens, log_probs = ops.top_k_log_probs(logits, count)
    bench.findings.equal("candidate_tokens", got_ids[:, :count], tokens)
    largest = np.abs(logits.max(axis=1, keepdims=True))
    error = tolerances.formula(np.abs(log_probs) + largest) + tolerances.positive_sum(np.ones(1), bench.p.vocab)
    bench.findings.close("candidate_log_probs", got[:, :count], log_probs, error)
    bench.findings.untouched("candidates beyond the last", got[:, count:])
    bench.findings.untouched("candidates beyond the last", got_ids[:, count:])


def part_candidates(logits: Array, count: int, size: int) -> tuple[Array, Array, Array]:
    """Of float32 logits [M, V] in parts of ``size``: keys (uint32) and tokens [M, parts, count], best first, those that are not there 0
    and 2^31 - 1; and [M, parts, 2], each part's maximum and its sum of exponentials above that."""
    bits = (logits + np.float32(0)).view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))
    parts = range(-(-logits.shape[1] // size))
    found_keys = np.zeros((len(logits), len(parts), count), np.uint32)
    found_tokens = np.full(found_keys.shape, 2**31 - 1, np.int32)
    sums = np.zeros((len(logits), len(parts), 2))
    for part in parts:
        mine = slice(part * size, (part + 1) * size)
        order = np.argsort(~keys[:, mine], axis=1, kind="stable")[:, :count]
        found_tokens[:, part, : order.shape[1]] = order + part * size
        found_keys[:, part, : order.shape[1]] = np.take_along_axis(keys[:, mine], order, axis=1)
        largest = logits[:, mine].max(axis=1, keepdims=True).astype(np.float64)
        sums[:, part, 0] = largest[:, 0]
        sums[:, part, 1] = np.exp(logits[:, mine] - np.where(np.isinf(largest), 0, largest)).sum(axis=1)
    return found_keys, found_tokens, sums.astype(np.float32)


# ---- trees --------------------------------------------------------------------------------------------------------------


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


def launch_tree_build(bench: Bench, draft: Draft, root: int = 5, places: int = 1, place: int = 0) -> list[Array]:
    """(size, tokens, parents, depths) as the kernel leaves them, each MAX_NODES long, poison beyond the tree.

    The draft stands at ``place`` of a step of ``places``; the others draft nothing.
    """
    depths, ranks = draft.tokens.shape
    # beyond the draft's own rows and ranks lies what an earlier one left: candidates that are certain
    ids, probs = np.full((places, MAX_PATH, MAX_CANDIDATES), 9999, np.int32), np.zeros((places, MAX_PATH, MAX_CANDIDATES), np.float32)
    ids[place, :depths, :ranks], probs[place, :depths, :ranks] = draft.tokens, draft.log_probs
    shape = np.zeros((places, 4), np.int32)
    shape[place] = depths, ranks, draft.budget, 0
    step = bench.rng.permutation(SEQUENCES)[:places].astype(np.int32)
    roots = np.full(SEQUENCES, -9, np.int32)
    roots[step[place]] = root
    outputs: list[DeviceArray] = [bench.poisoned("i32", places), *(bench.poisoned("i32", places, MAX_NODES) for _ in range(3))]
    inputs = [bench.input(values) for values in (step, shape, ids, probs, roots)]
    bench.launch(bench.integer(places), *inputs, *outputs, sequences=places)
    results = [bench.read(array)[place] for array in outputs]
    results[0] = results[0].reshape(1)
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
    for kind in ("plain", "ties", "close", "impossible"):
        for i in range(8):
            draft = random_draft(bench.rng, kind)
            expected = reference.build_tree(draft.tokens, draft.log_probs, draft.budget)
            places = 1 + i % SEQUENCES
            got = launch_tree_build(bench, draft, places=places, place=i % places)
            compare_tree(bench, f"{kind} draft {i}", got, expected.tokens, expected.parents, expected.depths)
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


def _trees(bench: Bench, trees: list[reference.Tree]) -> list[DeviceArray]:
    """(sizes, tokens, parents, depths) of a step's trees, one padded row a place."""
    columns = ([[77, *tree.tokens] for tree in trees], [tree.parents for tree in trees], [[0, *tree.depths] for tree in trees])
    sizes = np.array([tree.size + 1 for tree in trees], np.int32)
    return [bench.input(sizes), *(bench.input(np.stack([_padded(np.array(values)) for values in column])) for column in columns)]


@for_template(CHECKS, ["tree_rows.cu.j2"])
def check_tree_rows(bench: Bench) -> None:
    for step in (*_steps(bench), *_steps(bench), *_steps(bench), bench.rng.permutation(CROWD)[:9].astype(np.int32)):
        trees = [_random_tree(bench, int(bench.rng.choice(TREE_SIZES))) for _ in step]
        lengths, nodes = _lengths(bench, CROWD), [tree.size + 1 for tree in trees]
        rows, begins = sum(nodes), np.cumsum([0, *nodes])
        begin, number = bench.poisoned("i32", len(step) + 1), bench.poisoned("i32", 1)
        columns = [bench.poisoned("i32", guard(rows)) for _ in range(5)]
        path = bench.poisoned("i32", guard(rows), MAX_PATH)
        inputs = bench.integer(len(step)), bench.input(step), begin, *_trees(bench, trees), bench.input(lengths)
        bench.launch(*inputs, number, *columns, path, sequences=len(step))
        sequence = np.repeat(step, nodes)
        expected = {
            "tokens": np.concatenate([[77, *tree.tokens] for tree in trees]),
            "row_sequence": sequence,
            "row_position": lengths[sequence] + np.concatenate([[0, *tree.depths] for tree in trees]),
            "row_prefix": lengths[sequence],
            "row_slot": lengths[sequence] + np.concatenate([np.arange(count) for count in nodes]),
        }
        for (name, values), array in zip(expected.items(), columns, strict=True):
            bench.findings.equal(name, split_guard(bench, name, bench.read(array), rows), values)
        bench.findings.equal("num_tokens", bench.read(number), np.array([rows]))
        bench.findings.equal("step_begin", bench.read(begin), begins)
        got = split_guard(bench, "row_path", bench.read(path), rows)
        wanted = np.full((rows, MAX_PATH), -1)  # which is what poison reads as: nothing behind a path's end is written
        for first, tree in zip(begins, trees, strict=False):
            wanted[first : first + tree.size + 1, : tree.paths.shape[1]] = tree.paths
        bench.findings.equal("row_path", got, wanted)
        bench.release()


def launch_tree_accept(
    bench: Bench, tree: reference.Tree, posterior: Array, length: int = 40, sequence: int = 2, after: int = 0
) -> list[Array]:
    """(count, nodes, tokens, sequence_length, root_token) as the kernel leaves them.

    ``after`` puts the tree at the step's second place, behind a root alone with that many rows before the tree's.
    """
    place = 1 if after else 0
    trees = [reference.Tree(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.array([-1], np.int32)), tree][1 - place :]
    step = np.array([(sequence + 1) % SEQUENCES, sequence], np.int32)[1 - place :]
    begins = np.array([0, after, after + tree.size + 1][1 - place :], np.int32)
    begins[0] = 0
    sizes, tokens, parents, _ = _trees(bench, trees)
    chosen = bench.input(np.concatenate([np.full(after, -5), posterior]).astype(np.int32))
    outputs = [bench.poisoned("i32", place + 1), *(bench.poisoned("i32", place + 1, MAX_PATH) for _ in range(2))]
    state = [bench.input(np.full(SEQUENCES, value, np.int32)) for value in (length, -9)]
    inputs = bench.integer(place + 1), bench.input(step), bench.input(begins), sizes, tokens, parents, chosen
    bench.launch(*inputs, *outputs, *state, sequences=place + 1)
    count, nodes, taken, lengths, roots = (bench.read(array) for array in (*outputs, *state))
    if after:  # the root alone: one more token, and its choice
        bench.findings.equal("sequence_length of a root alone", lengths[step[0]], np.array(length + 1))
        bench.findings.equal("root_token of a root alone", roots[step[0]], np.array(-5))
        lengths[step[0]], roots[step[0]] = length, -9
    bench.release()
    return [count[place].reshape(1), nodes[place], taken[place], lengths, roots]


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
            got = launch_tree_accept(bench, tree, posterior, after=walk)
            compare_walk(bench, f"walk {walk} over {nodes} nodes", got, np.array([77, *tree.tokens]), np.array(accepted), following)


@for_template(CHECKS, ["kv_compact.cu.j2"])
def check_kv_compact(bench: Bench) -> None:
    """Accepted rows move to their positions in every layer; all else keeps its bits."""
    p, layers, capacity = bench.p, bench.few(bench.kernel.grid[0].times), 90
    for nodes in TREE_SIZES:
        for step in _steps(bench):
            trees = [_random_tree(bench, nodes) for _ in step]
            deepest = [int(np.argmax([0, *tree.depths])) for tree in trees]
            ends = [int(bench.rng.choice([0, deep, int(bench.rng.integers(0, nodes))])) for deep in deepest]
            accepted = [tree.path(end) for tree, end in zip(trees, ends, strict=True)]
            prefixes = bench.rng.integers(0, capacity - MAX_NODES, len(step))
            cache = bench.random(bench.act, layers, SEQUENCES, capacity, p.row)
            slots = in_slots(bench, cache).reshape(layers * SEQUENCES, -1, p.row)
            most = 2**31 // slots[0].size + SEQUENCES  # sequences of a cache beyond 2^31 elements
            places = np.arange(layers)[:, None] * most + spaced(SEQUENCES, most)
            device, numbers = bench.spread(slots, places.reshape(-1), layers * most)
            most = SEQUENCES if numbers[1] == 1 else most  # where they are side by side
            meta = [
                np.array([len(step)]),
                np.arange(len(step) + 1) * nodes,
                np.array([len(path) for path in accepted]),
                np.stack([_padded(np.array(path), MAX_PATH) for path in accepted]),
                np.repeat(numbers[step], nodes),
                np.repeat(prefixes, nodes),
            ]
            inputs = [bench.input(values.astype(np.int32)) for values in meta]
            bench.launch(*inputs, device, slots.shape[1], most, grid={0: layers}, sequences=len(step))
            expected = cache.copy()
            for sequence, prefix, path in zip(step, prefixes, accepted, strict=True):
                kept = reference.compact(cache[:, sequence], int(prefix), path)
                expected[:, sequence, : kept.shape[1]] = kept
            got = read_cache(bench, device, numbers, slots).reshape(layers, SEQUENCES, -1, p.row)[:, :, :capacity]
            bench.findings.same_bits(f"kv_cache with nodes {accepted} of {nodes}", got, expected)
            bench.release()
