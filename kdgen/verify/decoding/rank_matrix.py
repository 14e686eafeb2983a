"""Ranks in every combination that changes what they compute: 1 to 4 of them, both compute types, biases, INT4 experts, drafters that ranks
share or have whole, ties over the divided vocabulary, and both exchanges.

Ranks that gather run in one process (``kdgen.verify.decoding.lockstep``). Their sums must have the bits of ((r0 + r1) + r2) + … in float32,
and their logits are compared with the float64 reference. Ranks that read each other's memory are processes, whose results must have the
bits of the ranks that gather. ``python -m kdgen.verify.decoding.rank_matrix`` is one such process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import BrokenBarrierError
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends import open_backend
from kdgen.codegen.render import render
from kdgen.errors import KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute
from kdgen.plan.shard import Exchange, Shard
from kdgen.ranks.group import joined
from kdgen.ranks.place import place_in
from kdgen.ranks.start import run_ranks
from kdgen.reference.dflash import ReferenceDrafter
from kdgen.runtime.engine import Engine
from kdgen.runtime.pipeline import open_shard, start_engine
from kdgen.spec.model import Spec
from kdgen.verify.decoding.lockstep import Team
from kdgen.verify.decoding.rank_cases import Case
from kdgen.verify.decoding.rank_observations import BLOCK, BUDGET, LIMITS, PROMPT_TOKENS, SAMPLING, Observed, observe, prompt_of
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.inboxes import words_out_of_place
from kdgen.verify.kernels.sampling import may_draw
from kdgen.verify.published import reference_of
from kdgen.verify.report.checks import Check, Status, finite

Array = NDArray[Any]


def check_case(case: Case, weights: Mapping[str, Array]) -> tuple[str, float, float, list[Observed]]:
    """(problem, largest error of the logits, its tolerance, what each rank saw) of ranks that gather."""
    team = Team(case.spec, case.compute, case.ranks, LIMITS, weights)
    prompt = prompt_of(case.spec)
    sums = team.watched((lambda engine: engine.prefill(prompt), Engine.decode), weights)
    found = team.run(observe)
    problem = sums.problem or next((f"rank {rank}: {each.problem}" for rank, each in enumerate(found) if each.problem), "")
    if case.ranks > 1 and not sums.seen:
        problem = problem or "no sum over ranks was seen"
    if case.ranks > 2 and not sums.ordered:
        problem = problem or "no sum over ranks depends on their order"
    problem = problem or _alike(found) or _chosen(found)
    error, tolerance = _logits_error(case, found, weights)
    if not error <= tolerance:
        problem = problem or f"logits differ from the float64 reference by {error:.3g}"
    return problem or _drafts(case, found[0], weights), error, tolerance, found


def _alike(found: Sequence[Observed]) -> str:
    """Everything but the logits' parts is the same on every rank."""
    for rank, each in enumerate(found[1:], 1):
        for name in ("tokens", "sampled", "cache", "features", "drafts", "candidates"):
            if np.asarray(getattr(each, name)).tobytes() != np.asarray(getattr(found[0], name)).tobytes():
                return f"rank {rank} has {name} that differ from rank 0's"
    return ""


def _chosen(found: Sequence[Observed]) -> str:
    """Each token is what the ranks' logits side by side give; of equals, the lowest."""
    whole, drawn = (np.concatenate([getattr(each, name) for each in found], axis=1) for name in ("logits", "sampled_logits"))
    for place, token in enumerate(found[0].tokens):
        if token != (best := int(whole[PROMPT_TOKENS - 1 + place].argmax())):
            return f"token {place} is {token}, but the largest of all ranks' logits is that of {best}"
    for place, token in enumerate(found[0].sampled):
        if not may_draw(drawn[PROMPT_TOKENS - 1 + place], SAMPLING, PROMPT_TOKENS + place, token):
            return f"sampled token {place}, {token}, is not what all ranks' logits give"
    drafts = found[0].drafts
    if (found[0].candidates != np.argsort(-drafts, axis=1, kind="stable")[:, :BUDGET]).any():
        return "the candidates of a draft are not the largest of its logits, the lowest of equals first"
    return ""


def _logits_error(case: Case, found: Sequence[Observed], weights: Mapping[str, Array]) -> tuple[float, float]:
    tokens = [*prompt_of(case.spec), *found[0].tokens[:-1]]
    expected = reference_of(case.spec, weights).forward(tokens).logits
    return _error(case, np.concatenate([each.logits for each in found], axis=1), expected, case.spec.num_hidden_layers)


def _error(case: Case, got: Array, expected: Array, layers: int) -> tuple[float, float]:
    """In float32 each element, in bf16 the rows' typical error."""
    error = np.abs(got.astype(np.float64) - expected)
    if case.compute == "f32":
        return float(error.max()), tolerances.float32_logits(expected)
    return float(np.median(np.sqrt(np.square(error).mean(axis=1)))), tolerances.bf16_logits(expected, layers)


def _drafts(case: Case, found: Observed, weights: Mapping[str, Array]) -> str:
    draft = case.spec.draft
    assert draft is not None
    head = "model.embed_tokens.weight" if case.spec.tie_word_embeddings else "lm_head.weight"
    drafter = ReferenceDrafter(draft, weights, weights["model.embed_tokens.weight"], weights[head])
    _, expected = drafter.block(drafter.extend(drafter.empty_cache(), found.features), found.tokens[0], BLOCK)
    error, tolerance = _error(case, found.drafts, expected, draft.num_hidden_layers + 1)
    return "" if error <= tolerance else f"the drafter's logits differ from the float64 reference by {error:.3g}"


@dataclass(frozen=True)
class Seen:
    """What a process saw: the digests of ``Observed``, and its problem."""

    digests: tuple[str, ...]
    problem: str


def processes_see(wanted: Sequence[tuple[Case, Exchange]], ranks: int) -> list[list[Seen]]:
    """What each of ``ranks`` processes sees of each wanted case, by its exchange. Raises KdgenError, with what they said, if they fail."""
    for case, exchange in wanted:  # once, not by every rank
        plan = build_plan(case.spec, case.compute, LIMITS, Shard(ranks, 0, exchange))
        open_backend("cpu").load([rendered.source for rendered in render(plan)])
    jobs = [(case.spec.model_dump(mode="json"), case.compute, case.ties, exchange) for case, exchange in wanted]
    command = [sys.executable, "-P", "-m", "kdgen.verify.decoding.rank_matrix", json.dumps(jobs)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = run_ranks(command, ranks, output=output, errors=errors)
        for file in (output, errors):
            file.seek(0)
        if code:
            raise KdgenError(f"{ranks} ranks ended with {code}: {errors.read().decode(errors='replace').strip()}")
        return [[Seen(tuple(digests), problem) for digests, problem in each] for each in json.loads(output.read())]


def run_rank(jobs: Sequence[tuple[dict[str, Any], Compute, bool, Exchange]]) -> list[list[tuple[tuple[str, ...], str]]] | None:
    """This process's part of ``jobs``: on rank 0 what every rank saw, else None."""
    with joined(place_in(os.environ)) as group:
        backend, shard = open_shard(group, "cpu")
        found = []
        for values, compute, ties, exchange in jobs:
            case = Case(Spec.from_mapping(values), compute, shard.ranks, ties)
            plan = build_plan(case.spec, compute, LIMITS, replace(shard, exchange=exchange))
            seen = observe(engine := start_engine(case.spec, plan, backend, case.weights().__getitem__))
            found.append((seen.digests(), seen.problem or words_out_of_place(engine)))
        if group is None:
            return [[each] for each in found]
        everybody = [json.loads(each) for each in group.exchange(json.dumps(found).encode())]
        return None if group.rank else [list(ranks) for ranks in zip(*everybody, strict=True)]


def check_rank_matrix(wanted: Sequence[Case]) -> Iterator[Check]:
    """A Check for each case, all of them of one number of ranks, and one for each exchange by which a case is processes."""
    expected: list[list[Seen]] = []
    for case in wanted:
        began = perf_counter()
        try:
            problem, error, tolerance, found = check_case(case, case.weights())
        except (KdgenError, BrokenBarrierError) as failed:
            expected.append([])
            yield _check(case, str(case), str(failed) or "a rank did not reach a gather", perf_counter() - began)
            continue
        expected.append([Seen(each.digests(), each.problem) for each in found])
        bits = 0 if problem else 8 * sum(each.logits.nbytes + each.cache.nbytes for each in found)
        detail = "sums rank after rank, by bits; tokens, drafts, trees, rounds and samples are those of all ranks' logits"
        yield _check(case, str(case), problem, perf_counter() - began, detail, finite(error), tolerance, bits)
    started = [(case, exchange, seen) for case, seen in zip(wanted, expected, strict=True) for exchange in case.processes]
    if not started:
        return
    began, problem, everything = perf_counter(), "", []
    try:
        everything = processes_see([(case, exchange) for case, exchange, _ in started], wanted[0].ranks)
    except KdgenError as failed:
        problem = str(failed)
    seconds = (perf_counter() - began) / len(started)
    for place, (case, exchange, seen) in enumerate(started):
        detail = "the bits of the same ranks in one process, on every rank"
        yield _check(case, f"{case}, processes, {exchange}", problem or _other_bits(seen, everything[place]), seconds, detail)


def _other_bits(expected: Sequence[Seen], found: Sequence[Seen]) -> str:
    if len(expected) != len(found):
        return f"{len(found)} ranks reported, but {len(expected)} ran in one process"
    for rank, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        if theirs.problem:
            return f"rank {rank}: {theirs.problem}"
        names = (each.name for each in dataclasses.fields(Observed))
        for name, one, other in zip(names, ours.digests, theirs.digests, strict=False):
            if one != other:
                return f"rank {rank} has {name} that differ from those of the same rank in one process"
    return ""


def _check(
    case: Case, name: str, problem: str, seconds: float, detail: str = "", figure: float | None = None, tolerance: float | None = None,
    bits: int = 0,
) -> Check:  # fmt: skip
    status: Status = "failed" if problem else "ok"
    detail = "" if problem else detail
    return Check(case.spec.name, case.compute, "ranks", name, "cpu", status, figure, tolerance, detail, problem, seconds, bits)


def main(arguments: Sequence[str]) -> int:
    """The entry point of a rank."""
    try:
        found = run_rank(json.loads(arguments[0]))
    except KdgenError as error:
        sys.stderr.write(f"kdgen: error: {error}\n")
        return 2
    if found is not None:
        sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
