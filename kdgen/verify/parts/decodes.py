"""Whole decodes of a model: alone, against an oracle, several requests together, and programs under the checker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from kdgen.backends.base import Backend
from kdgen.errors import BackendError
from kdgen.plan.attention import WGMMA_TILE
from kdgen.plan.ir import MAX_NODES, Compute, Plan
from kdgen.spec.model import Spec
from kdgen.spec.published import load_config
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.decodes import FEW_SITUATIONS, check_decodes, oracle_subject, random_subject
from kdgen.verify.decoding.decodes import Situation as DecodeSituation
from kdgen.verify.decoding.exact import check_exactness
from kdgen.verify.decoding.programs import CONTEXT as PROGRAM_CONTEXT
from kdgen.verify.decoding.programs import Model, check_programs
from kdgen.verify.decoding.random_cases import RequestDraw, Situation
from kdgen.verify.oracles.models import ModelCase, model_cases
from kdgen.verify.plans import Plans, small_of
from kdgen.verify.report.checks import Check, Say, Status, finite

#: The situation that every model is put in: four requests over three slabs, full to the last token, across a split of 64 keys.
TOGETHER = Situation(
    weights_seed=1, slots=3, spare=0, max_tokens=13,
    requests=(
        RequestDraw(1, 58, 10, 9, "replay", 0.2, 31, 8, None, Sampling(1.0, seed=3), joins=0),
        RequestDraw(2, 5, 14, 64, "none", 0.0, 0, 2, None, GREEDY, joins=1),
        RequestDraw(3, 3, 9, 2, "random", 0.0, 7, 4, 6, Sampling(0.7, top_k=20, top_p=0.9, min_p=0.01, seed=2**63 + 1), joins=1),
        RequestDraw(4, 33, 6, 8, "replay", 0.0, 15, 16, 2, GREEDY, joins=3),
    ),
)  # fmt: skip


def decodes_of(backend: Backend, spec: Spec, plan: Plan, situations: Sequence[DecodeSituation], say: Say) -> Iterator[Check]:
    small, _ = small_of(spec, plan)
    case = case_of(spec)
    subject = oracle_subject(spec, plan.compute, case) if case is not None else random_subject(small, plan.compute)
    yield from _decodes(plan.compute, subject.title, check_decodes(backend, subject, situations), say)


def decodes_of_oracle(backend: Backend, case: ModelCase, spec: Spec, say: Say) -> Iterator[Check]:
    yield from _decodes("f32", case.name, check_decodes(backend, oracle_subject(spec, "f32", case), FEW_SITUATIONS), say)


def _situation(spec: Spec, plan: Plan) -> Situation:
    """TOGETHER; with trees of more rows than an attention launch takes, where a plan has several launches for them and few heads, with
    which they are quick.
    """
    if plan.family == "generic" or spec.num_attention_heads >= WGMMA_TILE:
        return TOGETHER
    return replace(TOGETHER, requests=tuple(replace(each, budget=each.budget and MAX_NODES - 1) for each in TOGETHER.requests))


def requests_together(backend: Backend, title: str, spec: Spec, plan: Plan, say: Say) -> Iterator[Check]:
    """L1 to L5 in a drawn situation: several requests with drafters, chunks and samplings of their own, joining and leaving."""
    if spec.max_position_embeddings < TOGETHER.context:
        return
    compute = plan.compute
    say(f"{title} {compute}: requests joining and leaving")
    began = perf_counter()
    try:
        found = check_exactness(backend, spec, compute, _situation(spec, plan), bf16_too=True, family=plan.family)
        detail = (
            f"{found.requests} requests, each with the bits of the request alone: logits and cache rows (L1 to L5);"
            f" {found.accepted} drafts accepted"
        )
        figures: tuple[float | None, float | None] = finite(found.error), found.tolerance
        problem, bits = found.problem, found.bits
    except BackendError as error:
        detail, figures, problem, bits = "", (None, None), str(error), 0
    status: Status = "failed" if problem else "ok"
    name, seconds = "requests that join and leave", perf_counter() - began
    yield Check(title, compute, "together", name, backend.description, status, *figures, "" if problem else detail, problem, seconds, bits)


def _decodes(compute: Compute, title: str, found: Iterator[Check], say: Say) -> Iterator[Check]:
    for check in found:
        say(f"{title} {compute}: {check.name}")
        yield check


def named_models(plans: Plans) -> list[Model]:
    """One for each spec: its last plan, the one that has most of its own."""
    last = {spec.name: (spec, plan) for spec, plan in plans}
    return [Model(small_of(spec, plan)[0], plan.compute, plan.family, complete=False) for spec, plan in last.values()]


def programs(model: Model, say: Say) -> Iterator[Check]:
    """Whole programs of a model where launches overlap as they may on a GPU."""
    if model.spec.max_position_embeddings >= PROGRAM_CONTEXT:
        say(f"{model.title} {model.compute}: programs under the checker")
        yield check_programs(model)


def case_of(spec: Spec) -> ModelCase | None:
    """An oracle's run of this very model."""
    return next((case for case in model_cases() if load_config(case.folder).sha256 == spec.sha256), None)


def other_oracles(specs: Sequence[Spec]) -> Iterator[tuple[ModelCase, Spec]]:
    """Oracle cases that are no shipped specs: other structures, decoded in fewer situations, and in float32, which is held to the oracle
    element by element. Variants with these structures have their bf16 kernels, programs and requests checked."""
    seen = {spec.sha256 for spec in specs}
    for case in model_cases():
        spec = load_config(case.folder)
        if spec.sha256 not in seen:
            yield case, spec
