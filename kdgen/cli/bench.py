"""``kdgen bench``: how far a model's steps and kernels are from what the GPU's memory allows."""

from __future__ import annotations

import click

from kdgen.backends import open_backend
from kdgen.bench import BenchReport, StepTime, measure
from kdgen.cli.output import emit_json, emit_table, status
from kdgen.engine import Engine
from kdgen.errors import KdgenError
from kdgen.model import random_model
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits


def _numbers(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,8") from error


@click.command("bench")
@click.argument("spec_name", metavar="SPEC")
@click.option("--layers", type=click.IntRange(min=1), help="The first so many layers only.")
@click.option("--context", "contexts", default="4096", show_default=True, callback=_numbers, help="Tokens in the cache, several by comma.")
@click.option("--nodes", default="1,8", show_default=True, callback=_numbers, help="Token rows of a step: 1 decodes, more verify a tree.")
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Compute type; the spec decides without it.")
@click.option("--kernels/--no-kernels", default=True, show_default=True, help="Time each kernel alone, too.")
@click.option("--draft", is_flag=True, help="Time the drafter of the spec's draft: section, too.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Of the random weights.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.bench/1).")
def command(
    spec_name: str, layers: int | None, contexts: tuple[int, ...], nodes: tuple[int, ...], dtype: Compute | None, kernels: bool,
    draft: bool, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Time decode and verify steps of SPEC with random weights, and every kernel in them, against the floor: the bytes that must be
    read, over the read bandwidth measured in the same run."""
    if not all(1 <= rows <= 64 for rows in nodes) or not all(context >= 1 for context in contexts):
        raise KdgenError("--nodes takes numbers from 1 to 64, --context numbers from 1")
    with status() as say:
        say("opening the GPU")
        backend = open_backend("cuda")
        model = random_model(spec_name, layers, seed, draft)
        plan = build_plan(model.spec, dtype, Limits(max_context=max(contexts) + 1024))
        loading = "weights {:.1f} of {:.1f} GB"
        engine = Engine(model.spec, plan, backend, model.weights, lambda done, total: say(loading.format(done / 1e9, total / 1e9)))
        report = measure(engine, contexts, nodes, say, kernels)
    if as_json:
        emit_json("kdgen.bench/1", report)
    else:
        _print(report)


def _print(report: BenchReport) -> None:
    click.echo(f"{report.spec}, {report.layers} layers, {report.compute}, random weights, on {report.backend}")
    click.echo(f"read bandwidth {report.read_bytes_per_second / 1e12:.2f} TB/s\n")
    rows = [
        (s.program, str(s.rows), str(s.context), str(s.experts), f"{s.microseconds:.0f}", f"{s.floor_microseconds:.0f}", _ratio(s))
        for s in report.steps
    ]
    emit_table(("step", "rows", "context", "experts hit", "µs", "floor µs", "ratio"), rows, right=range(1, 7))
    for step in report.steps:
        if step.kernels:
            click.echo(f"\n{step.program}, {step.rows} rows, context {step.context}")
            emit_table(
                ("kernel", "launches", "µs", "floor µs", "ratio", "µs a step"),
                [
                    (
                        k.kernel, str(k.launches), f"{k.microseconds:.1f}", f"{k.floor_microseconds:.1f}",
                        f"{k.microseconds / k.floor_microseconds:.2f}" if k.floor_microseconds > 0.5 else "",
                        f"{k.microseconds * k.launches:.0f}",
                    )
                    for k in step.kernels
                ],
                right=range(1, 6),
            )  # fmt: skip


def _ratio(step: StepTime) -> str:
    return f"{step.microseconds / step.floor_microseconds:.2f}"
