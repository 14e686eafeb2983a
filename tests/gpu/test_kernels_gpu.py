"""Every generated kernel on the GPU, alone against float64 and by bits, and whole random models against plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exactness import assert_exact, unshrunk
from hypothesis import given
from strategies import TILED, situations, specs

from kdgen.backends.base import Backend
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Plan
from kdgen.plan.shard import Shard
from kdgen.spec.model import Spec, load_spec
from kdgen.verify.decoding.random_cases import Situation
from kdgen.verify.kernels import attention
from kdgen.verify.kernels.check import check_kernels
from kdgen.verify.plans import own_and_decode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["tiny", "tiny2", "tiny-dflash"])
def test_kernels_are_right(cuda_backend: Backend, name: str, compute: Compute) -> None:
    spec = load_spec(name)
    wrong = [check for check in check_kernels(cuda_backend, spec, build_plan(spec, compute)) if not check.ok]
    assert not wrong, "\n".join(f"{check.kernel}: {check.why}" for check in wrong)


@pytest.mark.parametrize("name", ["k26", "deepseek-v3", "glm-4.7-flash"])
def test_full_width_kernels_are_right_on_slices(cuda_backend: Backend, name: str) -> None:
    spec = load_spec(name)
    wrong = [check for check in check_kernels(cuda_backend, spec, build_plan(spec), size="slice", tokens=(1, 9, 33)) if not check.ok]
    assert not wrong, "\n".join(f"{check.kernel}: {check.why}" for check in wrong)


@pytest.mark.parametrize(("name", "ranks"), [("k26", 1), ("k26", 2), ("k26", 8), ("deepseek-v3", 1), ("moonlight-16b-a3b", 1)])
def test_kernels_for_these_targets_alone_are_right_on_slices(cuda_backend: Backend, name: str, ranks: int) -> None:
    spec, plan = load_spec(name), special_plan(cuda_backend, name, ranks)
    wrong = [check for check in check_kernels(cuda_backend, spec, plan, size="slice", tokens=(1, 9, 33)) if not check.ok]
    assert not wrong, "\n".join(f"{check.kernel}: {check.why}" for check in wrong)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_attention_over_long_contexts(cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Contexts in splits of every length up to 1,024 keys, whose blocks have several splits each."""
    monkeypatch.setattr(attention, "CONTEXTS", (1, 255, 4103, 8192, 8193, 9000, 16400, 33000))
    monkeypatch.setattr(attention, "LONG_CONTEXTS", (33000,))
    spec, plan = load_spec("k26"), special_plan(cuda_backend, "k26", ranks)
    plan = replace(plan, kernels=tuple(kernel for kernel in plan.kernels if kernel.name == "mla_attention"))
    wrong = [check for check in check_kernels(cuda_backend, spec, plan) if not check.ok]
    assert not wrong, "\n".join(f"{check.kernel}: {check.why}" for check in wrong)


def special_plan(backend: Backend, name: str, ranks: int) -> Plan:
    """The kernels that this GPU's own plan of a rank has otherwise, and those they are held to; without any, the test skips itself."""
    plan = build_plan(load_spec(name), shard=Shard(ranks))
    own = own_and_decode(plan.on(backend.family), plan)
    if not own.kernels:
        pytest.skip(f"{name} has no kernels for {backend.description} alone")
    return own


@unshrunk
@given(spec=specs(quantized=None), situation=situations())
def test_float32_requests_are_decoded_as_alone(cuda_backend: Backend, spec: Spec, situation: Situation) -> None:
    assert_exact(cuda_backend, spec, "f32", situation)


@unshrunk
@given(spec=specs(sizes=TILED, quantized=None, dtypes=("bfloat16",)), situation=situations())
def test_tensor_core_requests_are_decoded_as_alone(cuda_backend: Backend, spec: Spec, situation: Situation) -> None:
    assert_exact(cuda_backend, spec, "bf16", situation)
