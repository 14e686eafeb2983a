"""The tables that ``kdgen bench`` prints."""

from __future__ import annotations

import click

from kdgen.bench.ranks import TITLES, RanksReport
from kdgen.bench.run import BenchReport, StepTime
from kdgen.cli.output import emit_table


def print_ranks(report: RanksReport) -> None:
    one = report.one
    click.echo(f"{one.spec}, {one.layers} layers, {one.compute}, random weights, on {report.ranks} ranks and on one, {one.backend}")
    bandwidths = ", ".join(f"{each.read_bytes_per_second / 1e12:.2f}" for each in (one, *report.runs.values()))
    click.echo(f"read bandwidth {bandwidths} TB/s\n")
    alone = [
        ("one GPU", s.program, str(s.rows), str(s.context), f"{s.microseconds:.0f}", f"{s.floor_microseconds:.0f}", "", _ratio(s), "")
        for s in one.steps
    ]
    shared = [
        (
            TITLES[s.exchange], s.program, str(s.rows), str(s.context), f"{s.microseconds:.0f}", f"{s.floor_microseconds:.0f}",
            f"{s.collectives_microseconds:.0f}", f"{s.microseconds / (s.floor_microseconds + s.collectives_microseconds):.2f}",
            f"{s.speedup:.2f}",
        )
        for s in report.steps
    ]  # fmt: skip
    columns = ("by", "step", "rows", "context", "µs", "floor µs", "collectives µs", "over both", "of one GPU's speed")
    emit_table(columns, [*alone, *shared], right=range(2, 9))
    click.echo("\ncollectives")
    emit_table(
        ("by", "collective", "rows", "in a step", "µs"),
        [(TITLES[c.exchange], c.collective, str(c.rows), str(c.in_step), f"{c.microseconds:.1f}") for c in report.collectives],
        right=range(2, 5),
    )
    for exchange, why in report.missing.items():
        click.echo(f"\nnothing by {TITLES[exchange]}: {why}")


def print_report(report: BenchReport) -> None:
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
    _print_parts(report)


def _print_parts(report: BenchReport) -> None:
    if report.parts:
        click.echo("\nparts of a step that are no forward")
        emit_table(
            ("part", "rows", "context", "µs"),
            [(p.part, str(p.rows), str(p.context), f"{p.microseconds:.1f}") for p in report.parts],
            right=range(1, 4),
        )
    if report.rounds:
        click.echo("\nrounds, from draft to compaction")
        emit_table(
            ("budget", "context", "µs"), [(str(r.budget), str(r.context), f"{r.microseconds:.0f}") for r in report.rounds], right=range(3)
        )
    if report.experts:
        click.echo("\nexperts of a layer: gate_up, SiLU, down")
        others = [peer.peer for peer in report.experts[0].peers]
        emit_table(
            ("rows", "distinct", "µs", "floor µs", "ratio", *(f"{name} µs" for name in others)),
            [
                (
                    str(e.rows), str(e.experts), f"{e.microseconds:.0f}", f"{e.floor_microseconds:.0f}",
                    f"{e.microseconds / e.floor_microseconds:.2f}", *(f"{peer.microseconds:.0f}" for peer in e.peers),
                )
                for e in report.experts
            ],
            right=range(5 + len(others)),
        )  # fmt: skip
        if report.missing:
            click.echo(report.missing)
    if report.peers:
        click.echo(f"\nbeside {report.peer}, in turn")
        emit_table(
            ("kernel", "rows", "context", "µs", "torch µs", "torch / ours"),
            [
                (
                    p.kernel, str(p.rows), str(p.context), f"{p.microseconds:.1f}", f"{p.peer_microseconds:.1f}",
                    f"{p.peer_microseconds / p.microseconds:.2f}",
                )
                for p in report.peers
            ],
            right=range(1, 6),
        )  # fmt: skip
    elif report.peer:
        click.echo(f"\nno peer: {report.peer}")
    if report.prefill:
        p = report.prefill
        share = f"{100 * p.matrix_share:.0f} % of the measured {p.matrix_rate / 1e12:.0f} TFLOP/s"
        click.echo(f"\nprefill: {p.tokens} tokens in chunks of {p.chunk}: {p.seconds:.3f} s, {p.tokens_per_second:.0f} tokens/s, {share}")


def _ratio(step: StepTime) -> str:
    return f"{step.microseconds / step.floor_microseconds:.2f}"
