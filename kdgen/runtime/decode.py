"""The decoding loops over an engine: plain (AR), with a draft tree (DDTree), and of rounds that the host starts ahead of their results.
They give the same tokens, greedy or sampled."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kdgen.drafters.base import Candidates, DeviceDrafter, DeviceDraftRequest, DraftLogits, Proposal
from kdgen.errors import BackendError
from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES, Plan
from kdgen.runtime.budget import Budgets, FixedBudget, budget_for
from kdgen.runtime.engine import Engine, Verified
from kdgen.runtime.request import Emit, Output, Request, ignore, room_after
from kdgen.runtime.rounds import Rounds, budgets_for, step_costs
from kdgen.spec.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Decoded:
    """New tokens (a final stop token included) and what they cost.

    ``acceptance_lengths`` has one entry a verify step, the root counted; it is empty for plain decoding. ``target_forwards`` counts
    decode or verify steps, not the prefill. ``prepare_seconds`` went into recording rounds and measuring them. ``budgets`` has each
    draft tree's, as ``acceptance_lengths``.
    """

    tokens: tuple[int, ...]
    acceptance_lengths: tuple[int, ...]
    target_forwards: int
    prefill_seconds: float
    decode_seconds: float
    prepare_seconds: float = 0.0
    budgets: tuple[int, ...] = ()

    @property
    def tokens_per_forward(self) -> float:
        """The first token comes from the prompt's forward, which is not counted."""
        return (len(self.tokens) - 1) / self.target_forwards if self.target_forwards else 0.0


#: Makes what chooses each round's budget, when the prompt is there; called with the token after it.
Choose = Callable[[int], Budgets]


def same_rows(plain: NDArray[np.generic], drafted: NDArray[np.generic]) -> bool:
    """Whether cache rows [layers, length, width] are equal by bits as far as ``plain`` goes: a tree that holds a stop token may have
    committed more behind it."""
    return plain.tobytes() == drafted[:, : plain.shape[1]].tobytes()


class DecodingEngine(Protocol):
    """What the loops need of an engine."""

    @property
    def plan(self) -> Plan: ...

    def reset(self, sequence: int = 0, sampling: Sampling = GREEDY) -> None: ...

    def prefill(self, tokens: Sequence[int]) -> int: ...

    def decode(self) -> int: ...

    def verify(self, proposal: Proposal, budget: int) -> Verified: ...


def prefill(engine: DecodingEngine, prompt: Sequence[int], chunk: int = 0, sampling: Sampling = GREEDY) -> int:
    """Reset, commit ``prompt`` in chunks of at most ``chunk`` tokens (0: as many as fit) and return the first new token.

    Raises KdgenError for an empty prompt or one that fills the context.
    """
    limits = engine.plan.limits
    room_after(prompt, limits.max_context)
    chunk = min(chunk or limits.max_tokens, limits.max_tokens)
    engine.reset(sampling=sampling)
    token = -1
    for start in range(0, len(prompt), chunk):
        token = engine.prefill(prompt[start : start + chunk])
    return token


class _Steps(ABC):
    """A way of decoding, step by step. ``lengths`` and ``budgets`` are those of ``Decoded``; ``forwards`` counts steps."""

    def __init__(self) -> None:
        self.forwards = 0
        self.lengths: list[int] = []
        self.budgets: list[int] = []

    def begin(self, output: Output) -> None:  # noqa: B027
        """Get ready once the first token is known and is not the only one."""

    @abstractmethod
    def step(self, output: Output) -> Sequence[int]:
        """The tokens of the next step, those that nobody wants among them."""

    def end(self, output: Output) -> None:  # noqa: B027
        """Leave the engine as plain decoding of ``output`` would."""


def _decode(engine: DecodingEngine, request: Request, steps: _Steps, emit: Emit) -> Decoded:
    """The loop of every way of decoding: the prompt, then steps until the output is done."""
    output = Output(request, engine.plan.limits.max_context, emit)
    began = time.perf_counter()
    root = prefill(engine, request.prompt, request.chunk, request.sampling)
    ready = time.perf_counter()
    output.add((root,))
    if output.done:
        return Decoded((root,), (), 0, ready - began, 0.0)
    preparing = time.perf_counter()
    steps.begin(output)
    prepared = time.perf_counter()
    try:
        while not output.done:
            output.add(steps.step(output))
            steps.forwards += 1
    except BackendError:
        raise  # a device that failed cannot be put right
    except BaseException:
        steps.end(output)
        raise
    seconds = time.perf_counter() - prepared
    steps.end(output)
    lengths, budgets = tuple(steps.lengths), tuple(steps.budgets)
    return Decoded(tuple(output.tokens), lengths, steps.forwards, ready - began, seconds, prepared - preparing, budgets)


class _Plain(_Steps):
    """One token a forward."""

    def __init__(self, engine: DecodingEngine) -> None:
        super().__init__()
        self._engine = engine

    def step(self, output: Output) -> Sequence[int]:
        return (self._engine.decode(),)


class _Trees(_Steps):
    """A draft tree a forward. The drafter may be anywhere, so the host goes from step to step."""

    def __init__(self, engine: DecodingEngine, choose: Choose) -> None:
        super().__init__()
        self._engine, self._choose = engine, choose

    def begin(self, output: Output) -> None:
        self._chooser = self._choose(output.tokens[0])

    def step(self, output: Output) -> Sequence[int]:
        proposal = output.proposal()
        budget = self._chooser.choose() if proposal.depths else 0
        step = self._engine.verify(proposal, budget)
        if proposal.depths:  # a drafter with nothing to say shows nothing
            self._chooser.observe(budget, [row - step.rows[0] for row in step.rows], _log_probs(proposal))
        self.lengths.append(len(step.accepted))
        self.budgets.append(budget)
        return (*step.accepted[1:], step.next_token)


class _Rounds(_Steps):
    """Rounds, of which ``ahead`` are started before the results of the last are read."""

    def __init__(self, rounds: Rounds, choose: Choose, ahead: int) -> None:
        super().__init__()
        self._rounds, self._choose, self._ahead = rounds, choose, ahead

    def begin(self, output: Output) -> None:
        self._rounds.begin(output.length, output.room + MAX_NODES)
        self._chooser = self._choose(output.tokens[0])

    def step(self, output: Output) -> Sequence[int]:
        rounds = self._rounds
        while rounds.running <= self._ahead and rounds.may_start and (not rounds.running or rounds.running < output.room):
            rounds.start(self._chooser.choose())
        done = rounds.finish()
        self._chooser.observe(done.budget, done.nodes, done.log_probs)
        if any(rounds.budgets):
            self.lengths.append(min(len(done.tokens), output.room))
            self.budgets.append(done.budget)
        return done.tokens

    def end(self, output: Output) -> None:
        self._rounds.end(output.length, output.tokens[-1])


def decode_plain(engine: DecodingEngine, request: Request, emit: Emit = ignore) -> Decoded:
    """Decode ``request`` with one token a forward, whatever drafter it names.

    The engine starts anew with sequence 0; ``emit`` is called with each step's tokens. Raises KdgenError for a prompt that fills the
    context.
    """
    return _decode(engine, request, _Plain(engine), emit)


def decode_tree(engine: DecodingEngine, request: Request, choose: Choose | None = None, emit: Emit = ignore) -> Decoded:
    """Decode ``request`` with a draft tree a forward, of the request's budget or of what ``choose`` says.

    The engine starts anew with sequence 0. Raises KdgenError for a prompt that fills the context.
    """
    return _decode(engine, request, _Trees(engine, choose or (lambda root: FixedBudget(request.budget))), emit)


def _log_probs(proposal: Proposal) -> NDArray[np.float32] | None:
    """What a drafter on the host expects; None where it is not on the host."""
    if isinstance(proposal, Candidates):
        return proposal.log_probs
    return proposal.log_probs(MAX_CANDIDATES) if isinstance(proposal, DraftLogits) else None


def decode_rounds(rounds: Rounds, request: Request, choose: Choose, emit: Emit = ignore, ahead: int | None = None) -> Decoded:
    """Decode ``request`` by rounds with the drafter on the device, or plain ones, of which ``ahead`` (None: as many as the backend gains
    from) are started before the results of the last are read.

    Rounds started behind the last token leave no trace: the engine ends as plain decoding does, and they are not counted.
    """
    backend = rounds.engine.backend
    return _decode(rounds.engine, request, _Rounds(rounds, choose, backend.rounds_ahead if ahead is None else ahead), emit)


class Decoder:
    """Decodes over one engine the fastest way there is, and keeps the rounds that it recorded and measured."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rounds: dict[tuple[DeviceDraftRequest | None, tuple[int, ...]], Rounds] = {}
        self._step_costs: dict[int, float] = {}

    def decode(self, request: Request, auto_budget: bool = False, emit: Emit = ignore) -> Decoded:
        """Rounds where nothing is drafted or the drafter is on the device, steps where the host drafts.

        With ``auto_budget`` each step's budget is what was measured to pay, instead of the request's.
        """
        engine, drafter = self._engine, request.drafter
        if drafter is not None and not isinstance(drafter, DeviceDrafter):
            return decode_tree(engine, request, self._choose_steps if auto_budget else None, emit)
        block = drafter.propose(request.prompt, request.block_size - 1) if drafter else None
        kind = (block, budgets_for(block) if auto_budget else (request.budget if block else 0,))
        if kind not in self._rounds:
            self._rounds[kind] = Rounds(engine, *kind)
        rounds = self._rounds[kind]

        def choose(root: int) -> Budgets:
            return budget_for(rounds.costs(root)) if auto_budget and block else FixedBudget(rounds.budgets[0])

        return decode_rounds(rounds, request, choose, emit)

    def _choose_steps(self, root: int) -> Budgets:
        if not self._step_costs:
            self._step_costs = step_costs(self._engine, root)
        return budget_for(self._step_costs)
