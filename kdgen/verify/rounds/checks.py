"""The list of checks of rounds, and of subjects that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from kdgen.backends.base import Backend
from kdgen.errors import BackendError
from kdgen.verify.report.checks import Check, Status
from kdgen.verify.rounds.costs import automatic_budgets, chosen_budgets, measured_costs
from kdgen.verify.rounds.forwards import forwards_of_a_batch, forwards_of_trees, prompt_lookup, seeds_of_64_bits
from kdgen.verify.rounds.situation import Situation
from kdgen.verify.rounds.started import accepted_drafts, budgets_in_turn, drawn_tokens, one_decoder, stops_everywhere, to_the_end
from kdgen.verify.rounds.subjects import Subject, shipped, small

#: Makes a check: what is wrong, or else what was done.
Try = Callable[[Situation], tuple[str, str]]


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


SMALL_CHECKS: tuple[tuple[str, Try], ...] = (
    ("drafts that are accepted", accepted_drafts),
    ("budgets in turn, started ahead of results", budgets_in_turn),
    ("tokens drawn", drawn_tokens),
    ("a stop at every place", stops_everywhere),
    ("to the end of the context", to_the_end),
    ("one Decoder, many requests", one_decoder),
    ("measured costs", measured_costs),
    ("budgets by measured costs", chosen_budgets),
    ("forwards of draft trees", forwards_of_trees),
    ("forwards of a batch", forwards_of_a_batch),
    ("seeds of 64 bits", seeds_of_64_bits),
)
SHIPPED_CHECKS = tuple(
    each for each in SMALL_CHECKS if each[1] in (accepted_drafts, budgets_in_turn, forwards_of_trees, forwards_of_a_batch)
)


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
