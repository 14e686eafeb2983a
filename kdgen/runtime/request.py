"""What is asked for, and how far it has got: the one place that checks a request's ranges and says where its output ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kdgen.drafters.base import Drafter, Proposal, nothing
from kdgen.errors import KdgenError
from kdgen.plan.ir import MAX_NODES, MAX_PATH
from kdgen.spec.sampling import GREEDY, Sampling

#: Called with the new tokens of each step as they are decided, the first after the prompt; decoding ends with whatever it raises.
Emit = Callable[[tuple[int, ...]], None]


def ignore(tokens: tuple[int, ...]) -> None:
    """Emits nothing."""


@dataclass(frozen=True)
class Request:
    """What to decode: at most ``max_new_tokens`` after ``prompt`` (token ids), or up to the first of ``stop``, which is kept.

    ``chunk`` bounds the prompt tokens of a forward (0: as many as fit). Without a ``drafter`` a forward gives one token; with one,
    draft trees of at most ``budget`` nodes and ``block_size`` - 1 depths (DDTree, arXiv 2604.12989).
    Raises KdgenError for an empty prompt and values outside their ranges.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    stop: Collection[int] = ()
    sampling: Sampling = GREEDY
    chunk: int = 0
    drafter: Drafter | None = None
    budget: int = 15
    block_size: int = 8

    def __post_init__(self) -> None:
        need_prompt(self.prompt)
        if self.max_new_tokens < 1:
            raise KdgenError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.chunk < 0:
            raise KdgenError(f"a chunk has at least one token (0: as many as fit), not {self.chunk}")
        if not 2 <= self.block_size <= MAX_PATH:
            raise KdgenError(f"a block size lies between 2 and {MAX_PATH}, not at {self.block_size}")
        need_budget(self.budget)


def need_budget(budget: int) -> None:
    """Raises KdgenError where a draft tree cannot have so many nodes."""
    if not 0 <= budget < MAX_NODES:
        raise KdgenError(f"a budget lies between 0 and {MAX_NODES - 1}, not at {budget}")


def need_prompt(prompt: Sequence[int]) -> None:
    """Raises KdgenError for an empty prompt."""
    if not len(prompt):
        raise KdgenError("the prompt is empty: give at least one token id")


def room_after(prompt: Sequence[int], max_context: int) -> int:
    """New tokens that fit behind ``prompt``. Raises KdgenError for an empty prompt, and for one that fills the context."""
    need_prompt(prompt)
    if len(prompt) >= max_context:
        raise KdgenError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {max_context}: raise --context")
    return max_context - len(prompt)


def through_stop(tokens: Sequence[int], stop: Collection[int]) -> Sequence[int]:
    """``tokens`` up to the first of ``stop``, which is kept."""
    return tokens[: next((place + 1 for place, token in enumerate(tokens) if token in stop), len(tokens))]


class Output:
    """The new tokens of a request, which end with a stop token, with ``max_new_tokens``, or where the context does.

    Raises KdgenError when the prompt fills the context.
    """

    def __init__(self, request: Request, max_context: int, emit: Emit = ignore) -> None:
        self.request = request
        self.tokens: list[int] = []
        self._limit = min(request.max_new_tokens, room_after(request.prompt, max_context))
        self._emit = emit
        self._stopped = False

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self._limit - len(self.tokens)

    @property
    def done(self) -> bool:
        return self._stopped or self.room < 1

    @property
    def length(self) -> int:
        """Committed tokens, the prompt's among them: all but the last one, which the next step begins with."""
        return len(self.request.prompt) + len(self.tokens) - 1

    def add(self, new: Sequence[int]) -> None:
        """Add a step's tokens as far as they are wanted: a tree may go on behind a stop token or the last one."""
        new = through_stop(new, self.request.stop)[: self.room]
        self.tokens += new
        self._stopped = new[-1] in self.request.stop
        self._emit(tuple(new))

    def proposal(self) -> Proposal:
        """What the request's drafter proposes next, no deeper than the tokens still wanted: a deeper tree would be cut away again."""
        drafter, depths = self.request.drafter, min(self.request.block_size - 1, self.room - 1)
        if drafter is None or depths < 1:
            return nothing()
        return drafter.propose([*self.request.prompt, *self.tokens], depths)
