"""Tasks one by one in this process, or side by side in several.

The report has the tasks' checks in the order of the list of tasks, however many processes did them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kdgen.errors import KdgenError
from kdgen.plan.ir import Compute
from kdgen.verify.report.checks import Check
from kdgen.verify.tasks import Task, prepare
from kdgen.verify.workers import Workers


class Progress(Protocol):
    """Who hears how far ``verify`` is."""

    def doing(self, what: str) -> None:
        """What runs now."""

    def failed(self, check: Check) -> None:
        """A check has just failed."""

    def ended(self, part: str, checks: Sequence[Check]) -> None:
        """A part of the report has ended, with these checks."""


class Silent:
    """A Progress that shows nothing."""

    def doing(self, what: str) -> None:
        """Shows nothing."""

    def failed(self, check: Check) -> None:
        """Shows nothing."""

    def ended(self, part: str, checks: Sequence[Check]) -> None:
        """Shows nothing."""


def one_by_one(all_tasks: Sequence[Task], progress: Progress, fail_fast: bool) -> list[Check]:
    checks: list[Check] = []
    for task in all_tasks:
        first = len(checks)
        for check in task.make(progress.doing):
            checks.append(check)
            if check.status == "failed":
                progress.failed(check)
                if fail_fast:
                    return checks
        progress.ended(task.title, checks[first:])
    return checks


def open_tasks(names: Sequence[str], backend_name: str | None, compute: Compute | None, threads: int) -> Callable[[int], Iterator[Check]]:
    """What a worker process does with a task's place in the list, over a backend of its own."""
    all_tasks = prepare(names, backend_name, compute, threads).tasks()
    return lambda place: all_tasks[place].make(lambda _: None)


def side_by_side(all_tasks: Sequence[Task], workers: Workers[int, Check], progress: Progress, fail_fast: bool) -> list[Check]:
    """The tasks' checks in the order of the list.

    With ``fail_fast`` tasks begin in that order. Once a check fails, what stands behind it is dropped and what stands before it is still
    finished, so that the report ends with the same check as one process's.
    """
    found: list[list[Check]] = [[] for _ in all_tasks]
    ended = 0
    for event in workers.each(range(len(all_tasks)), lambda place: 0.0 if fail_fast else -all_tasks[place].seconds):
        title, check = all_tasks[event.place].title, event.answer or _died(all_tasks[event.place], event.died)
        if check is not None:
            found[event.place].append(check)
            if check.status == "failed":
                progress.failed(check)
                if fail_fast:
                    workers.need_before(event.place)
        if event.answer is None:
            ended += 1
            progress.ended(title, found[event.place])
            progress.doing(f"{ended} of {len(all_tasks)} parts have ended")
    checks = [check for each in found for check in each]
    first = next((place for place, check in enumerate(checks) if check.status == "failed"), len(checks))
    return checks[: first + 1] if fail_fast else checks


def _died(task: Task, how: str) -> Check | None:
    """A crash is a finding. Raises KdgenError where somebody else has ended the process: the machine for lack of memory, or a person."""
    if not how:
        return None
    if how.endswith(("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")):
        raise KdgenError(f"the process that made the checks of {task.title} was {how}: --jobs 1 needs less memory")
    return Check(
        task.title, "", "process", task.title, "cpu", "failed", why=f"the process that made these checks was {how}: a kernel crashed"
    )
