"""``kdgen verify --fuzz N``: random models in random situations, several at a time, and what to do about one that fails.

Case S is drawn from seed S alone, its model and its situation independently, so that a shrunk model can be held in the situation
that its original failed in: ``kdgen verify FILE --fuzz 1 --seed S``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.console import Console

from kdgen.backends import open_backend
from kdgen.backends.base import Backend
from kdgen.codegen.folders import write_whole
from kdgen.demo.prompts import read_prompts
from kdgen.errors import KdgenError
from kdgen.files.resources import demo_dir
from kdgen.plan.attention import mma_obstacles
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute
from kdgen.plan.shard import EXCHANGES, part_of, shard_obstacles
from kdgen.spec.model import Spec
from kdgen.verify.decoding.exact import Exactness, Trained, check_exactness
from kdgen.verify.decoding.random_cases import MOST_CONTEXT, RoundsDraw, SeededChoices, Situation, draw_model, draw_rounds, draw_situation
from kdgen.verify.decoding.ranks import check_ranks
from kdgen.verify.kernels.check import check_kernels
from kdgen.verify.rounds.situation import drawn_rounds
from kdgen.verify.rounds.subjects import favouring, shipped
from kdgen.verify.shrink import is_wide, shrink
from kdgen.verify.workers import Workers, cpus
from kdgen.weights.checkpoint import Checkpoint

SCHEMA = "kdgen.fuzz/1"
KERNEL_TOKENS = (1, 9, 33)
COMPUTES: tuple[Compute, Compute] = ("bf16", "f32")  #: of the shipped model, in turn
RANKS = (2, 3, 4)  #: that may share a model
SHRINK_TRIES = 60
_MODEL, _SITUATION, _ROUNDS = 0, 1, 2  # streams of a seed
SHIPPED_EVERY = 8  #: with each eighth seed the shipped model and drafter are put in its situation, too

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """A model in a situation. ``choices`` has, by name, the number of the option of each choice that made the model; empty where the model
    was given."""

    seed: int
    spec: Spec
    compute: Compute
    situation: Situation
    choices: Mapping[str, int] = field(default_factory=dict)

    @property
    def rounds(self) -> RoundsDraw:
        """A request that is decoded by rounds."""
        return draw_rounds(SeededChoices(self.seed, _ROUNDS))

    @property
    def shipped_too(self) -> bool:
        """Whether the shipped model is put in this situation, too."""
        return bool(self.choices) and self.seed % SHIPPED_EVERY == SHIPPED_EVERY - 1


@dataclass(frozen=True)
class Outcome:
    """What a case gave. ``problem`` is empty or says what is wrong; ``exactness`` is missing where the check could not end. ``ranks``:
    so many processes shared the model, too; 1: none did. ``by_rounds`` drafted tokens were accepted by rounds. ``shipped`` is what the
    shipped model gave, and ``of_shipped`` says that the problem is its."""

    case: Case
    problem: str
    exactness: Exactness | None
    seconds: float
    ranks: int = 1
    by_rounds: int = 0
    shipped: Exactness | None = None
    of_shipped: bool = False


@dataclass(frozen=True)
class Failure:
    """``command`` repeats it; ``spec_file`` holds the model, as small as it was made."""

    seed: int
    problem: str
    spec_file: str
    command: str


@dataclass(frozen=True)
class FuzzReport:
    """Models ``seed`` to ``seed + models - 1``. ``largest_error`` is that of float32 logits, relative to its tolerance."""

    ok: bool
    backend: str
    seed: int
    models: int
    f32: int
    bf16: int
    int4: int
    shared: int  #: among ranks, too
    requests: int
    tokens: int
    drafts_accepted: int
    accepted_by_rounds: int  #: of drafts on the device, in other requests than those
    shipped: int  #: situations that the shipped model and drafter were put in, too
    bits_compared: int
    largest_error: float
    seconds: float
    failures: tuple[Failure, ...]


def draw_case(seed: int, given: tuple[Spec, Compute] | None = None, forced: Mapping[str, int] | None = None) -> Case:
    """Case ``seed``, with the model ``given`` if there is one. ``forced`` has, by name, choices of the model to make instead of
    drawn ones."""
    situation = draw_situation(SeededChoices(seed, _SITUATION))
    if given is not None:
        return Case(seed, *given, situation)
    choices = SeededChoices(seed, _MODEL, forced)
    spec, compute = draw_model(choices)
    name = spec.model_copy(update={"name": f"fuzz-{seed}"})
    return Case(seed, name, compute, situation, choices.taken)


def check_case(backend: Backend, case: Case) -> Outcome:
    """Every kernel of the model against float64, then L1 to L5, and rounds; on a CPU also among ranks, where some number of them can share
    it; and, for some seeds, the shipped model and its drafter in the same situation."""
    began = perf_counter()
    exactness, ranks, accepted, of_shipped = None, 1, 0, False
    of_trained: Exactness | None = None
    try:
        kernels = check_kernels(backend, case.spec, build_plan(case.spec, case.compute), case.seed, tokens=KERNEL_TOKENS)
        problem = next((f"kernel {check.kernel}: {check.why}" for check in kernels if not check.ok), "")
        if not problem:
            exactness = check_exactness(backend, case.spec, case.compute, case.situation)
            problem = exactness.problem
        if not problem:
            problem, accepted = _by_rounds(backend, case)
        if not problem and backend.name.startswith("cpu"):
            ranks = ranks_for(case)
            problem = _shared_problem(case, ranks, backend.name) if ranks > 1 else ""
        if not problem and case.shipped_too:
            of_shipped = True
            problem, of_trained, more = _shipped(backend, case)
            accepted += more
    except KdgenError as error:
        problem = str(error)
    return Outcome(case, problem, exactness, perf_counter() - began, ranks, accepted, of_trained, of_shipped and bool(problem))


def _by_rounds(backend: Backend, case: Case) -> tuple[str, int]:
    """What is wrong with a request's rounds, and drafted tokens that they accepted, of weights by which some are."""
    draw = case.rounds
    prompt = np.random.default_rng(draw.seed).integers(0, case.spec.vocab_size, draw.prompt_length).tolist()
    problem, accepted = drawn_rounds(backend, favouring(case.spec, draw.seed), case.compute, draw, prompt)
    return f"{draw}: {problem}" if problem else "", accepted


def _shipped(backend: Backend, case: Case) -> tuple[str, Exactness, int]:
    """What is wrong with the shipped model in the case's situation, what was found there, and drafted tokens accepted by rounds."""
    subject, draw, compute = shipped(), case.rounds, COMPUTES[case.seed // SHIPPED_EVERY % 2]
    folder = demo_dir()
    tensors = {**Checkpoint(folder / "model-int4"), **Checkpoint(folder / "drafter")}
    trained = Trained(tensors, [prompt.tokens for prompt in read_prompts(folder / "prompts.json")])
    own = tuple(replace(each, drafter="dflash") if each.drafter in ("random", "none") else each for each in case.situation.requests)
    situation = replace(case.situation, requests=own)  # its own drafter is there to be asked
    found = check_exactness(backend, subject.model.spec, compute, situation, trained=trained)
    problem, accepted = found.problem, 0
    if not problem:
        prompt = trained.prompt(draw.seed, draw.prompt_length)
        problem, accepted = drawn_rounds(backend, subject.model, compute, draw, prompt)
        problem = f"{draw}: {problem}" if problem else ""
    return f"the shipped model, {compute}: {problem}" if problem else "", found, accepted


def ranks_for(case: Case) -> int:
    """One of the numbers of ranks that can share the case's model, 1 where none can."""
    fast = case.compute == "bf16"
    able = [n for n in RANKS if not shard_obstacles(case.spec, n) and not (fast and mma_obstacles(part_of(case.spec, n)))]
    return able[case.seed % len(able)] if able else 1


def _shared_problem(case: Case, ranks: int, backend: str) -> str:
    """What is wrong when processes share the model, by either exchange; empty when nothing is."""
    exchange = EXCHANGES[case.seed // 2 % len(EXCHANGES)]
    checks = check_ranks(case.spec, case.compute, ranks, backend=backend, situations=1, weights=case.seed, exchange=exchange)
    return next((f"{check.name}, by {exchange}: {check.why}" for check in checks if check.status != "ok"), "")


def given_model(spec: Spec, compute: Compute | None) -> tuple[Spec, Compute]:
    """The model to draw situations for: ``spec``, shrunk where a CPU could not decode it, in ``compute`` or its own type.

    Raises KdgenError when it takes no context as long as situations need, or cannot be computed in ``compute``.
    """
    if spec.max_position_embeddings < MOST_CONTEXT:
        raise KdgenError(f"{spec.name}: situations need a context of {MOST_CONTEXT}, more than its {spec.max_position_embeddings}")
    spec = shrink(spec) if is_wide(spec) else spec
    return spec, build_plan(spec, compute).compute


def fuzz(
    count: int,
    seed: int,
    backend_name: str | None = None,
    given: tuple[Spec, Compute] | None = None,
    jobs: int | None = None,
    save: Path | None = None,
    say: Say = lambda _: None,
) -> FuzzReport:
    """Check ``count`` cases from ``seed`` on, in ``jobs`` processes; write each failing model, shrunk, to a spec file.

    The file is ``save`` for the first failure, kdgen-fuzz-<seed>.yaml for the others. Raises BackendError when the backend is not
    to be had.
    """
    began = perf_counter()
    description = open_backend(backend_name).description
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    with Workers(_opened, (backend_name,), jobs or cpus()) as workers:
        for outcome in _outcomes(workers, [draw_case(each, given) for each in range(seed, seed + count)]):
            outcomes.append(outcome)
            say(f"{len(outcomes)} of {count} models, {sum(bool(each.problem) for each in outcomes)} failed")
        for outcome in sorted((each for each in outcomes if each.problem), key=lambda each: each.case.seed):
            say(f"model {outcome.case.seed} failed; reducing it")
            smaller = outcome if given is not None or outcome.of_shipped else _shrink(workers, outcome)
            failures.append(_write_failure(smaller, save if not failures else None, backend_name))
    return _report(outcomes, failures, description, seed, perf_counter() - began)


def _report(outcomes: Sequence[Outcome], failures: Sequence[Failure], backend: str, seed: int, seconds: float) -> FuzzReport:
    cases = [outcome.case for outcome in outcomes]
    found = [each for outcome in outcomes for each in (outcome.exactness, outcome.shipped) if each is not None]
    return FuzzReport(
        ok=not failures,
        backend=backend,
        seed=seed,
        models=len(cases),
        f32=sum(case.compute == "f32" for case in cases),
        bf16=sum(case.compute == "bf16" for case in cases),
        int4=sum(case.spec.quantization is not None for case in cases),
        shared=sum(outcome.ranks > 1 for outcome in outcomes),
        requests=sum(each.requests for each in found),
        tokens=sum(each.tokens for each in found),
        drafts_accepted=sum(each.accepted for each in found),
        accepted_by_rounds=sum(outcome.by_rounds for outcome in outcomes),
        shipped=sum(outcome.shipped is not None for outcome in outcomes),
        bits_compared=sum(each.bits for each in found),
        largest_error=max(
            (
                outcome.exactness.error / outcome.exactness.tolerance
                for outcome in outcomes
                if outcome.case.compute == "f32" and outcome.exactness is not None and outcome.exactness.tolerance
            ),
            default=0.0,
        ),
        seconds=seconds,
        failures=tuple(failures),
    )


def print_fuzz(report: FuzzReport, console: Console) -> None:
    kinds = f"{report.f32} in float32, {report.bf16} on tensor cores, {report.int4} with INT4 experts"
    if report.shared:
        kinds += f"; {report.shared} shared by ranks, too"
    console.print(f"{report.models} models from seed {report.seed} on {report.backend}: {kinds}")
    console.print(
        f"{report.requests} requests, {report.tokens} tokens, {report.drafts_accepted} of them accepted from drafts;"
        f" {report.bits_compared:,} bits compared"
    )
    console.print(f"{report.accepted_by_rounds} more drafts accepted by rounds; the shipped model in {report.shipped} of the situations")
    console.print(f"largest error of float32 logits: {report.largest_error:.2f} of its tolerance")
    for failure in report.failures:
        console.print(f"FAILED model {failure.seed}: {failure.problem}\n  repeat: {failure.command}", style="red")
    console.print(f"{len(report.failures)} of {report.models} models failed in {report.seconds:.0f} s")


# ---- processes ----------------------------------------------------------------------------------------------------------


def _opened(backend_name: str | None) -> Callable[[Case], Sequence[Outcome]]:
    """What a worker process does with a case, over a backend of its own."""
    backend = open_backend(backend_name, threads=1)
    return lambda case: [check_case(backend, case)]


def _outcomes(workers: Workers[Case, Outcome], cases: Sequence[Case]) -> Iterator[Outcome]:
    """Outcomes as they come. A case that takes its process down has failed."""
    for event in workers.each(cases):
        if event.answer is not None:
            yield event.answer
        elif event.died:
            yield Outcome(cases[event.place], f"the process that ran its kernels was {event.died}", None, 0.0)


# ---- failures -----------------------------------------------------------------------------------------------------------


def _shrink(workers: Workers[Case, Outcome], failed: Outcome) -> Outcome:
    """The same failure in a model whose choices are earlier options, as long as there are tries."""
    best, tries = failed, 0
    improved = True
    while improved and tries < SHRINK_TRIES:
        improved = False
        for name in best.case.choices:
            chosen = best.case.choices.get(name, 0)  # a model that was made smaller may lack the choice
            for number in sorted({0, chosen // 2}):
                if number >= chosen or tries >= SHRINK_TRIES:
                    continue
                forced = {**best.case.choices, name: number}
                tries += 1
                [outcome] = _outcomes(workers, [draw_case(best.case.seed, forced=forced)])
                if outcome.problem:
                    best, improved = outcome, True
                    break
    return best


def _write_failure(outcome: Outcome, save: Path | None, backend_name: str | None) -> Failure:
    case = outcome.case
    path = save or Path(f"kdgen-fuzz-{case.seed}.yaml")
    backend = f" --backend {backend_name}" if backend_name else ""
    command = f"kdgen verify {path} --dtype {case.compute} --fuzz 1 --seed {case.seed}{backend}"
    if outcome.of_shipped:
        command = f"kdgen verify --fuzz 1 --seed {case.seed}{backend}"
    problem = " ".join(outcome.problem.split())
    requests = (f"#   {request}" for request in case.situation.requests)
    lines = [
        f"# {problem[:300]}", f"# Repeat: {command}", f"# Found by: kdgen verify --fuzz 1 --seed {case.seed}{backend}",
        f"# {case.situation.slots} cache slabs, context {case.situation.context}, steps of {case.situation.max_tokens} tokens; requests:",
        *requests,
    ]  # fmt: skip
    write_whole(path, "\n".join(lines) + "\n" + case.spec.to_yaml())
    return Failure(case.seed, problem, str(path), command)
