"""Processes that do pieces of one command's work side by side, and that end with it, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from time import perf_counter, sleep
from typing import Any, Generic, TypeVar

from kdgen.errors import KdgenError

Work = TypeVar("Work")
Answer = TypeVar("Answer")

_PATIENCE_SECONDS = 5.0  #: for a process that was told to end


def cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers(Generic[Work, Answer]):
    """``jobs`` processes, each of which calls ``open_work(*arguments)`` once and the function that this returns for each piece of work.

    ``open_work``, ``arguments``, works and answers go from process to process, so they must pickle. A piece of work that takes its
    process down (a kernel that crashes) is answered by None, and the other pieces are done all the same. Leaving the block, by
    whatever way, ends the processes.
    """

    def __init__(self, open_work: Callable[..., Callable[[Work], Answer]], arguments: tuple[Any, ...], jobs: int) -> None:
        self._open, self._arguments, self._jobs = open_work, arguments, jobs
        self._others = multiprocessing.active_children()
        self._pool = self._start(jobs)

    def __enter__(self) -> Workers[Work, Answer]:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._end()
        self._pool.shutdown(cancel_futures=True)

    def each(self, works: Sequence[Work]) -> Iterator[tuple[int, Answer | None]]:
        """The answers as they are there, each with its work's place in ``works``; None for work that took its process down.

        Raises what the work raises. A caller that needs no more answers calls ``drop``.
        """
        left = set(range(len(works)))
        try:
            places = {self._pool.submit(_do, work): place for place, work in enumerate(works)}
            for future in as_completed(places):
                answer = future.result()
                left.discard(places[future])
                yield places[future], answer
        except BrokenProcessPool:  # which work it was shows when each has a process to itself
            for place in sorted(left):
                yield place, self._apart(works[place])
            self._pool = self._start(self._jobs)

    def drop(self) -> None:
        """End the processes now, whatever they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _start(self, jobs: int) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(self._open, self._arguments))

    def _apart(self, work: Work) -> Answer | None:
        pool = self._start(1)
        try:
            answer: Answer = pool.submit(_do, work).result()
            return answer
        except BrokenProcessPool:
            return None
        finally:
            pool.shutdown()

    def _end(self) -> None:
        """Tell the processes to drop what they are doing, and again what they take up next, until they are gone."""
        patience = perf_counter() + _PATIENCE_SECONDS
        while left := [child for child in multiprocessing.active_children() if child not in self._others]:
            for child in left:
                child.terminate() if perf_counter() < patience else child.kill()
            wait([child.sentinel for child in left], timeout=0.2)


# ---- in a worker process ------------------------------------------------------------------------------------------------

_work: Callable[[Any], Any] | KdgenError | None = None  # what this process does; or why it cannot


def _begin(open_work: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent tells these to end
    try:
        _work = open_work(*arguments)
    except KdgenError as error:
        _work = error
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _do(work: Any) -> Any:
    assert _work is not None
    if isinstance(_work, KdgenError):
        raise _work  # in the process that asked, which ends with it
    return _work(work)


def _leave_with_parent() -> None:
    """A killed parent tells nobody; without this the process would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    patience = perf_counter() + _PATIENCE_SECONDS
    while perf_counter() < patience:
        os.kill(os.getpid(), signal.SIGTERM)  # again and again: the pool takes one as the outcome of a piece of work
        sleep(0.2)
    os._exit(2)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # by way of everything that tidies up
