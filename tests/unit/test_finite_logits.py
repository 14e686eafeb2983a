"""The first token that would be chosen by logits that are not finite ends a run, at the same place however it decodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kdgen.backends.base import Backend
from kdgen.drafters.base import DeviceDraftRequest
from kdgen.drafters.synthetic import AdversarialDrafter, ReplayDrafter
from kdgen.errors import LogitsError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.runtime.batch import decode_together
from kdgen.runtime.budget import FixedBudget
from kdgen.runtime.decode import decode_plain, decode_rounds, decode_tree
from kdgen.runtime.engine import Engine
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.request import Request
from kdgen.runtime.rounds import Rounds
from kdgen.spec.model import load_spec
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.recording import differing_bits
from kdgen.weights.formats import numpy_dtype
from kdgen.weights.random import random_weights

SPEC = load_spec("tiny-dflash")
PROMPT = tuple(range(3, 20))
NEW = 12


def damage(engine: Engine, token: int, value: float) -> None:
    """The model's logits behind ``token`` are ``value``: so is the token's row of the embedding in device memory."""
    table = engine._memory._weights["embed_tokens"]
    engine.backend.write(table, np.full(SPEC.hidden_size, value, numpy_dtype(table.dtype)), token * SPEC.hidden_size)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=5)], ids=["greedy", "drawn"])
def test_every_way_to_decode_ends_at_the_first_token_without_logits(cpu_backend: Backend, compute: Compute, sampling: Sampling) -> None:
    engine = start_engine(SPEC, build_plan(SPEC, compute, Limits(32, 96, 3)), cpu_backend, random_weights(SPEC, 11).__getitem__)
    whole = decode_plain(engine, Request(PROMPT, NEW, sampling=sampling)).tokens
    place = next(i for i in range(4, NEW) if whole[i] not in (*PROMPT, *whole[:i]))
    damage(engine, whole[place], np.nan)
    seen: list[int] = []
    truth = (*PROMPT, *whole)
    drafters = (ReplayDrafter(truth, SPEC.vocab_size, 0.3, 1), AdversarialDrafter(truth, SPEC.vocab_size, seed=2))
    rounds = {budgets: Rounds(engine, DeviceDraftRequest(7, 8) if budgets != (0,) else None, budgets) for budgets in ((0,), (15,))}
    requests = [Request(PROMPT[:5], 3), Request(PROMPT, NEW, sampling=sampling, drafter=drafters[0]), Request(PROMPT[2:9], 4)]

    def emit(tokens: tuple[int, ...]) -> None:
        seen.extend(tokens)

    ways: list[Callable[[], object]] = [
        lambda: decode_plain(engine, Request(PROMPT, NEW, sampling=sampling), emit=emit),
        *(
            lambda d=drafter: decode_tree(engine, Request(PROMPT, NEW, sampling=sampling, drafter=d, budget=15), emit=emit)
            for drafter in drafters
        ),
        *(
            lambda b=budgets: decode_rounds(rounds[b], Request(PROMPT, NEW, sampling=sampling), lambda _: FixedBudget(b[0]), emit=emit)
            for budgets in rounds
        ),
    ]
    for way in ways:
        seen.clear()
        with pytest.raises(LogitsError, match=rf"^tiny-dflash: the logits for token {len(PROMPT) + place + 1} ") as caught:
            way()
        assert (caught.value.sequence, caught.value.position) == (0, len(PROMPT) + place + 1)
        assert tuple(seen) == whole[: len(seen)] and len(seen) <= place + 1
    with pytest.raises(LogitsError) as caught:
        decode_together(engine, requests)
    assert (caught.value.sequence, caught.value.position) == (1, len(PROMPT) + place + 1)
    # nothing of it is left: a run that ends before is as it was
    again = decode_plain(engine, Request(PROMPT, place + 1, sampling=sampling))
    assert again.tokens == whole[: place + 1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_logit_among_all_is_enough(cpu_backend: Backend, value: float) -> None:
    """A norm's gain that is infinite where the row is not zero; the row with a prompt's last token is looked at, and no other."""
    engine = start_engine(SPEC, build_plan(SPEC, "f32", Limits(32, 96, 2)), cpu_backend, random_weights(SPEC, 11).__getitem__)
    damage(engine, 7, value)
    roots = engine.prefill_many([(0, [1, 2, 3]), (1, [4, 5])])
    rows = engine.cache_rows(1)
    with pytest.raises(LogitsError) as caught:
        engine.prefill_many([(1, [6, 8]), (0, [1, 7])])
    assert (caught.value.sequence, caught.value.position) == (0, 5)
    for sequence in range(2):
        engine.reset(sequence)
    assert engine.prefill_many([(0, [1, 2, 3]), (1, [4, 5])]) == roots and differing_bits(engine.cache_rows(1), rows) == 0


@pytest.mark.parametrize(
    "key", ["model.layers.1.mlp.shared_experts.down_proj.weight", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
)
def test_a_norm_whose_squares_are_beyond_float32_gives_no_zeros(cpu_backend: Backend, key: str) -> None:
    """One damaged weight of 1e30, finite itself: in float64 the model goes on, in float32 the squares' sum is infinite."""
    spec = load_spec("tiny")
    weights = dict(random_weights(spec, 11))
    weights[key] = weights[key].copy()
    weights[key][2, 3] = 1.0e30
    engine = start_engine(spec, build_plan(spec, "f32", Limits(32, 96, 1)), cpu_backend, weights.__getitem__)
    with pytest.raises(LogitsError, match=rf"^tiny: the logits for token {len(PROMPT)} "):
        decode_plain(engine, Request(PROMPT, 3))
