"""A model in an engine, requests decoded plainly, and how rounds of them differ from what they must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdgen.backends.base import Backend
from kdgen.drafters.base import DeviceDraftRequest
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.runtime.decode import Decoded, decode_rounds
from kdgen.runtime.engine import Engine
from kdgen.runtime.model import Model
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.request import Request
from kdgen.runtime.rounds import Rounds
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.expected_rounds import (
    Ask,
    Course,
    Drafted,
    Expected,
    KnownDrafter,
    Turns,
    drafted_along,
    expected_rounds,
    plain_course,
)
from kdgen.verify.decoding.random_cases import RoundsDraw
from kdgen.verify.decoding.recording import differing_bits
from kdgen.verify.decoding.watched import WatchedBackend
from kdgen.verify.rounds.subjects import Subject

#: What the automatic choice is to choose from, written down once more.
BUDGETS = (0, 7, 15, 31, 63)
NEW_TOKENS = 14


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
        self.block = DeviceDraftRequest(self.size - 1, self.size)
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
        self, prepared: Prepared, block: DeviceDraftRequest | None, budgets: Sequence[int], ahead: int, stops: frozenset[int] = frozenset(),
        engine: Engine | None = None, new_tokens: int = NEW_TOKENS,
    ) -> str:  # fmt: skip
        """How new rounds, of ``budgets`` in turn, differ from what they must be."""
        engine, course = engine or self.engine, prepared.course
        ask, chooser, watch = Ask(new_tokens, block, ahead, stops), Turns(budgets), Watch(self.backend)
        context = engine.plan.limits.max_context
        expected = expected_rounds(course, prepared.drafted, ask, budgets, Turns(budgets), self.backend, context)
        rounds = Rounds(engine, block, budgets)
        got = decode_rounds(
            rounds,
            Request(course.prompt, new_tokens, stop=stops, sampling=course.sampling, chunk=9),
            lambda _: chooser,
            emit=watch,
            ahead=ahead,
        )
        problem = difference(engine, course, expected, got, watch, len(expected.units))
        problem = problem or seen_wrongly(chooser, expected) or (f"{rounds.running} rounds are left" if rounds.running else "")
        return f"budgets {tuple(budgets)}, {ahead} ahead, {said_of(course.sampling)}: {problem}" if problem else ""


def said_of(sampling: Sampling) -> str:
    return str(sampling) if sampling.temperature else "greedy"


def drawn_rounds(backend: Backend, model: Model, compute: Compute, draw: RoundsDraw, prompt: Sequence[int]) -> tuple[str, int]:
    """(how a drawn request's rounds differ from what they must be, drafted tokens that they accept), of any model."""
    watched, draft = WatchedBackend(backend), model.spec.draft
    size = min(draw.depths + 1, draft.block_size) if draft else 0
    block = DeviceDraftRequest(size - 1, size, int(draw.chain)) if size else None
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
    got = decode_rounds(
        rounds, Request(prompt, draw.new_tokens, stop=stops, sampling=draw.sampling), lambda _: turns, emit=watch, ahead=draw.ahead
    )
    problem = difference(engine, course, expected, got, watch, len(expected.units)) or seen_wrongly(turns, expected)
    return problem, sum(expected.accepted) - len(expected.accepted)
