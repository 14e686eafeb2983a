"""One layer of Kimi K2.6 at its true width on the GPU, against the float64 reference: MLA with 64 heads, INT4 experts of 7168 × 2048.

Vocabulary and number of experts are cut (they are no width of the layer), so that the reference fits a machine's memory.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.runtime.pipeline import start_engine
from kdgen.spec.model import Spec, load_spec
from kdgen.verify.published import reference_of
from kdgen.weights.random import RandomWeights, random_weights

pytestmark = pytest.mark.gpu

PROMPT = [5, 17, 9, 1000, 2000, 3000, 4000, 77, 1, 2, 3, 500, 700, 11, 13, 19]


@functools.cache
def one_layer() -> tuple[Spec, RandomWeights, NDArray[np.float64]]:
    """(spec, weights, the reference's logits [T, V])."""
    cut = {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "vocab_size": 4096,
        "n_routed_experts": 16,
        "bos_token_id": None,
        "draft": None,
    }
    spec = Spec.from_mapping(load_spec("k26").model_dump(mode="json") | cut | {"eos_token_id": [], "name": "k26-layer"})
    weights = random_weights(spec, 7)
    return spec, weights, reference_of(spec, weights).forward(PROMPT).logits


def logits(backend: Backend, compute: Compute) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    spec, weights, expected = one_layer()
    engine = start_engine(spec, build_plan(spec, compute, Limits(max_context=64)), backend, weights.__getitem__)
    engine.prefill(PROMPT, every_logit=True)
    return engine.logits(len(PROMPT)).astype(np.float64), expected


def test_float32(cuda_backend: Backend) -> None:
    got, expected = logits(cuda_backend, "f32")
    error = np.abs(got - expected).max() / np.abs(expected).max()
    print(f"\nK2.6 layer, float32: largest error {error:.2e} of the largest logit")
    assert error <= 1e-5  # sums of up to 18,432 float32 terms


def test_tensor_cores(cuda_backend: Backend) -> None:
    got, expected = logits(cuda_backend, "bf16")
    rows = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    print(f"\nK2.6 layer, bf16: relative error of a row {np.median(rows):.2e} (median), {rows.max():.2e} (largest)")
    # activations carry 8 bits: 2^-9 a rounding, some ten roundings on the way; a row whose experts flip is off by more
    assert np.median(rows) <= 2e-2
