"""Rounds: what a drafter on the device and its target do to gain a few tokens, started by the host with one call.

A round is one recorded unit, draft, top-k, tree, verify forward, accept, compaction, with no place where the host is waited for:
lengths, root, tree and acceptance live in device memory, and each budget's shape lies in an array of its own. The host reads a
round's results while the next one runs. It learns of a stop token, or that the tokens are enough, one round late; what was decoded
behind that is cut off again. Budget 0 is plain decoding, and needs no drafter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import DeviceArray, Replay
from kdgen.drafters.base import DeviceDraftRequest
from kdgen.drafters.synthetic import wide_candidates
from kdgen.errors import KdgenError
from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES
from kdgen.runtime.engine import Engine

#: Budgets to choose from; what lies between is hardly faster than the next.
BUDGETS = (0, 7, 15, 31, 63)
TIMED_REPLAYS = 3


@dataclass(frozen=True)
class Round:
    """A round's results: the new tokens, and the accepted nodes' numbers in the order in which the tree took them, root first.

    ``log_probs`` are the draft's, float32 [depths, candidates], best first; None where there was no draft.
    """

    budget: int
    tokens: tuple[int, ...]
    nodes: tuple[int, ...]
    log_probs: NDArray[np.float32] | None


def budgets_for(block: DeviceDraftRequest | None) -> tuple[int, ...]:
    """The budgets worth choosing from: none but 0 without a drafter on the device, and no more nodes than a chain has."""
    most = 0 if block is None else block.depths if block.width == 1 else BUDGETS[-1]
    return tuple(sorted({min(budget, most) for budget in BUDGETS}))


def step_costs(engine: Engine, root: int) -> dict[int, float]:
    """Seconds of a verify step of each of ``BUDGETS`` (0: of a decode step) as the host makes it, behind what is committed now; ``root``
    is the token after that. The trees are drawn at random. Budgets that the context has no room for are left out."""
    length, costs = engine.length(), {}
    for budget in BUDGETS:
        draft = wide_candidates(engine.spec.vocab_size, budget)
        if length + draft.depths + 1 > engine.plan.limits.max_context:
            continue
        times = []
        for _ in range(TIMED_REPLAYS + 2):  # the first two record
            stop = engine.backend.timer()
            _ = engine.verify(draft, budget) if budget else engine.decode()
            times.append(stop())
            engine.cut(length, root)
        costs[budget] = min(times[2:])
    return engine.backend.agreed(costs)


class Rounds:
    """The rounds of an engine's sequence 0, one unit for each of ``budgets`` and each context that is recorded.

    ``block`` is what the drafter is asked for. Between ``begin`` and ``end`` nothing else may step the engine. Raises KdgenError for
    budgets outside 0 … 63, or above 0 where there is no block, or for a block that the drafter does not fill.
    """

    def __init__(self, engine: Engine, block: DeviceDraftRequest | None, budgets: Sequence[int]) -> None:
        if not budgets or not all(0 <= budget < MAX_NODES for budget in budgets):
            raise KdgenError(f"a budget lies between 0 and {MAX_NODES - 1}, not at {', '.join(map(str, budgets)) or 'none'}")
        self.engine, self.budgets = engine, tuple(sorted(set(budgets)))
        self._block, self._rows = block, engine.block_rows(block) if block is not None else 0
        if block is None and self.budgets != (0,):
            raise KdgenError("rounds with draft trees need a block from a drafter; without one the budget is 0")
        self._shapes = {budget: self._shape(budget) for budget in self.budgets if budget}
        self._units: dict[tuple[int, int, str], Replay] = {}
        results = ["root_token"]
        if block is not None:
            results += ["accepted_count", "accepted_nodes", "accepted_tokens", "candidate_log_probs"]
        self._results = engine.backend.mailbox([engine.buffer(name) for name in results])
        self._running: deque[int] = deque()  # the budgets of rounds whose results were not taken
        self._length = 0
        self._costs: dict[int, float] = {}

    def begin(self, length: int, tokens: int = 0) -> None:
        """Rounds follow, behind the engine's committed ``length`` tokens. Records their units where that was not done yet.

        Pages for ``tokens`` more are reserved now; a round that goes beyond those reserves some, for which the device is waited for.
        """
        self.engine.begin_rounds(self._rows)
        self._length = length
        self._reserve(tokens)
        for budget in self.budgets:
            self._unit(budget)

    def costs(self, root: int) -> dict[int, float]:
        """Seconds of a round of each budget, measured once, behind what is committed now; ``root`` is the token after that."""
        for budget in self.budgets:
            if budget not in self._costs:
                unit, times = self._unit(budget), []
                for _ in range(TIMED_REPLAYS + 1):
                    self.engine.cut(self._length, root)
                    stop = self.engine.backend.timer()
                    unit()
                    times.append(stop())
                self.engine.cut(self._length, root)
                self._costs[budget] = min(times[1:])  # the first one warms up
        return self.engine.backend.agreed(self._costs)

    @property
    def running(self) -> int:
        """Rounds started whose results were not taken; two at most."""
        return len(self._running)

    @property
    def may_start(self) -> bool:
        """Whether another round surely fits the context; if not, one must be finished first."""
        return self._reach() <= self.engine.plan.limits.max_context

    def start(self, budget: int) -> None:
        """Start a round behind those that run. Waits for nothing."""
        self._unit(budget)()
        self._running.append(budget)
        self._results.post()

    def finish(self) -> Round:
        """The oldest running round's results, as soon as they are there."""
        budget, (root, *tree) = self._running.popleft(), self._results.take()
        if budget == 0:
            done = Round(0, (int(root[0]),), (0,), None)
        else:
            counts, nodes, tokens, log_probs = tree
            count, (depths, width) = int(counts[0]), self._extent(budget)
            new = (*tokens[0, 1:count].tolist(), int(root[0]))
            drafted = log_probs[0, :depths, :width].astype(np.float32)
            done = Round(budget, new, tuple(nodes[0, :count].tolist()), drafted)
        self._length += len(done.tokens)
        self.engine.need_finite(int(root[0]), self._length)
        return done

    def end(self, length: int, root: int) -> None:
        """Wait for what runs, and make the sequence end after ``length`` tokens and the root."""
        self.engine.backend.synchronize()
        self._results.clear()
        self._running.clear()
        self.engine.cut(length, root)

    def _reserve(self, slots: int) -> None:
        """Pages for ``slots`` more slots than the running rounds reach."""
        self.engine.reserve(0, min(self._reach() + slots, self.engine.plan.limits.capacity))

    def _reach(self) -> int:
        """The most tokens that can be committed once the running rounds have ended."""
        return self._length + sum(1 + (self._extent(budget)[0] if budget else 0) for budget in self._running)

    def _extent(self, budget: int) -> tuple[int, int]:
        """Depths of a budget's tree, and candidates of each."""
        assert self._block is not None
        width = min(budget, self.engine.spec.vocab_size, MAX_CANDIDATES)
        return self._block.depths, min(width, self._block.width) if self._block.width else width

    def _shape(self, budget: int) -> DeviceArray:
        depths, width = self._extent(budget)
        return self.engine.backend.to_device(np.array([[depths, width, budget, 1]], np.int32), "i32")  # row 0 is the root's

    def _unit(self, budget: int) -> Replay:
        engine, rows = self.engine, max(budget + 1, self._rows)
        self._reserve(rows)
        context = engine.backend.recorded_context(self._reach() + rows)
        kind = (budget, context, engine.choosing("decode", [0]))
        if kind not in self._units:
            if budget == 0:
                work = engine.work(engine.choosing("decode", [0]), 1, context)
            else:
                shape = {"draft_shape": self._shapes[budget]}
                draft = engine.work("draft", self._rows, context, instead=shape)
                work = (*draft, *engine.work(engine.choosing("verify", [0]), budget + 1, context, instead=shape))
            self._units[kind] = engine.backend.record(work)
        return self._units[kind]
