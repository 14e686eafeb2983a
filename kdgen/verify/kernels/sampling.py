"""Check of the seeded choice: the token drawn is the best of those that float64 keeps, as far as float32 can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.reference import sampling as reference
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.kernels.harness import Grid, Harness, Registry, check_rows, for_template, guard, split_guard

Array = NDArray[Any]

CHECKS: Registry = {}
#: Relative rounding of a float32 sum over the vocabulary, and absolute rounding of logf and of scores up to a hundred.
SLACK, SCORE_ERROR = 1e-4, 1e-4
PLANTED = 48  #: tokens of a row that can be drawn at all
CHOICES = (
    GREEDY,
    Sampling(1.0, seed=1),
    Sampling(0.7, top_k=1, seed=2),
    Sampling(1.3, top_k=5, seed=2**64 - 1),
    Sampling(1.0, top_p=0.5, seed=2**40 + 3),
    Sampling(2.0, top_k=20, top_p=0.9, min_p=0.02, seed=5),
    Sampling(0.5, min_p=0.3, seed=6),
    Sampling(1.0, top_p=1e-6, seed=7),
    *(Sampling(1.0, seed=seed) for seed in (0, 1 + 2**31, 1 + 2**32, 2**32 - 1, 1 + 2**63)),  # each half of a seed to its last bit
)


@for_template(CHECKS, ["sample.cu.j2"])
def check_sample(harness: Harness) -> None:
    vocab, most = harness.p.vocab, max(harness.tokens)
    logits = harness.random("f32", most, vocab, scale=2.0)
    logits[1::3] = np.round(logits[1::3])  # ties at every threshold
    lowered = -np.floor(np.abs(logits[2::6]))
    logits[2::6] = np.where(lowered == 0, np.copysign(np.float32(0), logits[2::6]), lowered)  # the largest are zeros of both signs
    run = _draws(harness, logits, np.arange(most) % len(CHOICES))
    base = run(np.arange(most))["next_token"]
    check_rows(harness, run, {"next_token": (base, np.zeros(1))})
    planted, sequence = _planted(harness)
    _draws(harness, planted, sequence)(np.arange(len(planted)))
    harness.release()


def _draws(harness: Harness, logits: NDArray[np.float32], sequence: NDArray[np.int64]) -> Callable[[NDArray[np.int64]], dict[str, Array]]:
    """Draws for chosen rows of ``logits`` [rows, vocab], row m as CHOICES[sequence[m]] says at a random position, each seen to be right."""
    position = harness.rng.integers(0, 1000, len(logits)).astype(np.int32)
    position[1::2] += 1 << 17
    greedy = logits.argmax(axis=1).astype(np.int32)
    drawn = np.array([reference.draw(row, CHOICES[c], int(at) + 1) for row, c, at in zip(logits, sequence, position, strict=True)])

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        chosen = np.full(guard(count), -1, np.int32)
        chosen[:count] = greedy[rows]
        device = harness.input(chosen)
        harness.launch(
            Grid(count),
            num_tokens=harness.integer(count),
            logits=harness.input(logits[rows]),
            row_sequence=harness.input(sequence[rows].astype(np.int32)),
            row_position=harness.input(position[rows]),
            temperature=harness.input(np.array([c.temperature for c in CHOICES], np.float32)),
            top_k=harness.input(np.array([c.top_k for c in CHOICES], np.int32)),
            top_p=harness.input(np.array([c.top_p for c in CHOICES], np.float32)),
            min_p=harness.input(np.array([c.min_p for c in CHOICES], np.float32)),
            seed=harness.input(np.array([c.seed for c in CHOICES], np.uint64).view(np.int32)),
            next_token=device,
        )
        got = split_guard(harness, "next_token", harness.read(device), count)
        for m, token in zip(rows, got, strict=True):
            choice = CHOICES[sequence[m]]
            if token != drawn[m] and not may_draw(logits[m], choice, int(position[m]) + 1, int(token)):
                harness.findings.problem(f"row {m}, {choice}: token {token} instead of {drawn[m]}")
        return {"next_token": got}

    return run


def _planted(harness: Harness) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Logits [rows, vocab] in which few tokens can be drawn at all, and which choice draws from each row.

    The first rows have one token each, in the first, the second and the last pass of a block's threads over the vocabulary. The others
    have up to PLANTED all over it, as probable as each other, so that top-k keeps the lowest, or a little less so one after another: a
    thread that leaves some tokens out counts too few for a filter, or draws another.
    """
    vocab, block = harness.p.vocab, harness.p.block
    alone = np.unique(np.minimum([0, block - 1, block, 2 * block - 1, (vocab - 1) // block * block, vocab - 1], vocab - 1))
    sequence = np.concatenate([np.ones(len(alone), int), np.repeat(np.arange(1, len(CHOICES)), 4)])
    logits = np.full((len(sequence), vocab), -60, np.float32)
    logits[np.arange(len(alone)), alone] = 0
    for row in range(len(alone), len(logits)):
        places = harness.rng.permutation(vocab)[:PLANTED]
        logits[row, places] = 0 if row % 4 == 0 else -0.02 * np.arange(len(places))
    return logits, sequence


def may_draw(logits: NDArray[np.float32], choice: Sampling, position: int, token: int) -> bool:
    """Whether float32 may have drawn ``token`` at ``position`` after ``logits`` [vocab]: the largest, the lowest id on ties, where it is
    greedy; else one that is kept within the slack, and nothing surely kept scores clearly higher."""
    if choice.temperature == 0:
        return token == int(logits.argmax())
    if not reference.kept(logits, choice, SLACK)[token]:
        return False
    scores, sure = reference.scores(logits, choice, position), reference.kept(logits, choice, -SLACK)
    return bool(scores[token] + SCORE_ERROR >= scores[sure].max(initial=-np.inf))
