"""What ``kdgen verify`` found: one Check a line, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

SCHEMA = 1  #: of the JSON; raised when a field changes its meaning


@dataclass(frozen=True)
class Check:
    """One thing that was held against another.

    ``part`` groups checks (kernels, trees, drift, logits, decode). ``figure`` is what was measured, in the unit of ``tolerance``
    (0 where bits or integers must be equal). A check that did not run is neither ok nor a failure, and ``why`` says why not;
    for a failure ``why`` says where.
    """

    spec: str
    compute: str
    part: str
    name: str
    backend: str
    ran: bool
    ok: bool
    figure: float | None = None
    tolerance: float | None = None
    detail: str = ""
    why: str = ""
    seconds: float = 0.0

    @property
    def status(self) -> str:
        return "skipped" if not self.ran else "ok" if self.ok else "FAILED"


@dataclass
class Report:
    """Checks in the order in which they ran, and what a reader should know about how they did."""

    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.ran and not check.ok]

    @property
    def skipped(self) -> list[Check]:
        return [check for check in self.checks if not check.ran]

    @property
    def ok(self) -> bool:
        """Something ran and nothing failed."""
        return not self.failures and len(self.skipped) < len(self.checks)

    def to_json(self) -> str:
        document = {
            "schema": SCHEMA,
            "ok": self.ok,
            "notes": self.notes,
            "checks": [{**asdict(check), "status": check.status, **_finite(check)} for check in self.checks],
        }
        return json.dumps(document, indent=2, allow_nan=False)


def _finite(check: Check) -> dict[str, float | str | None]:
    """JSON has no infinity: a result that is no number at all is written as a word."""
    return {"figure": str(check.figure)} if check.figure is not None and not math.isfinite(check.figure) else {}


def number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.2g}"


def print_report(report: Report, console: Console) -> None:
    """The table: kernels of one spec a line each, then the other parts; failures again below, with where they are."""
    for (spec, compute), checks in _grouped(report.checks).items():
        table = Table(title=f"{spec} ({compute})" if compute else spec, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for heading in ("part", "check", "backend"):
            table.add_column(heading, no_wrap=heading != "backend")
        table.add_column("result", no_wrap=True)
        for heading in ("figure", "tolerance"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("detail", overflow="fold")
        for check in checks:
            style = {"ok": "green", "FAILED": "bold red", "skipped": "yellow"}[check.status]
            about = check.detail if check.ok and check.ran else check.why
            table.add_row(
                check.part, check.name, check.backend, f"[{style}]{check.status}[/]", number(check.figure), number(check.tolerance), about
            )
        console.print(table)
        console.print()
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    ran = len(report.checks) - len(report.skipped)
    seconds = sum(check.seconds for check in report.checks)
    console.print(
        f"{ran} checks ran in {seconds:.0f} s, {len(report.failures)} failed, {len(report.skipped)} did not run", highlight=False
    )
    for check in report.failures:
        console.print(f"FAILED {check.spec} {check.compute} {check.part} {check.name}: {check.why}", style="red", highlight=False, markup=False)


def _grouped(checks: Sequence[Check]) -> dict[tuple[str, str], list[Check]]:
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.spec, check.compute), []).append(check)
    return groups
