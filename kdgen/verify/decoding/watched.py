"""A backend that counts what is recorded and started, and has a simulated clock, so that choices by measured times can be predicted.

A launch takes as many seconds as it has blocks. A recorded unit takes a thousand times as long at its first start, like a device that has
to warm up, and then three times, once and twice as long, in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from kdgen.backends.base import AllGather, Argument, Backend, DeviceArray, Launch, Mailbox, Replay, Work
from kdgen.codegen.source import Source
from kdgen.plan.ir import DType
from kdgen.plan.shard import Exchange
from kdgen.ranks.group import Group

COLD, PACE = 1000, (3, 1, 2)
#: How many times as long another rank takes, by whose seconds all ranks go.
SLOWER = 4
#: Keys by which contexts of recorded units differ: fewer than a split has, so that decodes of a few tokens need several units.
CONTEXT_STEP = 16


def seconds_of(work: Sequence[Work]) -> int:
    """What the made-up clock shows for ``work``."""
    return sum(each.grid[0] * each.grid[1] * each.grid[2] if isinstance(each, Launch) else 1 for each in work)


class WatchedBackend(Backend):
    """Does what ``inner`` does. ``recorded`` and ``started`` count units and starts of them, ``timed`` what was measured; ``before`` is
    called before each start of a unit."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name, self.description, self.family = inner.name, inner.description, inner.family
        self.group, self.processors, self.rounds_ahead = inner.group, inner.processors, inner.rounds_ahead
        self.recorded = self.started = self.timed = 0
        self.before: Callable[[], None] = lambda: None
        self._clock = 0.0

    def record(self, work: Sequence[Work]) -> Replay:
        replay, seconds, paces = self.inner.record(work), seconds_of(work), itertools.chain((COLD,), itertools.cycle(PACE))
        self.recorded += 1

        def start() -> None:
            self.before()
            self.started += 1
            self._clock += seconds * next(paces)
            replay()

        return start

    def copy(self, array: DeviceArray, source: int, target: int, count: int) -> None:
        self.inner.copy(array, source, target, count)

    def start(self, work: Work) -> None:
        self._clock += COLD * seconds_of([work])
        self.inner.start(work)

    def timer(self) -> Callable[[], float]:
        self.timed += 1
        began = self._clock
        return lambda: self._clock - began

    def recorded_context(self, context: int) -> int:
        return self.inner.recorded_context(-(-context // CONTEXT_STEP) * CONTEXT_STEP)

    def agreed(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """Those of a rank that is slower, as if there were one: whoever goes by its own seconds shows."""
        return {budget: SLOWER * each for budget, each in self.inner.agreed(seconds).items()}

    # ---- the rest, unchanged --------------------------------------------------------------------------------------------

    def load(self, sources: Sequence[Source]) -> None:
        self.inner.load(sources)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        return self.inner.empty(shape, dtype)

    def memory_limit(self) -> int | None:
        return self.inner.memory_limit()

    def to_host(self, array: DeviceArray, rows: int | None = None) -> npt.NDArray[Any]:
        return self.inner.to_host(array, rows)

    def write(self, array: DeviceArray, values: npt.NDArray[Any], offset: int = 0) -> None:
        self.inner.write(array, values, offset)

    def free(self, array: DeviceArray) -> None:
        self.inner.free(array)

    def launch(self, kernel: str, grid: tuple[int, int, int], block: int, smem: int, args: Sequence[Argument]) -> None:
        self.inner.launch(kernel, grid, block, smem, args)

    def join(self, group: Group) -> Exchange:
        return self.inner.join(group)

    def inbox(self, shape: tuple[int, ...], dtype: DType) -> tuple[DeviceArray, DeviceArray]:
        return self.inner.inbox(shape, dtype)

    def gather(self, work: AllGather) -> None:
        self.inner.gather(work)

    def mailbox(self, arrays: Sequence[DeviceArray]) -> Mailbox:
        return self.inner.mailbox(arrays)

    def synchronize(self) -> None:
        self.inner.synchronize()
