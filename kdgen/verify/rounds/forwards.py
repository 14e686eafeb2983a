"""How many forwards draft trees and batches of requests take, what prompt lookup proposes, and that every bit of a seed counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from kdgen.drafters.base import Drafter
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.drafters.ngram import NgramDrafter
from kdgen.drafters.synthetic import AdversarialDrafter, ReplayDrafter
from kdgen.runtime.batch import Batch, Finished
from kdgen.runtime.budget import FixedBudget
from kdgen.runtime.decode import decode_plain, decode_tree
from kdgen.runtime.engine import Engine
from kdgen.runtime.request import Request
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.expected_rounds import (
    Course,
    to_stop,
    tree_steps,
)
from kdgen.verify.decoding.recording import RecordingEngine
from kdgen.verify.kernels.sampling import may_draw
from kdgen.verify.report.checks import Check, Status
from kdgen.verify.rounds.situation import NEW_TOKENS, Prepared, Situation
from kdgen.verify.rounds.subjects import LogitsDrafter

#: Seeds of which some are alike but for one bit, each in another place of the 64.
SEEDS = (0, 5, 5 + 2**31, 5 + 2**32, 2**32 - 1, 5 + 2**63, 2**63, 2**64 - 1)


def forwards_of_trees(situation: Situation) -> tuple[str, str]:
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
        got = decode_tree(engine, Request(course.prompt, NEW_TOKENS, drafter=drafter, budget=budget, block_size=size))
        if (got.tokens, got.acceptance_lengths, got.target_forwards) != (course.tokens[:NEW_TOKENS], lengths, len(lengths)):
            return f"a drafter {name}: {got.target_forwards} forwards accept {got.acceptance_lengths} instead of {lengths}", ""
    return "", f"{len(tests)} drafters: forwards, and tokens of each forward, as expected"


def forwards_of_a_batch(situation: Situation) -> tuple[str, str]:
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
                return f"{who}: {found.forwards} forwards instead of {forwards}, although its tokens are right", ""
        ends = itertools.accumulate(len(request.prompt) for request in requests)  # a prompt begins in the step in which the last one ends
        needed = max(-(-end // room) + forwards for end, (_, forwards) in zip(ends, wanted, strict=True))
        if not chunk and taken != needed:
            return f"{len(asked)} requests whose prompts are not cut: {taken} steps instead of {needed}", ""
    return "", f"{sum(map(len, groups))} requests, three at a time: each has as many forwards as alone, and prompts fill steps"


def _steps_together(engine: Engine, requests: Sequence[Request]) -> tuple[list[Finished], int]:
    """The requests' results, in their order, and the steps of the batch that they take."""
    batch, found, steps = Batch(engine), list[Finished](), 0
    for request in requests:
        batch.add(request)
    while not batch.idle:
        found += batch.step()
        steps += 1
    return sorted(found, key=lambda each: each.number), steps


def seeds_of_64_bits(situation: Situation) -> tuple[str, str]:
    """Every bit of a seed counts: each token is the reference sampler's."""
    recorder, prompt, drawn = RecordingEngine(situation.engine), situation.subject.prompts[0][:9], set()
    for seed in SEEDS:
        sampling = Sampling(1.0, seed=seed)
        tokens = decode_plain(recorder, Request(prompt, 10, sampling=sampling)).tokens
        for place, token in enumerate(tokens):
            position = len(prompt) + place
            if not may_draw(recorder.logits[position - 1], sampling, position, token):
                return f"seed {seed}: token {place}, {token}, is not what the reference draws", ""
        drawn.add(tokens)
    problem = "" if len(drawn) == len(SEEDS) else f"{len(SEEDS)} seeds give {len(drawn)} different results"
    return problem, f"{len(SEEDS)} seeds up to 2^64 - 1, some alike modulo 2^31, 2^32 or 2^63, give the reference's tokens, all different"


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
            problems.append(f"after {context}: {got} instead of {wanted}")
    status: Status = "failed" if problems else "ok"
    detail = "" if problems else "the longest suffix that occurs earlier, and its last occurrence first"
    return Check(
        "any model", "f32", "rounds", "what prompt lookup proposes", "host", status, detail=detail, why="; ".join(problems),
        seconds=perf_counter() - began,
    )  # fmt: skip
