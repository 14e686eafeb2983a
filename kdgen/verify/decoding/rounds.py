"""Rounds, the path that users run: requests of every kind on a small model, and the shipped model and drafter, whose drafts are accepted.

Every request is decoded plainly, and what its rounds must do is found on the host (``kdgen.verify.decoding.course``). Then they run:
tokens, cache bits, lengths, forwards, rounds started, accepted tokens, nodes, budgets and recorded units must be those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.demo.prompts import read_prompts
from kdgen.drafters.base import BlockDraft, Candidates, Drafter, DraftLogits
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.drafters.ngram import NgramDrafter
from kdgen.drafters.synthetic import AdversarialDrafter, ReplayDrafter
from kdgen.errors import BackendError
from kdgen.files.resources import demo_dir
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.plan.step import SAMPLED
from kdgen.runtime.batch import Batch, Finished, Request
from kdgen.runtime.budget import AutoBudget, FixedBudget
from kdgen.runtime.decode import Decoded, Decoder, decode_plain, decode_rounds, decode_tree, prefill
from kdgen.runtime.engine import Engine
from kdgen.runtime.model import Model, open_model, with_drafter
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.rounds import Rounds, step_costs
from kdgen.spec.model import Spec
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.course import (
    Ask,
    Course,
    Drafted,
    Expected,
    KnownDrafter,
    Turns,
    drafted_along,
    expected_rounds,
    plain_course,
    to_stop,
    tree_steps,
)
from kdgen.verify.decoding.draw import RoundsDraw
from kdgen.verify.decoding.recording import RecordingEngine, differing_bits
from kdgen.verify.decoding.watched import SLOWER, WatchedBackend, seconds_of
from kdgen.verify.kernels.sampling import may_draw
from kdgen.verify.report.checks import Check, Status
from kdgen.verify.variants import variants
from kdgen.weights.pack import CheckpointWeights
from kdgen.weights.random import random_weights

Array = NDArray[Any]

#: What the automatic choice is to choose from, written down once more.
BUDGETS = (0, 7, 15, 31, 63)
NEW_TOKENS = 14
#: Seeds of which some are alike but for one bit, each in another place of the 64.
SEEDS = (0, 5, 5 + 2**31, 5 + 2**32, 2**32 - 1, 5 + 2**63, 2**63, 2**64 - 1)
SAMPLINGS = (
    Sampling(0.8, top_p=0.95, seed=2**63 + 5),
    Sampling(1.5, seed=2**31),
    Sampling(0.6, top_k=5, min_p=0.02, seed=2**64 - 1),
)


class LogitsDrafter:
    """What another drafter proposes, as logits of the whole vocabulary, so that the device takes the best of them."""

    name = "logits"

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size

    def propose(self, context: Sequence[int], depths: int) -> DraftLogits:
        found = self._drafter.propose(context, depths)
        assert isinstance(found, Candidates)
        # no two tokens are alike, so that it does not matter how a log-probability is rounded
        logits = np.tile((-20 - np.arange(self._vocab_size) / 16).astype(np.float32), (found.depths, 1))
        for row, tokens, log_probs in zip(logits, found.tokens, found.log_probs, strict=True):
            row[tokens] = np.maximum(log_probs, np.float32(-19))
        return DraftLogits(logits)


class Watch:
    """An ``Emit`` that notes tokens, step by step, and from the first on what is recorded and started."""

    def __init__(self, backend: WatchedBackend) -> None:
        self._backend = backend
        self._recorded = self._started = 0
        self.emitted: list[tuple[int, ...]] = []
        self.begun: list[int] = []  # starts before each step

    def __call__(self, tokens: tuple[int, ...]) -> None:
        if not self.emitted:
            self._recorded, self._started = self._backend.recorded, self._backend.started
        self.emitted.append(tokens)
        self.begun.append(self.started)

    @property
    def recorded(self) -> int:
        return self._backend.recorded - self._recorded

    @property
    def started(self) -> int:
        return self._backend.started - self._started


def difference(engine: Engine, course: Course, expected: Expected, got: Decoded, watch: Watch, units: int, measured: int = 0) -> str:
    """How a decode by rounds differs from what it must be; empty if it does not. ``units`` were to be recorded, and ``measured`` starts
    to be timed."""
    length, root = len(course.prompt) + len(expected.tokens) - 1, expected.tokens[-1]
    trees = any(expected.budgets)
    for what, value, wanted in (
        ("tokens", got.tokens, expected.tokens),
        ("target forwards", got.target_forwards, len(expected.accepted)),
        ("acceptance lengths", got.acceptance_lengths, expected.accepted if got.acceptance_lengths or trees else ()),
        ("budgets", got.budgets, expected.budgets if got.budgets or trees else ()),
        ("tokens shown step by step", tuple(watch.emitted), expected.emitted),
        ("rounds started before each step", tuple(begun - measured for begun in watch.begun[1:]), expected.begun[1:]),
        ("rounds started", watch.started - measured, expected.started),
        ("units recorded", watch.recorded, units),
        ("committed tokens", engine.length(), length),
        ("the device's length", int(engine.read("sequence_length")[0]), length),
        ("the token after them", int(engine.read("root_token")[0]), root),
    ):
        if value != wanted:
            return f"{what}: {value} instead of {wanted}"
    count = differing_bits(engine.cache_rows(), course.rows[:, :length])
    return f"cache rows differ from plain decoding's in {count} elements" if count else ""


def seen_wrongly(turns: Turns, expected: Expected) -> str:
    """How what a chooser was shown of the rounds differs from what they were; empty if it does not."""
    if tuple(turns.budgets) != expected.budgets:
        return f"budgets shown are {turns.budgets} instead of {expected.budgets}"
    for number, (nodes, wanted) in enumerate(zip(turns.nodes, expected.nodes, strict=True)):
        shown, drawn = turns.log_probs[number], expected.log_probs[number]
        if nodes != wanted:
            return f"round {number} accepted nodes {nodes} instead of {wanted}"
        if (shown is None) != (drawn is None):
            return f"round {number} shows {'no' if shown is None else 'a'} draft"
        if shown is not None and drawn is not None and (shown.shape != drawn.shape or shown.tobytes() != drawn.tobytes()):
            return f"round {number} shows another draft's log-probabilities"
    return ""


@dataclass(frozen=True)
class Subject:
    """A model with a drafter, and prompts whose decodes grow beyond a split of the keys."""

    title: str
    model: Model
    compute: Compute
    prompts: tuple[tuple[int, ...], ...]
    block_size: int  #: rows that the drafter is asked for


def shipped() -> Subject:
    """The shipped model and drafter, and ends of two held-out prompts."""
    folder = demo_dir()
    model = with_drafter(open_model(folder / "model-int4"), folder / "drafter")
    model = replace(model, spec=model.spec.model_copy(update={"name": "demo"}))
    prompts = [prompt.tokens for prompt in read_prompts(folder / "prompts.json")]
    return Subject(model.spec.name, model, "f32", (prompts[0][-58:], prompts[1][-120:]), block_size=8)


def favouring(spec: Spec, seed: int, favourites: int = 4) -> Model:
    """Random weights by which a model and its drafter, which share the head, choose a few tokens most of the time: drafts are accepted by
    chance."""
    weights = dict(random_weights(spec, seed))
    head = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    weights[head] = weights[head].copy()
    weights[head][favourites:] *= weights[head].dtype.type(2**-6)
    return Model(spec, CheckpointWeights(weights.__getitem__))


def small(seed: int = 1) -> Subject:
    """A model that is quick to decode, where requests of every kind are tried."""
    spec = next(spec for spec in variants() if spec.name == "tiny-odd")
    tokens = np.random.default_rng(seed).integers(0, spec.vocab_size, 70).tolist()
    return Subject(spec.name, favouring(spec, seed), "f32", (tuple(tokens[:58]), tuple(tokens[5:])), block_size=16)


@dataclass(frozen=True)
class Prepared:
    """A request decoded plainly, farther than it is to be decoded by rounds, and what is drafted along its way."""

    course: Course
    drafted: Drafted

    @property
    def host(self) -> KnownDrafter:
        return KnownDrafter(self.course, self.drafted)

    def truth(self, new_tokens: int = NEW_TOKENS) -> tuple[int, ...]:
        return self.course.tokens[:new_tokens]


class Situation:
    """A subject in an engine whose context is long enough for anything, and its prompts' greedy decodes."""

    def __init__(self, backend: Backend, subject: Subject) -> None:
        self.subject, self.backend = subject, WatchedBackend(backend)
        self.size = subject.block_size
        self.block = BlockDraft(self.size - 1, self.size)
        self.quick = subject.title != "demo"  # to decode
        self.aheads = (0, 1) if backend.name == "cuda" else (0, 1, 2)  # a GPU's mailbox holds the results of two rounds
        self.engine = self.opened(max(map(len, subject.prompts)) + NEW_TOKENS + 2 * self.size, 3)
        self.greedy = tuple(self.prepared(prompt) for prompt in subject.prompts)

    def opened(self, max_context: int, sequences: int = 1) -> Engine:
        model = self.subject.model
        plan = build_plan(model.spec, self.subject.compute, Limits(max_context=max_context, max_sequences=sequences))
        return start_engine(model.spec, plan, self.backend, model.weights, None, model.draft_weights)

    def prepared(self, prompt: Sequence[int], sampling: Sampling = GREEDY) -> Prepared:
        course = plain_course(self.engine, prompt, NEW_TOKENS + self.size, sampling)  # no path of a tree ends beyond it
        return Prepared(course, drafted_along(self.engine, course, self.size, NEW_TOKENS))

    def rounds(
        self, prepared: Prepared, block: BlockDraft | None, budgets: Sequence[int], ahead: int, stops: frozenset[int] = frozenset(),
        engine: Engine | None = None, new_tokens: int = NEW_TOKENS,
    ) -> str:  # fmt: skip
        """How new rounds, of ``budgets`` in turn, differ from what they must be."""
        engine, course = engine or self.engine, prepared.course
        ask, chooser, watch = Ask(new_tokens, block, ahead, stops), Turns(budgets), Watch(self.backend)
        context = engine.plan.limits.max_context
        expected = expected_rounds(course, prepared.drafted, ask, budgets, Turns(budgets), self.backend, context)
        rounds = Rounds(engine, block, budgets)
        got = decode_rounds(rounds, course.prompt, new_tokens, lambda _: chooser, stops, 9, course.sampling, watch, ahead)
        problem = difference(engine, course, expected, got, watch, len(expected.units))
        problem = problem or seen_wrongly(chooser, expected) or (f"{rounds.running} rounds are left" if rounds.running else "")
        return f"budgets {tuple(budgets)}, {ahead} ahead, {_said(course.sampling)}: {problem}" if problem else ""


def _said(sampling: Sampling) -> str:
    return str(sampling) if sampling.temperature else "greedy"


def check_rounds(backend: Backend, subject: Subject, checks: Sequence[tuple[str, Try]]) -> Iterator[Check]:
    """``checks`` of a subject, each as soon as it is known."""
    began, situation = perf_counter(), None
    for name, check in checks:
        try:
            situation = situation or Situation(backend, subject)
            problem, detail = check(situation)
        except BackendError as error:
            problem, detail = str(error), ""
        status: Status = "failed" if problem else "ok"
        now = perf_counter()
        yield Check(
            subject.title, subject.compute, "rounds", name, backend.description, status, detail="" if problem else detail, why=problem,
            seconds=now - began,
        )  # fmt: skip
        began = now


# ---- checks: (what is wrong, what was done) -----------------------------------------------------------------------------

Try = Callable[[Situation], tuple[str, str]]


def _drafts(situation: Situation) -> tuple[str, str]:
    """Where nothing is accepted, the other checks show little."""
    for each in situation.greedy:
        if problem := each.drafted.problem():
            return problem, ""
    steps = [tree_steps(each.course.prompt, each.truth(), each.host, FixedBudget(63), situation.size) for each in situation.greedy]
    lengths = [length for each in steps for length in each.accepted]
    mean = sum(lengths) / len(lengths)
    problem = "" if mean > 1.4 else f"trees of 63 nodes give {mean:.2f} tokens a forward"
    return problem, f"candidates are the best of the draft's logits; trees of 63 nodes give {mean:.1f} tokens a forward"


def _in_turn(situation: Situation) -> tuple[str, str]:
    """All budgets in one run, no rounds ahead of their results and several, chains, and none."""
    first, second = situation.greedy
    chain = BlockDraft(situation.size - 1, situation.size, 1)
    runs: list[tuple[Prepared, BlockDraft | None, tuple[int, ...], int]]
    runs = [(first, situation.block, BUDGETS, 1), (second, situation.block, (7, 0, 15), 0), (second, chain, (3, 15), 1)]
    if situation.quick:
        runs += [(first, BlockDraft(2, situation.size), (7,), 1), (second, None, (0,), 1)]
        runs += [(second, situation.block, (7, 0, 15), ahead) for ahead in situation.aheads]
    problem = next((said for run in runs if (said := situation.rounds(*run))), "")
    return problem, f"{len(runs)} decodes: tokens, cache bits, forwards, rounds, nodes, log-probabilities and units recorded as foretold"


def _drawn(situation: Situation) -> tuple[str, str]:
    for sampling, ahead in zip(SAMPLINGS, (1, 0, 1), strict=True):
        if problem := situation.rounds(situation.prepared(situation.subject.prompts[0], sampling), situation.block, (63, 7, 0), ahead):
            return problem, ""
    return "", f"{len(SAMPLINGS)} ways, with seeds beyond 2^31 and 2^63: all as foretold from plain sampling"


def _stopped(situation: Situation) -> tuple[str, str]:
    """A stop after every token that does not stand earlier: the first, the last, within and at the end of accepted paths."""
    prepared, places = situation.greedy[0], 0
    if situation.quick:  # there, few tokens come twice
        prepared = situation.prepared(situation.subject.prompts[0], SAMPLINGS[1])
    tokens = prepared.truth()
    for place, token in enumerate(tokens):
        if token not in tokens[:place]:
            places += 1
            if problem := situation.rounds(prepared, situation.block, (15, 63), place % 2, frozenset((token,))):
                return f"stop after token {place}: {problem}", ""
    return "", f"{places} places: ends there, and so many rounds are started and thrown away as foretold"


def _to_the_end(situation: Situation) -> tuple[str, str]:
    """Until the context is full. Trees reach beyond it."""
    engine, short = situation.opened(64), BlockDraft(7, situation.size)  # after one round of it, 8 tokens of room may be full
    rooms = ((1, (1,)), (2, (0,)), (3, (1,)), (8, situation.aheads), (14, (1,)))
    for room, aheads in rooms:
        prepared = situation.prepared(situation.subject.prompts[0][: 64 - room])
        for ahead in aheads:
            block = short if room == 8 else situation.block
            if problem := situation.rounds(prepared, block, (63, 7), ahead, engine=engine, new_tokens=100):
                return f"{room} tokens before the context's end: {problem}", ""
    return "", f"{', '.join(str(room) for room, _ in rooms)} tokens of room: filled to the last, no round more or fewer than foretold"


def _kept(situation: Situation) -> tuple[str, str]:
    """One Decoder for many requests: what it recorded for one of them serves the others."""
    engine, size = situation.engine, situation.size
    decoder, (first, second) = Decoder(engine), situation.greedy
    drawn = situation.prepared(situation.subject.prompts[0], SAMPLINGS[0])
    known: list[tuple[object, ...]] = []
    apart = any(program.name == "decode" + SAMPLED for program in engine.plan.programs)  # greedy choice has programs of its own
    situation.backend.rounds_ahead = 1
    tree, chain = DFlashDrafter(size), DFlashDrafter(size, chain=True)
    stop = frozenset(first.truth()[3:4])
    runs = (
        (first, tree, 15), (first, tree, 15), (second, tree, 15), (drawn, tree, 15), (first, tree, 15),
        (first, chain, 7), (drawn, chain, 7), (first, None, 15), (second, None, 15), (drawn, None, 15),
        (second, tree, 15), (first, tree, 7),
    )  # fmt: skip
    for number, (prepared, drafter, budget) in enumerate(runs):
        block = BlockDraft(size - 1, size, int(drafter is chain)) if drafter else None
        budget = budget if drafter else 0
        stops = stop if number % 3 == 1 else frozenset[int]()
        ask, course, watch = Ask(NEW_TOKENS, block, 1, stops), prepared.course, Watch(situation.backend)
        context = engine.plan.limits.max_context
        expected = expected_rounds(course, prepared.drafted, ask, (budget,), FixedBudget(budget), situation.backend, context)
        units = [(block, *unit, apart and course.sampling.temperature > 0) for unit in expected.units]
        new = [unit for unit in units if unit not in known]
        got = decoder.decode(course.prompt, NEW_TOKENS, drafter, budget, size, stops, 9, course.sampling, watch)
        if problem := difference(engine, course, expected, got, watch, len(new)):
            return f"request {number}, {_said(course.sampling)}: {problem}", ""
        known += new
    return (
        "",
        f"{len(runs)} requests of one Decoder, greedy and sampled, with trees, chains and none: {len(known)} units recorded, each once",
    )


def _costs(situation: Situation, draft: bool) -> dict[int, float]:
    """Seconds for each of ``BUDGETS`` behind the first prompt, of rounds, or of steps without a ``draft``: what the made-up clock must show
    of the rank by which all go."""
    engine, length, rows = situation.engine, len(situation.subject.prompts[0]), situation.size

    def seconds(budget: int) -> int:
        keys = situation.backend.recorded_context(length + (max(budget + 1, rows) if draft else budget + 1))
        works = [engine.work("verify", budget + 1, keys) if budget else engine.work("decode", 1, keys)]
        return sum(map(seconds_of, [*works, *([engine.work("draft", rows, keys)] if draft and budget else [])]))

    return {budget: float(SLOWER * seconds(budget)) for budget in BUDGETS}


def _measured(situation: Situation) -> tuple[str, str]:
    """Costs are the made-up clock's. Each measurement begins behind the same tokens, and leaves them so."""
    engine, backend = situation.engine, situation.backend
    prompt = situation.subject.prompts[0]
    root, began = prefill(engine, prompt), []
    rounds = Rounds(engine, situation.block, BUDGETS)
    rounds.begin(len(prompt))
    state = ([len(prompt)], [root])
    backend.before = lambda: began.append(_state(engine))
    try:
        for what, measure, draft, timed in (
            ("rounds", rounds.costs, True, 4 * len(BUDGETS)),
            ("rounds, asked again", rounds.costs, True, 0),
            ("steps", partial(step_costs, engine), False, 5 * len(BUDGETS)),
        ):
            before = backend.timed
            if (costs := measure(root)) != _costs(situation, draft):
                return f"costs of {what} are {costs} instead of {_costs(situation, draft)}", ""
            if backend.timed - before != timed:
                return f"costs of {what}: {backend.timed - before} measurements instead of {timed}", ""
            if wrong := next((each for each in (*began, _state(engine)) if each != state), None):
                return f"measuring {what} begins or ends with {wrong[0]} committed tokens and the root {wrong[1]} instead of {state}", ""
    finally:
        backend.before = lambda: None
    return "", "seconds of rounds and steps are those of the rank by which all go; nothing that was measured is left committed"


def _state(engine: Engine) -> tuple[list[int], list[int]]:
    """The device's length and root of sequence 0."""
    return engine.read("sequence_length")[:1].astype(int).tolist(), engine.read("root_token")[:1].astype(int).tolist()


def _chosen(situation: Situation) -> tuple[str, str]:
    """Budgets by what was measured, by one Decoder for several requests, which measures for the first of them."""
    engine, backend = situation.engine, situation.backend
    decoder, context, requests = Decoder(engine), engine.plan.limits.max_context, (*situation.greedy, situation.greedy[0])
    backend.rounds_ahead = 1
    for number, prepared in enumerate(requests):
        course, watch = prepared.course, Watch(backend)
        ask, chooser = Ask(NEW_TOKENS, situation.block, 1), AutoBudget(_costs(situation, True))
        expected = expected_rounds(course, prepared.drafted, ask, BUDGETS, chooser, backend, context)
        got = decoder.decode(course.prompt, NEW_TOKENS, DFlashDrafter(situation.size), "auto", situation.size, emit=watch)
        units = watch.recorded if number else len(expected.units)  # some were recorded before
        if problem := difference(engine, course, expected, got, watch, units, 0 if number else 4 * len(BUDGETS)):
            return f"request {number}, budgets by measured rounds: {problem}", ""
    prepared, watch = situation.greedy[0], Watch(backend)
    chain, few = BlockDraft(situation.size - 1, situation.size, 1), (0, 7, 15)  # no more than a chain has
    costs = {budget: _costs(situation, True)[budget] for budget in few}
    expected = expected_rounds(prepared.course, prepared.drafted, Ask(NEW_TOKENS, chain, 1), few, AutoBudget(costs), backend, context)
    got = decoder.decode(prepared.course.prompt, NEW_TOKENS, DFlashDrafter(situation.size, True), "auto", situation.size, emit=watch)
    if problem := difference(engine, prepared.course, expected, got, watch, len(expected.units), 4 * len(few)):
        return f"a chain, budgets by measured rounds: {problem}", ""
    for number, prepared in enumerate(requests):
        course, host, before = prepared.course, LogitsDrafter(prepared.host, engine.spec.vocab_size), backend.timed
        steps = tree_steps(course.prompt, prepared.truth(), host, AutoBudget(_costs(situation, False)), situation.size)
        got = decoder.decode(course.prompt, NEW_TOKENS, host, "auto", situation.size)
        wanted = prepared.truth(), steps.accepted, steps.budgets, 0 if number else 5 * len(BUDGETS)
        if (found := (got.tokens, got.acceptance_lengths, got.budgets, backend.timed - before)) != wanted:
            return f"request {number}, budgets by measured steps: tokens, accepted, budgets, measurements {found} instead of {wanted}", ""
    return "", f"{2 * len(requests)} requests: each round and step has the budget that follows from what was measured once"


def _steps(situation: Situation) -> tuple[str, str]:
    """Forwards of draft-tree decoding, step by step: by arithmetic where a drafter is never, or always, wrong."""
    engine, (first, second), vocab = situation.engine, situation.greedy, situation.engine.spec.vocab_size
    course, truth = first.course, first.truth()
    whole, rest = divmod(NEW_TOKENS - 1, 5)
    always = (*[5] * whole, *([rest] if rest else []))
    tests: list[tuple[str, Course, Drafter, int, int, tuple[int, ...]]] = [
        ("never wrong", course, ReplayDrafter((*course.prompt, *truth), vocab), 9, 5, always),
        ("always wrong", course, AdversarialDrafter((*course.prompt, *truth), vocab), 9, 5, (1,) * (NEW_TOKENS - 1)),
    ]
    for each, budget in ((first, 15), (second, 7))[: 2 if situation.quick else 1]:
        for host, device in ((each.host, DFlashDrafter(situation.size)), (LogitsDrafter(each.host, vocab), None)):
            steps = tree_steps(each.course.prompt, each.truth(), host, FixedBudget(budget), situation.size)
            tests.append((f"{host.name}, budget {budget}", each.course, device or host, budget, situation.size, steps.accepted))
    for name, course, drafter, budget, size, lengths in tests:
        got = decode_tree(engine, course.prompt, NEW_TOKENS, drafter, budget, size)
        if (got.tokens, got.acceptance_lengths, got.target_forwards) != (course.tokens[:NEW_TOKENS], lengths, len(lengths)):
            return f"a drafter {name}: {got.target_forwards} forwards accept {got.acceptance_lengths} instead of {lengths}", ""
    return "", f"{len(tests)} drafters: so many forwards, and tokens of each, as foretold"


def _together(situation: Situation) -> tuple[str, str]:
    """Requests of a batch take the forwards that each takes alone, and prompts that are not cut fill whole steps."""
    (first, second), size = situation.greedy, situation.size
    vocab, stop = situation.engine.spec.vocab_size, frozenset(first.truth()[NEW_TOKENS // 2 :][:1])
    device, never = DFlashDrafter(size), frozenset[int]()
    logits, others = LogitsDrafter(first.host, vocab), LogitsDrafter(second.host, vocab)
    deep = ReplayDrafter((*first.course.prompt, *first.course.tokens), vocab)  # as deep as a tree of 5 rows may be
    groups: tuple[tuple[tuple[Prepared, Drafter | None, Drafter | None, int, frozenset[int]], ...], ...] = (
        ((first, logits, logits, 7, never), (second, others, others, 15, never), (first, device, first.host, 15, never)),
        ((first, first.host, first.host, 15, never), (second, second.host, second.host, 7, never), (second, None, None, 0, never)),
        ((second, device, second.host, 7, never), (first, device, first.host, 15, never)),
        ((first, deep, deep, 15, never), (first, device, first.host, 31, stop), (first, None, None, 0, stop)),
    )
    for number, asked in enumerate(groups):
        requests, wanted, chunk, room = [], [], 40 if number % 2 else 0, situation.engine.plan.limits.max_tokens
        for prepared, drafter, host, budget, stops in asked:
            course, truth = prepared.course, to_stop(prepared.truth(), stops)
            rows = 5 if drafter is deep else size
            requests.append(Request(course.prompt, NEW_TOKENS, stops, GREEDY, chunk, drafter, budget, rows))
            steps = tree_steps(course.prompt, prepared.truth(), host, FixedBudget(budget), rows, stops) if host else None
            wanted.append((truth, len(steps.accepted) if steps else len(truth) - 1))
        results, taken = _steps_together(situation.engine, requests)
        for each, found, (tokens, forwards) in zip(asked, results, wanted, strict=True):
            who = f"a request with {each[1].name if each[1] else 'no'} drafter, budget {each[3]}"
            if found.tokens != tokens:
                return f"{who}: tokens {found.tokens} instead of {tokens}", ""
            if found.forwards != forwards:
                return f"{who}: {found.forwards} forwards instead of {forwards}, though its tokens are right", ""
        ends = itertools.accumulate(len(request.prompt) for request in requests)  # a prompt begins in the step in which the last one ends
        needed = max(-(-end // room) + forwards for end, (_, forwards) in zip(ends, wanted, strict=True))
        if not chunk and taken != needed:
            return f"{len(asked)} requests whose prompts are not cut: {taken} steps instead of {needed}", ""
    return "", f"{sum(map(len, groups))} requests, three at a time: each takes the forwards that it takes alone, and prompts fill steps"


def _steps_together(engine: Engine, requests: Sequence[Request]) -> tuple[list[Finished], int]:
    """The requests' results, in their order, and the steps of the batch that they take."""
    batch, found, steps = Batch(engine), list[Finished](), 0
    for request in requests:
        batch.add(request)
    while not batch.idle:
        found += batch.step()
        steps += 1
    return sorted(found, key=lambda each: each.number), steps


def _seeds(situation: Situation) -> tuple[str, str]:
    """Every bit of a seed counts: each token is the reference sampler's."""
    recorder, prompt, drawn = RecordingEngine(situation.engine), situation.subject.prompts[0][:9], set()
    for seed in SEEDS:
        sampling = Sampling(1.0, seed=seed)
        tokens = decode_plain(recorder, prompt, 10, sampling=sampling).tokens
        for place, token in enumerate(tokens):
            position = len(prompt) + place
            if not may_draw(recorder.logits[position - 1], sampling, position, token):
                return f"seed {seed}: token {place}, {token}, is not what the reference draws", ""
        drawn.add(tokens)
    problem = "" if len(drawn) == len(SEEDS) else f"{len(SEEDS)} seeds give {len(drawn)} different results"
    return problem, f"{len(SEEDS)} seeds up to 2^64 - 1, some alike modulo 2^31, 2^32 or 2^63, give the reference's tokens, all different"


def drawn_rounds(backend: Backend, model: Model, compute: Compute, draw: RoundsDraw, prompt: Sequence[int]) -> tuple[str, int]:
    """(how a drawn request's rounds differ from what they must be, drafted tokens that they accept), of any model."""
    watched, draft = WatchedBackend(backend), model.spec.draft
    size = min(draw.depths + 1, draft.block_size) if draft else 0
    block = BlockDraft(size - 1, size, int(draw.chain)) if size else None
    budgets = tuple(sorted(set(draw.budgets))) if block else (0,)
    context = len(prompt) + draw.new_tokens + draw.spare

    def opened(max_context: int) -> Engine:
        plan = build_plan(model.spec, compute, Limits(max_context=max_context))
        return start_engine(model.spec, plan, watched, model.weights, None, model.draft_weights)

    plain = opened(context + 2 * size)
    course = plain_course(plain, prompt, draw.new_tokens + size, draw.sampling)
    drafted = drafted_along(plain, course, size, draw.new_tokens) if size else None
    stops = frozenset(() if draw.stop_at is None else course.tokens[draw.stop_at : draw.stop_at + 1])
    ask, watch, engine = Ask(draw.new_tokens, block, draw.ahead, stops), Watch(watched), opened(context)
    rounds = Rounds(engine, block, budgets)
    turns, again = (Turns(draw.budgets if block else (0,)) for _ in range(2))
    expected = expected_rounds(course, drafted, ask, budgets, again, watched, context)
    got = decode_rounds(rounds, prompt, draw.new_tokens, lambda _: turns, stops, None, draw.sampling, watch, draw.ahead)
    problem = difference(engine, course, expected, got, watch, len(expected.units)) or seen_wrongly(turns, expected)
    return problem, sum(expected.accepted) - len(expected.accepted)


def automatic_budgets() -> Check:
    """The automatic choice over made-up drafters whose best budget is plain, against the best fixed one."""
    began, costs = perf_counter(), {0: 1.0, 7: 1.1, 15: 1.2, 31: 1.6, 63: 2.5}
    draft = np.log(np.tile([0.7, 0.2, 0.05], (15, 1))).astype(np.float32)
    problems = []
    for name, path, best in (
        ("useless", (), 0),
        ("short", (1, 2, 3, 4), 7),
        ("long", tuple(range(1, 13)), 15),
        ("wide", (*range(1, 6), *range(9, 12), *range(17, 25)), 31),
    ):
        chooser, spent, tokens = AutoBudget(costs), 0.0, 0
        for _ in range(600):
            budget = chooser.choose()
            nodes = (0, *(node for node in path if node <= budget))
            chooser.observe(budget, nodes, draft if budget else None)
            spent, tokens = spent + costs[budget], tokens + len(nodes)
        fixed = min(costs[budget] / (1 + sum(node <= budget for node in path)) for budget in BUDGETS)
        if abs(fixed - costs[best] / (1 + sum(node <= best for node in path))) > 1e-9 or not spent / tokens <= 1.05 * fixed:
            problems.append(f"a {name} draft: {spent / tokens:.3f} s a token instead of {fixed:.3f}, which a budget of {best} takes")
    status: Status = "failed" if problems else "ok"
    detail = "" if problems else "within 5 % of the best fixed budget for drafts that are useless, short, long and wide"
    return Check(
        "any model",
        "f32",
        "rounds",
        "the automatic choice",
        "host",
        status,
        detail=detail,
        why="; ".join(problems),
        seconds=perf_counter() - began,
    )


#: Contexts, and what prompt lookup must propose: of each depth tokens with their shares of 9/10, best first. The longest suffix that stands
#: earlier counts alone, though shorter ones stand later; of its places the last has a vote, the one before half a vote, a third, ….
LOOKED_UP: tuple[tuple[tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]], ...] = (
    ((1, 2, 3, 7, 5, 3, 8, 1, 2, 3), (((7, 1.0),), ((5, 1.0),))),
    ((1, 4, 1, 5, 1, 6, 1), (((6, 6 / 11), (5, 3 / 11), (4, 2 / 11)), ((1, 1.0),), ((6, 3 / 5), (5, 2 / 5)))),
    ((2, 9, 2, 6, 2, 9, 2), (((6, 1.0),), ((2, 1.0),), ((9, 1.0),))),
    ((1, 2, 3), ()),
)


def prompt_lookup() -> Check:
    """What prompt lookup proposes: a drafter that proposes less is exact all the same, and no other check knows what it should."""
    began, problems = perf_counter(), []
    for context, wanted in LOOKED_UP:
        found = NgramDrafter().propose(context, max(1, len(wanted)))
        shares = [np.exp(row) / 0.9 for row in found.log_probs]
        got = [[(int(t), s) for t, s in zip(row, of, strict=True) if s] for row, of in zip(found.tokens, shares, strict=True)]
        same = [[t for t, _ in row] for row in got] == [[t for t, _ in row] for row in wanted]
        if not same or not np.allclose([s for row in got for _, s in row], [s for row in wanted for _, s in row], rtol=0, atol=1e-6):
            problems.append(f"behind {context}: {got} instead of {wanted}")
    status: Status = "failed" if problems else "ok"
    detail = "" if problems else "the longest suffix that stands earlier, and the last of its places first"
    return Check(
        "any model", "f32", "rounds", "what prompt lookup proposes", "host", status, detail=detail, why="; ".join(problems),
        seconds=perf_counter() - began,
    )  # fmt: skip


SMALL_CHECKS: tuple[tuple[str, Try], ...] = (
    ("drafts that are accepted", _drafts),
    ("budgets in turn, started ahead of results", _in_turn),
    ("tokens drawn", _drawn),
    ("a stop at every place", _stopped),
    ("to the end of the context", _to_the_end),
    ("one Decoder, many requests", _kept),
    ("measured costs", _measured),
    ("budgets by measured costs", _chosen),
    ("forwards of draft trees", _steps),
    ("forwards of a batch", _together),
    ("seeds of 64 bits", _seeds),
)
SHIPPED_CHECKS = tuple(each for each in SMALL_CHECKS if each[1] in (_drafts, _in_turn, _steps, _together))


def check_small_rounds(backend: Backend, say: Callable[[str], None]) -> Iterator[Check]:
    """Requests of every kind on a small model, and on none prompt lookup and the automatic choice of budgets."""
    say("rounds of every kind")
    yield prompt_lookup()
    yield automatic_budgets()
    yield from check_rounds(backend, small(), SMALL_CHECKS)


def check_shipped_rounds(backend: Backend, say: Callable[[str], None]) -> Iterator[Check]:
    """Those that need a drafter that is often right, on the shipped one."""
    say("rounds of the shipped model")
    yield from check_rounds(backend, shipped(), SHIPPED_CHECKS)
