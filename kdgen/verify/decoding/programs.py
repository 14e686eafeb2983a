"""Whole programs, launched by the engine, under the checker.

Under the checker, a launch overlaps earlier ones as far as a GPU permits. A thread that has not waited may not use what an unfinished
launch reads or writes, and workspaces are uninitialised when a program starts. Logits, tokens and cache rows must have the bits of plain
mode with one token at a time. That uses other programs, so a wrong buffer, row or grid in one of them shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import DeviceArray, Work
from kdgen.backends.cpu import CpuBackend
from kdgen.drafters.base import DeviceDraftRequest, nothing
from kdgen.drafters.synthetic import RandomDrafter, ReplayDrafter
from kdgen.errors import KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Family, Limits
from kdgen.plan.shard import WHOLE, Exchange, Shard
from kdgen.ranks.group import Group
from kdgen.runtime.engine import Draft, Engine
from kdgen.runtime.pipeline import load_kernels, start_engine
from kdgen.runtime.rounds import Rounds
from kdgen.spec.model import Spec, load_spec
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.recording import RecordingEngine, RecordingSequences, differing_bits
from kdgen.verify.report.checks import Check, Status
from kdgen.verify.variants import variants
from kdgen.weights.pack import packed
from kdgen.weights.random import random_weights

#: Prompt rows of two sequences: of the first one, as many as twins begin with; then of both, more than an attention launch of a small model
#: takes, whose second launch has a tile of 64 keys that are not all old; then few.
FIRST, BOTH, FEW = 30, (41, 4), (2, 2)
TREE = 37  #: nodes of the largest tree, whose rows with another sequence's are more than such a launch takes, too
NEW = 40  #: tokens of each sequence at most
CONTEXT = FIRST + BOTH[0] + FEW[0] + NEW
SAMPLINGS = GREEDY, Sampling(0.8, top_k=20, top_p=0.95, seed=2**63 + 5)  #: of the two sequences


@dataclass(frozen=True)
class Model:
    """What is run: the programs of the plan for ``family`` of a model.

    ``complete``: each of its programs is to have run, and each early use that its plan speaks of is to have been made.
    """

    spec: Spec
    compute: Compute
    family: Family
    complete: bool = True

    @property
    def title(self) -> str:
        return self.spec.name if self.family == "generic" else f"{self.spec.name}, {self.family}"


def models() -> tuple[Model, ...]:
    """Together they have all templates but those of ranks, with drafters, for few rows and many."""
    small = {spec.name: spec for spec in variants()}
    return (
        Model(small["tiny-odd"], "f32", "generic"),
        Model(small["tiny-int4"], "bf16", "generic"),
        Model(small["tiny-wgmma-int4"], "bf16", "sm_90a"),
        Model(small["tiny-wgmma-8"], "bf16", "sm_90a", complete=False),
    )


def model_of_ranks() -> Model:
    """tiny with fewer layers, biases and a drafter, for two ranks."""
    small = next(spec for spec in variants() if spec.name == "tiny-v2").draft
    assert small is not None
    tiny = load_spec("tiny")
    draft = small.model_copy(update={"hidden_size": tiny.hidden_size})
    changes = {"name": "tiny-ranks", "num_hidden_layers": 2, "attention_bias": True, "draft": draft}
    return Model(tiny.model_copy(update=changes), "bf16", "generic")


def check_programs(model: Model, group: Group | None = None, exchange: Exchange = "gather") -> Check:
    """Every program of ``model``, or of this process's part of it, under the checker."""
    began, bits, ran = perf_counter(), 0, ""
    backend, plain = CpuBackend("checker", seed=1), CpuBackend("plain")
    shard = WHOLE
    try:
        if group is not None:
            backend.join(group)
            plain.join(group)
            shard = Shard(group.ranks, group.rank, exchange)
        programs = _Programs(model, backend, plain, shard)
        problem = programs.run()
        bits, ran = programs.bits, ", ".join(programs.engine.ran)
    except KdgenError as error:
        problem = str(error)
    detail = "" if problem else f"{ran}: no thread uses data before they are ready; the bits are those of plain mode, token by token"
    status: Status = "failed" if problem else "ok"
    return Check(
        model.title, model.compute, "programs", "launches that overlap", backend.description, status, detail=detail, why=problem,
        seconds=perf_counter() - began, bits=0 if problem else bits,
    )  # fmt: skip


class _Watched(Engine):
    """Forgets workspaces when a program is put together, before it runs for the first time. ``ran`` has the programs' names."""

    ran: tuple[str, ...] = ()

    def work(
        self, program: str, tokens: int, context: int, sequences: int = 1, logits: int | None = None,
        instead: Mapping[str, DeviceArray] | None = None,
    ) -> tuple[Work, ...]:  # fmt: skip
        assert isinstance(self.backend, CpuBackend)
        for buffer in self.plan.buffers:
            if buffer.role == "workspace":
                self.backend.forget(self.buffer(buffer.name))
        self.ran = tuple(dict.fromkeys((*self.ran, program)))
        return super().work(program, tokens, context, sequences, logits, instead)


@dataclass(frozen=True)
class _Expected:
    """One sequence in plain mode, a token at a time: ``tokens`` with the prompt's, the rows of all but the last."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    cache: NDArray[np.generic]


class _Programs:
    """One model's programs over two sequences, the second of which draws its tokens. ``bits`` were compared."""

    def __init__(self, model: Model, backend: CpuBackend, plain: CpuBackend, shard: Shard) -> None:
        spec, limits = model.spec, Limits(max_context=CONTEXT, max_sequences=2)
        plan = build_plan(spec, model.compute, limits, shard).on(model.family)
        weights = random_weights(spec, 0).__getitem__
        self.bits = 0
        self._backend, self._spec, self._complete = backend, spec, model.complete
        self.engine = _Watched(spec, load_kernels(spec, plan, backend), backend, packed(weights), packed(weights))
        alone, rng = start_engine(spec, plan, plain, weights), np.random.default_rng(0)
        for buffer in plan.buffers:
            for each in (self.engine, alone):
                backend.label(each.buffer(buffer.name), buffer.name)
        self._target = RecordingSequences(self.engine)
        prompts = [rng.integers(0, spec.vocab_size, rows).tolist() for rows in (FIRST + BOTH[0] + FEW[0], BOTH[1] + FEW[1])]
        self._expected = [_expect(alone, prompt, sampling) for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)]
        self._tokens = [list(prompt) for prompt in prompts]

    def run(self) -> str:
        """Run every program; what is wrong, or nothing. Raises BackendError where the checker stops a kernel, LogitsError for a NaN."""
        target, (first, second) = self._target, (expected.prompt for expected in self._expected)
        for sequence, sampling in enumerate(SAMPLINGS):
            target.reset(sequence, sampling)
        target.prefill_many([(0, first[:FIRST])])
        target.prefill_many([(1, second[: BOTH[1]]), (0, first[FIRST:-2])])
        target.prefill_many([(0, first[-2:-1])])
        roots = target.prefill_many([(1, second[BOTH[1] :]), (0, first[-1:])])
        self._commit([1, 0], [(root,) for root in roots])
        for sequences in ([1, 0], [0]):
            self._commit(sequences, [(root,) for root in target.decode_many(sequences)])
        self._verify([self._replayed(0, TREE), Draft(1, RandomDrafter(self._spec.vocab_size).propose(self._tokens[1], 5), 7)])
        self._verify([self._replayed(1, 7), Draft(0, nothing(), 0)])
        self._verify([self._replayed(0, 5, depths=1)])  # of so few nodes that some blocks have no row
        if self._spec.draft is not None:
            depths = self._spec.draft.block_size - 1
            block = DeviceDraftRequest(depths, depths + 1)
            self._verify([Draft(1, block, 15), Draft(0, DeviceDraftRequest(1, 2), 2)])
            self._rounds(block, (7, 0))
        else:
            self._rounds(None, (0, 0))
        return self._problem()

    def _commit(self, sequences: Sequence[int], new: Sequence[tuple[int, ...]]) -> None:
        for sequence, tokens in zip(sequences, new, strict=True):
            self._tokens[sequence] += tokens

    def _replayed(self, sequence: int, budget: int, depths: int = 7) -> Draft:
        drafter = ReplayDrafter(self._expected[sequence].tokens, self._spec.vocab_size, 0.2)
        return Draft(sequence, drafter.propose(self._tokens[sequence], depths), budget)

    def _verify(self, drafts: Sequence[Draft]) -> None:
        steps = self._target.verify_many(drafts)
        self._commit([draft.sequence for draft in drafts], [(*step.accepted[1:], step.next_token) for step in steps])

    def _rounds(self, block: DeviceDraftRequest | None, budgets: tuple[int, int]) -> None:
        """Two rounds of the first sequence, the second started before the first one's results are read."""
        length = self.engine.length(0)
        rounds = Rounds(self.engine, block, budgets)
        rounds.begin(length)
        for budget in budgets:
            rounds.start(budget)
        for _ in budgets:
            done = rounds.finish()
            self._tokens[0] += done.tokens
            length += len(done.tokens)
        rounds.end(length, self._tokens[0][-1])

    def _problem(self) -> str:
        for sequence, expected in enumerate(self._expected):
            if problem := self._difference(sequence, expected):
                return f"sequence {sequence}: {problem}"
        if not self._complete:
            return ""
        if left := [program.name for program in self.engine.plan.programs if program.name not in self.engine.ran]:
            return f"no launch of {', '.join(left)}"
        for kernel in self.engine.plan.kernels:
            if unused := self._backend.unused_early(kernel.name):
                return f"{kernel.name} may use {', '.join(unused)} before it waits for the previous kernel, but no launch does"
        return ""

    def _difference(self, sequence: int, expected: _Expected) -> str:
        tokens, cache = self._tokens[sequence], self._target.cache_rows(sequence)
        if cache.shape[1] != len(tokens) - 1:
            return f"{cache.shape[1]} cache rows of {len(tokens) - 1} committed tokens"
        for row in range(cache.shape[1]):
            ours = self._target.logits[sequence][row] if row < len(self._target.logits[sequence]) else None
            if count := differing_bits(cache[:, row], expected.cache[:, row]):
                layer = next(i for i in range(len(cache)) if differing_bits(cache[i, row], expected.cache[i, row]))
                return f"cache row {row} differs in {count} elements, first in layer {layer}"
            if ours is not None and (count := differing_bits(ours, expected.logits[row])):
                return f"logits row {row} differs in {count} elements, its cache row does not"
            self.bits += 8 * int(cache[:, row].nbytes + (0 if ours is None else ours.nbytes))
        wrong = next((row for row, token in enumerate(tokens) if token != expected.tokens[row]), None)
        return "" if wrong is None else f"token {wrong} is {tokens[wrong]} instead of {expected.tokens[wrong]}, and no row differs"


def _expect(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> _Expected:
    target = RecordingEngine(engine)
    target.reset(sampling=sampling)
    for token in prompt:
        root = target.prefill([token])
    tokens = [*prompt, root]
    while len(tokens) < len(prompt) + NEW:
        tokens.append(target.decode())
    return _Expected(tuple(prompt), tuple(tokens), np.stack(target.logits), target.cache_rows())
