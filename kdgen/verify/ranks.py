"""Several ranks of one model: processes of this host that decode together on the CPU backend, each held against plain decoding.

``python -m kdgen.verify.ranks`` is one rank; ``check_ranks`` starts them. Every rank makes the checks of ``check_decodes`` with its part of
the model, and what they found is put together: a check is ok when it is on every rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kdgen.errors import KdgenError
from kdgen.launch import run_ranks
from kdgen.model import open_shard
from kdgen.oracles import model_cases
from kdgen.plan.ir import Compute, Family
from kdgen.plan.shard import Exchange
from kdgen.ranks import Group, joined, place_in
from kdgen.spec import Spec
from kdgen.verify.decodes import SITUATIONS, check_decodes, oracle_subject, random_subject
from kdgen.verify.programs import Model, check_programs
from kdgen.verify.report import Check


@dataclass(frozen=True)
class Job:
    """What the ranks do: decode ``spec``, with an oracle's weights where ``case`` names one, else with random ones."""

    spec: dict[str, Any]
    compute: Compute
    case: str
    backend: str
    situations: int  #: so many of decodes.SITUATIONS
    seed: int
    exchange: Exchange
    family: Family
    programs: bool  #: run every program under the checker, instead of decoding


def check_ranks(
    spec: Spec, compute: Compute, ranks: int, case: str = "", backend: str = "cpu", situations: int = 2, seed: int = 0,
    exchange: Exchange = "gather", family: Family = "generic", programs: bool = False,
) -> list[Check]:  # fmt: skip
    """The checks of ``check_decodes``, or of ``check_programs``, by ``ranks`` processes; the figure of each is the largest of any rank.
    A GPU takes the plan of its own family.

    Raises KdgenError when a rank fails otherwise than by a check, with what it said.
    """
    job = Job(spec.model_dump(mode="json"), compute, case, backend, situations, seed, exchange, family, programs)
    command = [sys.executable, "-m", "kdgen.verify.ranks", json.dumps(dataclasses.asdict(job))]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = run_ranks(command, ranks, output=output, errors=errors)
        for file in (output, errors):
            file.seek(0)
        if code:
            raise KdgenError(f"{ranks} ranks of {spec.name} ended with {code}: {errors.read().decode(errors='replace').strip()}")
        found = [[Check(**values) for values in checks] for checks in json.loads(output.read())]
    return [_together(each, f"{ranks} ranks, {exchange}") for each in zip(*found, strict=True)]


def _together(found: Sequence[Check], who: str) -> Check:
    """One check as all ranks made it."""
    name, first = f"{who}: {found[0].name}", found[0]
    for rank, check in enumerate(found):
        if check.status != "ok":
            return replace(check, part="ranks", name=name, why=f"rank {rank}: {check.why}")
    worst = max(found, key=lambda check: check.figure or 0.0)
    bits = sum(check.bits for check in found)
    return replace(first, part="ranks", name=name, figure=worst.figure, tolerance=worst.tolerance, bits=bits)


def run_rank(job: Job) -> list[list[Check]] | None:
    """This process's part of ``job``: on rank 0 what every rank found, else None."""
    spec = Spec.from_mapping(job.spec)
    with joined(place_in(os.environ)) as group:
        if job.programs:
            return _of_all(group, [check_programs(Model(spec, job.compute, job.family), group, job.exchange)])
        backend, shard = open_shard(group, job.backend, exchange=job.exchange)
        case = next((case for case in model_cases() if case.name == job.case), None)
        subject = oracle_subject(spec, job.compute, case) if case else random_subject(spec, job.compute, job.seed)
        found = list(check_decodes(backend, subject, SITUATIONS[: job.situations], shard, job.family))
        return _of_all(group, found)


def _of_all(group: Group | None, found: list[Check]) -> list[list[Check]] | None:
    if group is None:
        return [found]
    everybody = group.exchange(json.dumps([dataclasses.asdict(check) for check in found]).encode())
    if group.rank:
        return None
    return [[Check(**values) for values in json.loads(each)] for each in everybody]


def main(arguments: Sequence[str]) -> int:
    """The entry point of a rank."""
    try:
        found = run_rank(Job(**json.loads(arguments[0])))
    except KdgenError as error:
        sys.stderr.write(f"kdgen: error: {error}\n")
        return 2
    if found is not None:
        sys.stdout.write(json.dumps([[dataclasses.asdict(check) for check in checks] for checks in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
