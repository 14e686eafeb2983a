"""Which rounds are started, accepted, thrown away and recorded, up to a stop or the end of the context."""

from __future__ import annotations

from kdgen.drafters.base import DeviceDraftRequest
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.plan.step import SAMPLED
from kdgen.runtime.budget import FixedBudget
from kdgen.runtime.decode import Decoder
from kdgen.runtime.request import Request
from kdgen.spec.sampling import Sampling
from kdgen.verify.decoding.expected_rounds import (
    Ask,
    expected_rounds,
    tree_steps,
)
from kdgen.verify.rounds.situation import BUDGETS, NEW_TOKENS, Prepared, Situation, Watch, difference, said_of

SAMPLINGS = (
    Sampling(0.8, top_p=0.95, seed=2**63 + 5),
    Sampling(1.5, seed=2**31),
    Sampling(0.6, top_k=5, min_p=0.02, seed=2**64 - 1),
)


def accepted_drafts(situation: Situation) -> tuple[str, str]:
    """Where nothing is accepted, the other checks show little."""
    for each in situation.greedy:
        if problem := each.drafted.problem():
            return problem, ""
    steps = [tree_steps(each.course.prompt, each.truth(), each.host, FixedBudget(63), situation.size) for each in situation.greedy]
    lengths = [length for each in steps for length in each.accepted]
    mean = sum(lengths) / len(lengths)
    problem = "" if mean > 1.4 else f"trees of 63 nodes give {mean:.2f} tokens a forward"
    return problem, f"candidates are the best of the draft's logits; trees of 63 nodes give {mean:.1f} tokens a forward"


def budgets_in_turn(situation: Situation) -> tuple[str, str]:
    """All budgets in one run, no rounds ahead of their results and several, chains, and none."""
    first, second = situation.greedy
    chain = DeviceDraftRequest(situation.size - 1, situation.size, 1)
    runs: list[tuple[Prepared, DeviceDraftRequest | None, tuple[int, ...], int]]
    runs = [(first, situation.block, BUDGETS, 1), (second, situation.block, (7, 0, 15), 0), (second, chain, (3, 15), 1)]
    if situation.quick:
        runs += [(first, DeviceDraftRequest(2, situation.size), (7,), 1), (second, None, (0,), 1)]
        runs += [(second, situation.block, (7, 0, 15), ahead) for ahead in situation.aheads]
    problem = next((said for run in runs if (said := situation.rounds(*run))), "")
    return problem, f"{len(runs)} decodes: tokens, cache bits, forwards, rounds, nodes, log-probabilities and units recorded as expected"


def drawn_tokens(situation: Situation) -> tuple[str, str]:
    for sampling, ahead in zip(SAMPLINGS, (1, 0, 1), strict=True):
        if problem := situation.rounds(situation.prepared(situation.subject.prompts[0], sampling), situation.block, (63, 7, 0), ahead):
            return problem, ""
    return "", f"{len(SAMPLINGS)} ways, with seeds beyond 2^31 and 2^63: all as expected from plain sampling"


def stops_everywhere(situation: Situation) -> tuple[str, str]:
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
    return "", f"{places} places: decoding ends there, and starts and discards as many rounds as expected"


def to_the_end(situation: Situation) -> tuple[str, str]:
    """Until the context is full. Trees reach beyond it."""
    engine, short = situation.opened(64), DeviceDraftRequest(7, situation.size)  # after one round of it, 8 tokens of room may be full
    rooms = ((1, (1,)), (2, (0,)), (3, (1,)), (8, situation.aheads), (14, (1,)))
    for room, aheads in rooms:
        prepared = situation.prepared(situation.subject.prompts[0][: 64 - room])
        for ahead in aheads:
            block = short if room == 8 else situation.block
            if problem := situation.rounds(prepared, block, (63, 7), ahead, engine=engine, new_tokens=100):
                return f"{room} tokens before the context's end: {problem}", ""
    return "", f"{', '.join(str(room) for room, _ in rooms)} tokens of room: filled to the last one, with as many rounds as expected"


def one_decoder(situation: Situation) -> tuple[str, str]:
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
        block = DeviceDraftRequest(size - 1, size, int(drafter is chain)) if drafter else None
        budget = budget if drafter else 0
        stops = stop if number % 3 == 1 else frozenset[int]()
        ask, course, watch = Ask(NEW_TOKENS, block, 1, stops), prepared.course, Watch(situation.backend)
        context = engine.plan.limits.max_context
        expected = expected_rounds(course, prepared.drafted, ask, (budget,), FixedBudget(budget), situation.backend, context)
        units = [(block, *unit, apart and course.sampling.temperature > 0) for unit in expected.units]
        new = [unit for unit in units if unit not in known]
        request = Request(course.prompt, NEW_TOKENS, stops, course.sampling, 9, drafter, budget, size)
        got = decoder.decode(request, emit=watch)
        if problem := difference(engine, course, expected, got, watch, len(new)):
            return f"request {number}, {said_of(course.sampling)}: {problem}", ""
        known += new
    return (
        "",
        f"{len(runs)} requests of one Decoder, greedy and sampled, with trees, chains and none: {len(known)} units recorded, each once",
    )
