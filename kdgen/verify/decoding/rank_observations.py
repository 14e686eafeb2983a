"""What one rank sees of a fixed course: prefill, plain decoding, trees and rounds, greedy and sampled."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.drafters.dflash import DFlashDrafter
from kdgen.drafters.synthetic import ReplayDrafter
from kdgen.plan.ir import Limits
from kdgen.runtime.budget import FixedBudget
from kdgen.runtime.decode import decode_plain, decode_rounds, decode_tree
from kdgen.runtime.engine import Engine
from kdgen.runtime.request import Request
from kdgen.runtime.rounds import Rounds
from kdgen.spec.model import Spec
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.recording import RecordingEngine, differing_bits

Array = NDArray[Any]
PROMPT_TOKENS, NEW_TOKENS = 21, 7
LIMITS = Limits(max_context=PROMPT_TOKENS + NEW_TOKENS + 8, max_sequences=2)
SAMPLING = Sampling(0.9, top_k=60, top_p=0.95, seed=2**40 + 7)
BLOCK = 5  #: rows of a draft block
BUDGET = 15  #: of nodes in a tree, and so of candidates a depth


@dataclass(frozen=True)
class Observed:
    """What one rank saw of the fixed course of ``observe``; logits are of its part of the vocabulary, the rest every rank has alike."""

    logits: Array  #: [T, V / ranks], of the prompt and the tokens after it but the last
    cache: Array  #: [layers, T, row]
    tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    sampled_logits: Array
    features: Array  #: of the prompt, as the drafter was given them
    drafts: Array  #: logits [BLOCK - 1, V] of a block behind the prompt
    candidates: Array  #: i32 [BLOCK - 1, BUDGET], best first
    problem: str = ""  #: the first course that left plain decoding

    def digests(self) -> tuple[str, ...]:
        """A hash of each result but the problem, in their order."""
        values = [getattr(self, each.name) for each in dataclasses.fields(self)[:-1]]
        return tuple(hashlib.sha256(np.asarray(value).tobytes()).hexdigest() for value in values)


def prompt_of(spec: Spec) -> tuple[int, ...]:
    return tuple(np.random.default_rng(3).integers(0, spec.vocab_size, PROMPT_TOKENS).tolist())


def observe(engine: Engine) -> Observed:
    """Prefill, plain decoding, trees and rounds, greedy and sampled, with the drafter that the model has and one that repeats."""
    recorder, prompt, problem = RecordingEngine(engine), prompt_of(engine.spec), ""
    block = DFlashDrafter(BLOCK).propose((), BLOCK - 1)
    recorder.reset()
    root = recorder.prefill(prompt)
    whole, features = recorder.logits, engine.read("features")[:PROMPT_TOKENS]
    engine.verify(block, BUDGET)
    drafts = engine.read("draft_logits").reshape(-1, engine.spec.vocab_size)[1:BLOCK].astype(np.float32)  # row 0 is the root's
    candidates = engine.read("candidate_tokens")[0, : BLOCK - 1, :BUDGET]
    plain = decode_plain(recorder, Request(prompt, NEW_TOKENS, chunk=1))
    logits, cache = np.stack(recorder.logits), recorder.cache_rows()
    if plain.tokens[0] != root or differing_bits(np.stack(whole), logits[:PROMPT_TOKENS]):
        problem = "the prompt in one chunk gives other bits than token by token (L3)"
    truth = (*prompt, *plain.tokens)
    for drafter, chunk in ((ReplayDrafter(truth, engine.spec.vocab_size, 0.2), 12), (DFlashDrafter(BLOCK), 64)):
        tree = decode_tree(recorder, Request(prompt, NEW_TOKENS, chunk=chunk, drafter=drafter, budget=BUDGET, block_size=BLOCK))
        if tree.tokens != plain.tokens:
            problem = problem or f"the tokens differ from plain decoding, with drafts by {drafter.name} (L1)"
        problem = problem or _other_rows(recorder, logits, cache, f"drafted by {drafter.name} (L2)")
    rounds = Rounds(engine, block, (BUDGET,))
    got = decode_rounds(rounds, Request(prompt, NEW_TOKENS, chunk=9), lambda _: FixedBudget(BUDGET), ahead=1)
    if got.tokens != plain.tokens or differing_bits(engine.cache_rows(), cache):
        problem = problem or "the tokens or cache rows of rounds differ from plain decoding (L1, L2)"
    problem = problem or _in_company(engine, GREEDY, truth, logits, cache)
    drawn = decode_plain(recorder, Request(prompt, NEW_TOKENS, sampling=SAMPLING, chunk=8))
    drawn_logits, drawn_cache = np.stack(recorder.logits), recorder.cache_rows()
    problem = problem or _in_company(engine, SAMPLING, (*prompt, *drawn.tokens), drawn_logits, drawn_cache)
    half = ReplayDrafter((*prompt, *drawn.tokens), engine.spec.vocab_size, 0.5)
    again = decode_tree(recorder, Request(prompt, NEW_TOKENS, sampling=SAMPLING, drafter=half, budget=15, block_size=8))
    problem = problem or _other_rows(recorder, drawn_logits, drawn_cache, "sampled, with trees (L5)")
    other = decode_rounds(rounds, Request(prompt, NEW_TOKENS, sampling=SAMPLING, chunk=9), lambda _: FixedBudget(BUDGET))
    if again.tokens != drawn.tokens or other.tokens != drawn.tokens:
        problem = problem or "the tokens differ from plain sampling (L5)"
    return Observed(logits, cache, plain.tokens, drawn.tokens, drawn_logits, features, drafts, candidates, problem)


def _in_company(engine: Engine, sampling: Sampling, truth: Sequence[int], logits: Array, cache: Array) -> str:
    """Steps with another sequence, whose tokens are not drawn; this one, whose tokens are chosen as ``sampling`` says, stands second."""
    for sequence, chosen in enumerate((GREEDY, sampling)):
        engine.reset(sequence, chosen)
    _, token = engine.prefill_many([(0, truth[7:12]), (1, truth[:PROMPT_TOKENS])])
    for place in range(2):
        got, expected = engine.logits(2)[1], logits[PROMPT_TOKENS - 1 + place]
        if differing_bits(got, expected):
            return f"row {PROMPT_TOKENS - 1 + place} has other logits than in the request alone (L4)"
        if token != truth[PROMPT_TOKENS + place]:
            return f"token {place} is, beside another sequence, {token} instead of {truth[PROMPT_TOKENS + place]} (L4)"
        _, token = engine.decode_many([0, 1])
    return (
        ""
        if not differing_bits(engine.cache_rows(1), cache[:, : engine.length(1)])
        else "the cache rows differ from those of the request alone (L4)"
    )


def _other_rows(recorder: RecordingEngine, logits: Array, cache: Array, what: str) -> str:
    rows = min(len(recorder.logits), len(logits))
    if differing_bits(np.stack(recorder.logits[:rows]), logits[:rows]) or differing_bits(recorder.cache_rows()[:, :rows], cache[:, :rows]):
        return f"the logits or cache rows differ from plain decoding, {what}"
    return ""
