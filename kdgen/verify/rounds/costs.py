"""What rounds cost by a made-up clock, and the budgets that follow from it."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import numpy as np

from kdgen.drafters.base import DeviceDraftRequest, Drafter
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.runtime.budget import AutoBudget
from kdgen.runtime.decode import Decoder, prefill
from kdgen.runtime.engine import Engine
from kdgen.runtime.request import Request
from kdgen.runtime.rounds import Rounds, step_costs
from kdgen.verify.decoding.expected_rounds import (
    Ask,
    Course,
    expected_rounds,
    tree_steps,
)
from kdgen.verify.decoding.watched import SLOWER, seconds_of
from kdgen.verify.report.checks import Check, Status
from kdgen.verify.rounds.situation import BUDGETS, NEW_TOKENS, Situation, Watch, difference
from kdgen.verify.rounds.subjects import LogitsDrafter


def _costs(situation: Situation, draft: bool) -> dict[int, float]:
    """Seconds for each of ``BUDGETS`` behind the first prompt, of rounds, or of steps without a ``draft``: what the made-up clock must show
    of the rank by which all go."""
    engine, length, rows = situation.engine, len(situation.subject.prompts[0]), situation.size

    def seconds(budget: int) -> int:
        keys = situation.backend.recorded_context(length + (max(budget + 1, rows) if draft else budget + 1))
        works = [engine.work("verify", budget + 1, keys) if budget else engine.work("decode", 1, keys)]
        return sum(map(seconds_of, [*works, *([engine.work("draft", rows, keys)] if draft and budget else [])]))

    return {budget: float(SLOWER * seconds(budget)) for budget in BUDGETS}


def measured_costs(situation: Situation) -> tuple[str, str]:
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
    return "", "seconds of rounds and steps are those of rank 0; measuring leaves no tokens committed"


def _state(engine: Engine) -> tuple[list[int], list[int]]:
    """The device's length and root of sequence 0."""
    return engine.read("sequence_length")[:1].astype(int).tolist(), engine.read("root_token")[:1].astype(int).tolist()


def chosen_budgets(situation: Situation) -> tuple[str, str]:
    """Budgets by what was measured, by one Decoder for several requests, which measures for the first of them."""
    engine, backend = situation.engine, situation.backend
    decoder, context, requests = Decoder(engine), engine.plan.limits.max_context, (*situation.greedy, situation.greedy[0])
    backend.rounds_ahead = 1

    def asked(course: Course, drafter: Drafter) -> Request:
        return Request(course.prompt, NEW_TOKENS, drafter=drafter, block_size=situation.size)

    for number, prepared in enumerate(requests):
        course, watch = prepared.course, Watch(backend)
        ask, chooser = Ask(NEW_TOKENS, situation.block, 1), AutoBudget(_costs(situation, True))
        expected = expected_rounds(course, prepared.drafted, ask, BUDGETS, chooser, backend, context)
        got = decoder.decode(asked(course, DFlashDrafter(situation.size)), auto_budget=True, emit=watch)
        units = watch.recorded if number else len(expected.units)  # some were recorded before
        if problem := difference(engine, course, expected, got, watch, units, 0 if number else 4 * len(BUDGETS)):
            return f"request {number}, budgets by measured rounds: {problem}", ""
    prepared, watch = situation.greedy[0], Watch(backend)
    chain, few = DeviceDraftRequest(situation.size - 1, situation.size, 1), (0, 7, 15)  # no more than a chain has
    costs = {budget: _costs(situation, True)[budget] for budget in few}
    expected = expected_rounds(prepared.course, prepared.drafted, Ask(NEW_TOKENS, chain, 1), few, AutoBudget(costs), backend, context)
    got = decoder.decode(asked(prepared.course, DFlashDrafter(situation.size, True)), auto_budget=True, emit=watch)
    if problem := difference(engine, prepared.course, expected, got, watch, len(expected.units), 4 * len(few)):
        return f"a chain, budgets by measured rounds: {problem}", ""
    for number, prepared in enumerate(requests):
        course, host, before = prepared.course, LogitsDrafter(prepared.host, engine.spec.vocab_size), backend.timed
        steps = tree_steps(course.prompt, prepared.truth(), host, AutoBudget(_costs(situation, False)), situation.size)
        got = decoder.decode(asked(course, host), auto_budget=True)
        wanted = prepared.truth(), steps.accepted, steps.budgets, 0 if number else 5 * len(BUDGETS)
        if (found := (got.tokens, got.acceptance_lengths, got.budgets, backend.timed - before)) != wanted:
            return f"request {number}, budgets by measured steps: tokens, accepted, budgets, measurements {found} instead of {wanted}", ""
    return "", f"{2 * len(requests)} requests: each round and step has the budget that follows from the measured times"


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
            problems.append(f"a {name} draft takes {spent / tokens:.3f} s a token instead of {fixed:.3f}, which a budget of {best} takes")
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
