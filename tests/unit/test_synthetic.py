"""Made-up weights of large models, on models small enough to look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.drafters.synthetic import ReplayDrafter
from kdgen.errors import KdgenError, SpecError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits, Plan
from kdgen.runtime.decode import decode_plain, decode_tree
from kdgen.runtime.model import random_model, shorten
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.request import Request
from kdgen.spec.fields import TensorGroup
from kdgen.spec.model import Quantization, Spec, load_spec
from kdgen.verify.decoding.recording import RecordingEngine, differing_bits
from kdgen.weights.formats import numpy_dtype
from kdgen.weights.pack import CheckpointWeights
from kdgen.weights.random import random_weights
from kdgen.weights.synthetic import SyntheticWeights, checkpoint_bytes

TINY = load_spec("tiny")
INT4 = TINY.model_copy(update={"quantization": Quantization(group_size=32)})
SPECS = {"bf16": TINY, "int4": INT4, "float32": TINY.model_copy(update={"dtype": "float32"})}


class WithVectors(Spec):
    """A model with vectors that no published model has."""

    def layer_tensors(self, layer: int) -> Iterator[TensorGroup]:
        yield from super().layer_tensors(layer)
        for name in ("residual_scale", "gates.weight", "mixing_bias"):
            yield TensorGroup(f"model.layers.{layer}.{name}", (2000,), "small")
        yield TensorGroup(f"model.layers.{layer}.step", (), "small")


def test_vectors_of_any_name_get_values() -> None:
    """A vector lies around 1, a bias around 0."""
    weights = random_weights(WithVectors(**TINY.model_dump()), 5)
    for name, middle in (("residual_scale", 1), ("gates.weight", 1), ("mixing_bias", 0)):
        values = weights[f"model.layers.1.{name}"].astype(np.float64)
        assert values.shape == (2000,) and abs(values.mean() - middle) < 0.02 and abs(values.std() - 0.1) < 0.02, name
    assert 0.5 < float(weights["model.layers.1.step"]) < 1.5
    assert (weights["model.layers.1.gates.weight"] != weights["model.layers.2.gates.weight"]).any()


def whole(weights: SyntheticWeights, plan: Plan) -> dict[str, NDArray[Any]]:
    found = {}
    for weight in plan.weights:
        for layer in range(*weight.layers) if weight.layers else (0,):
            parts = [part.copy() for part in weights.parts(weight, layer)]
            assert all(part.ndim == 1 and part.dtype == numpy_dtype(weight.dtype) for part in parts)
            found[weight.device_name(layer)] = np.concatenate(parts)
            assert found[weight.device_name(layer)].nbytes == weight.stored_bytes
    return found


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("family", SPECS)
def test_sizes_scales_and_seeds(family: str, compute: Compute) -> None:
    spec = SPECS[family]
    plan = build_plan(spec, compute)
    weights, again, other = (whole(SyntheticWeights(spec, seed), plan) for seed in (1, 1, 2))
    drawn = CheckpointWeights(random_weights(spec, 1).__getitem__)
    for weight in plan.weights:
        layer = weight.layers[0] if weight.layers else 0
        name = weight.device_name(layer)
        assert weights[name].tobytes() == again[name].tobytes()
        assert weights[name].tobytes() != other[name].tobytes()
        if not weight.group_size:
            expected = np.concatenate(list(drawn.parts(weight, layer))).astype(np.float32)
            values = weights[name].astype(np.float32)
            assert abs(values.std() / expected.std() - 1) < 0.05, name
    experts = weights["layers.1.experts_down"].reshape(TINY.n_routed_experts or 0, -1)
    assert len({expert.tobytes() for expert in experts}) == len(experts)
    assert weights["layers.1.experts_down"].tobytes() != weights["layers.2.experts_down"].tobytes()


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("family", ["bf16", "int4"])
def test_a_model_made_of_them_decodes(family: str, compute: Compute, cpu_backend: Backend) -> None:
    spec = SPECS[family]
    plan = build_plan(spec, compute, Limits(max_context=64))
    target = RecordingEngine(start_engine(spec, plan, cpu_backend, SyntheticWeights(spec, 3)))
    plain = decode_plain(target, Request([5, 17, 9], 40))
    logits = np.stack(target.logits)
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 8
    assert len(set(plain.tokens)) > 10
    tree = decode_tree(target, Request([5, 17, 9], 40, drafter=ReplayDrafter((5, 17, 9, *plain.tokens), spec.vocab_size, 0.3), budget=15))
    assert tree.tokens == plain.tokens
    assert differing_bits(np.stack(target.logits), logits) == 0


def test_dims_that_need_padding() -> None:
    spec = TINY.model_copy(update={"vocab_size": 101, "moe_intermediate_size": 96, "quantization": Quantization(group_size=32)})
    plan = build_plan(spec, "bf16")
    weights = whole(SyntheticWeights(spec, 1), plan)
    lanes = weights["lm_head"].reshape(7, 16, 8, 4, 2, 2, 2).astype(np.float32)  # [tile][step][g][t][half][high][odd]
    assert lanes[6, ..., 0, :].any()
    assert not lanes[6, ..., 1, :].any(), "rows 104 and on"


def test_large_models_get_them_and_small_ones_do_not() -> None:
    small, large = random_model("tiny", 3), random_model("k26", 2)
    assert (small.spec.num_hidden_layers, small.spec.first_k_dense_replace) == (3, 1)
    assert isinstance(small.weights, CheckpointWeights)
    assert isinstance(large.weights, SyntheticWeights)
    drawn = sum(array.nbytes for array in random_weights(small.spec, 0).values())
    assert checkpoint_bytes(small.spec) == drawn - 2 * 8 * 2, "two layers' router biases are drawn as float32"


def dims(spec: Spec) -> tuple[int, int]:
    return spec.num_hidden_layers, spec.first_k_dense_replace


def test_cutting_layers() -> None:
    v3 = load_spec("deepseek-v3")
    assert [dims(shorten(v3, n)) for n in (1, 2, 3, 4, 61)] == [(1, 0), (2, 1), (3, 2), (4, 3), (61, 3)]
    with pytest.raises(KdgenError, match="has 61 layers and cannot be cut to 62"):
        shorten(v3, 62)
    dense = Spec.from_mapping(TINY.model_dump(mode="json") | {"first_k_dense_replace": 4, "n_routed_experts": None})
    assert dims(shorten(dense, 2)) == (2, 2)
    with pytest.raises(SpecError):
        random_model("no-such-spec")


def test_weights_of_millions_of_experts_are_not_made_up(tmp_path: Path) -> None:
    file = tmp_path / "deep.yaml"
    file.write_text(load_spec("tiny").model_copy(update={"num_hidden_layers": 4096, "n_routed_experts": 512}).to_yaml())
    with pytest.raises(KdgenError, match="--layers"):
        random_model(str(file))
    assert random_model(str(file), 2).spec.num_hidden_layers == 2
