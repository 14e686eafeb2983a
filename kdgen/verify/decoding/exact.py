"""The exactness contract as a check of one model in one situation, on any backend.

Every request is decoded alone, token by token without drafts; then all of them together, with their own drafters, chunks and
samplings, joining and leaving. Tokens must be equal, logits and cache rows by bits. What differs is then looked for alone, so
that a finding names the level of the contract (docs/exactness.md) that is broken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.drafters.base import Drafter
from kdgen.drafters.by_name import Making, drafter_called
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Family, Limits
from kdgen.runtime.batch import Batch
from kdgen.runtime.budget import FixedBudget
from kdgen.runtime.decode import decode_plain
from kdgen.runtime.engine import Engine
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.request import Request
from kdgen.spec.model import Spec
from kdgen.verify.decoding.expected_rounds import Course, KnownDrafter, drafted_along, tree_steps
from kdgen.verify.decoding.first_difference import first_departure
from kdgen.verify.decoding.random_cases import RequestDraw, Situation
from kdgen.verify.decoding.recording import RecordingEngine, RecordingSequences, differing_bits
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.sampling import may_draw
from kdgen.verify.published import reference_of
from kdgen.weights.pack import CheckpointWeights
from kdgen.weights.random import random_weights

#: Weights are packed in parts of so many bytes, as those of large models are, whose matrices do not fit one of the usual size.
PART_BYTES = 1 << 14


@dataclass(frozen=True)
class Alone:
    """A request decoded token by token, with nothing else in the engine: what everything else must equal."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: NDArray[np.float32]  # [committed, vocab_size]
    cache: NDArray[np.generic]  # [layers, committed, cache_row_dim]


@dataclass(frozen=True)
class Trained:
    """A trained model: tensors by their published names, its drafter's among them, and prompts of its kind of text."""

    weights: Mapping[str, NDArray[Any]]
    prompts: Sequence[Sequence[int]]

    def prompt(self, seed: int, length: int) -> list[int]:
        """The last ``length`` tokens of one of them."""
        return list(self.prompts[seed % len(self.prompts)][-length:])


@dataclass(frozen=True)
class Exactness:
    """What a check found. ``problem`` is empty, or says which level of the contract is broken, in which request and where.

    ``bits`` were compared of logits and cache rows; ``accepted`` draft tokens and ``forwards`` are those of decoding together.
    ``error`` is the largest of float32 logits against the float64 reference, and of bf16 logits (which routing may turn elsewhere where
    two experts score alike) that of a typical row; ``tolerance`` is its bound.
    """

    problem: str
    requests: int
    tokens: int
    accepted: int
    forwards: int
    bits: int
    error: float
    tolerance: float


def make_drafter(draw: RequestDraw, truth: Sequence[int], spec: Spec) -> Drafter | None:
    """The drafter that a request was drawn with: a random one where it is dflash and the model has none."""
    if draw.drafter == "none":
        return None
    block = min(draw.block_size, spec.draft.block_size) if spec.draft else draw.block_size
    name = "random" if draw.drafter == "dflash" and spec.draft is None else draw.drafter
    return drafter_called(name, Making(spec.vocab_size, truth, draw.error_rate, draw.seed, block, draw.budget == 1))


def check_exactness(
    backend: Backend, spec: Spec, compute: Compute, situation: Situation, bf16_too: bool = False, family: Family = "generic",
    trained: Trained | None = None,
) -> Exactness:  # fmt: skip
    """L1 to L5 of one model with random or ``trained`` weights, float32 logits against the reference, and tokens against their logits.

    ``bf16_too`` holds bf16 logits against the reference, too: not for any model, but for those where its bound is known to do.
    ``family`` chooses the plan where there are several. Raises BackendError when a kernel is stopped.
    """
    weights = trained.weights if trained else random_weights(spec, situation.weights_seed)
    limits = Limits(situation.max_tokens, situation.context, situation.slots)
    parts = CheckpointWeights(weights.__getitem__, part_bytes=PART_BYTES)
    engine = start_engine(spec, build_plan(spec, compute, limits).on(family), backend, parts)
    alone = [_decode_alone(engine, draw, trained) for draw in situation.requests]
    error, tolerance = _error(spec, compute, weights, alone[0])
    problem = ""
    if not error <= tolerance and (compute == "f32" or bf16_too):
        problem = f"logits differ from the float64 reference by {error:.3g}, more than {tolerance:.3g}; "
        problem += first_departure(spec, compute, weights, [*alone[0].prompt, *alone[0].tokens[:-1]], alone[0].cache)
    problem = problem or next((said for number, each in enumerate(alone) if (said := _misdrawn(number, situation, each))), "")
    together = _Together(engine, situation, alone)
    problem = problem or together.problem
    if together.problem:
        level, said = _level(engine, situation, alone, together)
        problem = problem if problem != together.problem else f"{level}: {said}"
    bits = sum(8 * (each.logits.nbytes + each.cache.nbytes) for each in alone)
    tokens_drawn = sum(len(each.tokens) for each in alone)
    return Exactness(problem, len(alone), tokens_drawn, together.accepted, together.forwards, bits, error, tolerance)


def _misdrawn(number: int, situation: Situation, alone: Alone) -> str:
    """The first token that its own row of logits does not give, as the request's sampling says."""
    sampling = situation.requests[number].sampling
    for place, token in enumerate(alone.tokens):
        position = len(alone.prompt) + place
        if not may_draw(alone.logits[position - 1], sampling, position, token):
            return f"request {number}: token {place}, {token}, is not what its logits give with {sampling}"
    return ""


def _error(spec: Spec, compute: Compute, weights: Mapping[str, NDArray[Any]], alone: Alone) -> tuple[float, float]:
    """The error of a request's logits, and its tolerance.

    Drawn models may be badly conditioned (an RMSNorm over one or three elements that nearly cancel), so the bound adds what float64
    itself makes of weights that are off by float32's rounding.
    """
    tokens = [*alone.prompt, *alone.tokens[:-1]]
    expected = reference_of(spec, weights).forward(tokens).logits
    if compute == "bf16":
        typical = np.median(np.sqrt(np.square(alone.logits - expected).mean(axis=1)))
        return float(typical), tolerances.bf16_logits(expected, spec.num_hidden_layers)
    rng = np.random.default_rng(0)
    off = {
        key: value.astype(np.float64) * (1 + tolerances.EPS32 * rng.standard_normal(value.shape)) if value.dtype.kind != "i" else value
        for key, value in weights.items()
    }
    moved = np.abs(reference_of(spec, off).forward(tokens).logits - expected).max()
    return float(np.abs(alone.logits - expected).max()), tolerances.float32_logits(expected) + float(10 * moved)


def _decode_alone(engine: Engine, draw: RequestDraw, trained: Trained | None) -> Alone:
    recorder = RecordingEngine(engine)
    prompt = np.random.default_rng(draw.seed).integers(0, engine.spec.vocab_size, draw.prompt_length).tolist()
    if trained:
        prompt = trained.prompt(draw.seed, draw.prompt_length)
    decoded = decode_plain(recorder, Request(prompt, draw.new_tokens, sampling=draw.sampling, chunk=1))
    return Alone(tuple(prompt), decoded.tokens, np.stack(recorder.logits), recorder.cache_rows())


def _request(draw: RequestDraw, alone: Alone, spec: Spec) -> tuple[Request, tuple[int, ...]]:
    """The request, and the tokens that it must give."""
    stop = frozenset() if draw.stop_at is None else frozenset(alone.tokens[draw.stop_at : draw.stop_at + 1])
    end = next((i + 1 for i, token in enumerate(alone.tokens) if token in stop), len(alone.tokens))
    drafter = make_drafter(draw, (*alone.prompt, *alone.tokens), spec)
    request = Request(alone.prompt, draw.new_tokens, stop, draw.sampling, draw.chunk, drafter, draw.budget, draw.block_size)
    return request, alone.tokens[:end]


def _forwards(engine: Engine, draw: RequestDraw, alone: Alone) -> int:
    """The forwards that a request must take, in whatever company: found on the host, from what it gives alone and what is drafted."""
    request, truth = _request(draw, alone, engine.spec)
    drafter = request.drafter
    if drafter is None or len(truth) == 1:
        return len(truth) - 1
    if isinstance(drafter, DFlashDrafter):
        course = Course(alone.prompt, draw.sampling, alone.tokens, alone.cache)
        drafter = KnownDrafter(course, drafted_along(engine, course, drafter.block_size, len(truth) - 1), drafter.chain)
    steps = tree_steps(alone.prompt, alone.tokens, drafter, FixedBudget(draw.budget), draw.block_size, request.stop)
    return len(steps.accepted)


class _Together:
    """The requests of a situation decoded in one batch, compared with each alone as it leaves.

    ``request`` is the first whose result differs and ``problem`` says how; empty when there is none.
    """

    def __init__(self, engine: Engine, situation: Situation, alone: Sequence[Alone]) -> None:
        self.problem, self.request, self.accepted, self.forwards = "", 0, 0, 0
        recorder = RecordingSequences(engine)
        batch = Batch(recorder)
        coming = sorted(range(len(alone)), key=lambda i: situation.requests[i].joins)
        order: list[int] = []  # of requests as they were added, which is how the batch numbers them
        expected: dict[int, tuple[int, ...]] = {}
        forwards: dict[int, int] = {}
        steps = 0
        while coming or not batch.idle:
            while coming and situation.requests[coming[0]].joins <= steps:
                number = coming.pop(0)
                request, expected[number] = _request(situation.requests[number], alone[number], engine.spec)
                batch.add(request)
                order.append(number)
            for finished in batch.step():
                number = order[finished.number]
                self.forwards += finished.forwards
                self.accepted += max(0, len(finished.tokens) - 1 - finished.forwards)
                logits, cache = recorder.logits[finished.sequence], recorder.cache_rows(finished.sequence)
                problem = _difference(finished.tokens, expected[number], logits, cache, alone[number])
                forwards[number] = finished.forwards
                if problem and not self.problem:
                    self.problem, self.request = f"request {number}: {problem}", number
            steps += 1
        for number, taken in forwards.items() if not self.problem else ():
            needed = _forwards(engine, situation.requests[number], alone[number])
            if taken != needed:
                self.problem, self.request = f"request {number}: {taken} forwards instead of {needed}, although its bits are right", number
                return


def _difference(
    tokens: tuple[int, ...], expected: tuple[int, ...], logits: Sequence[NDArray[np.float32] | None], cache: NDArray[np.generic],
    alone: Alone,
) -> str:  # fmt: skip
    """How a request's result differs from its own alone; trees may have committed more rows, or stopped before as many."""
    if cache.shape[1] != len(logits):
        return f"{cache.shape[1]} cache rows for {len(logits)} committed tokens"
    for row in range(min(len(logits), len(alone.logits))):
        if count := differing_bits(cache[:, row], alone.cache[:, row]):
            layer = next(i for i in range(len(cache)) if differing_bits(cache[i, row], alone.cache[i, row]))
            return f"cache row {row} differs in {count} elements, first in layer {layer}"
        ours = logits[row]
        if ours is not None and (count := differing_bits(ours, alone.logits[row])):
            return f"logits row {row} differs in {count} elements, its cache row does not"
    if tokens != expected:
        first = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), min(len(tokens), len(expected)))
        return f"token {first} of {len(expected)} differs, no row does"
    needed = len(alone.prompt) + len(expected) - 1
    return "" if len(logits) >= needed else f"{len(logits)} rows are committed instead of {needed}"


def _level(engine: Engine, situation: Situation, alone: Sequence[Alone], found: _Together) -> tuple[str, str]:
    """The first level that the request breaks by itself, with what is wrong there: in its chunks, then with its trees; in company, with
    what was ``found`` there, if in neither."""
    number = found.request
    draw = situation.requests[number]
    plain = replace(draw, drafter="none", joins=0)
    if said := _Together(engine, replace(situation, requests=(plain,)), [alone[number]]).problem:
        return "L3, chunking", _of_request(number, said)
    if said := _Together(engine, replace(situation, requests=(replace(draw, joins=0),)), [alone[number]]).problem:
        return "L5, sampling with speculation" if draw.sampling.temperature else "L1 and L2, speculation", _of_request(number, said)
    return "L4, other sequences in the batch", found.problem


def _of_request(number: int, said: str) -> str:
    """What is wrong with a request that was decoded by itself, where it is number 0, under its own number."""
    return f"request {number}, by itself: {said.partition(': ')[2]}"
