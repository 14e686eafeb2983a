"""Tensor parallelism in the plan: what ranks share, what each keeps, and which numbers of them a model allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kdgen.codegen.render import render
from kdgen.errors import KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Plan, Weight
from kdgen.plan.shard import EXCHANGES, Shard
from kdgen.spec.model import Spec, load_spec
from kdgen.verify.variants import variants
from kdgen.weights.formats import numpy_dtype
from kdgen.weights.pack import packed_parts
from kdgen.weights.random import random_weights

BOTH: tuple[Compute, ...] = ("f32", "bf16")


@pytest.mark.parametrize("compute", BOTH)
@pytest.mark.parametrize(("name", "ranks"), [("tiny", 2), ("tiny", 4), ("k26", 8), ("tiny-dflash", 2)])
def test_ranks_differ_in_weights_and_first_tokens_alone(name: str, ranks: int, compute: Compute) -> None:
    first, last = (build_plan(load_spec(name), compute, shard=Shard(ranks, rank)) for rank in (0, ranks - 1))
    assert first.kernels == last.kernels and first.buffers == last.buffers and first.gathers == last.gathers
    assert [r.text for r in render(first)] == [r.text for r in render(last)]
    for mine, theirs in zip(first.weights, last.weights, strict=True):
        assert dataclasses.replace(mine, part=None) == dataclasses.replace(theirs, part=None)
    for program, other in zip(first.programs, last.programs, strict=True):
        pairs = zip(program.launches(), other.launches(), strict=True)
        assert {mine.kernel for (mine, _), (theirs, _) in pairs if mine != theirs} <= {"embed", "argmax", "draft_fc"}


def test_a_drafter_is_shared_where_its_dims_allow_it() -> None:
    """Of K2.6's on eight ranks each holds an eighth, norms aside; with three key heads two ranks have it whole."""
    spec = load_spec("k26")
    whole, part = build_plan(spec), build_plan(spec, shard=Shard(8, 3))
    total = sum(weight.total_bytes for weight in whole.draft_weights)
    everywhere = sum(weight.total_bytes for weight in part.draft_weights if weight.part is None)
    assert everywhere < 1e6
    assert sum(weight.total_bytes for weight in part.draft_weights) == (total - everywhere) // 8 + everywhere
    assert part.buffer("draft_cache").bytes == whole.buffer("draft_cache").bytes // 8
    assert spec.draft is not None
    odd = spec.with_draft(spec.draft.model_copy(update={"num_attention_heads": 24, "num_key_value_heads": 3}))
    alone, beside = build_plan(odd), build_plan(odd, shard=Shard(2))
    assert beside.draft_weights == alone.draft_weights and any("drafter is on each rank" in note for note in beside.notes)


def test_one_rank_has_no_collectives_and_no_parts() -> None:
    plan = build_plan(load_spec("tiny"), shard=Shard(1, 0))
    assert plan == build_plan(load_spec("tiny"))
    assert not plan.gathers and not any(weight.part for weight in plan.weights)


def test_weights_are_shared_evenly() -> None:
    """Of K2.6 on eight ranks each holds an eighth, and what is on every rank: latents, router, norms."""
    whole, part = build_plan(load_spec("k26")), build_plan(load_spec("k26"), shard=Shard(8))
    total = sum(weight.total_bytes for weight in whole.weights)
    everywhere = sum(weight.total_bytes for weight in part.weights if weight.part is None)
    assert {weight.name for weight in part.weights if weight.part is None} == {
        "norm", "input_layernorm", "post_attention_layernorm", "kv_a_layernorm", "q_a_layernorm", "q_a_kv_a_proj", "router", "router_bias",
    }  # fmt: skip
    assert sum(weight.total_bytes for weight in part.weights) == (total - everywhere) // 8 + everywhere


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 2), ("tiny", 4), ("tiny-v2", 2)])
def test_parts_are_cut_where_they_should_be(name: str, ranks: int) -> None:
    """Parts of rows below each other, and parts of columns side by side, are the whole; in the generic layouts, whose order is plain."""
    spec = _spec(name)
    weights = random_weights(spec, 3)
    plans = [build_plan(spec, "f32", shard=Shard(ranks, rank)) for rank in range(ranks)]
    for place, weight in enumerate(build_plan(spec, "f32").weights):
        layer = weight.layers[0] if weight.layers else 0
        parts = [_logical(plan.weights[place], layer, weights) for plan in plans]
        expected = _logical(weight, layer, weights)
        cut = plans[0].weights[place].part
        if cut is None:
            assert all(np.array_equal(part, expected) for part in parts)
        elif "gate_up" in weight.assembly:
            gates, ups = ([np.split(part, 2, axis=1)[half] for part in parts] for half in (0, 1))
            assert np.array_equal(np.concatenate([*gates, *ups], axis=1), expected)
        else:
            axis = 2 if cut.axis == 1 else 0 if weight.assembly in ("w_uk", "w_uv") else 1
            assert np.array_equal(np.concatenate(parts, axis=axis), expected)


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 4), ("tiny-v2", 2)])
def test_layouts_for_tensor_cores_are_made_of_the_same_parts(name: str, ranks: int) -> None:
    """A packed part is what packing makes of a checkpoint that has no more than this part."""
    spec = _spec(name)
    weights = random_weights(spec, 3)
    plan = build_plan(spec, "bf16", shard=Shard(ranks, 1))
    for weight in plan.weights:
        layer = weight.layers[0] if weight.layers else 0

        def cut(key: str, weight: Weight = weight) -> np.ndarray:
            matrix = weights[key]
            return matrix if weight.part is None else np.ascontiguousarray(np.split(matrix, ranks, axis=weight.part.axis)[1])

        whole = dataclasses.replace(weight, part=None)
        expected = [part.tobytes() for part in packed_parts(whole, layer, cut)]
        assert [part.tobytes() for part in packed_parts(weight, layer, weights.__getitem__)] == expected
        assert sum(map(len, expected)) == weight.stored_bytes


def _spec(name: str) -> Spec:
    return next((spec for spec in variants() if spec.name == name), None) or load_spec(name)


def _logical(weight: Weight, layer: int, weights: Mapping[str, Any]) -> np.ndarray:
    """[batch, rows, cols]; of INT4, stored values and scales: [batch, rows, cols, 2]."""
    flat = np.concatenate([part.reshape(-1) for part in packed_parts(weight, layer, weights.__getitem__)])
    batch, rows, cols = weight.logical
    if weight.layout == "row_major":
        return flat.reshape(batch, rows, cols)
    if weight.layout == "k_major":
        return flat.view(numpy_dtype(weight.dtype)).reshape(batch, cols, rows).swapaxes(1, 2)
    one, scales_at = flat.reshape(batch, -1), cols // 8 * rows * 4
    words = np.ascontiguousarray(one[:, :scales_at]).view(np.uint32).reshape(batch, cols // 8, rows)
    scales = np.ascontiguousarray(one[:, scales_at:]).view(np.uint16).reshape(batch, cols // weight.group_size, rows)
    stored = (words[:, :, None, :] >> (4 * np.arange(8, dtype=np.uint32))[None, None, :, None] & 15).reshape(batch, cols, rows)
    return np.stack([stored, np.repeat(scales, weight.group_size, axis=1)], axis=-1).swapaxes(1, 2)


@pytest.mark.parametrize(
    ("name", "ranks", "reason"),
    [
        ("k26", 3, r"vocab_size 163840 is no multiple of 3; .*Numbers that can: 1, 2, 4, 8, 16, 32, 64"),
        ("tiny2", 4, "num_attention_heads 6 is no multiple of 4"),
        ("tiny", 0, "0 ranks; 1 to 64 can share a model"),
        ("tiny", 65, "65 ranks; 1 to 64 can share a model"),
    ],
)
def test_numbers_of_ranks_that_do_not_divide_a_model(name: str, ranks: int, reason: str) -> None:
    with pytest.raises(KdgenError, match=reason):
        build_plan(load_spec(name), shard=Shard(ranks))


@pytest.mark.parametrize("name", ["tiny", "tiny2", "tiny-dflash", "k26"])
def test_sums_of_two_ranks_have_their_norm_in_them(name: str) -> None:
    """In decoding each norm of the residual is in the sum before it, and takes that norm's weights; prefill does one after the other."""
    plan, apart = (build_plan(load_spec(name), shard=Shard(2, 1, exchange)) for exchange in EXCHANGES[::-1])
    assert "rank_sum_norm" not in {kernel.name for kernel in apart.kernels}

    def gains(plan: Plan, program: str, kernel: str) -> list[str]:
        """The weights of the norms in ``kernel``."""
        found = []
        for launch, layer in plan.program(program).launches():
            if launch.kernel == kernel:
                gain = launch.argument("weight")
                found.append(f"{layer + gain.value}.{gain.name}" if gain.kind == "layer_weight" else gain.name)
        return found

    for program in ("decode", "verify"):
        kernels = [launch.kernel for launch, _ in plan.program(program).launches()]
        norms = gains(plan, program, "rank_sum_norm")
        assert norms == gains(apart, program, "rmsnorm_hidden") and len(norms) == 2 * load_spec(name).num_hidden_layers + 1
        assert norms[-1] == "norm" and "rmsnorm_hidden" not in kernels
        assert len(kernels) < len([launch for launch, _ in apart.program(program).launches()])
    assert gains(plan, "prefill", "rmsnorm_hidden") == gains(apart, "prefill", "rmsnorm_hidden")
    assert "rank_sum_norm" not in {launch.kernel for launch, _ in plan.program("prefill").launches()}


def test_sums_of_many_ranks_are_launches_of_their_own() -> None:
    plan = build_plan(load_spec("k26"), shard=Shard(8, 0, "peer"))
    assert "rank_sum" in {kernel.name for kernel in plan.kernels} and "rank_sum_norm" not in {kernel.name for kernel in plan.kernels}


def test_groups_of_int4_are_not_cut() -> None:
    values = load_spec("k26").model_dump(mode="json") | {"moe_intermediate_size": 96, "draft": None, "intermediate_size": 96}
    with pytest.raises(KdgenError, match="a rank's 48 of moe_intermediate_size are no whole groups of 32 INT4 weights"):
        build_plan(Spec.from_mapping(values), shard=Shard(2))


def test_no_such_rank() -> None:
    with pytest.raises(KdgenError, match="no rank 2 among 2"):
        build_plan(load_spec("tiny"), shard=Shard(2, 2))
