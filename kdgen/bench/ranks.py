"""Several ranks beside one GPU: ``kdgen bench --tp N`` runs itself on one GPU, then on N GPUs with each way to exchange data, and combines
the reports."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kdgen.bench.run import BenchReport, KernelTime, StepTime
from kdgen.errors import KdgenError
from kdgen.plan.shard import Exchange
from kdgen.ranks.start import own_command, run_ranks


@dataclass(frozen=True)
class CollectiveTime:
    """One collective of a step of ``rows`` rows: the microseconds of one, and the number of them in a step."""

    exchange: Exchange
    collective: str
    rows: int
    in_step: int
    microseconds: float


@dataclass(frozen=True)
class RankStep:
    """A step of all ranks beside the same step on one GPU.

    ``floor_microseconds`` is the time to read a rank's bytes at its GPU's bandwidth. ``collectives_microseconds`` is the sum of the times
    of the step's collectives. ``speedup`` is one GPU's time divided by the ranks' time.
    """

    exchange: Exchange
    program: str
    rows: int
    context: int
    microseconds: float
    floor_microseconds: float
    collectives_microseconds: float
    one_microseconds: float
    speedup: float


@dataclass(frozen=True)
class RanksReport:
    """``one`` is one GPU's report, ``runs`` has rank 0's by exchange, and ``missing`` says why an exchange has none."""

    ranks: int
    steps: tuple[RankStep, ...]
    collectives: tuple[CollectiveTime, ...]
    one: BenchReport
    runs: dict[Exchange, BenchReport]
    missing: dict[Exchange, str]


def measure_ranks(options: Sequence[str], ranks: int, exchanges: Sequence[Exchange], say: Callable[[str], None]) -> RanksReport:
    """Run ``kdgen bench`` with ``options`` on one GPU and on ``ranks``. Raises KdgenError when that fails on one GPU, or with every
    exchange."""
    say("one GPU")
    one = _run(options, 1)
    runs: dict[Exchange, BenchReport] = {}
    missing: dict[Exchange, str] = {}
    for exchange in exchanges:
        say(f"{ranks} ranks, {TITLES[exchange]}")
        try:
            runs[exchange] = _run([*options, "--exchange", exchange], ranks)
        except KdgenError as error:
            missing[exchange] = str(error)
    if not runs:
        raise KdgenError("; ".join(dict.fromkeys(missing.values())))
    collectives = tuple(time for exchange, report in runs.items() for time in _collectives(exchange, report))
    steps = tuple(
        _beside(exchange, step, alone, collectives)
        for exchange, report in runs.items()
        for step, alone in zip(report.steps, one.steps, strict=True)
    )
    return RanksReport(ranks, steps, collectives, one, runs, missing)


TITLES: dict[Exchange, str] = {"peer": "peer memory", "gather": "NCCL"}


def _run(options: Sequence[str], ranks: int) -> BenchReport:
    """Rank 0's report. Raises KdgenError with the ranks' messages when they fail."""
    command = own_command(["bench", *options, "--json"])
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = run_ranks(command, ranks, os.environ, output=output, errors=errors)
        for file in (output, errors):
            file.seek(0)
        if code:
            said = errors.read().decode(errors="replace").strip().removeprefix("kdgen: error: ")
            raise KdgenError(f"{ranks} ranks: {said}" if ranks > 1 else said)
        return _report(json.loads(output.read()))


def _report(values: dict[str, Any]) -> BenchReport:
    steps = tuple(StepTime(**step | {"kernels": tuple(KernelTime(**kernel) for kernel in step["kernels"])}) for step in values["steps"])
    names = ("spec", "compute", "layers", "backend", "read_bytes_per_second")
    return BenchReport(**{name: values[name] for name in names}, steps=steps)


def _collectives(exchange: Exchange, report: BenchReport) -> list[CollectiveTime]:
    """The collectives of every step, from its kernels."""
    found = []
    for step in report.steps:
        mine = [kernel for kernel in step.kernels if kernel.group == "sums over ranks" and kernel.launches]
        found += [CollectiveTime(exchange, kernel.kernel, step.rows, kernel.launches, kernel.microseconds) for kernel in mine]
    return found


def _beside(exchange: Exchange, step: StepTime, alone: StepTime, collectives: Sequence[CollectiveTime]) -> RankStep:
    mine = [each for each in collectives if each.exchange == exchange and each.rows == step.rows]
    waiting = sum(each.in_step * each.microseconds for each in mine)
    return RankStep(
        exchange, step.program, step.rows, step.context, step.microseconds, step.floor_microseconds, waiting,
        alone.microseconds, alone.microseconds / step.microseconds,
    )  # fmt: skip
