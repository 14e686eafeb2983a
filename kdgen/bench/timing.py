"""Measuring times: medians over replays of recorded work, also of several contenders in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdgen.backends.base import Backend, Work

REPLAYS = 15
WARM_UP = 2  #: replays whose times are discarded


@dataclass(frozen=True)
class Contender:
    """Another implementation of the same work. ``start`` starts it ``repeats`` times; ``timer`` is a stopwatch as ``Backend.timer``."""

    start: Callable[[], object]
    timer: Callable[[], Callable[[], float]]
    repeats: int = 1


def median(backend: Backend, work: Sequence[Work], between: Callable[[], None] | None = None, in_a_row: int = 1) -> float:
    """Seconds of one replay of ``work``. Starts ``in_a_row`` replays one after another, each time after ``between``, which restores
    state."""
    replay = backend.record(work)

    def start() -> None:
        for _ in range(in_a_row):
            replay()

    return _medians([Contender(start, backend.timer, in_a_row)], between)[0]


def medians(backend: Backend, work: Sequence[Work], others: Sequence[Contender]) -> list[float]:
    """Seconds of one replay of ``work`` and of each contender, measured in turn, so that a hotter GPU affects all alike."""
    return _medians([Contender(backend.record(work), backend.timer), *others], None)


def seconds(contender: Contender) -> float:
    """Seconds of the contender's work."""
    return _medians([contender], None)[0]


def _medians(contenders: Sequence[Contender], between: Callable[[], None] | None) -> list[float]:
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(REPLAYS + WARM_UP):
        for contender, mine in zip(contenders, times, strict=True):
            if between:
                between()
            stop = contender.timer()
            contender.start()
            mine.append(stop())
    return [statistics.median(mine[WARM_UP:]) / contender.repeats for contender, mine in zip(contenders, times, strict=True)]
