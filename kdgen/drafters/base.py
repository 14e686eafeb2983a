"""What a drafter gives: for each depth below the root, candidate tokens with log-probabilities, or a whole row of logits, or neither,
where the drafter runs on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Candidates:
    """Candidates of each depth, best first: ``tokens`` int32 and ``log_probs`` float32, both [depths, width].

    A log-probability of -inf marks a place with no candidate.
    """

    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]

    @property
    def depths(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(frozen=True)
class DraftLogits:
    """Draft logits float32 [depths, vocab_size]; the device takes each row's most probable tokens."""

    logits: NDArray[np.float32]

    @property
    def depths(self) -> int:
        return int(self.logits.shape[0])

    def log_probs(self, width: int) -> NDArray[np.float32]:
        """Of each depth's ``width`` most probable tokens, float32 [depths, width], best first."""
        ranked: NDArray[np.float64] = -np.sort(-self.logits.astype(np.float64), axis=1)
        log_sum = ranked[:, :1] + np.log(np.exp(ranked - ranked[:, :1]).sum(axis=1, keepdims=True))
        best: NDArray[np.float32] = (ranked[:, :width] - log_sum).astype(np.float32)
        return best


@dataclass(frozen=True)
class DeviceDraftRequest:
    """The model's own drafter proposes, on the device: ``depths`` depths, from one pass over a block of ``block_size`` rows.

    ``width`` bounds the candidates of a depth; 0 leaves them to the tree's budget, and 1 makes the tree a chain.
    """

    depths: int
    block_size: int
    width: int = 0


Proposal = Candidates | DraftLogits | DeviceDraftRequest


class Drafter(Protocol):
    """Proposes what may follow ``context``, whose last token is the root."""

    name: str

    def propose(self, context: Sequence[int], depths: int) -> Proposal:
        """A proposal of at most ``depths`` depths; fewer, or none, when the drafter has nothing to say."""


class DeviceDrafter(ABC):
    """A drafter whose network runs on the device, in the target's own steps, so that the host need not wait for it."""

    name: str

    @abstractmethod
    def propose(self, context: Sequence[int], depths: int) -> DeviceDraftRequest:
        """What the device is to propose. It knows the context itself."""


def nothing() -> Candidates:
    """No candidates: the step gives one token, as plain decoding does."""
    return Candidates(np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32))


def from_lists(rows: Sequence[Sequence[tuple[int, float]]]) -> Candidates:
    """Candidates from (token, probability) lists, one a depth; sorted best first, lower ids first on ties."""
    width = max((len(row) for row in rows), default=1)
    tokens = np.zeros((len(rows), width), np.int32)
    log_probs = np.full((len(rows), width), -np.inf, np.float32)
    for depth, row in enumerate(rows):
        for rank, (token, probability) in enumerate(sorted(row, key=lambda pair: (-pair[1], pair[0]))):
            tokens[depth, rank] = token
            log_probs[depth, rank] = np.log(np.float32(probability))
    return Candidates(tokens, log_probs)
