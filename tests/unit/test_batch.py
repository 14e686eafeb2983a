"""Several requests together: who stands in a step, when slabs are free, and results in the order asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kdgen.backends.base import Backend
from kdgen.drafters.ngram import NgramDrafter
from kdgen.errors import KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Limits, Plan
from kdgen.runtime.batch import Batch, decode_together
from kdgen.runtime.decode import decode_plain
from kdgen.runtime.engine import Draft, Verified
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.request import Request
from kdgen.spec.model import load_spec
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.weights.random import random_weights

TINY = load_spec("tiny")


@dataclass
class CountingEngine:
    """The token after n committed ones is n; every step is noted as (kind, sequences, tokens of each)."""

    plan: Plan
    steps: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)

    def reset(self, sequence: int = 0, sampling: Sampling = GREEDY) -> None:
        self.lengths[sequence] = 0

    def _commit(self, kind: str, counts: dict[int, int]) -> tuple[int, ...]:
        self.steps.append((kind, tuple(counts), tuple(counts.values())))
        for sequence, count in counts.items():
            self.lengths[sequence] += count
        return tuple(self.lengths[sequence] for sequence in counts)

    def prefill_many(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> tuple[int, ...]:
        return self._commit("prefill", {sequence: len(tokens) for sequence, tokens in chunks})

    def decode_many(self, sequences: Sequence[int]) -> tuple[int, ...]:
        return self._commit("decode", dict.fromkeys(sequences, 1))

    def verify_many(self, drafts: Sequence[Draft]) -> tuple[Verified, ...]:
        roots = self._commit("verify", {draft.sequence: 1 for draft in drafts})
        return tuple(Verified((root - 1,), root, (0,)) for root in roots)


def counting(**limits: Any) -> CountingEngine:
    return CountingEngine(build_plan(TINY, "f32", Limits(**limits)))


def request(prompt: int, new: int, **rest: Any) -> Request:
    return Request(tuple(range(prompt)), new, **rest)


def test_prompts_are_cut_to_the_chunk_and_to_what_a_step_holds() -> None:
    engine = counting(max_tokens=8, max_context=64, max_sequences=3)
    batch = Batch(engine)
    for each in (request(5, 2, chunk=3), request(20, 1), request(2, 3)):
        batch.add(each)
    finished = list(batch.run())
    assert engine.steps == [
        ("prefill", (0, 1), (3, 5)),
        ("prefill", (0, 1), (2, 6)),
        ("prefill", (1,), (8,)),
        ("decode", (0,), (1,)),  # the two forwards of one step
        ("prefill", (1, 2), (1, 2)),
        ("decode", (2,), (1,)),
        ("decode", (2,), (1,)),
    ]
    assert [each.number for each in finished] == [0, 1, 2]
    assert [each.tokens for each in finished] == [(5, 6), (20,), (2, 3, 4)]


def test_a_free_slab_goes_to_who_waits_longest() -> None:
    engine = counting(max_tokens=64, max_context=64, max_sequences=1)
    batch = Batch(engine)
    for new in (1, 2, 1):
        batch.add(request(3, new))
    assert [(each.number, each.sequence, len(each.tokens)) for each in batch.run()] == [(0, 0, 1), (1, 0, 2), (2, 0, 1)]
    assert batch.idle and batch.step() == ()


def test_one_drafter_makes_a_step_a_verify_step_and_the_context_bounds_tokens() -> None:
    engine = counting(max_tokens=64, max_context=10, max_sequences=2)
    found = decode_together(engine, [request(8, 100), request(4, 3, drafter=NgramDrafter())])
    assert {kind for kind, *_ in engine.steps} == {"prefill", "verify"}
    assert [each.tokens for each in found] == [(8, 9), (4, 5, 6)]
    assert [each.forwards for each in found] == [1, 2]


def test_stop_tokens_end_a_request() -> None:
    (found,) = decode_together(counting(max_context=64), [request(3, 50, stop=frozenset({6, 5}))])
    assert found.tokens == (3, 4, 5)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"prompt": ()}, "empty"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"chunk": -1}, "chunk"),
        ({"block_size": 17}, "block size"),
        ({"budget": 64}, "budget"),
    ],
)
def test_impossible_requests_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(KdgenError, match=why):
        Request(**{"prompt": (1,), "max_new_tokens": 1, **values})
    with pytest.raises(KdgenError, match="--context"):
        Batch(counting(max_context=4)).add(request(4, 1))


def test_a_real_engine_gives_each_request_what_it_gives_it_alone(cpu_backend: Backend) -> None:
    plan = build_plan(TINY, "f32", Limits(max_tokens=16, max_context=40, max_sequences=2))
    engine = start_engine(TINY, plan, cpu_backend, random_weights(TINY, 1).__getitem__)
    prompts = [np.random.default_rng(i).integers(0, TINY.vocab_size, 5 + i).tolist() for i in range(3)]
    alone = [decode_plain(engine, Request(prompt, 6, sampling=Sampling(1.0, seed=i))).tokens for i, prompt in enumerate(prompts)]
    requests = [Request(tuple(prompt), 6, sampling=Sampling(1.0, seed=i), drafter=NgramDrafter()) for i, prompt in enumerate(prompts)]
    assert [each.tokens for each in decode_together(engine, requests)] == alone
