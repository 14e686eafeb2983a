"""Processes that do pieces of one command's work side by side, and that end with it, however it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from time import perf_counter, sleep
from typing import Any, Generic, TypeVar

from kdgen.errors import KdgenError
from kdgen.ranks.group import signal_of

Work = TypeVar("Work")
Answer = TypeVar("Answer")

_PATIENCE_SECONDS = 5.0  #: for a process that was told to end
#: Libraries of linear algebra read these when they are loaded: a process has its share of the processors, no more.
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(jobs: int) -> int:
    """How many threads each of ``jobs`` processes may have, so that together they have no more than there are processors."""
    return max(1, cpus() // jobs)


@dataclass(frozen=True)
class Event(Generic[Answer]):
    """What is heard of the piece of work at ``place``: an ``answer``, or, where that is None, its end.

    ``died`` is empty, or says how the process has ended that was at it.
    """

    place: int
    answer: Answer | None = None
    died: str = ""


class Workers(Generic[Work, Answer]):
    """``jobs`` processes, each of which calls ``open_work(*arguments)`` once, and for each piece of work the function that this returns,
    which gives one answer after another.

    ``open_work``, ``arguments``, works and answers go from process to process, so they must pickle. A piece of work that takes its
    process down (a kernel that crashes) ends alone: another process does the pieces that are left. Leaving the block, by whatever
    way, ends the processes.
    """

    def __init__(self, open_work: Callable[..., Callable[[Work], Iterable[Answer]]], arguments: tuple[Any, ...], jobs: int) -> None:
        self._open, self._arguments, self._jobs = open_work, arguments, jobs
        self._processes: list[_Process] = []
        self._needed = 0

    def __enter__(self) -> Workers[Work, Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._processes)

    def each(self, works: Sequence[Work], first: Callable[[int], float] = lambda place: 0.0) -> Iterator[Event[Answer]]:
        """Begin with the places of which ``first`` is least, and say what is heard of each piece as soon as it is. Raises what the work
        raises: a KdgenError as it is, another error as a RuntimeError with its traceback."""
        waiting = sorted(range(len(works)), key=first)
        self._needed = len(works)
        busy: dict[Connection, _Process] = {}
        idle = list(self._processes)
        try:
            while True:
                waiting = [place for place in waiting if place < self._needed]
                while waiting and (idle or len(busy) < self._jobs):
                    process = idle.pop() if idle else self._begun()
                    process.send(waiting[0], works[waiting.pop(0)])
                    busy[process.connection] = process
                if not any(process.place < self._needed for process in busy.values()):
                    return
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    process = busy[connection]
                    event = process.heard()
                    if event.answer is None:
                        del busy[connection]
                        if event.died:
                            self._end([process])
                        else:
                            idle.append(process)
                    yield event
        finally:
            self._end(list(busy.values()))  # at what is needed no longer

    def need_before(self, place: int) -> None:
        """In the loop over ``each``: pieces from ``place`` on are needed no longer, those before it still are."""
        self._needed = min(self._needed, place)

    def _begun(self) -> _Process:
        process = _Process(self._open, self._arguments, threads_each(self._jobs))
        self._processes.append(process)
        return process

    def _end(self, processes: Sequence[_Process]) -> None:
        """Tell the processes to drop what they are doing until they are gone: one may take it as the end of a single step."""
        patience = perf_counter() + _PATIENCE_SECONDS
        while left := [each.process for each in processes if each.process.is_alive()]:
            for process in left:
                process.terminate() if perf_counter() < patience else process.kill()
            wait([process.sentinel for process in left], timeout=0.2)
        for each in processes:
            each.connection.close()
        self._processes = [each for each in self._processes if each not in processes]


class _Process:
    """A process that does one piece of work at a time, and the connection to it."""

    def __init__(self, open_work: Callable[..., Any], arguments: tuple[Any, ...], threads: int) -> None:
        self.place = -1
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, open_work, arguments), daemon=True)
        with _environment(dict.fromkeys(_THREAD_VARIABLES, str(threads))):
            self.process.start()
        theirs.close()  # else the end of the process would not close the pipe

    def send(self, place: int, work: Any) -> None:
        self.place = place
        with contextlib.suppress(ConnectionError):  # what has become of the process shows when it is read from
            self.connection.send(work)

    def heard(self) -> Event[Any]:
        """The next that it says. Raises what the work raised."""
        try:
            said = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(_PATIENCE_SECONDS)
            name = signal_of(self.process.exitcode)
            return Event(self.place, died=f"ended by {name}" if name else f"ended with exit code {self.process.exitcode}")
        if isinstance(said, Exception):
            raise said
        return Event(self.place, said)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """These variables, for a process that starts in the block. What the user has set stays."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


# ---- in a worker process ------------------------------------------------------------------------------------------------


def _work(connection: Connection, open_work: Callable[..., Callable[[Any], Iterable[Any]]], arguments: tuple[Any, ...]) -> None:
    """Do the pieces of work that are sent, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent tells these to end
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        do = None
        while True:
            piece = connection.recv()
            try:
                do = do or open_work(*arguments)
                for answer in do(piece):
                    connection.send(answer)
                connection.send(None)
            except ConnectionError:
                raise
            except Exception as error:
                connection.send(_sendable(error))


def _sendable(error: Exception) -> Exception:
    """``error`` as a pipe can take it: classes of errors may need more than their text to be made again."""
    if isinstance(error, KdgenError):
        return KdgenError(str(error))
    return MemoryError() if isinstance(error, MemoryError) else RuntimeError("".join(traceback.format_exception(error)))


def _leave_with_parent() -> None:
    """A killed parent tells nobody; without this the process would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    patience = perf_counter() + _PATIENCE_SECONDS
    while perf_counter() < patience:
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(0.2)
    os._exit(2)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # by way of everything that tidies up
