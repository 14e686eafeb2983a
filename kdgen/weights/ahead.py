"""Work done a few steps ahead on threads, its results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_MOST_WORKERS = 8  #: threads, each of which holds a result in memory


def in_order(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Results of ``tasks``, in their order. As many threads as there are CPUs run the tasks, because NumPy releases the interpreter lock.

    At most one result more than threads is kept. An exception of a task is raised here, in its turn.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cpus, _MOST_WORKERS)
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="kdgen-ahead")
    try:
        for task in tasks:
            pending.append(pool.submit(task))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
