"""Several ranks of one model: processes of this host that decode together on the CPU backend, each held against plain decoding.

``python -m kdgen.verify.decoding.ranks`` is one rank; ``check_ranks`` starts them. Every rank makes the checks of ``check_decodes`` with
its part of the model, and what they found is put together: a check is ok when it is on every rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdgen.errors import KdgenError
from kdgen.plan.ir import Compute, Family
from kdgen.plan.shard import Exchange
from kdgen.ranks.group import Group, joined, place_in
from kdgen.ranks.start import run_ranks
from kdgen.runtime.pipeline import open_shard
from kdgen.spec.model import Spec
from kdgen.verify.decoding.decodes import SITUATIONS, check_decodes, oracle_subject, random_subject
from kdgen.verify.decoding.programs import Model, check_programs
from kdgen.verify.oracles.models import model_cases
from kdgen.verify.report.checks import Check


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
    errors: str  #: a folder; a rank that ends early writes there why, before the others can notice


def check_ranks(
    spec: Spec, compute: Compute, ranks: int, case: str = "", backend: str = "cpu", situations: int = 2, seed: int = 0,
    exchange: Exchange = "gather", family: Family = "generic", programs: bool = False,
) -> list[Check]:  # fmt: skip
    """The checks of ``check_decodes``, or of ``check_programs``, by ``ranks`` processes; the figure of each is the largest of any rank.
    A GPU takes the plan of its own family.

    The first check that fails on a rank ends the job, for that rank no longer takes the steps that the others wait for. Raises KdgenError
    then, and when a rank fails otherwise, with what the first of them said.
    """
    said_in = tempfile.TemporaryDirectory(prefix="kdgen-ranks-")
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, said_in as folder:
        job = Job(spec.model_dump(mode="json"), compute, case, backend, situations, seed, exchange, family, programs, folder)
        command = [sys.executable, "-P", "-m", "kdgen.verify.decoding.ranks", json.dumps(dataclasses.asdict(job))]
        code = run_ranks(command, ranks, output=output, errors=errors)
        for file in (output, errors):
            file.seek(0)
        if code:
            said = _first_said(Path(folder)) or errors.read().decode(errors="replace").strip()
            raise KdgenError(f"{ranks} ranks of {spec.name}, {exchange}, ended with {code}: {said}")
        found = [[Check(**values) for values in checks] for checks in json.loads(output.read())]
    return [_together(each, f"{ranks} ranks, {exchange}") for each in zip(*found, strict=True)]


def _first_said(folder: Path) -> str:
    """What the first rank that ended early wrote; empty where none did."""
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    return files[0].read_text(encoding="utf-8") if files else ""


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
    """This process's part of ``job``: on rank 0 what every rank found, else None.

    Raises KdgenError for the first check that fails where there are other ranks, and writes why before these can notice.
    """
    with joined(place_in(os.environ)) as group:
        try:
            return _of_all(group, list(_checks(job, group)))
        except KdgenError as error:
            rank = 0 if group is None else group.rank
            (Path(job.errors) / f"rank-{rank}").write_text(f"rank {rank}: {error}", encoding="utf-8")
            raise


def _checks(job: Job, group: Group | None) -> Iterator[Check]:
    spec = Spec.from_mapping(job.spec)
    if job.programs:
        yield check_programs(Model(spec, job.compute, job.family), group, job.exchange)
        return
    backend, shard = open_shard(group, job.backend, exchange=job.exchange)
    case = next((case for case in model_cases() if case.name == job.case), None)
    subject = oracle_subject(spec, job.compute, case) if case else random_subject(spec, job.compute, job.seed)
    for check in check_decodes(backend, subject, SITUATIONS[: job.situations], shard, job.family):
        if check.status == "failed" and group is not None:
            raise KdgenError(f"{check.name}: {check.why}")
        yield check


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
