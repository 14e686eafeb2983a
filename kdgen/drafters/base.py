"""What a drafter proposes: for each depth below the root, candidate tokens with log-probabilities or a row of logits; or, if it runs on
the device, how the device is to draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Candidates:
    """Candidates of each depth, most probable first: ``tokens`` int32 and ``log_probs`` float32, both [depths, width].

    Where the log-probability is -inf, there is no candidate.
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
        """The log-probabilities of each depth's ``width`` most probable tokens, float32 [depths, width], largest first."""
        ranked: NDArray[np.float64] = -np.sort(-self.logits.astype(np.float64), axis=1)
        log_sum = ranked[:, :1] + np.log(np.exp(ranked - ranked[:, :1]).sum(axis=1, keepdims=True))
        best: NDArray[np.float32] = (ranked[:, :width] - log_sum).astype(np.float32)
        return best


@dataclass(frozen=True)
class DeviceDraftRequest:
    """A draft by the model's own drafter on the device: ``depths`` depths, from one pass over a block of ``block_size`` rows.

    ``width`` is the most candidates of a depth; with 0 only the tree's budget limits them, and with 1 the tree is a chain.
    """

    depths: int
    block_size: int
    width: int = 0


Proposal = Candidates | DraftLogits | DeviceDraftRequest


class Drafter(Protocol):
    """Proposes tokens that may follow ``context``, whose last token is the root."""

    name: str

    def propose(self, context: Sequence[int], depths: int) -> Proposal:
        """A proposal of at most ``depths`` depths, or fewer, or none."""


class DeviceDrafter(ABC):
    """A drafter that runs on the device, in the target's steps, so that the host need not wait for it."""

    name: str

    @abstractmethod
    def propose(self, context: Sequence[int], depths: int) -> DeviceDraftRequest:
        """How the device is to draft. ``context`` is already on the device."""


def nothing() -> Candidates:
    """A proposal without candidates: the step gives one token, as in plain decoding."""
    return Candidates(np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32))


def from_lists(rows: Sequence[Sequence[tuple[int, float]]]) -> Candidates:
    """Candidates from lists of (token, probability), one for each depth. Sorts by probability, and equal ones by id."""
    width = max((len(row) for row in rows), default=1)
    tokens = np.zeros((len(rows), width), np.int32)
    log_probs = np.full((len(rows), width), -np.inf, np.float32)
    for depth, row in enumerate(rows):
        for rank, (token, probability) in enumerate(sorted(row, key=lambda pair: (-pair[1], pair[0]))):
            tokens[depth, rank] = token
            log_probs[depth, rank] = np.log(np.float32(probability))
    return Candidates(tokens, log_probs)
