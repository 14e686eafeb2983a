"""Every kernel of the tiny specs, and of models drawn at random, alone on the CPU backend in each of its modes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import TILED, specs

from kdgen.backends import open_backend
from kdgen.backends.base import Backend
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Plan
from kdgen.spec import Spec, load_spec
from kdgen.verify.bench import TOKENS
from kdgen.verify.kernels import CHECKS, check_kernel, check_kernels, load_kernels

BACKENDS = {"cpu": TOKENS, "cpu-shuffled": (1, 9), "cpu-checker": (1, 9)}
MODELS: tuple[tuple[str, Compute], ...] = (("tiny", "f32"), ("tiny", "bf16"), ("tiny2", "f32"), ("tiny2", "bf16"))


@cache
def model(name: str, compute: Compute) -> tuple[Spec, Plan]:
    spec = load_spec(name)
    return spec, build_plan(spec, compute)


@cache
def loaded(name: str, compute: Compute, backend: str) -> Backend:
    opened = open_backend(backend, seed=7)
    load_kernels(opened, model(name, compute)[1])
    return opened


CASES = [
    pytest.param(name, compute, place, backend, id=f"{name}-{compute}-{kernel.name}-{backend}")
    for name, compute in MODELS
    for backend in BACKENDS
    for place, kernel in enumerate(model(name, compute)[1].kernels)
]


@pytest.mark.parametrize(("name", "compute", "place", "backend"), CASES)
def test_kernel_is_right(name: str, compute: Compute, place: int, backend: str) -> None:
    spec, plan = model(name, compute)
    rng = np.random.default_rng([1, place])
    check = check_kernel(loaded(name, compute, backend), spec, plan, plan.kernels[place], rng, tokens=BACKENDS[backend])
    assert check.ok, check.why


def test_every_template_has_a_check() -> None:
    from kdgen.resources import templates_dir

    assert set(CHECKS) == {path.name for path in (templates_dir() / "kernels").glob("*.cu.j2")}


def check_all(backend: Backend, spec: Spec, compute: Compute, seed: int, tokens: tuple[int, ...]) -> None:
    checks = check_kernels(backend, spec, build_plan(spec, compute), seed, tokens=tokens)
    wrong = [f"{check.kernel}: {check.why}" for check in checks if not check.ok]
    assert not wrong, "\n".join(wrong)


few = settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)


@few
@given(spec=specs(quantized=None), seed=seeds)
def test_float32_kernels_of_any_model(cpu_backend: Backend, spec: Spec, seed: int) -> None:
    check_all(cpu_backend, spec, "f32", seed, TOKENS)


@few
@given(spec=specs(sizes=TILED, quantized=None, dtypes=("bfloat16",)), seed=seeds)
def test_tensor_core_kernels_of_any_model(cpu_backend: Backend, spec: Spec, seed: int) -> None:
    check_all(cpu_backend, spec, "bf16", seed, TOKENS)


@settings(parent=few, max_examples=4)
@given(spec=specs(quantized=True), seed=seeds)
def test_float32_kernels_under_the_checker(spec: Spec, seed: int) -> None:
    check_all(open_backend("cpu-checker", seed), spec, "f32", seed, (2, 9))


@settings(parent=few, max_examples=4)
@given(spec=specs(sizes=TILED, quantized=True, dtypes=("bfloat16",)), seed=seeds)
def test_tensor_core_kernels_under_the_checker(spec: Spec, seed: int) -> None:
    check_all(open_backend("cpu-checker", seed), spec, "bf16", seed, (2, 9))
