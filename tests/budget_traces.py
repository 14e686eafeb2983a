"""Traces of what drafts expect and what is accepted of them, and decoding over a trace without a model.

A trace says for each position of a text what a draft there would look like and which of its nodes the target would accept, so
that any sequence of budgets can be played on it.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kdgen.runtime.budget import Budgets

DEPTHS, WIDTH, NODES = 7, 63, 63
RECORDED_WIDTH = 8  #: candidates of a depth

#: Costs of a round by budget. ``experts``: steps of K2.6's width measured on an H200 in milliseconds (1, 8 and 16 rows; the others
#: extrapolated), where each row reads experts of its own; ``dense``: rows that cost little, as in a model without experts.
COSTS = {
    "experts": {0: 1.65, 7: 3.34, 15: 4.58, 31: 6.35, 63: 8.85},
    "dense": {0: 1.65, 7: 2.1, 15: 2.5, 31: 3.1, 63: 4.6},
}


@dataclass(frozen=True)
class Position:
    """A draft's log-probabilities [depths, width], and the nodes of its whole tree that the target accepts, root first."""

    log_probs: NDArray[np.float32]
    accepted: tuple[int, ...]


Trace = Sequence[Position]


@dataclass(frozen=True)
class Played:
    tokens: int
    seconds: float
    used: dict[int, int]  #: rounds by budget


@functools.cache
def _draft(claimed: float) -> tuple[NDArray[np.float32], dict[tuple[int, ...], int]]:
    """A draft whose best token has probability ``claimed`` at every depth, the next that part of what is left, and so on: its rows, and
    its tree's node numbers by their ranks."""
    row = np.log(claimed) + np.arange(WIDTH) * np.log1p(-claimed)
    nodes: dict[tuple[int, ...], int] = {}
    heap: list[tuple[float, tuple[int, ...]]] = [(-row[0], (0,))]
    while len(nodes) < NODES:
        score, ranks = heapq.heappop(heap)
        nodes[ranks] = len(nodes) + 1
        if ranks[-1] + 1 < WIDTH:
            heapq.heappush(heap, (score + row[ranks[-1]] - row[ranks[-1] + 1], (*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < DEPTHS:
            heapq.heappush(heap, (score - row[0], (*ranks, 0)))
    return np.tile(row.astype(np.float32), (DEPTHS, 1)), nodes


def _position(rng: np.random.Generator, claimed: float, true: float) -> Position:
    log_probs, nodes = _draft(claimed)
    ranks = tuple(int(rank) - 1 for rank in rng.geometric(true, DEPTHS)) if true > 0 else (WIDTH,)
    accepted = [0]
    for depth in range(1, DEPTHS + 1):
        if (node := nodes.get(ranks[:depth])) is None:
            break
        accepted.append(node)
    return Position(log_probs, tuple(accepted))


def drawn(length: int, claimed: float, true: float, seed: int) -> Trace:
    """A drafter whose best token is right with probability ``true``, and that says ``claimed``."""
    rng = np.random.default_rng(seed)
    return [_position(rng, claimed, true) for _ in range(length)]


def switching(length: int, phases: Sequence[tuple[float, float]], period: int, seed: int) -> Trace:
    """Drafters that take turns after every ``period`` positions, each (claimed, true)."""
    rng = np.random.default_rng(seed)
    return [_position(rng, *phases[place // period % len(phases)]) for place in range(length)]


def save(file: Path, trace: Trace) -> None:
    """Log-probabilities go to float16, which the comparison of budgets does not feel."""
    depths = trace[0].log_probs.shape[0]
    accepted = np.full((len(trace), depths + 1), -1, np.int8)
    for row, position in zip(accepted, trace, strict=True):
        row[: len(position.accepted)] = position.accepted
    log_probs = np.stack([position.log_probs[:, :RECORDED_WIDTH] for position in trace]).astype(np.float16)
    np.savez_compressed(file, log_probs=log_probs, accepted=accepted)


def recorded(file: Path) -> Trace:
    data = np.load(file)
    rows = zip(data["log_probs"].astype(np.float32), data["accepted"].tolist(), strict=True)
    return [Position(log_probs, tuple(node for node in accepted if node >= 0)) for log_probs, accepted in rows]


def simulate(policy: Budgets, trace: Trace, costs: dict[int, float], ahead: int = 1) -> Played:
    """Decode the whole trace. The policy is told of a round when ``ahead`` more have been started."""
    place, seconds, used = 0, 0.0, Counter[int]()
    running: deque[tuple[int, list[int], NDArray[np.float32] | None]] = deque()
    while place < len(trace):
        budget = policy.choose()
        accepted = [node for node in trace[place].accepted if node <= budget]
        running.append((budget, accepted, trace[place].log_probs if budget else None))
        place += len(accepted)
        seconds += costs[budget]
        used[budget] += 1
        if len(running) > ahead:
            policy.observe(*running.popleft())
    return Played(min(place, len(trace)), seconds, dict(used))
