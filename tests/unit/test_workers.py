"""Processes that share a command's work: answers, a process that dies, errors, and an early end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from kdgen.errors import KdgenError
from kdgen.verify.workers import Workers


def doubling(offset: int) -> Callable[[int], int]:
    def work(number: int) -> int:
        if number == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if number < 0:
            time.sleep(-number)
        return 2 * number + offset

    return work


def refusing() -> Callable[[int], int]:
    raise KdgenError("there is nothing to work with")


def test_every_answer_has_its_works_place() -> None:
    with Workers(doubling, (1,), 2) as workers:
        assert sorted(workers.each([5, 6, 7])) == [(0, 11), (1, 13), (2, 15)]


def test_work_that_takes_its_process_down_is_answered_by_none_and_the_others_are_done() -> None:
    with Workers(doubling, (0,), 2) as workers:
        assert sorted(workers.each([1, 13, 2])) == [(0, 2), (1, None), (2, 4)]
        assert list(workers.each([4])) == [(0, 8)]


def test_an_error_of_the_opening_is_the_callers() -> None:
    with Workers(refusing, (), 1) as workers, pytest.raises(KdgenError, match="nothing to work with"):
        list(workers.each([1]))


def test_work_that_is_dropped_does_not_hold_the_caller_up() -> None:
    began = time.perf_counter()
    with Workers(doubling, (0,), 2) as workers:
        for _ in workers.each([1, -100, -100]):
            workers.drop()
            break
    assert time.perf_counter() - began < 60
