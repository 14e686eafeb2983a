"""Models that ranks share, as processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

from kdgen.errors import KdgenError
from kdgen.plan.shard import EXCHANGES
from kdgen.spec.model import Spec
from kdgen.verify.decoding.programs import model_of_ranks
from kdgen.verify.decoding.rank_cases import Case
from kdgen.verify.decoding.rank_matrix import check_rank_matrix
from kdgen.verify.decoding.ranks import check_programs_of_ranks, check_ranks
from kdgen.verify.parts.decodes import case_of
from kdgen.verify.parts.kernels import CHECKER
from kdgen.verify.plans import RANKS
from kdgen.verify.report.checks import Check, Say


def ranks_of(spec: Spec, say: Say) -> Iterator[Check]:
    """Processes that share ``spec``, on this machine's CPU wherever the other checks ran: bits among themselves, and an oracle's tokens."""
    case = case_of(spec)
    for exchange, situations in zip(EXCHANGES, (2, 1), strict=True):
        say(f"{spec.name} f32: {RANKS} ranks, {exchange}")
        began = perf_counter()
        try:
            yield from check_ranks(spec, "f32", RANKS, case.name if case else 0, situations=situations, exchange=exchange)
        except KdgenError as error:
            why, seconds = str(error), perf_counter() - began
            yield Check(spec.name, "f32", "ranks", f"{RANKS} ranks, {exchange}", "cpu", "failed", why=why, seconds=seconds)


def rank_matrix_of(wanted: Sequence[Case], say: Say) -> Iterator[Check]:
    """Small models on each number of ranks, in one process and as processes of this machine's CPU."""
    for case in wanted:
        say(f"{case} {case.compute}")
    yield from check_rank_matrix(wanted)


def programs_of_ranks(say: Say) -> Iterator[Check]:
    """Whole programs of two ranks, which exchange through each other's memory, under the checker."""
    model = model_of_ranks()
    say(f"{model.title} {model.compute}: programs of {RANKS} ranks under the checker")
    began = perf_counter()
    try:
        yield from check_programs_of_ranks(model.spec, model.compute, RANKS, "peer")
    except KdgenError as error:
        name, seconds = f"programs of {RANKS} ranks", perf_counter() - began
        yield Check(model.title, model.compute, "ranks", name, CHECKER, "failed", why=str(error), seconds=seconds)
