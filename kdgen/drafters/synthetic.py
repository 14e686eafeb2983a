"""Drafters for tests. Two of them get the target's true continuation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kdgen.drafters.base import Candidates, DraftLogits, from_lists, nothing
from kdgen.errors import KdgenError
from kdgen.plan.ir import MAX_PATH


def _generator(seed: int, position: int) -> np.random.Generator:
    """A generator that depends only on seed and position, so that a run can be repeated from any round."""
    return np.random.Generator(np.random.Philox(key=seed, counter=position))


def wide_candidates(vocab_size: int, nodes: int) -> Candidates:
    """Random candidates whose tree has ``nodes`` nodes below the root, both deep and wide. They are for measuring steps."""
    rng = np.random.default_rng(0)
    depths, width = MAX_PATH // 2 - 1, min(vocab_size, max(8, (nodes + 1) // 4))
    tokens = np.stack([rng.choice(vocab_size, width, replace=False) for _ in range(depths)]).astype(np.int32)
    log_probs = -np.sort(rng.exponential(1.0, (depths, width)).astype(np.float32), axis=1)
    return Candidates(tokens[:nodes], log_probs[:nodes])  # a tree cannot be deeper than its number of nodes


class RandomDrafter:
    """Random draft logits. It is the only drafter here that uses the device's top-k."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size, self.seed = vocab_size, seed

    def propose(self, context: Sequence[int], depths: int) -> DraftLogits:
        noise = _generator(self.seed, len(context)).standard_normal((depths, self.vocab_size))
        return DraftLogits((3 * noise).astype(np.float32))


class ReplayDrafter:
    """Proposes the true continuation, wrong at each position with probability ``error_rate``.

    ``truth`` is prompt and continuation. The first choice has probability 1 - error_rate. The second choice has probability error_rate; it
    is the true token if the first one is wrong, so that a tree may still hold it.
    """

    name = "replay"

    def __init__(self, truth: Sequence[int], vocab_size: int, error_rate: float = 0.0, seed: int = 0) -> None:
        if not 0 <= error_rate <= 1:  # also false for NaN
            raise KdgenError(f"the error rate is {error_rate}; it must be between 0 and 1")
        self.truth, self.vocab_size, self.error_rate, self.seed = tuple(truth), vocab_size, error_rate, seed

    def propose(self, context: Sequence[int], depths: int) -> Candidates:
        rows = []
        for position in range(len(context), min(len(context) + depths, len(self.truth))):
            noise = _generator(self.seed, position)
            wrong = (self.truth[position] + 1 + int(noise.integers(max(self.vocab_size - 1, 1)))) % self.vocab_size
            first, second = (wrong, self.truth[position]) if noise.random() < self.error_rate else (self.truth[position], wrong)
            choices = [(first, max(1 - self.error_rate, 0.5)), (second, min(self.error_rate, 0.49))]
            rows.append([choice for choice in choices if choice[1] > 0][: self.vocab_size])
        return from_lists(rows) if rows else nothing()


class AdversarialDrafter:
    """Proposes at every depth only tokens that the target will not choose. ``truth`` is prompt and continuation."""

    name = "adversarial"

    def __init__(self, truth: Sequence[int], vocab_size: int, width: int = 4, seed: int = 0) -> None:
        self.truth, self.vocab_size, self.width, self.seed = tuple(truth), vocab_size, width, seed

    def propose(self, context: Sequence[int], depths: int) -> Candidates:
        rows = []
        for position in range(len(context), min(len(context) + depths, len(self.truth))):
            count = min(self.width, self.vocab_size - 1)
            offsets = [1 + int(o) for o in _generator(self.seed, position).permutation(max(self.vocab_size - 1, 0))[:count]]
            rows.append([((self.truth[position] + offset) % self.vocab_size, 0.5 / (1 + rank)) for rank, offset in enumerate(offsets)])
        return from_lists(rows) if rows and rows[0] else nothing()
