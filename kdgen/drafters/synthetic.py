"""Drafters for tests and demonstrations. Two of them are told the target's true continuation; none of them can change it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kdgen.drafters.base import Candidates, DraftLogits, from_lists, nothing
from kdgen.errors import KdgenError
from kdgen.plan.ir import MAX_PATH


def _generator(seed: int, position: int) -> np.random.Generator:
    """Noise as a function of seed and position, so that a run can be repeated from any round."""
    return np.random.Generator(np.random.Philox(key=seed, counter=position))


def wide_candidates(vocab_size: int, nodes: int) -> Candidates:
    """Candidates drawn at random whose tree has ``nodes`` nodes below the root, some deep and some wide; to measure steps with."""
    rng = np.random.default_rng(0)
    depths, width = MAX_PATH // 2 - 1, min(vocab_size, max(8, (nodes + 1) // 4))
    tokens = np.stack([rng.choice(vocab_size, width, replace=False) for _ in range(depths)]).astype(np.int32)
    log_probs = -np.sort(rng.exponential(1.0, (depths, width)).astype(np.float32), axis=1)
    return Candidates(tokens[:nodes], log_probs[:nodes])  # no tree is deeper than that


class RandomDrafter:
    """Draft logits drawn at random: a drafter that knows nothing, and the only one here that uses the device's top-k."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size, self.seed = vocab_size, seed

    def propose(self, context: Sequence[int], depths: int) -> DraftLogits:
        noise = _generator(self.seed, len(context)).standard_normal((depths, self.vocab_size))
        return DraftLogits((3 * noise).astype(np.float32))


class ReplayDrafter:
    """Proposes the true continuation, wrong at each position with probability ``error_rate``.

    ``truth`` is prompt and continuation. It knows how often it errs: the first choice has probability 1 - error_rate, the second
    (the true token where the first is wrong, so that a tree may still hold it) error_rate.
    """

    name = "replay"

    def __init__(self, truth: Sequence[int], vocab_size: int, error_rate: float = 0.0, seed: int = 0) -> None:
        if not 0 <= error_rate <= 1:  # NaN is no rate either
            raise KdgenError(f"an error rate of {error_rate} is none: it must be between 0 and 1")
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
    """Always wrong: at every depth it proposes tokens that the target will not choose. ``truth`` is prompt and continuation."""

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
