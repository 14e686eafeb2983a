"""What a mutant is: where, what was right, what is wrong, what bug that is, and what should see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``right`` stands exactly once in ``file``.

    What should see it is one of these: ``part``, the part of the report (kdgen.verify.report.checks.Check) that sees it first; ``tasks``,
    titles of ``kdgen verify``'s tasks (kdgen.verify.tasks.Task), or words of some; ``tests``, the file of tests that must fail, for what no
    check of the command looks at: readers of files, what only a GPU's backend decides, the choice of budgets. ``kind`` is its class of
    mistakes.
    """

    name: str
    file: str
    right: str
    wrong: str
    bug: str
    part: str = "kernel"
    kind: str = ""
    tasks: tuple[str, ...] = ()
    tests: str = ""


def seen_by(kind: str, path: str, tasks: Sequence[str], *edits: tuple[str, str, str]) -> list[Mutant]:
    """Mutants of one file from (bug, right, wrong), which the tasks with these words in their titles should see."""
    stem = path.rpartition("/")[2].partition(".")[0]
    return [Mutant(f"{stem}: {bug}", path, right, wrong, bug, "", kind, tuple(tasks)) for bug, right, wrong in edits]


def tested_by(kind: str, path: str, tests: str, *edits: tuple[str, str, str]) -> list[Mutant]:
    """Mutants of one file from (bug, right, wrong), with which a file of tests should fail."""
    stem = path.rpartition("/")[2].partition(".")[0]
    return [Mutant(f"{stem}: {bug}", path, right, wrong, bug, "tests", kind, (), tests) for bug, right, wrong in edits]
