"""How many draft nodes a round may have: as many as pay, by measured times and by what the draft itself expects.

A tree's nodes come best first, so the tree of a smaller budget is the beginning of a larger one's, and a round shows what every
smaller budget would have accepted. Nodes fall into buckets, (0, 7], (7, 15], … . A bucket's path probabilities add up to the nodes
that the draft expects to be accepted of it; how many really are, over all rounds so far, says how far to believe that. The choice
is the budget with the most tokens a second. It changes no token.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: What a round weighs against the next where only the last ones count.
RECENT = 0.8
#: The part of the time that following the last rounds may lose against the best budget of the whole run; before that, plain steps.
ALLOWANCE = 0.01
CREDIT = 8.0
#: The part of the time that may be spent on looking at a budget not chosen otherwise.
LOOKS = 0.0075
#: How much better another budget must be to become the best of the whole run.
MARGIN = 1.01
#: Accepted nodes that a bucket starts with, as many as expected: the draft is believed until it has shown how it errs.
PRIOR = 8.0
GOLDEN = (math.sqrt(5) - 1) / 2


class Budgets(Protocol):
    """Chooses each round's budget, and is told of each round's outcome, maybe after the next was chosen."""

    def choose(self) -> int: ...

    def observe(self, budget: int, nodes: Sequence[int], log_probs: NDArray[np.float32] | None) -> None:
        """``nodes`` were accepted, numbered as the tree took them; ``log_probs`` [depths, width] are the draft's, if there was one."""


def budget_for(costs: Mapping[int, float]) -> Budgets:
    """The automatic choice, or the only budget where there is just one."""
    return AutoBudget(costs) if len(costs) > 1 else FixedBudget(min(costs, default=0))


class FixedBudget:
    """The same budget always."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def choose(self) -> int:
        return self._budget

    def observe(self, budget: int, nodes: Sequence[int], log_probs: NDArray[np.float32] | None) -> None:
        """Learns nothing."""


def bucket_sums(log_probs: NDArray[np.float32], budgets: Sequence[int]) -> list[float]:
    """The path probabilities of the tree of ``max(budgets)`` nodes, summed over each bucket. ``log_probs`` [depths, width] are sorted."""
    rows: list[list[float]] = log_probs.tolist()
    sums, taken = [0.0] * len(budgets), 0
    heap = [(-rows[0][0], 0, 0)] if rows and rows[0] and rows[0][0] > -math.inf else []
    while heap and taken < budgets[-1]:
        negative, depth, rank = heapq.heappop(heap)
        taken += 1
        sums[bisect.bisect_left(budgets, taken)] += math.exp(-negative)
        row = rows[depth]
        if rank + 1 < len(row) and row[rank + 1] > -math.inf:
            heapq.heappush(heap, (negative + row[rank] - row[rank + 1], depth, rank + 1))
        if depth + 1 < len(rows) and rows[depth + 1][0] > -math.inf:
            heapq.heappush(heap, (negative - rows[depth + 1][0], depth + 1, 0))
    return sums


class _Estimate:
    """Nodes that a bucket brings a round: what drafts expect of it on average, times how much of that has come true.

    ``keep`` is what a round weighs against the next; where rounds are forgotten, ``behind`` says what is believed without them.
    """

    def __init__(self, buckets: int, keep: float = 1.0, behind: _Estimate | None = None) -> None:
        self._keep, self._behind, self._drafts = keep, behind, 0.0
        self._expected = [0.0] * buckets  # over all drafts
        self._promised = [0.0] * buckets  # of drafts whose tree reached the bucket
        self._accepted = [0.0] * buckets

    def add(self, expected: Sequence[float], accepted: Sequence[float], reached: int) -> None:
        """A draft's expectations, and the nodes accepted of the first ``reached`` buckets."""
        self.age()
        self._drafts += 1
        for i, value in enumerate(expected):
            self._expected[i] += value
            if i < reached:
                self._promised[i] += value
                self._accepted[i] += accepted[i]

    def age(self) -> None:
        """A round has gone by."""
        self._drafts *= self._keep
        for sums in (self._expected, self._promised, self._accepted):
            sums[:] = [value * self._keep for value in sums]

    def belief(self, bucket: int) -> float:
        """Nodes accepted for one expected; without evidence, as the bucket before it."""
        before = self._behind.belief(bucket) if self._behind else self.belief(bucket - 1) if bucket else 1.0
        return (PRIOR * before + self._accepted[bucket]) / (PRIOR + self._promised[bucket])

    def expected(self, bucket: int) -> float:
        """Nodes that a draft expects."""
        if self._behind:
            return (self._behind.expected(bucket) + self._expected[bucket]) / (1 + self._drafts)
        return self._expected[bucket] / self._drafts if self._drafts else 0.0

    def nodes(self, bucket: int) -> float:
        return self.belief(bucket) * self.expected(bucket)


class AutoBudget:
    """The budget with the most tokens a second of late; the whole run's best where following the last rounds has lost too much.

    ``costs`` are measured seconds of a round by budget, 0 for plain decoding among them. A small part of the time goes to looks at the
    next larger budget, for what a round shows of larger ones is only what the draft says.
    """

    def __init__(self, costs: Mapping[int, float]) -> None:
        self._budgets = sorted(costs)
        if len(costs) < 2 or self._budgets[0] != 0 or not all(0 < cost < math.inf for cost in costs.values()):
            raise ValueError(f"costs are seconds of budget 0 and of others, not {dict(costs)}")
        self._costs = [costs[budget] for budget in self._budgets]
        buckets = len(costs) - 1
        self._run = _Estimate(buckets)
        self._recent = _Estimate(buckets, RECENT, self._run)
        self._best = min(2, buckets)  # until something is known; places among the budgets
        self._elapsed = self._debt = self._looked = 0.0
        self._looks: deque[bool] = deque()  # whether each round not yet observed is one
        self._count = 0  # of looks

    def choose(self) -> int:
        if not self._elapsed:  # nothing is known yet
            self._looks.append(False)
            return self._budgets[self._best]
        place, trial = self._best, self._leader(self._recent)
        allowed = CREDIT * self._costs[0] + ALLOWANCE * self._elapsed
        if self._debt + self._costs[trial] - 1 / self._speed(self._run, self._best) <= allowed:
            place = trial
        look = place + 1 if place + 1 < len(self._budgets) else place - 1
        costs_more = abs(self._costs[look] - self._costs[place])
        uneven = 0.5 + self._count * GOLDEN % 1  # so that looks fall in step with nothing
        self._looks.append(self._looked + uneven * costs_more <= LOOKS * self._elapsed)
        if self._looks[-1]:
            self._looked += costs_more
            self._count += 1
            place = look
        return self._budgets[place]

    def observe(self, budget: int, nodes: Sequence[int], log_probs: NDArray[np.float32] | None) -> None:
        place, best = self._budgets.index(budget), self._best
        accepted = [0.0] * (len(self._budgets) - 1)
        for node in nodes:
            if node:  # the root is accepted in any case
                accepted[bisect.bisect_left(self._budgets, node) - 1] += 1
        believed = [self._recent.nodes(i) for i in range(len(accepted))]
        if log_probs is not None:
            expected = bucket_sums(log_probs, self._budgets[1:])
            believed = [accepted[i] if i < place else self._run.belief(i) * expected[i] for i in range(len(accepted))]
            for estimate in (self._run, self._recent):
                estimate.add(expected, accepted, place)
        else:
            self._recent.age()
        self._elapsed += self._costs[place]
        gained = sum(accepted) - sum(believed[:best])  # tokens more than the run's best would have had here
        if not self._looks.popleft():
            self._debt += self._costs[place] - self._costs[best] - gained / self._speed(self._run, best)
        leader = self._leader(self._run)
        if self._speed(self._run, leader) > MARGIN * self._speed(self._run, best):
            self._best = leader

    def _speed(self, estimate: _Estimate, place: int) -> float:
        """Tokens a second."""
        return (1 + sum(estimate.nodes(i) for i in range(place))) / self._costs[place]

    def _leader(self, estimate: _Estimate) -> int:
        return max(range(len(self._budgets)), key=lambda place: (self._speed(estimate, place), -place))
