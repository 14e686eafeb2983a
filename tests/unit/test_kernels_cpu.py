"""Every kernel of the tiny specs, their variants, and models drawn at random, alone on the CPU backend, plainly and under the checker;
then whole decodes of several sequences, in shuffled order with late copies, and under the checker."""

from __future__ import annotations

import re
from dataclasses import replace
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
from kdgen.plan.shard import Shard
from kdgen.spec.model import Spec, load_spec
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.exact import check_exactness
from kdgen.verify.decoding.random_cases import RequestDraw, Situation
from kdgen.verify.kernels.check import CHECKS, check_kernel, check_kernels, load_kernels
from kdgen.verify.kernels.harness import TOKENS, Grid, Harness
from kdgen.verify.variants import variants

BACKENDS = {"cpu": TOKENS, "cpu-checker": (1, 9)}  # whose order is drawn, and whose copies are late, as with cpu-shuffled
VARIANTS = {spec.name: spec for spec in variants()}
COMPUTES: tuple[Compute, ...] = ("f32", "bf16")
MODELS = [(name, compute) for name in ("tiny", "tiny2", *VARIANTS) for compute in COMPUTES if (name, compute) != ("tiny-odd", "bf16")]


@cache
def model(name: str, compute: Compute) -> tuple[Spec, Plan]:
    spec = VARIANTS.get(name) or load_spec(name)
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


@pytest.mark.parametrize("hidden", [576, 4160])
def test_sums_with_norms_of_wide_rows(hidden: int) -> None:
    """More than one block a row where the sum is a launch of its own, each with a round; a last round of vectors that is no full one."""
    spec = load_spec("tiny").model_copy(update={"hidden_size": hidden, "intermediate_size": 32, "moe_intermediate_size": 32})
    plan = build_plan(spec, "f32", shard=Shard(2, 1, "peer"))
    kernel, backend = plan.kernel("rank_sum_norm"), open_backend("cpu")
    plan = replace(plan, kernels=tuple(plan.kernel(name) for name in ("rank_sum", "rmsnorm_hidden", kernel.name)))
    load_kernels(backend, plan)
    check = check_kernel(backend, spec, plan, kernel, np.random.default_rng(3), tokens=(1, 7))
    assert check.ok and check.ran, check.why


@pytest.mark.parametrize("heads", [128, 192])
def test_attention_schedule_of_fewer_blocks_than_could_be_left_over(cpu_backend: Backend, heads: int) -> None:
    spec = VARIANTS["tiny-wgmma"].model_copy(update={"num_attention_heads": heads})
    plan = build_plan(spec, "bf16").on("sm_90a")
    kernel = plan.kernel("attention_schedule")
    assert kernel.grid[0].cap == {128: 2, 192: 1}[heads]
    plan = replace(plan, kernels=(kernel,))
    load_kernels(cpu_backend, plan)
    check = check_kernel(cpu_backend, spec, plan, kernel, np.random.default_rng(4))
    assert check.ok and check.ran, check.why


@pytest.mark.parametrize(("name", "compute", "place", "backend"), CASES)
def test_kernel_is_right(name: str, compute: Compute, place: int, backend: str) -> None:
    spec, plan = model(name, compute)
    rng = np.random.default_rng([1, place])
    check = check_kernel(loaded(name, compute, backend), spec, plan, plan.kernels[place], rng, tokens=BACKENDS[backend])
    assert check.ok, check.why


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"next_token": None}, "a launch of advance lacks next_token"),
        ({"next_tokens": 0}, "advance has no parameter next_tokens"),
        ({"next_token": 7}, "gives a number for const int"),
    ],
)
def test_a_launch_binds_every_parameter_by_its_name(cpu_backend: Backend, changes: dict[str, int | None], said: str) -> None:
    spec, plan = model("tiny", "f32")
    kernel = plan.kernel("advance")
    with Harness(cpu_backend, spec, plan, kernel, np.random.default_rng(0)) as harness:
        given = {parameter.name: harness.integer(0) for parameter in kernel.parameters} | changes
        with pytest.raises(ValueError, match=re.escape(said)):
            harness.launch(Grid(), **{name: value for name, value in given.items() if value is not None})


def test_every_template_has_a_check() -> None:
    from kdgen.files.resources import templates_dir

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


#: Two sequences over two slabs, one of them taken over by a third request: chunks, trees, compaction and sampling side by side.
BUSY = Situation(
    weights_seed=2, slots=2, spare=0, max_tokens=7,
    requests=(
        RequestDraw(1, 9, 6, 4, "replay", 0.2, 7, 4, None, GREEDY, 0),
        RequestDraw(2, 3, 3, 64, "random", 0.0, 5, 3, None, Sampling(1.0, top_k=9, top_p=0.9, min_p=0.01, seed=6), 0),
        RequestDraw(3, 5, 3, 64, "none", 0.0, 0, 2, None, GREEDY, 1),
    ),
)  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu-shuffled", "cpu-checker"])
@pytest.mark.parametrize(("name", "compute"), [("tiny-odd", "f32"), ("tiny-int4", "f32"), ("tiny-int4", "bf16"), ("tiny-v2", "bf16")])
def test_several_sequences(name: str, compute: Compute, backend: str) -> None:
    found = check_exactness(open_backend(backend, seed=3), VARIANTS[name], compute, BUSY)
    assert not found.problem, found.problem
    assert found.accepted > 0
