"""What ``kdgen verify`` found: one Check a line, as a table for people and, field for field, as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "failed", "skipped"]
Say = Callable[[str], None]  #: is given what runs now, for whoever waits for checks
SCHEMA = "kdgen.verify/1"


@dataclass(frozen=True)
class Check:
    """One thing that was held against another.

    ``part`` groups checks (primitives, kernel, tables, numbers, trees, checker, drift, together, logits, tokens, decode, rounds, ranks).
    ``figure`` is what was measured, in the unit of ``tolerance``; both are None where bits or integers were compared, or where the result
    was no number. ``bits`` were compared one by one. ``why`` says where a failed check failed, and why a skipped one did not run.
    """

    spec: str
    compute: str
    part: str
    name: str
    backend: str
    status: Status
    figure: float | None = None
    tolerance: float | None = None
    detail: str = ""
    why: str = ""
    seconds: float = 0.0
    bits: int = 0


@dataclass(frozen=True)
class Report:
    """Checks in the order in which they ran. ``ok``: some ran and none failed. ``notes`` say what a reader should know about how."""

    ok: bool
    ran: int
    failed: int
    skipped: int
    seconds: float
    checks: tuple[Check, ...]
    notes: tuple[str, ...]


def make_report(checks: Sequence[Check], notes: Sequence[str], seconds: float) -> Report:
    count = {status: sum(check.status == status for check in checks) for status in ("ok", "failed", "skipped")}
    ran = count["ok"] + count["failed"]
    return Report(count["failed"] == 0 and ran > 0, ran, count["failed"], count["skipped"], seconds, tuple(checks), tuple(notes))


def finite(value: float) -> float | None:
    """JSON knows no infinity, and a table needs none."""
    return value if math.isfinite(value) else None


def print_report(report: Report, console: Console) -> None:
    """A table for each spec and compute type; then notes, failures with where they are, and a count."""
    for title, checks in groups(report.checks):
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for heading in ("part", "check", "backend", "result"):
            table.add_column(heading, no_wrap=True)
        for heading in ("error", "tolerance", "s"):
            table.add_column(heading, no_wrap=True, justify="right")
        table.add_column("")
        for check in checks:
            style = {"ok": "green", "failed": "bold red", "skipped": "yellow"}[check.status]
            about = check.why or check.detail
            cells = (check.part, check.name, check.backend, Text(check.status, style), _number(check.figure), _number(check.tolerance))
            table.add_row(*cells, f"{check.seconds:.1f}", _one_line(about))
        with console.capture() as lines:
            console.print(table)
        for line in lines.get().splitlines():  # rich fills lines up with blanks
            console.out(line.rstrip(), highlight=False)
        console.print()
    for note in report.notes:
        console.print(f"note: {note}")
    for check in report.checks:
        if check.status == "failed":
            console.print(failure_text(check), style="red")
    console.print(f"{report.ran} checks ran in {report.seconds:.0f} s: {report.failed} failed. {report.skipped} did not run.")


def failure_text(check: Check) -> str:
    """Where a failed check failed, and how, in full."""
    return f"FAILED {check.spec} {check.compute}, {check.part}, {check.name} on {check.backend}:\n  {check.why}"


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.2g}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else f"{line[:157]}..."


def groups(checks: Sequence[Check]) -> Iterator[tuple[str, list[Check]]]:
    for title in dict.fromkeys(f"{check.spec} {check.compute}" for check in checks):
        yield title, [check for check in checks if f"{check.spec} {check.compute}" == title]
