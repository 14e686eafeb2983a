"""``kdgen verify --report``: the report as one HTML page that needs nothing else, to be kept or sent."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np

from kdgen import __version__
from kdgen.codegen.folders import write_whole
from kdgen.verify.report.checks import Check, Report, groups

ROW, LABEL, WIDTH, AXIS = 17, 150, 620, 26  #: of a plot, in its own units: a row's height, the labels' width, the axis's length
LOWEST = 1e-4  #: of the error axis; smaller errors stand at its end


@dataclass(frozen=True)
class Dot:
    x: float
    compute: str
    failed: bool
    title: str


@dataclass(frozen=True)
class PlotRow:
    """One kernel: a dot for each model it was measured in, or none where only bits and integers were compared."""

    name: str
    y: int
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class Plot:
    title: str
    rows: tuple[PlotRow, ...]
    ticks: tuple[tuple[float, str], ...]
    height: int
    label: int = LABEL
    width: int = WIDTH


@dataclass(frozen=True)
class Reference:
    """The check that came closest to its tolerance among those against one reference."""

    against: str
    checks: int
    worst: Check
    ratio: float


def write_page(report: Report, path: Path) -> None:
    """Write ``report`` to ``path``, whole or not at all. Raises KdgenError when it cannot be written."""
    write_whole(path, render_page(report))


def render_page(report: Report) -> str:
    template = (Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=True)
    environment.filters["number"] = lambda value: "" if value is None else "0" if value == 0 else f"{value:.2g}"
    return environment.from_string(template).render(
        report=report,
        failures=[check for check in report.checks if check.status == "failed"],
        bits=sum(check.bits for check in report.checks),
        backends=sorted({check.backend for check in report.checks if check.status != "skipped" and check.backend not in ("text", "NumPy")}),
        models=[(title, checks, sum(check.status == "failed" for check in checks)) for title, checks in groups(report.checks)],
        references=_references(report.checks),
        plots=[plot for plot in (_kernel_plot(report.checks), _model_plot(report.checks)) if plot.rows],
        made=time.strftime("%Y-%m-%d %H:%M"),
        versions=f"kdgen {__version__}, Python {platform.python_version()}, NumPy {np.__version__}, {platform.platform(terse=True)}",
    )


def _ratio(check: Check) -> float | None:
    """Error over tolerance, None where there is none; an error that is no number is as large as can be."""
    if check.tolerance is None or check.figure is None:
        return None
    return check.figure / check.tolerance if check.tolerance else 0.0


def _references(checks: Sequence[Check]) -> list[Reference]:
    """In the order in which they were first used."""
    found: dict[str, list[tuple[float, Check]]] = {}
    for check in checks:
        ratio = _ratio(check)
        if ratio is None:
            continue
        where = {
            "kernel": "each kernel alone, from the same inputs: float64",
            "together": "a request's logits: the float64 reference",
            "tables": "cos and sin of RoPE: float64",
        }
        found.setdefault(where.get(check.part, f"whole models' logits: {check.name}"), []).append((ratio, check))
    references = []
    for name, each in found.items():
        ratio, worst = max(each, key=lambda pair: pair[0])
        references.append(Reference(name, len(each), worst, ratio))
    return references


def _x(ratio: float) -> float:
    low = math.log10(LOWEST)
    place = (math.log10(max(ratio, LOWEST)) - low) / (1 - low)  # the axis ends at ten times the tolerance
    return round(LABEL + min(place, 1.0) * WIDTH, 1)


def _plot(title: str, rows: Sequence[tuple[str, Sequence[Check]]]) -> Plot:
    drawn = []
    for place, (name, checks) in enumerate(rows):
        measured = [(check, ratio) for check in checks if (ratio := _ratio(check)) is not None and ratio > 0]
        dots = tuple(
            Dot(
                _x(ratio), check.compute, check.status == "failed",
                f"{check.spec} {check.compute}: error {check.figure:.2g}, {100 * ratio:.2g} % of its tolerance {check.tolerance:.2g}",
            )
            for check, ratio in measured
        )  # fmt: skip
        drawn.append(PlotRow(name, AXIS + place * ROW + ROW // 2, dots))
    ticks = tuple((_x(10.0**n), f"{10.0**n:g}") for n in range(round(math.log10(LOWEST)), 2))
    return Plot(title, tuple(drawn), ticks, AXIS + ROW * len(rows) + 6)


def _kernel_plot(checks: Sequence[Check]) -> Plot:
    kernels = [check for check in checks if check.part == "kernel" and check.backend != "text" and check.status != "skipped"]
    names = dict.fromkeys(check.name for check in kernels)
    return _plot("Kernels, each against float64", [(name, [check for check in kernels if check.name == name]) for name in names])


def _model_plot(checks: Sequence[Check]) -> Plot:
    models = [check for check in checks if check.part in ("logits", "together") and _ratio(check) is not None]
    names = dict.fromkeys(f"{check.spec}, {check.part}" for check in models)
    return _plot("Logits of whole models", [(name, [check for check in models if f"{check.spec}, {check.part}" == name]) for name in names])
