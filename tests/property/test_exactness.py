"""Whole random models on the CPU backend, in random situations: L1 to L5 of the exactness contract, by bits (docs/exactness.md)."""

from __future__ import annotations

from exactness import assert_exact, unshrunk
from hypothesis import example, given
from strategies import TILED, situations, specs

from kdgen.backends.base import Backend
from kdgen.spec.model import Spec
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.random_cases import RequestDraw, Situation
from kdgen.verify.variants import variants

#: A tree over the end of the context, beside a request that takes its slab over.
FULL = Situation(
    weights_seed=0, slots=1, spare=0, max_tokens=64,
    requests=(
        RequestDraw(1, 33, 9, 64, "replay", 0.0, 63, 16, None, GREEDY, 0),
        RequestDraw(2, 33, 9, 3, "replay", 0.2, 63, 16, None, Sampling(1.0, seed=9), 0),
    ),
)  # fmt: skip
VARIANTS = {spec.name: spec for spec in variants()}
INT4, ODD_DIMS = VARIANTS["tiny-int4"], VARIANTS["tiny-odd"]


@unshrunk
@given(spec=specs(quantized=None), situation=situations())
@example(spec=ODD_DIMS, situation=FULL)
def test_float32_requests_are_decoded_as_alone(cpu_backend: Backend, spec: Spec, situation: Situation) -> None:
    assert_exact(cpu_backend, spec, "f32", situation)


@unshrunk
@given(spec=specs(sizes=TILED, quantized=None, dtypes=("bfloat16",)), situation=situations())
@example(spec=INT4, situation=FULL)
def test_tensor_core_requests_are_decoded_as_alone(cpu_backend: Backend, spec: Spec, situation: Situation) -> None:
    assert_exact(cpu_backend, spec, "bf16", situation)
