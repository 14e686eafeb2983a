"""Processes that share a command's work: answers in turn, a process that dies, errors, an early end, and the report of ``kdgen verify``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from kdgen.errors import KdgenError
from kdgen.verify.report.checks import Check
from kdgen.verify.task_runner import one_by_one, open_tasks, side_by_side
from kdgen.verify.tasks import Task, prepare
from kdgen.verify.workers import _THREAD_VARIABLES, Event, Workers, cpus

# ---- works --------------------------------------------------------------------------------------------------------------


def doubling(offset: int) -> Callable[[int], Iterator[int]]:
    def work(number: int) -> Iterator[int]:
        yield 2 * number + offset
        if number == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if number < 0:
            time.sleep(-number)
        yield -number

    return work


def refusing() -> Callable[[int], Iterator[int]]:
    raise KdgenError("there is nothing to work with")


class _UnsendableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def failing() -> Callable[[int], Iterator[int]]:
    def work(number: int) -> Iterator[int]:
        yield number
        raise _UnsendableError(number, 2)

    return work


def surrounded() -> Callable[[int], Iterator[str]]:
    return lambda _: iter([" ".join(os.environ[name] for name in _THREAD_VARIABLES)])


def test_every_answer_has_its_works_place() -> None:
    with Workers(doubling, (1,), 2) as workers:
        events = list(workers.each([5, 6, 7]))
        assert len(events) == 9
        assert [[event.answer for event in events if event.place == place] for place in range(3)] == [
            [11, -5, None], [13, -6, None], [15, -7, None],
        ]  # fmt: skip


def test_work_that_takes_its_process_down_ends_alone_and_the_others_are_done() -> None:
    with Workers(doubling, (0,), 2) as workers:
        events = list(workers.each([1, 13, 2]))
        ends = {event.place: event.died for event in events if event.answer is None}
        assert ends == {0: "", 1: "ended by SIGKILL", 2: ""}
        assert [event.answer for event in workers.each([4])] == [8, -4, None]


def test_an_error_is_the_callers() -> None:
    with Workers(refusing, (), 1) as workers, pytest.raises(KdgenError, match="nothing to work with"):
        list(workers.each([1]))
    with Workers(failing, (), 2) as workers, pytest.raises(RuntimeError, match="_UnsendableError: 1 and 2"):
        list(workers.each([1]))


def test_work_that_is_not_needed_does_not_hold_the_caller_up() -> None:
    began = time.perf_counter()
    with Workers(doubling, (0,), 2) as workers:
        for event in workers.each([1, 2, -100, -100]):
            if event.place == 1:
                workers.need_before(2)
        assert [event.answer for event in workers.each([3])] == [6, -3, None]  # by another process
    assert time.perf_counter() - began < 60


def test_the_least_begins_first() -> None:
    with Workers(doubling, (0,), 1) as workers:
        places = [event.place for event in workers.each([1, 2, 3], lambda place: (2.0, 0.0, 1.0)[place])]
        assert list(dict.fromkeys(places)) == [1, 2, 0]


def test_processes_share_the_processors() -> None:
    with Workers(surrounded, (), max(2, cpus())) as workers:
        found = {event.answer for event in workers.each([1, 2])}
    assert found == {None, " ".join(os.environ.get(name, "1") for name in _THREAD_VARIABLES)}


# ---- the report ---------------------------------------------------------------------------------------------------------


#: Seconds that each part takes, and whether its second check fails. The third fails first, the second in the report's order.
PARTS = ((0.0, False), (1.5, True), (0.0, True), (0.0, False), (0.0, False), (0.0, False))


def part(place: int) -> Iterator[Check]:
    seconds, bad = PARTS[place]
    yield Check("tiny", "f32", "test", f"{place}, first", "none", "ok")
    time.sleep(seconds)
    yield Check("tiny", "f32", "test", f"{place}, second", "none", "failed" if bad else "ok", why="wrong" if bad else "")
    yield Check("tiny", "f32", "test", f"{place}, third", "none", "ok")


def parts() -> Callable[[int], Iterator[Check]]:
    return part


def tasks_of(places: Sequence[int]) -> list[Task]:
    return [Task(f"part {place}", lambda _, place=place: part(place), seconds=place) for place in places]  # type: ignore[misc]


class Heard:
    """A Progress that keeps what it hears."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def doing(self, what: str) -> None:
        pass

    def failed(self, check: Check) -> None:
        self.said.append(f"failed: {check.name}")

    def ended(self, part: str, checks: Sequence[Check]) -> None:
        self.said.append(f"{part}: {len(checks)}")


@pytest.mark.parametrize("fail_fast", [False, True])
def test_the_report_does_not_depend_on_the_number_of_processes(fail_fast: bool) -> None:
    tasks, alone, shared = tasks_of(range(len(PARTS))), Heard(), Heard()
    checks = one_by_one(tasks, alone, fail_fast)
    with Workers(parts, (), 2) as workers:
        assert side_by_side(tasks, workers, shared, fail_fast) == checks
    assert [check.name for check in checks[3:5]] == ["1, first", "1, second"] and len(checks) == (5 if fail_fast else 18)
    assert alone.said[:2] == ["part 0: 3", "failed: 1, second"] and "failed: 1, second" in shared.said
    assert ("part 5: 3" in shared.said) != fail_fast


def test_a_failure_is_heard_before_its_part_has_ended() -> None:
    heard = Heard()
    one_by_one(tasks_of([2]), heard, False)
    assert heard.said == ["failed: 2, second", "part 2: 3"]


def test_a_model_has_the_same_report_in_one_process_and_in_several() -> None:
    tasks = prepare(("tiny",), "cpu", "f32", None).tasks()
    wanted = [place for place, task in enumerate(tasks) if task.title in ("tiny f32, kernels", "tables")]
    with Workers(open_tasks, (("tiny",), "cpu", "f32", 1), 2) as workers:
        events = [event for event in workers.each(wanted) if event.answer is not None]
    shared = [
        replace(event.answer, seconds=0.0) for place in range(len(wanted)) for event in events if event.place == place if event.answer
    ]
    alone = [replace(check, seconds=0.0) for check in one_by_one([tasks[place] for place in wanted], Heard(), False)]
    assert shared == alone and len(alone) > 35


class Dead:
    """Workers of which one has died."""

    def __init__(self, how: str) -> None:
        self.how = how

    def each(self, works: Sequence[int], first: object) -> Iterator[Event[Check]]:
        yield Event(0, next(part(0)))
        yield Event(0, died=self.how)


def test_a_crash_is_a_finding_and_a_killed_process_the_end() -> None:
    found = side_by_side(tasks_of([0]), Dead("ended by SIGSEGV"), Heard(), False)  # type: ignore[arg-type]
    assert (found[1].status, found[1].why) == ("failed", "the process that made these checks was ended by SIGSEGV: a kernel crashed")
    with pytest.raises(KdgenError, match="the process that made the checks of part 0 was ended by SIGKILL"):
        side_by_side(tasks_of([0]), Dead("ended by SIGKILL"), Heard(), False)  # type: ignore[arg-type]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "code", "message"), [(signal.SIGINT, 130, "kdgen: interrupted"), (signal.SIGTERM, 143, "")])
def test_an_interrupt_ends_all_processes(number: int, code: int, message: str) -> None:
    """They hold its stderr, which ends when the last of them does."""
    script = "from kdgen.cli import main; main(prog_name='kdgen')"
    command = [sys.executable, "-c", script, "verify", "tiny", "--jobs", "2", "--backend", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(6)
    assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert [line for line in err.splitlines() if line.startswith("kdgen:") or "Traceback" in line] == ([message] if message else [])
