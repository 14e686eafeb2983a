"""Whole random models on the CPU backend: float32 logits against the float64 reference, and decoding with draft trees, in any
chunking, against plain decoding, by bits."""

from __future__ import annotations

import numpy as np
from exactness import Situation, check_exactness, situations, unshrunk
from hypothesis import given
from hypothesis import strategies as st
from strategies import TILED, specs

from kdgen.backends.base import Backend
from kdgen.decode import prefill
from kdgen.engine import Engine
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Limits
from kdgen.reference.model import ReferenceModel
from kdgen.spec import Spec
from kdgen.weights.random import random_weights


@unshrunk
@given(spec=specs(quantized=None), situation=situations)
def test_float32_draft_trees_change_no_bit(cpu_backend: Backend, spec: Spec, situation: Situation) -> None:
    check_exactness(spec, "f32", situation, cpu_backend)


@unshrunk
@given(spec=specs(sizes=TILED, quantized=None, dtypes=("bfloat16",)), situation=situations)
def test_tensor_core_draft_trees_change_no_bit(cpu_backend: Backend, spec: Spec, situation: Situation) -> None:
    check_exactness(spec, "bf16", situation, cpu_backend)


@unshrunk
@given(spec=specs(quantized=None), seed=st.integers(0, 2**32 - 1), length=st.sampled_from((1, 5, 40)))
def test_float32_logits_are_the_references(cpu_backend: Backend, spec: Spec, seed: int, length: int) -> None:
    """float32 sums of at most a few hundred terms: 1e-4 of the largest logit is a hundred times their rounding."""
    weights = random_weights(spec, seed)
    plan = build_plan(spec, "f32", Limits(max_context=length + 1))
    engine = Engine(spec, plan, cpu_backend, weights.__getitem__)
    prompt = np.random.default_rng(seed).integers(0, spec.vocab_size, length).tolist()
    prefill(engine, prompt)
    expected = ReferenceModel(spec, weights).forward(prompt).logits
    assert np.abs(engine.logits(length) - expected).max() <= 1e-4 * np.abs(expected).max()
