"""Requests of any kind by rounds: plain decoding's tokens, cache bits and length, and the counts that are found on the host."""

from __future__ import annotations

import numpy as np
from hypothesis import event, example, given, settings
from strategies import rounds_draws

from kdgen.backends.base import Backend
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.random_cases import RoundsDraw
from kdgen.verify.rounds.situation import drawn_rounds
from kdgen.verify.rounds.subjects import favouring, small

MODEL = favouring(small().model.spec, 1)
#: Trees over the end of the context, and a stop in the first round's path.
FULL = RoundsDraw(3, 64, 9, (63, 7), 15, False, 1, None, Sampling(1.0, top_k=4, seed=2**63 + 1), 0)
STOPPED = RoundsDraw(1, 58, 16, (63,), 15, False, 1, 1, GREEDY, 1)


@settings(max_examples=8)
@given(draw=rounds_draws())
@example(draw=FULL)
@example(draw=STOPPED)
def test_rounds_do_what_plain_decoding_and_the_drafter_foretell(cpu_backend: Backend, draw: RoundsDraw) -> None:
    prompt = np.random.default_rng(draw.seed).integers(0, MODEL.spec.vocab_size, draw.prompt_length).tolist()
    problem, accepted = drawn_rounds(cpu_backend, MODEL, "f32", draw, prompt)
    event(f"{'some' if accepted else 'no'} drafts accepted")
    assert not problem, problem
