"""bf16 experts to the published INT4 format: the rounding, the folder, and what is refused with nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_model
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kdgen.cli import main
from kdgen.errors import WeightError
from kdgen.reference import int4
from kdgen.spec.model import Quantization, Spec, load_spec
from kdgen.spec.published import load_config
from kdgen.weights.checkpoint import Checkpoint
from kdgen.weights.quantize import quantize_matrix
from kdgen.weights.random import random_weights

SMALL = load_spec("tiny").model_copy(update={"num_hidden_layers": 2, "vocab_size": 40, "n_routed_experts": 2, "hidden_size": 64})
BF16 = np.dtype(ml_dtypes.bfloat16)
DENSE = {"first_k_dense_replace": 2, "n_routed_experts": None, "moe_intermediate_size": 0, "num_experts_per_tok": 0} | {
    "n_shared_experts": 0, "routed_scaling_factor": 1.0,
}  # fmt: skip


def kdgen(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="kdgen")


def refused(*arguments: str) -> str:
    result = kdgen(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 70), groups=st.integers(1, 40), spread=st.sampled_from((1e-39, 1e-3, 1, 1e30)))
def test_rounding_is_the_references(seed: int, rows: int, groups: int, spread: float) -> None:
    generator = np.random.default_rng(seed)
    weight = (generator.standard_normal((rows, groups * 32)) * spread).astype(BF16)
    weight[0, :32] = 0
    words, scales = quantize_matrix(weight, 32)
    expected_words, expected_scales = int4.encode(weight, 32)
    np.testing.assert_array_equal(scales.view(np.uint16), expected_scales.view(np.uint16))
    np.testing.assert_array_equal(words, expected_words)


def test_every_bfloat16_quotient_rounds_as_in_float64() -> None:
    """All mantissas against all scales' mantissas, over the magnitudes that do not round to zero."""
    values = np.concatenate([np.arange(128, 256) / 2.0**k for k in range(5)])
    values = np.pad(values, (0, -len(values) % 31)).reshape(-1, 31)
    for largest in range(128, 256):
        weight = np.insert(values, 0, 2.0 * largest, axis=1).astype(BF16)
        for found, expected in zip(quantize_matrix(weight, 32), int4.encode(weight, 32), strict=True):
            assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers(value: float) -> None:
    weight = np.ones((3, 64), BF16)
    weight[1, 33] = value
    with pytest.raises(ValueError, match="finite"):
        quantize_matrix(weight, 32)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_folder(tmp_path: Path, shards: int, prefix: str) -> None:
    tensors = dict(random_weights(SMALL, 5))
    vision = {"vision_tower.patch_embed.proj.weight": np.ones((2, 2), np.float32)} if prefix else None
    source, out = write_model(tmp_path / "model", SMALL, tensors, shards, prefix, vision), tmp_path / "quantized"
    (source / "tokenizer_config.json").write_text("{}")
    (source / "notes.bin").write_text("not wanted")
    result = kdgen("quantize", str(source), str(out), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["schema"], report["matrices"], report["spec"]) == ("kdgen.quantize/1", 6, "quantized")
    names = {file.name for file in out.iterdir()}
    assert names == {file.name for file in source.iterdir()} - {"notes.bin"}

    spec = load_config(out)
    assert spec == SMALL.model_copy(update={"name": "quantized", "quantization": Quantization(group_size=32)})
    read = Checkpoint(out)
    read.validate(spec)
    for key in read:
        stem, _, kind = key.rpartition("_")
        if kind in ("packed", "scale", "shape"):
            words, scales = int4.encode(tensors[stem], 32)
            np.testing.assert_array_equal(read[key], {"packed": words, "scale": scales, "shape": np.array(tensors[stem].shape)}[kind])
        else:
            np.testing.assert_array_equal(read[key].view(np.uint16), tensors[key].view(np.uint16))
    if prefix:
        header = (out / ("model.safetensors" if shards == 1 else "model.safetensors.index.json")).read_text(encoding="latin-1")
        assert "vision_tower.patch_embed.proj.weight" in header


def left_over(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {"model"}


def damaged(folder: Path, key: str, value: float) -> Path:
    tensors: dict[str, NDArray[Any]] = dict(random_weights(SMALL, 5))
    tensors[key] = tensors[key].copy()
    tensors[key][1, 2] = value
    return write_model(folder / "model", SMALL, tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_copied_must_be_finite_too(tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdgen.weights.quantize._COPY_BYTES", 64)
    key = "model.layers.1.self_attn.o_proj.weight"
    text = refused("quantize", str(damaged(tmp_path, key, value)), str(tmp_path / "out"))
    assert f"model.safetensors: {key}: element [1, 2] is {value}; the file is damaged: download it again" in text
    assert left_over(tmp_path) == set()


def test_refusals_write_nothing(tmp_path: Path) -> None:
    key = "model.layers.1.mlp.experts.1.down_proj.weight"
    source = damaged(tmp_path, key, np.nan)
    out = tmp_path / "out"
    assert f"model.safetensors: {key}: weights to quantize must be finite" in refused("quantize", str(source), str(out))
    assert left_over(tmp_path) == set()
    assert "does not exist" in refused("quantize", str(source), str(tmp_path / "no" / "where"))
    assert "nothing: there is no such folder; `kdgen quantize` takes" in refused("quantize", str(tmp_path / "nothing"), str(out))
    assert "config.json: is no folder; `kdgen quantize` takes" in refused("quantize", str(source / "config.json"), str(out))
    out.mkdir()
    (out / "mine").write_text("kept")
    assert "is there already" in refused("quantize", str(source), str(out))
    assert (out / "mine").read_text() == "kept"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization": Quantization(group_size=64)}, "config.json: quantization_config: the routed experts are INT4 already; there is"),
        ({"moe_intermediate_size": 40}, "group size of 32 does not divide moe_intermediate_size 40"),
        (DENSE, "has no routed experts"),
    ],
)
def test_models_that_cannot_be_quantized(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    spec = Spec.model_validate(SMALL.model_dump() | changes)
    source = write_model(tmp_path / "model", spec, random_weights(spec, 1))
    assert reason in refused("quantize", str(source), str(tmp_path / "out"))
    assert left_over(tmp_path) == set()


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model", SMALL, random_weights(SMALL, 5))

    def interrupted(weight: NDArray[Any], group_size: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kdgen.weights.quantize.quantize_matrix", interrupted)
    assert kdgen("quantize", str(source), str(tmp_path / "out")).exit_code == 130
    assert left_over(tmp_path) == set()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model", SMALL, random_weights(SMALL, 5))
    monkeypatch.setattr("kdgen.weights.stream.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert "has 0 MB left" in refused("quantize", str(source), str(tmp_path / "out"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.undo()
    monkeypatch.setattr("kdgen.weights.stream.os.fsync", full)
    assert "cannot be written: No space left on device" in refused("quantize", str(source), str(tmp_path / "out"))
    assert left_over(tmp_path) == set()
    with pytest.raises(WeightError):
        Checkpoint(tmp_path / "out")
