"""Whole decodes of one model on one backend: logits against an oracle or float64, plain against draft-tree decoding by bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.drafters.base import Drafter
from kdgen.drafters.by_name import Making, drafter_called
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.errors import BackendError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Family, Limits
from kdgen.plan.shard import WHOLE, Shard
from kdgen.runtime.decode import Decoded, decode_plain, decode_rounds, decode_tree, prefill
from kdgen.runtime.engine import Draft, Engine
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.request import Request
from kdgen.runtime.rounds import Rounds
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.model import Spec
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.drafter import check_drafter
from kdgen.verify.decoding.expected_rounds import Turns
from kdgen.verify.decoding.first_difference import first_departure
from kdgen.verify.decoding.recording import RecordingEngine, RecordingSequences, differing_bits
from kdgen.verify.kernels import tolerances
from kdgen.verify.oracles.models import ModelCase
from kdgen.verify.published import reference_of
from kdgen.verify.report.checks import Check, Status, finite
from kdgen.weights.checkpoint import Checkpoint
from kdgen.weights.random import random_weights

NEW_TOKENS = 24
TREE_TOKENS = 20  #: of which draft-tree decodes repeat so many
PROMPT_TOKENS = 50  #: with the new ones, more than the 64 keys of a small model's split
DRAWN_TOKENS = 8  #: by rounds
CHUNKS = (7, 8, 9, 33, 64)


@dataclass(frozen=True)
class Situation:
    """One draft-tree decode: a drafter (behind replay's name its errors in percent, behind dflash's its block size), tree limits, and
    the prefill's chunk."""

    drafter: str
    budget: int
    block_size: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.drafter}, budget {self.budget}, block {self.block_size}"


#: Good, useless and hostile drafters over small and large trees; no two prefills are cut alike.
SITUATIONS = (
    Situation("replay 20", 63, 16, 8),
    Situation("adversarial", 15, 8, 31),
    Situation("random", 33, 5, 32),
    Situation("replay 0", 7, 8, 1),
    Situation("replay 0", 15, 16, 7),
    Situation("replay 50", 31, 4, 9),
    Situation("replay 50", 1, 2, 33),
    Situation("replay 100", 15, 8, 64),
    Situation("replay 20", 0, 8, 3),
    Situation("ngram", 31, 8, 5),
    Situation("adversarial", 63, 16, 2),
)
FEW_SITUATIONS = SITUATIONS[:3]


def drafted_situations(draft: DraftSpec | None) -> tuple[Situation, ...]:
    """The model's own drafter, if it has one: whole blocks and small ones, trees and a chain."""
    if draft is None:
        return ()
    block = draft.block_size
    return (
        Situation(f"dflash {block}", 31, block, 7),
        Situation(f"dflash {block} chain", block - 1, block, 64),
        Situation(f"dflash {min(block, 3)}", 5, min(block, 3), 33),
    )


@dataclass(frozen=True)
class Subject:
    """A model to decode with, called ``title`` in reports. ``case`` is the oracle's run of it, if there is one."""

    title: str
    spec: Spec
    compute: Compute
    weights: Mapping[str, NDArray[Any]]
    prompt: tuple[int, ...]
    new_tokens: int
    case: ModelCase | None = None


def random_subject(spec: Spec, compute: Compute, seed: int = 0) -> Subject:
    """``spec`` with random weights and a random prompt."""
    new = min(NEW_TOKENS, max(1, spec.max_position_embeddings // 3))
    length = min(PROMPT_TOKENS, max(1, spec.max_position_embeddings - new))
    prompt = np.random.default_rng(seed).integers(0, spec.vocab_size, length).tolist()
    return Subject(spec.name, spec, compute, random_weights(spec, seed), tuple(prompt), new)


def oracle_subject(spec: Spec, compute: Compute, case: ModelCase) -> Subject:
    """``spec`` with the oracle's checkpoint and prompt."""
    return Subject(spec.name, spec, compute, Checkpoint(case.folder), tuple(case.prompt.tolist()), len(case.greedy), case)


@dataclass(frozen=True)
class _Plain:
    """Plain decoding, token by token from the first of the prompt: what everything else must equal."""

    decoded: Decoded
    logits: NDArray[np.float32]
    cache: NDArray[np.generic]

    def bits(self, rows: int) -> int:
        """In so many logits and cache rows."""
        return 8 * rows * int(self.logits[0].nbytes + self.cache[:, 0].nbytes)


class _Clock:
    """Builds Checks of one subject, each with the seconds since the last."""

    def __init__(self, subject: Subject, backend: Backend) -> None:
        self._subject, self._backend, self._began = subject, backend, perf_counter()

    def check(
        self, part: str, name: str, problem: str, detail: str = "", figure: float | None = None, tolerance: float | None = None,
        bits: int = 0,
    ) -> Check:  # fmt: skip
        now = perf_counter()
        seconds, self._began = now - self._began, now
        where = self._backend.description
        status: Status = "failed" if problem else "ok"
        spec, compute = self._subject.title, self._subject.compute
        said = "" if problem else detail
        return Check(spec, compute, part, name, where, status, figure, tolerance, said, problem, seconds, 0 if problem else bits)


def check_decodes(
    backend: Backend, subject: Subject, situations: Sequence[Situation] = SITUATIONS, shard: Shard = WHOLE, family: Family = "generic"
) -> Iterator[Check]:
    """Logits, plain tokens, and the exactness contract's levels L1 to L5; each Check as soon as it is known.

    Of a ``shard`` the logits are those of its part of the vocabulary; all ranks check alike, each in its own process. ``family``
    chooses the plan where there are several.
    """
    clock = _Clock(subject, backend)
    context = len(subject.prompt) + subject.new_tokens
    plan = build_plan(subject.spec, subject.compute, Limits(max_context=context, max_sequences=3), shard).on(family)
    try:
        engine = RecordingEngine(start_engine(subject.spec, plan, backend, subject.weights.__getitem__))
        decoded = decode_plain(engine, Request(subject.prompt, subject.new_tokens, chunk=1))
        plain = _Plain(decoded, np.stack(engine.logits), engine.cache_rows())
        yield _check_logits(engine, subject, plain, clock)
        if subject.case is not None and subject.compute == "f32":
            yield _check_tokens(subject, plain, clock)
        detail, bits = "logits and cache rows equal by bits (L3)", plain.bits(len(CHUNKS) * len(plain.logits))
        yield clock.check("decode", "prefill in any chunks", _rechunked(engine, subject, plain), detail, bits=bits)
        for situation in (*situations, *drafted_situations(subject.spec.draft)):
            tree, problem = _compare(engine, subject, situation, plain)
            length = sum(tree.acceptance_lengths) / max(1, tree.target_forwards)
            detail = f"tokens equal, logits and cache rows by bits (L1, L2); {length:.1f} tokens a forward"
            bits = plain.bits(min(len(engine.logits), len(plain.logits)))
            yield clock.check("decode", str(situation), problem, "" if problem else detail, bits=bits)
        detail, bits = "tokens and cache rows equal by bits (L1, L2)", 8 * int(plain.cache[:, : len(plain.logits)].nbytes)
        yield clock.check("decode", "rounds started ahead of results", _rounds(engine.engine, subject, plain), detail, bits=bits)
        if subject.spec.draft is not None:
            yield from check_drafter(engine, subject, plain.decoded, clock.check)
        yield clock.check("decode", "stop token inside a tree", _stopped(engine, subject, plain), "ends where plain decoding would")
        detail = "tokens equal, logits and cache rows by bits (L4)"
        bits = plain.bits(len(subject.prompt) + min(TREE_TOKENS, subject.new_tokens) - 1)
        yield clock.check("decode", "among two other sequences", _batched(engine.engine, subject, plain), detail, bits=bits)
        detail = "plain and tree draw the same tokens, logits and cache rows by bits (L5)"
        yield clock.check("decode", "sampled at temperature 0.8", _sampled(engine, subject), detail, bits=bits)
    except BackendError as error:
        yield clock.check("decode", "running the model", str(error))


# ---- against others -----------------------------------------------------------------------------------------------------


def _check_logits(engine: RecordingEngine, subject: Subject, plain: _Plain, clock: _Clock) -> Check:
    """Logits of every position, teacher forced: in float32 each element, in bf16 the rows' typical error, for routing may flip."""
    case = subject.case
    tokens = case.tokens.tolist() if case is not None else [*subject.prompt, *plain.decoded.tokens[:-1]]
    expected = (case.logits if case is not None else reference_of(subject.spec, subject.weights).forward(tokens).logits).astype(np.float64)
    prefill(engine, tokens)
    logits = np.stack(engine.logits)
    expected = expected[:, engine.plan.shard.rank * logits.shape[1] :][:, : logits.shape[1]]
    error = np.abs(logits - expected)
    if subject.compute == "f32":
        figure, what = float(error.max()), "largest error"
        tolerance = tolerances.ORACLE_LOGITS if case is not None else tolerances.float32_logits(expected)
    else:
        figure, what = float(np.median(np.sqrt(np.square(error).mean(axis=1)))), "median over rows of the error's root mean square"
        tolerance = tolerances.bf16_logits(expected, subject.spec.num_hidden_layers)
    row = int(np.nan_to_num(error, nan=np.inf).max(axis=1).argmax())
    name = f"the oracle's run of {case.name}" if case is not None else "the float64 reference"
    choices = f"{int((logits.argmax(axis=1) == expected.argmax(axis=1)).sum())} of {len(tokens)} greedy choices equal"
    problem = ""
    if not figure <= tolerance:
        where = first_departure(subject.spec, subject.compute, subject.weights, tokens, engine.cache_rows())
        problem = f"{what} is {figure:.3g}, more than {tolerance:.3g}; row {row} is off by {error[row].max():.3g}; {choices}; {where}"
    return clock.check("logits", name, problem, f"{what}; {choices}", finite(figure), tolerance)


def _check_tokens(subject: Subject, plain: _Plain, clock: _Clock) -> Check:
    """float32 must choose the oracle's tokens. (bf16 may leave them where two logits are close, and is then on a path of its own.)"""
    assert subject.case is not None
    ours, theirs = plain.decoded.tokens, subject.case.greedy.tolist()
    wrong = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    problem = f"token {wrong[0]} is {ours[wrong[0]]} instead of {theirs[wrong[0]]}" if wrong else ""
    return clock.check("tokens", "the oracle's greedy tokens", problem, f"{len(ours) - len(wrong)} of {len(ours)} equal")


# ---- by bits ------------------------------------------------------------------------------------------------------------


def _difference(engine: RecordingEngine, plain: _Plain) -> str:
    """Where the committed rows of the engine's last run leave plain decoding's; empty if nowhere. Either may have more rows."""
    rows = min(len(engine.logits), len(plain.logits))
    cache = engine.cache_rows()
    if cache.shape[1] != len(engine.logits):
        return f"{cache.shape[1]} cache rows for {len(engine.logits)} committed tokens"
    for row in range(rows):
        if count := differing_bits(cache[:, row], plain.cache[:, row]):
            layer = next(i for i in range(len(cache)) if differing_bits(cache[i, row], plain.cache[i, row]))
            return f"cache row {row} differs from plain decoding's in {count} elements, first in layer {layer}"
        if count := differing_bits(engine.logits[row], plain.logits[row]):
            return f"logits row {row} differs from plain decoding's in {count} elements, its cache row does not"
    return ""


def _rechunked(engine: RecordingEngine, subject: Subject, plain: _Plain) -> str:
    tokens = [*subject.prompt, *plain.decoded.tokens[:-1]]
    for chunk in CHUNKS:
        prefill(engine, tokens, chunk)
        if problem := _difference(engine, plain) or _last_rows(engine.engine, tokens, chunk, plain):
            return f"chunks of {chunk}: {problem}"
    return ""


def _last_rows(engine: Engine, tokens: Sequence[int], chunk: int, plain: _Plain) -> str:
    """Prefills as they are where nobody checks them: with logits of each chunk's last row alone."""
    engine.reset()
    root = -1
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        root, row = engine.prefill(part), at + len(part) - 1
        if count := differing_bits(engine.logits(1)[0], plain.logits[row]):
            return f"logits row {row}, the only one in its chunk, differs from plain decoding's in {count} elements"
    return "" if root == plain.decoded.tokens[-1] else f"the token after the last one is {root}"


def make_drafter(name: str, truth: Sequence[int], vocab_size: int, seed: int = 0) -> Drafter:
    """A drafter by what a Situation calls it: replay with the percentage of wrong tokens, dflash with its block size, or a chain's."""
    kind, *options = name.split()
    if kind == "dflash":
        return drafter_called(kind, Making(vocab_size, block_size=int(options[0]), chain="chain" in options))
    return drafter_called(kind, Making(vocab_size, truth, int(options[0]) / 100 if options else 0.0, seed))


def _compare(engine: RecordingEngine, subject: Subject, situation: Situation, plain: _Plain) -> tuple[Decoded, str]:
    """A draft-tree decode, and what is different about it: tokens (L1), or logits and cache rows of committed tokens (L2)."""
    drafter = make_drafter(situation.drafter, (*subject.prompt, *plain.decoded.tokens), subject.spec.vocab_size)
    tree = decode_tree(
        engine,
        Request(
            subject.prompt,
            subject.new_tokens,
            chunk=situation.chunk,
            drafter=drafter,
            budget=situation.budget,
            block_size=situation.block_size,
        ),
    )
    if tree.tokens != plain.decoded.tokens:
        first = next((i for i, (a, b) in enumerate(zip(tree.tokens, plain.decoded.tokens, strict=False)) if a != b), len(tree.tokens))
        return tree, f"token {first} of {len(tree.tokens)} differs from plain decoding's; {_difference(engine, plain) or 'no row does'}"
    needed = len(subject.prompt) + len(tree.tokens) - 1
    if len(engine.logits) < needed:
        return tree, f"{len(engine.logits)} rows are committed instead of {needed}"
    return tree, _difference(engine, plain)


def _rounds(engine: Engine, subject: Subject, plain: _Plain) -> str:
    """Plain rounds, or trees of several sizes in turn where the model has a drafter, one of them always ahead of what is known; then drawn
    tokens by the same rounds, for which ranks have programs of their own."""
    draft = subject.spec.draft
    block = DFlashDrafter(draft.block_size).propose((), draft.block_size - 1) if draft else None
    rounds = Rounds(engine, block, (0, 7, 31) if block else (0,))
    if problem := _by_rounds(rounds, subject, plain.decoded.tokens, plain.cache, GREEDY):
        return problem
    sampling = Sampling(temperature=0.9, seed=2**63 + 2**31)
    drawn = decode_plain(engine, Request(subject.prompt, min(DRAWN_TOKENS, subject.new_tokens), sampling=sampling))
    problem = _by_rounds(rounds, subject, drawn.tokens, engine.cache_rows(), sampling)
    return f"{sampling}: {problem}" if problem else ""


def _by_rounds(rounds: Rounds, subject: Subject, tokens: tuple[int, ...], cache: NDArray[np.generic], sampling: Sampling) -> str:
    turns = Turns(rounds.budgets)
    got = decode_rounds(rounds, Request(subject.prompt, len(tokens), sampling=sampling, chunk=9), lambda _: turns, ahead=1)
    if got.tokens != tokens:
        return "the tokens differ from plain decoding's"
    rows = rounds.engine.cache_rows()
    if rows.shape[1] != cache.shape[1]:
        return f"{rows.shape[1]} committed tokens are left instead of {cache.shape[1]}"
    count = differing_bits(rows, cache)
    return f"cache rows differ from plain decoding's in {count} elements" if count else ""


def _stopped(engine: RecordingEngine, subject: Subject, plain: _Plain) -> str:
    """Stop at a token that the first tree reaches beyond, which must not show."""
    tokens = plain.decoded.tokens
    stop = tokens[len(tokens) // 4]
    expected = tokens[: tokens.index(stop) + 1]
    drafter = make_drafter("replay 0", (*subject.prompt, *tokens), subject.spec.vocab_size)
    got = decode_tree(engine, Request(subject.prompt, subject.new_tokens, stop=(stop,), drafter=drafter, budget=15, block_size=16)).tokens
    return "" if got == expected else f"ends with {len(got)} tokens instead of {len(expected)}"


def _batched(engine: Engine, subject: Subject, plain: _Plain) -> str:
    """Sequence 1 in steps with two others, prefill and trees alike; its tokens, logits and cache rows are those it has alone."""
    ours, limit, vocab = 1, engine.plan.limits.max_context, subject.spec.vocab_size
    rng = np.random.default_rng(1)
    expected = plain.decoded.tokens[: min(TREE_TOKENS, subject.new_tokens)]
    waiting = {2: rng.integers(0, vocab, 7).tolist(), ours: list(subject.prompt), 0: rng.integers(0, vocab, 20).tolist()}
    context = {sequence: list(tokens) for sequence, tokens in waiting.items()}
    recorder, widths = RecordingSequences(engine), {2: 3, ours: 11, 0: 9}
    for sequence in waiting:
        recorder.reset(sequence)
    while any(waiting.values()):
        chunks = [(sequence, tokens[: widths[sequence]]) for sequence, tokens in waiting.items() if tokens]
        roots = recorder.prefill_many(chunks)
        for (sequence, tokens), root in zip(chunks, roots, strict=True):
            waiting[sequence] = waiting[sequence][len(tokens) :]
            if not waiting[sequence]:
                context[sequence].append(root)
    drafters = {sequence: make_drafter("random", (), vocab, sequence) for sequence in context}
    drafters[ours] = make_drafter("replay 20", (*subject.prompt, *plain.decoded.tokens), vocab)
    done = len(subject.prompt)
    while len(context[ours]) < done + len(expected):
        drafts = []
        for sequence, tokens in context.items():
            depths = min(7, limit - len(tokens), done + len(expected) - len(tokens) - 1 if sequence == ours else 7)
            if sequence == ours or depths >= 0:
                drafts.append(Draft(sequence, drafters[sequence].propose(tokens, depths), 15))
        for draft, step in zip(drafts, recorder.verify_many(drafts), strict=True):
            context[draft.sequence] += [*step.accepted[1:], step.next_token]
    if tuple(context[ours][done : done + len(expected)]) != expected:
        return "the tokens differ from those of the request alone"
    cache = engine.cache_rows(ours)
    for row, (logits, alone) in enumerate(zip(recorder.logits[ours], plain.logits, strict=False)):
        if (logits is not None and differing_bits(logits, alone)) or differing_bits(cache[:, row], plain.cache[:, row]):
            return f"row {row} has other bits than in the request alone"
    return ""


def _sampled(engine: RecordingEngine, subject: Subject) -> str:
    """Plain sampling, then the same seed with trees whose drafter is wrong half the time."""
    sampling, count = Sampling(temperature=0.8, top_p=0.95, seed=2**40 + 1), min(TREE_TOKENS, subject.new_tokens)
    decoded = decode_plain(engine, Request(subject.prompt, count, sampling=sampling))
    drawn = _Plain(decoded, np.stack(engine.logits), engine.cache_rows())
    drafters = [make_drafter("replay 50", (*subject.prompt, *decoded.tokens), subject.spec.vocab_size)]
    if subject.spec.draft is not None:
        drafters.append(DFlashDrafter(subject.spec.draft.block_size))
    for drafter in drafters:
        tree = decode_tree(engine, Request(subject.prompt, count, sampling=sampling, chunk=7, drafter=drafter, budget=15, block_size=8))
        if tree.tokens != decoded.tokens:
            return f"the tokens differ from plain sampling, with drafts by {drafter.name}"
        if problem := _difference(engine, drawn):
            return f"drafted by {drafter.name}: {problem}"
    return ""
