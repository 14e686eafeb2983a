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
from kdgen.verify.kernels.harness import (
    Grid,
    Harness,
    Registry,
    check_rows,
    for_template,
    guard,
    in_slots,
    poison,
    read_cache,
    spaced,
    split_guard,
)

Array = NDArray[Any]

CHECKS: Registry = {}
SEQUENCES = 3
CROWD = 130  #: sequences of a step: more than twice the threads of the kernels that have a place a thread


def _lengths(harness: Harness, sequences: int = SEQUENCES) -> NDArray[np.int32]:
    return harness.rng.integers(0, 100, sequences).astype(np.int32)


def _steps(harness: Harness) -> list[NDArray[np.int32]]:
    """Which sequence stands at each place of a step: one, some, all, in any order."""
    return [harness.rng.permutation(SEQUENCES)[:places].astype(np.int32) for places in range(1, SEQUENCES + 1)]


def crowded_steps(harness: Harness) -> list[NDArray[np.int32]]:
    """Steps of one to a few places, and of a crowd, which takes threads several rounds."""
    return [*_steps(harness), harness.rng.permutation(CROWD).astype(np.int32)]


@for_template(CHECKS, ["chain_rows.cu.j2"])
def check_chain_rows(harness: Harness) -> None:
    for step in crowded_steps(harness):
        for from_root in (0, 1):
            lengths, roots = _lengths(harness, CROWD), harness.rng.integers(0, 1000, CROWD).astype(np.int32)
            counts = np.ones(len(step), np.int32) if from_root else harness.rng.integers(1, 20, len(step)).astype(np.int32)
            begins, rows = np.cumsum([0, *counts], dtype=np.int32), int(counts.sum())
            tokens = harness.rng.integers(0, 1000, rows).astype(np.int32)
            places, number, ids = harness.integer(len(step)), harness.poisoned("i32", 1), harness.input(tokens)
            begin = harness.poisoned("i32", len(step) + 1) if from_root else harness.input(begins)
            outputs = {name: harness.poisoned("i32", guard(rows)) for name in ("row_sequence", "row_position", "row_prefix", "row_slot")}
            harness.launch(
                Grid(),
                step_count=places,
                step_sequence=harness.input(step),
                step_begin=begin,
                num_tokens=number,
                tokens=ids,
                sequence_length=harness.input(lengths),
                root_token=harness.input(roots),
                from_root=from_root,
                **outputs,
            )
            sequence = np.repeat(step, counts)
            position = lengths[sequence] + np.concatenate([np.arange(count) for count in counts])
            expected = {"row_sequence": sequence, "row_position": position, "row_prefix": position + 1, "row_slot": position}
            for name, values in expected.items():
                harness.findings.equal(name, split_guard(harness, name, harness.read(outputs[name]), rows), values)
            harness.findings.equal("tokens", harness.read(ids), roots[step] if from_root else tokens)
            harness.findings.equal("step_begin", harness.read(begin), begins)
            harness.findings.equal("num_tokens", harness.read(number), np.array([rows]))
            harness.release()


@for_template(CHECKS, ["logit_rows.cu.j2"])
def check_logit_rows(harness: Harness) -> None:
    """None, some or all rows of a place, more of them than a block has threads, too."""
    for step in crowded_steps(harness):
        counts = harness.rng.integers(1, 20, len(step)).astype(np.int32)
        counts[0] += 2 * harness.p.block
        wanted = harness.rng.integers(0, counts + 1).astype(np.int32)
        for chosen in (wanted, counts, np.minimum(counts, 1), np.zeros_like(counts)):
            begins, firsts = np.cumsum([0, *counts], dtype=np.int32), np.cumsum([0, *chosen], dtype=np.int32)
            sequence, position = (harness.rng.integers(0, 1000, begins[-1]).astype(np.int32) for _ in range(2))
            rows = np.concatenate([np.arange(end - number, end) for end, number in zip(begins[1:], chosen, strict=True)])
            expected = {"logit_row": rows, "logit_sequence": sequence[rows], "logit_position": position[rows]}
            number, outputs = harness.poisoned("i32", 1), {name: harness.poisoned("i32", guard(len(rows))) for name in expected}
            harness.launch(
                Grid(),
                step_count=harness.integer(len(step)),
                step_begin=harness.input(begins),
                logit_begin=harness.input(firsts),
                row_sequence=harness.input(sequence),
                row_position=harness.input(position),
                num_logits=number,
                **outputs,
            )
            for name, values in expected.items():
                harness.findings.equal(name, split_guard(harness, name, harness.read(outputs[name]), len(rows)), values)
            harness.findings.equal("num_logits", harness.read(number), np.array([len(rows)]))
            harness.release()


@for_template(CHECKS, ["advance.cu.j2"])
def check_advance(harness: Harness) -> None:
    for step in crowded_steps(harness):
        lengths, roots = _lengths(harness, CROWD), np.full(CROWD, 7, np.int32)
        counts = harness.rng.integers(1, 20, len(step)).astype(np.int32)
        begins = np.cumsum([0, *counts], dtype=np.int32)
        firsts = np.cumsum([0, *harness.rng.integers(1, counts + 1)], dtype=np.int32)
        choices = harness.rng.integers(0, 1000, firsts[-1]).astype(np.int32)
        length, root = harness.input(lengths), harness.input(roots)
        harness.launch(
            Grid(),
            step_count=harness.integer(len(step)),
            step_sequence=harness.input(step),
            step_begin=harness.input(begins),
            logit_begin=harness.input(firsts),
            next_token=harness.input(choices),
            sequence_length=length,
            root_token=root,
        )
        lengths[step] += counts
        roots[step] = choices[firsts[1:] - 1]
        harness.findings.equal("sequence_length", harness.read(length), lengths)
        harness.findings.equal("root_token", harness.read(root), roots)
        harness.release()


# ---- choices ------------------------------------------------------------------------------------------------------------


def _coarse_logits(harness: Harness, rows: int, vocab: int) -> NDArray[np.float32]:
    """Logits [rows, vocab] with many equal values, the largest among them; one row equal throughout, one with −inf, one random."""
    logits = (harness.rng.integers(-64, 65, (rows, vocab)) / 16).astype(np.float32)
    logits[0] = 0.5
    if rows > 1:
        logits[1] = -np.inf
        logits[1, harness.rng.permutation(vocab)[: max(1, vocab // 3)]] = -3.25
    if rows > 2:
        logits[2] = harness.random("f32", vocab, scale=4.0)
        logits[2, -1] = 40.0
    return logits


@for_template(CHECKS, ["argmax.cu.j2"])
def check_argmax(harness: Harness) -> None:
    p = harness.p
    most = max(harness.tokens)
    logits = _coarse_logits(harness, most, p.vocab)
    for row in range(3, most, 2):  # one logit that is not finite, anywhere, beside others that are
        logits[row, harness.rng.integers(p.vocab)] = (np.nan, -np.nan, np.inf, -np.inf)[row // 2 % 4]
    if p.sharded:
        _check_sharded_argmax(harness, logits)
    else:
        _check_whole_argmax(harness, logits)


def _check_whole_argmax(harness: Harness, logits: Array) -> None:
    planted, places = planted_logits(harness, harness.p)

    def run(rows: NDArray[np.int64], logits: Array = logits) -> dict[str, Array]:
        count = len(rows)
        chosen = harness.poisoned("i32", guard(count))
        harness.launch(Grid(count), num_tokens=harness.integer(count), logits=harness.input(logits[rows]), next_token=chosen)
        return {"next_token": split_guard(harness, "next_token", harness.read(chosen), count)}

    check_rows(harness, run, {"next_token": (marked(_largest(logits), logits), np.zeros(1))})
    harness.findings.equal("next_token of planted rows", run(np.arange(len(places)), planted)["next_token"], marked(places, planted))
    harness.release()


def marked(tokens: Array, logits: Array) -> Array:
    """``tokens`` [rows], with all bits flipped where a row of ``logits`` [rows, vocab] holds a NaN or an infinity."""
    return np.where(np.isfinite(logits).all(axis=1), tokens, ~tokens)


def _largest(logits: Array) -> Array:
    """The lowest index of each row's largest logit; a NaN is no logit."""
    return ops.argmax(np.where(np.isnan(logits), -np.inf, logits))


def planted_logits(harness: Harness, p: Any) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Logits [rows, vocab] with one largest each, and where it is: the ends of the row, both sides of every bound between the vectors
    that threads load one after another, and a place of each warp. Some rows have a second one, as large, behind the first, in another
    pass or warp; some hold a NaN.
    """
    chunk, vocab = p.block * p.vector, p.vocab  # what all threads load together
    bounds = np.arange(chunk, vocab, chunk)
    warps = np.arange(0, min(vocab, chunk), 32 * p.vector) + harness.rng.integers(
        0, 32 * p.vector, -(-min(vocab, chunk) // (32 * p.vector))
    )
    warps += harness.rng.integers(0, len(bounds) + 1, len(warps)) * chunk
    places = np.unique(np.concatenate([[0, vocab - 1], bounds - 1, bounds, warps[warps < vocab]]))
    logits = -np.abs(harness.random("f32", len(places), vocab)) - 1
    logits[np.arange(len(places)), places] = 1
    for row, place in enumerate(places[:-1]):
        if row % 3 == 0:
            logits[row, harness.rng.integers(place + 1, vocab)] = 1
        elif row % 3 == 1:
            logits[row, harness.rng.integers(place + 1, vocab)] = np.nan
    return logits, places


def _check_sharded_argmax(harness: Harness, logits: Array) -> None:
    """A rank's best: its value, and its id among all tokens, of which the rank's begin at ``first``."""
    first = 1000
    logits[-1] = np.nan
    planted, places = planted_logits(harness, harness.p)

    def run(rows: NDArray[np.int64], logits: Array = logits) -> dict[str, Array]:
        count = len(rows)
        choice = harness.poisoned("i32", guard(count), 2)
        harness.launch(Grid(count), num_tokens=harness.integer(count), logits=harness.input(logits[rows]), first_token=first, choice=choice)
        values, ids = split_guard(harness, "choice", harness.read(choice), count).T
        return {"value": values, "id": ids}

    best = _largest(logits[:-1])
    values = np.append(logits[np.arange(len(best)), best], np.float32(-np.inf)).view(np.int32)
    ids = marked(np.append(first + best, 2**31 - 1), logits)
    check_rows(harness, run, {"value": (values, np.zeros(1)), "id": (ids, np.zeros(1))})
    harness.findings.equal("ids of planted rows", run(np.arange(len(places)), planted)["id"], marked(first + places, planted))
    harness.release()


@for_template(CHECKS, ["top_k_parts.cu.j2", "top_k.cu.j2"])
def check_top_k(harness: Harness) -> None:
    """Tokens exactly, ties included; log-probabilities over the whole vocabulary, or a part's maximum and sum for them."""
    p, most = harness.p, min(MAX_PATH - 1, max(harness.tokens))
    logits = _coarse_logits(harness, most, p.vocab)
    finite = int(np.isfinite(logits).sum(axis=1).min())  # beyond these a row's candidates are impossible tokens, in any order
    for count in sorted({min(wanted, finite) for wanted in (1, 2, 10, MAX_CANDIDATES)}):
        for rows, place in ((1, 1), (most, 0)):  # the other place drafts nothing
            shape = np.zeros((2, 4), np.int32)
            first = int(harness.rng.integers(0, 2 * MAX_PATH - rows + 1))  # a place's logits may begin at any row
            shape[place] = rows, count, 60, first
            if harness.kernel.template == "top_k_parts.cu.j2":
                drafted = np.full((2 * MAX_PATH, p.vocab), np.nan, np.float32)
                drafted[first : first + rows] = logits[:rows]
                _check_parts(harness, shape, place, drafted, logits[:rows], count)
            else:
                _check_joined(harness, shape, place, logits[:rows], count)
            harness.release()


def _check_parts(harness: Harness, shape: Array, place: int, drafted: Array, logits: Array, count: int) -> None:
    """Each part's candidates in order, and the maximum and the sum of exponentials that its log-sum-exp is made of."""
    size, rows, parts = top_k_part_size(harness.p.vocab), len(logits), top_k_parts(harness.p.vocab)
    found = harness.poisoned("i32", 2, MAX_PATH, parts, MAX_CANDIDATES, 2)
    sums = harness.poisoned("f32", 2, MAX_PATH, parts, 2)
    harness.launch(
        Grid(rows, sequences=2),
        step_count=harness.integer(2),
        draft_shape=harness.input(shape),
        logits=harness.input(drafted),
        part_candidates=found,
        part_sums=sums,
    )
    candidates, both = harness.read(found), harness.read(sums)
    harness.findings.untouched("candidates of a place without draft", candidates[1 - place])
    got = split_guard(harness, "part_candidates", candidates[place], rows)
    got_sums = split_guard(harness, "part_sums", both[place], rows)
    keys, tokens, expected = part_candidates(logits, count, size)
    harness.findings.equal("part_candidates", got[:, :, :count, 0].view(np.uint32), keys)
    harness.findings.equal("tokens of part_candidates", got[:, :, :count, 1], tokens)
    harness.findings.untouched("candidates beyond the last", got[:, :, count:])
    harness.findings.equal("maxima of parts", got_sums[..., 0], expected[..., 0])
    harness.findings.close("sums of parts", got_sums[..., 1], expected[..., 1], tolerances.positive_sum(expected[..., 1], size))


def _check_joined(harness: Harness, shape: Array, place: int, logits: Array, count: int) -> None:
    rows, parts = len(logits), harness.p.parts
    keys, part_tokens, part_sums = part_candidates(logits, count, top_k_part_size(harness.p.vocab))
    candidates = poison("i32", 2, MAX_PATH, parts, MAX_CANDIDATES, 2)
    candidates[place, :rows, :, :count] = np.stack([keys.view(np.int32), part_tokens], axis=-1)
    sums = np.full((2, MAX_PATH, parts, 2), np.nan, np.float32)
    sums[place, :rows] = part_sums
    ids, probs = (harness.poisoned(dtype, 2, MAX_PATH, MAX_CANDIDATES) for dtype in ("i32", "f32"))
    harness.launch(
        Grid(rows, sequences=2),
        step_count=harness.integer(2),
        draft_shape=harness.input(shape),
        part_candidates=harness.input(candidates),
        part_sums=harness.input(sums),
        candidate_tokens=ids,
        candidate_log_probs=probs,
    )
    both_ids, both = harness.read(ids), harness.read(probs)
    harness.findings.untouched("candidates of a place without draft", both_ids[1 - place])
    got_ids = split_guard(harness, "candidate_tokens", both_ids[place], rows)
    got = split_guard(harness, "candidate_log_probs", both[place], rows)
    tokens, log_probs = ops.top_k_log_probs(logits, count)
    harness.findings.equal("candidate_tokens", got_ids[:, :count], tokens)
    largest = np.abs(logits.max(axis=1, keepdims=True))
    error = tolerances.formula(np.abs(log_probs) + largest) + tolerances.positive_sum(np.ones(1), harness.p.vocab)
    harness.findings.close("candidate_log_probs", got[:, :count], log_probs, error)
    harness.findings.untouched("candidates beyond the last", got[:, count:])
    harness.findings.untouched("candidates beyond the last", got_ids[:, count:])


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
    for step in (*_steps(harness), *_steps(harness), *_steps(harness), harness.rng.permutation(CROWD)[:9].astype(np.int32)):
        trees = [_random_tree(harness, int(harness.rng.choice(TREE_SIZES))) for _ in step]
        lengths, nodes = _lengths(harness, CROWD), [tree.size + 1 for tree in trees]
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
        for step in _steps(harness):
            trees = [_random_tree(harness, nodes) for _ in step]
            deepest = [int(np.argmax([0, *tree.depths])) for tree in trees]
            ends = [int(harness.rng.choice([0, deep, int(harness.rng.integers(0, nodes))])) for deep in deepest]
            accepted = [tree.path(end) for tree, end in zip(trees, ends, strict=True)]
            prefixes = harness.rng.integers(0, capacity - MAX_NODES, len(step))
            cache = harness.random(harness.act, layers, SEQUENCES, capacity, p.row)
            slots = in_slots(harness, cache).reshape(layers * SEQUENCES, -1, p.row)
            most = 2**31 // slots[0].size + SEQUENCES  # sequences of a cache beyond 2^31 elements
            places = np.arange(layers)[:, None] * most + spaced(SEQUENCES, most)
            device, numbers = harness.spread(slots, places.reshape(-1), layers * most)
            most = SEQUENCES if numbers[1] == 1 else most  # where they are side by side
            meta = {
                "step_count": np.array([len(step)]),
                "step_begin": np.arange(len(step) + 1) * nodes,
                "accepted_count": np.array([len(path) for path in accepted]),
                "accepted_nodes": np.stack([_padded(np.array(path), MAX_PATH) for path in accepted]),
                "row_sequence": np.repeat(numbers[step], nodes),
                "row_prefix": np.repeat(prefixes, nodes),
            }
            harness.launch(
                Grid(sequences=len(step), replaced={0: layers}),
                kv_cache=device,
                context_capacity=slots.shape[1],
                max_sequences=most,
                **harness.inputs({name: values.astype(np.int32) for name, values in meta.items()}),
            )
            expected = cache.copy()
            for sequence, prefix, path in zip(step, prefixes, accepted, strict=True):
                kept = reference.compact(cache[:, sequence], int(prefix), path)
                expected[:, sequence, : kept.shape[1]] = kept
            got = read_cache(harness, device, numbers, slots).reshape(layers, SEQUENCES, -1, p.row)[:, :, :capacity]
            harness.findings.same_bits(f"kv_cache with nodes {accepted} of {nodes}", got, expected)
            harness.release()
