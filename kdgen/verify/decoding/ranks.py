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
from kdgen.ranks.group import Group, joined
from kdgen.ranks.place import place_in
from kdgen.ranks.start import run_ranks
from kdgen.runtime.pipeline import open_shard
from kdgen.spec.model import Spec
from kdgen.verify.decoding.decodes import SITUATIONS, check_decodes, oracle_subject, random_subject
from kdgen.verify.decoding.programs import Model, check_programs
from kdgen.verify.oracles.models import model_cases
from kdgen.verify.report.checks import Check


@dataclass(frozen=True)
class Job:
    """What the ranks do: decode ``spec`` with ``weights``, the name of an oracle's case or the seed of random ones; without ``situations``
    they run every program under the checker instead."""

    spec: dict[str, Any]
    compute: Compute
    exchange: Exchange
    family: Family = "generic"
    weights: str | int = 0
    backend: str = "cpu"
    situations: int | None = None  #: so many of decodes.SITUATIONS
    errors: str = ""  #: a folder; a rank that ends early writes there why, before the others can notice


def check_ranks(
    spec: Spec, compute: Compute, ranks: int, weights: str | int = 0, backend: str = "cpu", situations: int = 2,
    exchange: Exchange = "gather", family: Family = "generic",
) -> list[Check]:  # fmt: skip
    """The checks of ``check_decodes`` by ``ranks`` processes, in the first ``situations``. ``weights`` name an oracle's case or seed random
    ones. The figure of each check is the largest of any rank. A GPU takes the plan of its own family.

    The first check that fails on a rank ends the job, for that rank no longer takes the steps that the others wait for. Raises KdgenError
    then, and when a rank fails otherwise, with what the first of them said.
    """
    return _by_ranks(Job(spec.model_dump(mode="json"), compute, exchange, family, weights, backend, situations), ranks)


def check_programs_of_ranks(spec: Spec, compute: Compute, ranks: int, exchange: Exchange) -> list[Check]:
    """The checks of ``check_programs`` by ``ranks`` processes. Raises KdgenError as ``check_ranks`` does."""
    return _by_ranks(Job(spec.model_dump(mode="json"), compute, exchange), ranks)


def _by_ranks(job: Job, ranks: int) -> list[Check]:
    said_in = tempfile.TemporaryDirectory(prefix="kdgen-ranks-")
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, said_in as folder:
        values = dataclasses.asdict(replace(job, errors=folder))
        command = [sys.executable, "-P", "-m", "kdgen.verify.decoding.ranks", json.dumps(values)]
        code = run_ranks(command, ranks, output=output, errors=errors)
        for file in (output, errors):
            file.seek(0)
        if code:
            said = _first_said(Path(folder)) or errors.read().decode(errors="replace").strip()
            raise KdgenError(f"{ranks} ranks of {job.spec['name']}, {job.exchange}, ended with {code}: {said}")
        found = [[Check(**values) for values in checks] for checks in json.loads(output.read())]
    return [_together(each, f"{ranks} ranks, {job.exchange}") for each in zip(*found, strict=True)]


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
    if job.situations is None:
        yield check_programs(Model(spec, job.compute, job.family), group, job.exchange)
        return
    backend, shard = open_shard(group, job.backend, exchange=job.exchange)
    if isinstance(job.weights, int):
        subject = random_subject(spec, job.compute, job.weights)
    else:
        subject = oracle_subject(spec, job.compute, next(case for case in model_cases() if case.name == job.weights))
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
