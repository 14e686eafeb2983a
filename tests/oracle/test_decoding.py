"""Whole models on a backend against Hugging Face transformers: logits, greedy tokens, and draft trees that change no bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.drafters.base import Drafter
from kdgen.drafters.ngram import NgramDrafter
from kdgen.drafters.synthetic import ReplayDrafter
from kdgen.plan.ir import Compute
from kdgen.runtime.decode import decode_plain, decode_tree
from kdgen.runtime.model import open_model
from kdgen.runtime.pipeline import open_engine
from kdgen.runtime.request import Request
from kdgen.verify.decoding.recording import RecordingEngine, differing_bits
from kdgen.verify.oracles.models import ModelCase

#: Of the largest logit's magnitude. The oracle's own float32 rounding is part of it.
RELATIVE_TOLERANCE = 1e-5
ERROR_RATES = (0.0, 0.1, 0.3, 0.6, 1.0)
SHAPES = ((0, 4), (7, 8), (20, 8), (63, 16))  #: (budget, block size)


@dataclass(frozen=True)
class Plain:
    """A case decoded token by token, with the bits of every committed token."""

    target: RecordingEngine
    tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    cache: NDArray[Any]


def decoded_plainly(case: ModelCase, compute: Compute, backend: str) -> Plain:
    context = len(case.prompt) + len(case.greedy)
    target = RecordingEngine(open_engine(open_model(case.folder), context, compute, backend).engine)
    tokens = decode_plain(target, Request(case.prompt.tolist(), len(case.greedy))).tokens
    return Plain(target, tokens, np.stack(target.logits), target.cache_rows())


def check_float32(case: ModelCase, backend: str) -> None:
    plain = decoded_plainly(case, "f32", backend)
    assert plain.tokens == tuple(case.greedy.tolist())
    error = np.abs(plain.logits - case.logits).max()
    assert error <= RELATIVE_TOLERANCE * np.abs(case.logits).max()


def check_drafts(case: ModelCase, compute: Compute, backend: str, error_rates: Sequence[float] = ERROR_RATES) -> None:
    plain = decoded_plainly(case, compute, backend)
    prompt = case.prompt.tolist()
    vocabulary = plain.target.engine.spec.vocab_size
    drafters: list[Drafter] = [NgramDrafter()]
    drafters += [ReplayDrafter([*prompt, *plain.tokens], vocabulary, rate, seed=3) for rate in error_rates]
    for i, drafter in enumerate(drafters):
        budget, block_size = SHAPES[i % len(SHAPES)]
        tree = decode_tree(plain.target, Request(prompt, len(plain.tokens), drafter=drafter, budget=budget, block_size=block_size))
        assert tree.tokens == plain.tokens
        assert differing_bits(np.stack(plain.target.logits), plain.logits) == 0, "logits"
        assert differing_bits(plain.target.cache_rows(), plain.cache) == 0, "cache rows"
        if isinstance(drafter, ReplayDrafter) and drafter.error_rate == 0 and budget:
            assert tree.target_forwards < len(plain.tokens) / 3


def test_float32_logits_and_greedy_tokens(model_case: ModelCase, cpu_backend: Backend) -> None:
    check_float32(model_case, "cpu")


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_drafts_change_no_bit(model_case: ModelCase, compute: Compute, cpu_backend: Backend) -> None:
    check_drafts(model_case, compute, "cpu")


@pytest.mark.gpu
def test_float32_logits_and_greedy_tokens_on_the_gpu(model_case: ModelCase) -> None:
    check_float32(model_case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_drafts_change_no_bit_on_the_gpu(model_case: ModelCase, compute: Compute) -> None:
    check_drafts(model_case, compute, "cuda")
