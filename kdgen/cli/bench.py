"""``kdgen bench``: times of a model's steps and kernels beside the floor set by the GPU's memory bandwidth, on one GPU or several ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kdgen.backends.gpu import cuda_unusable
from kdgen.bench.parts import check_distinct
from kdgen.bench.plot import plot
from kdgen.bench.ranks import measure_ranks
from kdgen.bench.run import BenchReport, measure, measure_parts
from kdgen.cli.bench_tables import print_ranks, print_report
from kdgen.cli.options import IntRange, plain
from kdgen.cli.output import check_writable, compile_note, emit_json, status
from kdgen.cli.ranks import agreed_ranks
from kdgen.codegen.folders import write_whole
from kdgen.errors import BackendError, KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import MAX_NODES, Compute, Limits
from kdgen.plan.shard import EXCHANGES, Exchange, Shard, check_shard
from kdgen.ranks.group import joined
from kdgen.ranks.place import Place, place_in
from kdgen.runtime.model import Model, random_model
from kdgen.runtime.pipeline import need_same_plan, open_shard, start_engine
from kdgen.spec.model import Spec


def _numbers(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        if plain(text):
            return tuple(int(part) for part in text.split(","))
    except ValueError:
        pass
    raise click.BadParameter(f"{text!r} is not a list of numbers such as 1,8")


def _optional_numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    return () if text is None else _numbers(ctx, param, text)


def _need_gpu() -> None:
    """Raises KdgenError with the reason when no GPU can be used."""
    if (why := cuda_unusable()) is not None:
        raise KdgenError(f"a benchmark needs a GPU, and none can be used: {why}; `kdgen plan` shows how fast a model can be on a GPU")


CONTEXT = 4096  #: tokens in the cache by default


@dataclass(frozen=True)
class Options:
    """The values of the command's options; None or empty where an option without a default was left out."""

    spec_name: str
    layers: int | None
    contexts: tuple[int, ...]  #: tokens in the cache
    nodes: tuple[int, ...]  #: token rows of each step
    dtype: Compute | None
    kernels: bool
    draft: bool
    distinct: tuple[int, ...]  #: experts that a step of as many rows hits
    prefill: int | None  #: tokens of a prompt
    chunk: int
    peers: bool
    picture: Path | None
    seed: int
    tp: int | None
    exchange: Exchange | None
    as_json: bool


_CONTEXT_HELP = f"Tokens in the cache, several separated by commas.  [default: {CONTEXT}, or the model's whole context]"
_NODES_HELP = f"Token rows of a step, several separated by commas, up to {MAX_NODES}: 1 is decoding, more verify a tree."
_EXCHANGE_HELP = "With --tp: time only this way to exchange, peer memory or gathers by NCCL; both in turn if left out."
_EXPERTS_HELP = "Distinct experts of a layer, a number for each of --nodes; if left out, as many as random tokens would hit."


@click.command("bench")
@click.argument("spec_name", metavar="SPEC")
@click.option("--layers", type=IntRange(min=1), help="Use only the first N layers.")
@click.option("--context", "contexts", callback=_optional_numbers, help=_CONTEXT_HELP)
@click.option("--nodes", default="1,8", show_default=True, callback=_numbers, help=_NODES_HELP)
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Compute type; the spec's own if left out.")
@click.option("--kernels/--no-kernels", default=True, show_default=True, help="Also time each kernel alone.")
@click.option(
    "--draft", is_flag=True, help="Also time the drafter of the spec's draft: section, and whole rounds of drafting and verifying."
)
@click.option("--experts", "distinct", callback=_optional_numbers, metavar="N,…", help=_EXPERTS_HELP)
@click.option("--prefill", type=IntRange(min=1), metavar="TOKENS", help="Also time a prompt of this many tokens.")
@click.option(
    "--chunk", type=IntRange(min=1), default=Limits().max_tokens, show_default=True, help="With --prefill: prompt tokens in each forward."
)
@click.option("--peers", is_flag=True, help="Also time torch, and Humming for INT4 experts, on the same work.")
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.svg",
    help="Draw the bytes per second of each kernel, as SVG.",
)
@click.option("--seed", type=IntRange(0, 2**64 - 1), default=0, show_default=True, help="Seed of the random weights.")
@click.option("--tp", type=IntRange(min=1), help="Time steps on N GPUs that share the model, beside one GPU.")
@click.option("--exchange", type=click.Choice(EXCHANGES), help=_EXCHANGE_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.bench/3, with --tp kdgen.bench-ranks/1).")
def command(**given: Any) -> None:
    """Time the decode and verify steps of SPEC with random weights, and each kernel in them, and compare with the floor: the bytes that a
    step must read, divided by the read bandwidth that the same run measures. With --tp, time steps and collectives of several ranks,
    started here, beside one GPU."""
    options = Options(**given)
    _check_options(options)
    check_writable(options.picture)
    place = place_in(os.environ)
    ranks = agreed_ranks(place, options.tp, options.exchange)
    if ranks > 1 and (options.distinct or options.prefill or options.peers or options.picture or not options.kernels):
        raise click.UsageError(
            "several ranks time steps and the kernels in them: leave out --experts, --prefill, --peers, --plot and --no-kernels"
        )
    if place is None:  # a rank chooses its GPU before anything asks for one
        _need_gpu()
    model = random_model(options.spec_name, options.layers, options.seed, options.draft)
    check_shard(model.spec, Shard(ranks))
    if options.distinct:
        check_distinct(model.spec, options.nodes, options.distinct)
    contexts, limits = _sizes(options, model.spec)
    if ranks > 1 and place is None:
        build_plan(model.spec, options.dtype, limits, Shard(ranks))
        _bench_ranks(options, contexts, ranks)
        return
    report = _measure(options, model, contexts, limits, place)
    if report is None:
        return
    if options.as_json:
        emit_json("kdgen.bench/3", report)
    else:
        print_report(report)
    if options.picture is not None:  # last: where it cannot be written, the figures are not lost
        write_whole(options.picture, plot(report))


def _check_options(options: Options) -> None:
    """Raises KdgenError when a value is out of range, or options contradict each other."""
    if not all(1 <= rows <= MAX_NODES for rows in options.nodes) or not all(context >= 1 for context in options.contexts):
        raise KdgenError(f"--nodes takes numbers from 1 to {MAX_NODES}, --context numbers from 1")
    if options.distinct and len(options.distinct) != len(options.nodes):
        raise KdgenError(f"--experts takes a number for each of --nodes: {len(options.nodes)}, not {len(options.distinct)}")
    if options.picture is not None and options.picture.suffix != ".svg":
        raise KdgenError(f"--plot draws SVG: {options.picture} must end in .svg")
    if options.picture is not None and not options.kernels:
        raise KdgenError("--plot shows kernels: leave out --no-kernels")


def _sizes(options: Options, spec: Spec) -> tuple[tuple[int, ...], Limits]:
    """The contexts to time, and the limits to plan for. Raises KdgenError when the model has too few positions."""
    positions = spec.max_position_embeddings
    step_rows = max(*options.nodes, spec.draft.block_size if spec.draft else 0)
    contexts = options.contexts or (min(CONTEXT, max(1, positions - step_rows)),)
    longest = max(*contexts, options.prefill or 0)
    if longest + step_rows > positions:
        raise KdgenError(f"{spec.name} has {positions} positions: choose a smaller --context, --prefill or --nodes")
    tokens = min(options.chunk, options.prefill) if options.prefill else Limits().max_tokens
    return contexts, Limits(tokens, min(longest + 1024, positions))


def _measure(options: Options, model: Model, contexts: tuple[int, ...], limits: Limits, place: Place | None) -> BenchReport | None:
    """The times of this process's rank; None on ranks other than 0."""
    with status() as say, joined(place) as group:
        say("opening the GPU")
        try:
            backend, shard = open_shard(group, "cuda", exchange=options.exchange)
        except BackendError:
            _need_gpu()
            raise
        if group is None or group.rank == 0:
            backend.compiling = compile_note
        plan = build_plan(model.spec, options.dtype, limits, shard)
        if group is not None:
            need_same_plan(group, plan)
            group.need_same({"--context": contexts, "--nodes": options.nodes, "--kernels": options.kernels, "--seed": options.seed})
        loading = "weights {:.1f} of {:.1f} GB"
        engine = start_engine(model.spec, plan, backend, model.weights, lambda done, total: say(loading.format(done / 1e9, total / 1e9)))
        report = measure(engine, contexts, options.nodes, say, options.kernels)
        if group is None:
            report = measure_parts(report, engine, contexts, options.nodes, options.distinct, options.prefill, options.peers, say)
    return None if shard.rank else report


def _bench_ranks(options: Options, contexts: Sequence[int], ranks: int) -> None:
    """Run this command on ``ranks`` ranks and on one GPU, and print both."""
    exchanges = EXCHANGES if options.exchange is None else (options.exchange,)
    with status() as say:
        report = measure_ranks(_arguments(options, contexts), ranks, exchanges, say)
    if options.as_json:
        emit_json("kdgen.bench-ranks/1", report)
    else:
        print_ranks(report)


def _arguments(options: Options, contexts: Sequence[int]) -> list[str]:
    """The arguments of this command that say what is timed."""
    nodes = ",".join(map(str, options.nodes))
    arguments = [options.spec_name, "--context", ",".join(map(str, contexts)), "--nodes", nodes, "--seed", str(options.seed)]
    if options.layers is not None:
        arguments += ["--layers", str(options.layers)]
    if options.dtype is not None:
        arguments += ["--dtype", options.dtype]
    return [*arguments, "--draft"] if options.draft else arguments
