"""Checks of what is chosen from logits: the largest, and a draft's best candidates with their log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.ir import MAX_CANDIDATES, MAX_PATH
from kdgen.plan.ops.tree import top_k_part_size, top_k_parts
from kdgen.reference import ops
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.harness import (
    Grid,
    Harness,
    Registry,
    check_rows,
    for_template,
    guard,
    poison,
    split_guard,
)

Array = NDArray[Any]
CHECKS: Registry = {}


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
    """The best candidates in each part of ``size`` float32 logits [M, V]: keys (uint32) and tokens [M, parts, count], best first. A part
    with fewer has the key 0 and the token 2^31 - 1 for the rest. The third result [M, parts, 2] has each part's maximum, and its sum of
    exponentials relative to that."""
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
