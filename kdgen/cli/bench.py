"""``kdgen bench``: how far a model's steps and kernels are from what the GPU's memory allows, on one GPU or on several that share it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from kdgen.backends.gpu import cuda_unusable
from kdgen.bench.parts import check_distinct
from kdgen.bench.plot import plot
from kdgen.bench.ranks import TITLES, RanksReport, measure_ranks
from kdgen.bench.run import BenchReport, StepTime, measure, measure_parts
from kdgen.cli.options import IntRange, plain
from kdgen.cli.output import check_writable, compile_note, emit_json, emit_table, status
from kdgen.cli.ranks import agreed_ranks
from kdgen.codegen.folders import write_whole
from kdgen.errors import BackendError, KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.plan.shard import EXCHANGES, Exchange, Shard, check_shard
from kdgen.ranks.group import joined
from kdgen.ranks.place import place_in
from kdgen.runtime.model import random_model
from kdgen.runtime.pipeline import need_same_plan, open_shard, start_engine


def _numbers(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        if plain(text):
            return tuple(int(part) for part in text.split(","))
    except ValueError:
        pass
    raise click.BadParameter(f"{text!r} is no list of numbers such as 1,8")


def _optional_numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    return () if text is None else _numbers(ctx, param, text)


def _need_gpu() -> None:
    """Raises KdgenError, saying why, where there is none."""
    if (why := cuda_unusable()) is not None:
        raise KdgenError(f"a benchmark needs a GPU, and none can be used: {why}; `kdgen plan` says how fast a model can be on one")


CONTEXT = 4096  #: tokens in the cache, unless told
_CONTEXT_HELP = f"Tokens in the cache, several by comma.  [default: {CONTEXT}, or all that the model has]"
_NODES_HELP = "Token rows of a step, several by comma, up to 64: 1 decodes, more verify a tree."
_EXCHANGE_HELP = "With --tp: one way to exchange alone, peer memory or gathers by NCCL; without it, both in turn."
_EXPERTS_HELP = "Distinct experts of a layer for each of --nodes; without it, as many as tokens hit that choose at random."


@click.command("bench")
@click.argument("spec_name", metavar="SPEC")
@click.option("--layers", type=IntRange(min=1), help="The first so many layers only.")
@click.option("--context", "contexts", callback=_optional_numbers, help=_CONTEXT_HELP)
@click.option("--nodes", default="1,8", show_default=True, callback=_numbers, help=_NODES_HELP)
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Compute type; the spec decides without it.")
@click.option("--kernels/--no-kernels", default=True, show_default=True, help="Time each kernel alone, too.")
@click.option("--draft", is_flag=True, help="Time the drafter of the spec's draft: section and whole rounds, too.")
@click.option("--experts", "distinct", callback=_optional_numbers, metavar="N,…", help=_EXPERTS_HELP)
@click.option("--prefill", type=IntRange(min=1), metavar="TOKENS", help="Time a prompt of so many tokens, too.")
@click.option(
    "--chunk", type=IntRange(min=1), default=Limits().max_tokens, show_default=True, help="With --prefill: prompt tokens of a forward."
)
@click.option("--peers", is_flag=True, help="Time torch, and Humming for INT4 experts, doing the same work beside ours.")
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.svg",
    help="Draw the kernels' bytes a second, as SVG.",
)
@click.option("--seed", type=IntRange(0, 2**64 - 1), default=0, show_default=True, help="Of the random weights.")
@click.option("--tp", type=IntRange(min=1), help="Time steps on so many GPUs that share the model, beside one GPU.")
@click.option("--exchange", type=click.Choice(EXCHANGES), help=_EXCHANGE_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.bench/3, with --tp kdgen.bench-ranks/1).")
def command(
    spec_name: str, layers: int | None, contexts: tuple[int, ...], nodes: tuple[int, ...], dtype: Compute | None, kernels: bool,
    draft: bool, distinct: tuple[int, ...], prefill: int | None, chunk: int, peers: bool, picture: Path | None, seed: int, tp: int | None,
    exchange: Exchange | None, as_json: bool,
) -> None:  # fmt: skip
    """Time decode and verify steps of SPEC with random weights, and every kernel in them, against the floor: the bytes that must be
    read, over the read bandwidth measured in the same run. With --tp, steps and collectives of ranks that it starts, beside one GPU."""
    if not all(1 <= rows <= 64 for rows in nodes) or not all(context >= 1 for context in contexts):
        raise KdgenError("--nodes takes numbers from 1 to 64, --context numbers from 1")
    if distinct and len(distinct) != len(nodes):
        raise KdgenError(f"--experts takes a number for each of --nodes: {len(nodes)}, not {len(distinct)}")
    if picture is not None and picture.suffix != ".svg":
        raise KdgenError(f"--plot draws SVG: {picture} must end in .svg")
    if picture is not None and not kernels:
        raise KdgenError("--plot shows kernels: leave out --no-kernels")
    check_writable(picture)
    place = place_in(os.environ)
    ranks = agreed_ranks(place, tp, exchange)
    if ranks > 1 and (distinct or prefill or peers or picture or not kernels):
        raise click.UsageError("of ranks, steps and their kernels are timed: leave out --experts, --prefill, --peers, --plot, --no-kernels")
    if place is None:  # a rank chooses its GPU before anything asks for one
        _need_gpu()
    model = random_model(spec_name, layers, seed, draft)
    check_shard(model.spec, Shard(ranks))
    if distinct:
        check_distinct(model.spec, nodes, distinct)
    most = model.spec.max_position_embeddings
    step_rows = max(*nodes, model.spec.draft.block_size if model.spec.draft else 0)
    contexts = contexts or (min(CONTEXT, max(1, most - step_rows)),)
    longest = max(*contexts, prefill or 0)
    if longest + step_rows > most:
        raise KdgenError(f"{model.spec.name} has {most} positions: choose a smaller --context, --prefill or --nodes")
    limits = Limits(min(chunk, prefill) if prefill else Limits().max_tokens, min(longest + 1024, most))
    if ranks > 1 and place is None:
        build_plan(model.spec, dtype, limits, Shard(ranks))
        _bench_ranks(ranks, exchange, _options(spec_name, layers, contexts, nodes, dtype, draft, seed), as_json)
        return
    with status() as say, joined(place) as group:
        say("opening the GPU")
        try:
            backend, shard = open_shard(group, "cuda", exchange=exchange)
        except BackendError:
            _need_gpu()
            raise
        if group is None or group.rank == 0:
            backend.compiling = compile_note
        plan = build_plan(model.spec, dtype, limits, shard)
        if group is not None:
            need_same_plan(group, plan)
            group.need_same({"--context": contexts, "--nodes": nodes, "--kernels": kernels, "--seed": seed})
        loading = "weights {:.1f} of {:.1f} GB"
        engine = start_engine(model.spec, plan, backend, model.weights, lambda done, total: say(loading.format(done / 1e9, total / 1e9)))
        report = measure(engine, contexts, nodes, say, kernels)
        if group is None:
            report = measure_parts(report, engine, contexts, nodes, distinct, prefill, peers, say)
    if shard.rank:
        return
    if as_json:
        emit_json("kdgen.bench/3", report)
    else:
        _print(report)
    if picture is not None:  # last: where it cannot be written, the figures are not lost
        write_whole(picture, plot(report))


def _print_ranks(report: RanksReport) -> None:
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


def _options(
    spec_name: str, layers: int | None, contexts: Sequence[int], nodes: Sequence[int], dtype: str | None, draft: bool, seed: int
) -> list[str]:
    """Options of this command that say what is timed."""
    options = [spec_name, "--context", ",".join(map(str, contexts)), "--nodes", ",".join(map(str, nodes)), "--seed", str(seed)]
    if layers is not None:
        options += ["--layers", str(layers)]
    if dtype is not None:
        options += ["--dtype", dtype]
    return [*options, "--draft"] if draft else options


def _bench_ranks(ranks: int, exchange: Exchange | None, options: Sequence[str], as_json: bool) -> None:
    with status() as say:
        report = measure_ranks(options, ranks, EXCHANGES if exchange is None else (exchange,), say)
    if as_json:
        emit_json("kdgen.bench-ranks/1", report)
    else:
        _print_ranks(report)


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
