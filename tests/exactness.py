"""The exactness contract as a check of one random model in one random situation, on any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import Phase, event, settings
from hypothesis import strategies as st

from kdgen.backends.base import Backend
from kdgen.decode import decode_plain, decode_tree
from kdgen.drafters.base import Drafter
from kdgen.drafters.ngram import NgramDrafter
from kdgen.drafters.synthetic import AdversarialDrafter, RandomDrafter, ReplayDrafter
from kdgen.engine import Engine
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.spec import Spec
from kdgen.verify.recording import RecordingEngine, differing_bits
from kdgen.weights.random import random_weights

#: A failing model would be shrunk by compiling hundreds of others; the blob that is printed repeats it as it is.
unshrunk = settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))


@dataclass(frozen=True)
class Situation:
    """One decoding run of a model whose weights come from ``seed``."""

    seed: int
    prompt_length: int
    chunk: int
    new_tokens: int
    drafter: str
    error_rate: float
    budget: int
    block_size: int
    stop_at: int | None  #: stop at the token that plain decoding gives here


situations = st.builds(
    Situation,
    seed=st.integers(0, 2**32 - 1),
    prompt_length=st.sampled_from((1, 2, 7, 31, 33, 64, 70)),
    chunk=st.sampled_from((1, 3, 8, 33, 64)),
    new_tokens=st.integers(1, 20),
    drafter=st.sampled_from(("replay", "ngram", "random", "adversarial")),
    error_rate=st.sampled_from((0.0, 0.2, 0.5, 1.0)),
    budget=st.sampled_from((0, 1, 7, 15, 33, 63)),
    block_size=st.integers(2, 16),
    stop_at=st.none() | st.integers(0, 19),
)


def make_drafter(situation: Situation, truth: Sequence[int], vocab_size: int) -> Drafter:
    if situation.drafter == "replay":
        return ReplayDrafter(truth, vocab_size, situation.error_rate, situation.seed)
    if situation.drafter == "random":
        return RandomDrafter(vocab_size, situation.seed)
    if situation.drafter == "adversarial":
        return AdversarialDrafter(truth, vocab_size, seed=situation.seed)
    return NgramDrafter()


def check_exactness(spec: Spec, compute: Compute, situation: Situation, backend: Backend) -> None:
    context = situation.prompt_length + situation.new_tokens
    plan = build_plan(spec, compute, Limits(max_context=context))
    target = RecordingEngine(Engine(spec, plan, backend, random_weights(spec, situation.seed).__getitem__))
    prompt = np.random.default_rng(situation.seed).integers(0, spec.vocab_size, situation.prompt_length).tolist()

    plain = decode_plain(target, prompt, situation.new_tokens)
    plain_logits, plain_cache = np.stack(target.logits), target.cache_rows()
    stop = () if situation.stop_at is None else plain.tokens[situation.stop_at : situation.stop_at + 1]
    expected = plain.tokens
    if stop:
        expected = plain.tokens[: plain.tokens.index(stop[0]) + 1]

    drafter = make_drafter(situation, [*prompt, *plain.tokens], spec.vocab_size)
    tree = decode_tree(target, prompt, situation.new_tokens, drafter, situation.budget, situation.block_size, stop, situation.chunk)
    event(f"{situation.drafter}, {'some' if sum(tree.acceptance_lengths) > len(tree.acceptance_lengths) else 'nothing'} accepted")
    assert tree.tokens == expected
    committed = min(len(target.logits), len(plain_logits))
    assert committed >= len(prompt) + len(expected) - 1
    assert differing_bits(np.stack(target.logits)[:committed], plain_logits[:committed]) == 0, "logits"
    assert differing_bits(target.cache_rows()[:, :committed], plain_cache[:, :committed]) == 0, "cache rows"
