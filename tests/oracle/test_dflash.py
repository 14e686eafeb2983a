"""DFlash drafters against the reference implementation: the float64 one, and the generated one as the engine runs it."""

from __future__ import annotations

import numpy as np
import pytest
from drafting import FedDrafter

from kdgen.backends.base import Backend
from kdgen.plan.ir import Compute
from kdgen.reference.dflash import ReferenceDrafter
from kdgen.verify.kernels import tolerances
from kdgen.verify.oracles.drafters import DraftCase, draft_cases

#: The oracle ran in float32, whose RoPE angles at positions above 600 are off by more than everything else together.
TOLERANCE = 1e-4

pytestmark = pytest.mark.parametrize("case", draft_cases(), ids=lambda case: case.name)


def test_reference(case: DraftCase) -> None:
    weights = case.weights()
    drafter = ReferenceDrafter(case.draft, weights, weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    cache = drafter.empty_cache()
    for step in case.rounds:
        cache = drafter.extend(cache, case.features[cache.length : step.start])
        hidden, logits = drafter.block(cache, step.block[0], len(step.block))
        np.testing.assert_allclose(hidden, step.hidden, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(logits, step.logits, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(cache.keys.swapaxes(1, 2), case.keys, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(cache.values.swapaxes(1, 2), case.values, rtol=0, atol=TOLERANCE)


def fed(case: DraftCase, compute: Compute, backend: Backend) -> FedDrafter:
    return FedDrafter.open(case.draft, case.weights(), compute, backend, case.rounds[-1].start + case.draft.block_size)


def check_float32(case: DraftCase, backend: Backend) -> None:
    drafter = fed(case, "f32", backend)
    for step in case.rounds:
        drafter.feed(case.features[drafter.length : step.start])
        hidden, logits = drafter.draft(step.block[0], len(step.block))
        np.testing.assert_allclose(hidden, step.hidden, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(logits, step.logits, rtol=0, atol=TOLERANCE)
    keys, values = drafter.cache()  # a block's own keys and values are not among them
    np.testing.assert_allclose(keys, case.keys, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(values, case.values, rtol=0, atol=TOLERANCE)


def check_bf16(case: DraftCase, backend: Backend) -> None:
    drafter = fed(case, "bf16", backend)
    for step in case.rounds:
        drafter.feed(case.features[drafter.length : step.start])
        _, logits = drafter.draft(step.block[0], len(step.block))
        error = np.sqrt(np.square(logits - step.logits).mean(axis=1))
        assert np.median(error) <= tolerances.bf16_logits(step.logits, case.draft.num_hidden_layers + 1)


def test_float32(case: DraftCase, cpu_backend: Backend) -> None:
    check_float32(case, cpu_backend)


def test_bf16(case: DraftCase, cpu_backend: Backend) -> None:
    check_bf16(case, cpu_backend)


@pytest.mark.gpu
def test_float32_on_the_gpu(case: DraftCase, cuda_backend: Backend) -> None:
    check_float32(case, cuda_backend)


@pytest.mark.gpu
def test_bf16_on_the_gpu(case: DraftCase, cuda_backend: Backend) -> None:
    check_bf16(case, cuda_backend)
