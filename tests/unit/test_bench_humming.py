"""What Humming is asked to do, by a stand-in for its layers: its kernels themselves need a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from kdgen.bench.humming import Humming, open_humming
from kdgen.bench.peers import Torch

BLOCK = 4


class Arrays(Torch):
    """numpy in torch's place; work is run where it would be recorded."""

    def __init__(self) -> None:
        self.bf16 = np.float32

    def random(self, *shape: int) -> Any:
        return np.random.default_rng(sum(shape)).standard_normal(shape)

    def random_words(self, *shape: int) -> Any:
        return np.zeros(shape, np.int32)

    def integers(self, values: NDArray[np.integer[Any]]) -> Any:
        return values

    def recorded(self, calls: Any) -> Any:
        return [call() for call in calls]


class Layer:
    """x [tokens, shape_k] times a matrix of each expert's, by Humming's lists; remembers its results."""

    made: ClassVar[list[Layer]] = []

    def __init__(self, shape_n: int, shape_k: int, config: dict[str, Any], num_experts: int, torch_dtype: object) -> None:
        assert config == {"dtype": "int4", "group_size": 32}
        self.shape_k, self.humming_config = shape_k, "the layer's"
        self.matrix = np.random.default_rng(shape_n).standard_normal((num_experts, shape_n, shape_k))
        self.weight = SimpleNamespace(data=None, shape=(num_experts, shape_n, shape_k // 8))
        self.weight_scale = SimpleNamespace(data=None, shape=(num_experts, shape_n, shape_k // 32))
        self.results: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self.made.append(self)

    def transform(self) -> None:
        assert self.weight.data.dtype == np.int32 and self.weight_scale.data is not None

    def __call__(self, x: NDArray[Any], top_k: int, sorted_ids: NDArray[Any], expert_ids: NDArray[Any], **rest: Any) -> NDArray[Any]:
        assert int(rest["num_tokens_padded"]) == len(sorted_ids) == len(expert_ids) * BLOCK
        y = np.full((len(x) * top_k, self.matrix.shape[1]), np.nan)
        for place, assignment in enumerate(sorted_ids):
            if assignment < len(y):
                assert np.isnan(y[assignment]).all()
                y[assignment] = self.matrix[expert_ids[place // BLOCK]] @ x[assignment // top_k]
        self.results.append((x, y))
        return y


@pytest.fixture
def humming(monkeypatch: pytest.MonkeyPatch) -> None:
    Layer.made = []

    def heuristics(config: object, *, shape_m: int, use_batch_invariant: bool, gemm_type: str) -> dict[str, Any]:
        assert config == "the layer's" and gemm_type == "indexed"
        return {"block_shape": [BLOCK, 1, 1], "for": shape_m}

    def process_input(inputs: NDArray[Any], activation_type: str, activation_impl: str) -> tuple[NDArray[Any], None, None]:
        assert activation_type == "binary_split" and "expf" in activation_impl
        gate, up = np.split(inputs, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up, None, None

    for name, members in (("layer", {"HummingLayer": Layer}), ("ops", {"process_input": process_input}),
                          ("tune", {"get_heuristics_config": heuristics})):  # fmt: skip
        module = ModuleType(f"humming.{name}")
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, f"humming.{name}", module)
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setattr("kdgen.bench.humming.version", lambda name: "0.0")


def test_every_assignment_meets_its_expert_once(humming: None) -> None:
    found = open_humming(Arrays(), 16, 64, 32, 32)
    assert isinstance(found, Humming)
    rng = np.random.default_rng(0)
    routings = [np.stack([rng.permutation(16)[:3] for _ in range(7)]).astype(np.int32) for _ in range(2)]
    assert [name for name, _ in found.contenders(routings)] == ["Humming 0.0", "Humming 0.0, bits kept"]
    gate_up, down = Layer.made
    assert len(gate_up.results) == len(down.results) == 4  # two calls in each mode
    for (x, y), (h, z), routing in zip(gate_up.results, down.results, routings * 2, strict=True):
        for assignment, expert in enumerate(routing.reshape(-1)):
            assert np.allclose(y[assignment], gate_up.matrix[expert] @ x[assignment // 3])
            assert np.allclose(z[assignment], down.matrix[expert] @ h[assignment])


def test_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    monkeypatch.setitem(sys.modules, "humming.layer", None)
    assert open_humming(Arrays(), 16, 64, 32, 32) == "Humming is not installed (pip install humming-kernels)"


def test_where_it_does_not_run(humming: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Layer) -> None:
        raise RuntimeError("No suitable CUDA 13 environment found.")

    monkeypatch.setattr(Layer, "transform", fails)
    assert open_humming(Arrays(), 16, 64, 32, 32) == "Humming does not run here: No suitable CUDA 13 environment found."
