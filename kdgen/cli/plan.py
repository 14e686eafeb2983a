"""``kdgen plan``: the memory that a model needs on some GPUs, and lower bounds for the times of its steps, from the plan alone."""

from __future__ import annotations

from pathlib import Path

import click

from kdgen.cli.options import Float, IntRange
from kdgen.cli.output import emit_json, emit_table, size_text
from kdgen.codegen.folders import write_whole
from kdgen.errors import KdgenError
from kdgen.forecast.gpus import gpu_model, gpu_models
from kdgen.forecast.steps import Forecast, Step, budgets_shown, expected_tokens, forecast
from kdgen.plan.ir import MAX_NODES, Compute
from kdgen.runtime.model import shorten
from kdgen.spec.model import Spec, load_spec
from kdgen.spec.published import load_config

CONTEXT = 4096  #: tokens in the cache by default


@click.command("plan")
@click.argument("spec_name", metavar="SPEC")
@click.option("--gpu", default="h200", show_default=True, help=f"The GPU: {', '.join(each.name for each in gpu_models())}.")
@click.option("--tp", type=IntRange(min=1), default=1, show_default=True, help="GPUs that share the model.")
@click.option("--context", type=IntRange(min=1), help="Tokens in the cache.  [default: 4096, or the model's whole context]")
@click.option(
    "--nodes",
    type=IntRange(0, MAX_NODES - 1),
    default=15,
    show_default=True,
    help="Draft nodes of the tree whose step is shown beside a decode step; 0 shows the decode step alone.",
)
@click.option(
    "--acceptance",
    type=Float(),
    default=0.8,
    show_default=True,
    help="Probability that the draft's best token is accepted, the same at each depth: at least 0, below 1.",
)
@click.option("--layers", type=IntRange(min=1), help="Use only the first N layers.")
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Compute type; the spec's own if left out.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.svg", help="Draw the speed-up over the tree's size.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.plan/1).")
def command(
    spec_name: str, gpu: str, tp: int, context: int | None, nodes: int, acceptance: float, layers: int | None, dtype: Compute | None,
    plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show the memory that SPEC needs on --tp GPUs, the bytes and the least time of each part of a step, and the expected gain of draft
    trees. SPEC is a shipped name, a YAML file, or a published model's folder. The command loads and runs nothing, so it works on any
    machine."""
    if plot is not None and plot.suffix != ".svg":
        raise KdgenError(f"--plot draws SVG: {plot} must end in .svg")
    spec = _spec(spec_name)
    if layers is not None:
        spec = shorten(spec, layers)
    context = context or min(CONTEXT, spec.max_position_embeddings)
    found = forecast(spec, gpu_model(gpu), tp, context, nodes, acceptance, dtype)
    if plot is not None:
        write_plot(found, plot)
    if as_json:
        emit_json("kdgen.plan/1", found)
    else:
        _print(found, nodes)


def _spec(source: str) -> Spec:
    path = Path(source)
    return load_config(path) if path.suffix == ".json" or (path / "config.json").exists() else load_spec(source)


def _print(found: Forecast, nodes: int) -> None:
    memory = found.memory
    click.echo(f"{found.spec} ({found.compute}) on {found.ranks} x {found.gpu.title}, context {found.context}\n")
    emit_table(
        ("memory of a rank", ""),
        [
            ("weights", size_text(memory.weights)),
            ("drafter's weights", size_text(memory.draft_weights)),
            ("cache", size_text(memory.cache)),
            ("buffers", size_text(memory.buffers)),
            ("driver, assumed", size_text(memory.reserved)),
            ("in all", f"{size_text(memory.total)} of {size_text(memory.of_gpu)}"),
        ],
        right=(1,),
    )
    click.echo(_verdict(found))
    for step, title in ((found.decode, "decode, 1 row"), (found.verify, f"verify, {found.verify.rows} rows")):
        if step is found.verify and nodes == 0:
            continue
        click.echo(f"\n{title}{f', {step.experts:.0f} experts a layer' if step.experts else ''}")
        emit_table(("part", "launches", "bytes", "floor µs"), _rows(step), right=(1, 2, 3))
    click.echo(f"\ndraft trees, acceptance {found.acceptance:g}, a draft of {found.draft_seconds * 1e6:.0f} µs")
    rows = [
        (str(tree.nodes), f"{tree.tokens:.2f}", f"{tree.seconds * 1e6:.0f}", f"{tree.speedup:.2f}")
        for tree in budgets_shown(found.trees, nodes, found.best.nodes)
    ]
    emit_table(("nodes", "tokens a round", "floor µs", "speed-up"), rows, right=(0, 1, 2, 3))
    click.echo(f"best: {found.best.nodes} nodes, {found.best.speedup:.2f} times plain decoding\n")
    if found.placements:
        click.echo(
            "bytes of experts that a rank reads in a layer, with random routing: a part of every expert on each rank, as planned (parts),"
            " or whole experts spread over the ranks (whole)"
        )
        table = [
            (
                str(p.rows), f"{p.experts:.0f}", f"{p.fullest:.1f}", size_text(int(p.shared_bytes)), size_text(int(p.whole_bytes)),
                f"{p.whole_bytes / p.shared_bytes:.2f}",
            )
            for p in found.placements
        ]  # fmt: skip
        emit_table(("rows", "experts hit", "on the fullest rank", "parts", "whole", "whole / parts"), table, right=range(6))
        click.echo()
    for assumption in found.assumptions:
        click.echo(f"assumed: {assumption}")


def _rows(step: Step) -> list[tuple[str, str, str, str]]:
    parts = sorted(step.parts, key=lambda part: -part.bytes)
    rows = [(part.name, str(part.launches), size_text(part.bytes), f"{part.seconds * 1e6:.1f}") for part in parts]
    if step.collectives:
        rows.append(("collectives", str(step.collectives), size_text(step.collective_bytes), f"{step.collective_seconds * 1e6:.1f}"))
    return [*rows, ("in all", str(sum(part.launches for part in step.parts)), size_text(step.bytes), f"{step.seconds * 1e6:.1f}")]


def _verdict(found: Forecast) -> str:
    if found.memory.fits:
        return f"It fits; so does a context of up to {found.memory.longest_context}."
    if found.fewest_ranks:
        return f"It does NOT fit; {found.fewest_ranks} such GPUs would be enough (--tp {found.fewest_ranks})."
    return "It does NOT fit, with any number of such GPUs that can share it."


# ---- the plot -----------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 340, 46, 40, 34, 86
_CURVES = ((0.5, "#b8c4d6"), (0.6, "#9ab0cf"), (0.7, "#7598c7"), (0.8, "#4a7fc0"), (0.9, "#1f5fae"))
_CHOSEN = "#bf5b17"


def write_plot(found: Forecast, file: Path) -> None:
    """Write an SVG of the speed-up over the nodes of a tree, for the chosen acceptance and others. Raises KdgenError when it cannot be
    written."""
    plain = found.trees[0].seconds
    curves = {}
    for acceptance in sorted({*(value for value, _ in _CURVES), found.acceptance}):
        tokens = expected_tokens(acceptance, found.depths, MAX_NODES - 1)
        curves[acceptance] = [gain * plain / tree.seconds for gain, tree in zip(tokens, found.trees, strict=True)]
    top = max(max(curve) for curve in curves.values()) * 1.05
    right = _WIDTH - _RIGHT

    def x(nodes: float) -> float:
        return _LEFT + (right - _LEFT) * nodes / (MAX_NODES - 1)

    def y(speedup: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * speedup / top

    title = f"{found.spec} on {found.ranks} x {found.gpu.title}, context {found.context}: expected speed-up of draft trees"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{title}</text>',
    ]
    for tick in range(int(top) + 1):
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{right}" stroke="{"#888" if tick == 1 else "#ddd"}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for nodes in (0, 7, 15, 31, 47, 63):
        parts.append(f'<text x="{x(nodes):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{nodes}</text>')
    colours = dict(_CURVES) | {found.acceptance: _CHOSEN}
    free = float(_HEIGHT - _BOTTOM)  # the y below which there are labels already; labels are placed from the lowest curve upwards
    for acceptance, curve in sorted(curves.items(), key=lambda item: item[1][-1]):
        points = " ".join(f"{x(nodes):.1f},{y(value):.1f}" for nodes, value in enumerate(curve))
        width = 2.5 if acceptance == found.acceptance else 1.2
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[acceptance]}" stroke-width="{width}"/>')
        free = min(y(curve[-1]) + 4, free - 14)
        parts.append(f'<text x="{right + 4}" y="{free:.1f}" fill="{colours[acceptance]}">accepted {acceptance:g}</text>')
    parts.append(f'<circle cx="{x(found.best.nodes):.1f}" cy="{y(found.best.speedup):.1f}" r="4" fill="{_CHOSEN}"/>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 8}">nodes of a tree; floors, not measurements</text></svg>\n')
    write_whole(file, "\n".join(parts))
