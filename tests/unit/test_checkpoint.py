"""Reading published checkpoints: whole ones, in every arrangement, and damaged ones, each refused with one clear message."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoints import write_drafter, write_model, write_safetensors
from hypothesis import given, settings
from numpy.typing import NDArray
from strategies import specs

from kdgen.errors import WeightError
from kdgen.spec.model import Quantization, Spec, load_spec
from kdgen.spec.published import load_config
from kdgen.verify.published import reference_of
from kdgen.weights.checkpoint import Checkpoint, as_stored
from kdgen.weights.random import random_weights

SMALL = load_spec("tiny").model_copy(update={"num_hidden_layers": 2, "vocab_size": 40, "n_routed_experts": 2, "hidden_size": 64})
INT4 = SMALL.model_copy(update={"quantization": Quantization(group_size=32)})


def tensors(spec: Spec = SMALL) -> dict[str, NDArray[Any]]:
    return dict(random_weights(spec, 5))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("spec", [SMALL, INT4], ids=["bf16", "int4"])
def test_every_arrangement_reads_the_same(tmp_path: Path, spec: Spec, shards: int, prefix: str) -> None:
    vision = {"vision_tower.patch_embed.proj.weight": np.zeros((2, 2), np.float32), "mm_projector.proj.0.bias": np.zeros(3, np.float32)}
    write_model(tmp_path, spec, tensors(spec), shards, prefix, extra=vision if prefix else None)
    read = Checkpoint(tmp_path)
    read.validate(spec)
    assert load_config(tmp_path).sha256 == spec.sha256
    expected = tensors(spec)
    assert read.names() == sorted(expected)
    for key, array in expected.items():
        assert read[key].dtype == array.dtype
        np.testing.assert_array_equal(read[key].astype(np.float64), array.astype(np.float64))
        assert not read[key].flags.writeable


def test_one_file_shards_without_index_and_symbolic_links(tmp_path: Path) -> None:
    whole = tensors()
    keys = list(whole)
    write_safetensors(tmp_path / "a.safetensors", {key: whole[key] for key in keys[:5]})
    write_safetensors(tmp_path / "b.safetensors", {key: whole[key] for key in keys[5:]})
    Checkpoint(tmp_path).validate(SMALL)
    assert Checkpoint(tmp_path / "a.safetensors").names() == sorted(keys[:5])
    linked = tmp_path / "linked"  # as a hub's cache lays a folder out
    linked.mkdir()
    write_safetensors(tmp_path / "blob", whole)
    (linked / "model.safetensors").symlink_to(tmp_path / "blob")
    Checkpoint(linked).validate(SMALL)


def test_a_multi_token_prediction_layer_is_left_alone(tmp_path: Path) -> None:
    layer = {"model.layers.2.eh_proj.weight": np.zeros((2, 4), np.float32), "model.layers.2.enorm.weight": np.zeros(2, np.float32)}
    write_model(tmp_path, SMALL, tensors(), extra=layer)
    Checkpoint(tmp_path).validate(SMALL)


def refused(folder: Path, spec: Spec = SMALL) -> str:
    with pytest.raises(WeightError) as error:
        read = Checkpoint(folder)
        read.validate(spec)
        for key in read:
            read[key]
    return str(error.value)


def test_a_layer_whose_number_is_no_number(tmp_path: Path) -> None:
    layer = f"model.layers.{'9' * 900}.eh_proj.weight"
    assert "is not part of this model" in refused(write_model(tmp_path, SMALL, tensors(), extra={layer: np.zeros(2, np.float32)}))


def test_missing_extra_wrong_shape_and_wrong_type_are_all_listed(tmp_path: Path) -> None:
    whole = tensors()
    del whole["model.norm.weight"]
    whole["model.layers.0.self_attn.extra.weight"] = np.zeros(3, np.float32)
    whole["model.layers.1.input_layernorm.weight"] = np.zeros(7, ml_dtypes.bfloat16)
    whole["model.embed_tokens.weight"] = whole["model.embed_tokens.weight"].T.copy()
    whole["lm_head.weight"] = whole["lm_head.weight"].astype(np.float16)
    message = refused(write_model(tmp_path, SMALL, whole))
    assert "tensor model.norm.weight [64] is missing" in message
    assert "model.layers.0.self_attn.extra.weight [3] is not part of this model" in message
    assert "model.layers.1.input_layernorm.weight has shape [7], the config says [64]" in message
    assert "model.embed_tokens.weight has shape [64, 40], the config says [40, 64]" in message
    assert "lm_head.weight is stored as F16, expected BF16" in message
    assert len(message.splitlines()) == 5


def test_parts_of_int4_in_other_types(tmp_path: Path) -> None:
    """Packed words and scales are taken as the bits that they are, so no other type will do."""
    whole, key = tensors(INT4), "model.layers.1.mlp.experts.1.down_proj.weight"
    whole[f"{key}_packed"] = whole[f"{key}_packed"].astype(np.int64)
    whole[f"{key}_scale"] = whole[f"{key}_scale"].astype(np.float32)
    message = refused(write_model(tmp_path, INT4, whole), INT4)
    assert f"{key}_packed is stored as I64, expected I32" in message
    assert f"{key}_scale is stored as F32, expected BF16" in message
    assert len(message.splitlines()) == 2


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    message = refused(write_model(tmp_path, SMALL, {}))
    assert len(message.splitlines()) == 21
    assert "more" in message.splitlines()[-1]


@pytest.mark.parametrize("cut", [0, 4, 20, 900, -1])
def test_a_file_cut_short_anywhere(tmp_path: Path, cut: int) -> None:
    write_model(tmp_path, SMALL, tensors())
    file = tmp_path / "model.safetensors"
    os.truncate(file, cut if cut >= 0 else file.stat().st_size - 1)
    message = refused(tmp_path)
    assert "model.safetensors" in message
    assert "cut off" in message
    assert "\n" not in message


def test_missing_and_truncated_shards_are_both_named(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL, tensors(), shards=3)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    os.truncate(tmp_path / "model-00002-of-00003.safetensors", 3000)
    message = refused(tmp_path)
    assert "model-00001-of-00003.safetensors: missing" in message
    assert "model-00002-of-00003.safetensors: cut off" in message


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../b.safetensors", "c:\\x", "", "."])
def test_an_index_that_points_outside_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert "points outside its folder" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\xff"])
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    assert "is no index" in refused(tmp_path)


def test_an_index_that_disagrees_with_its_shards(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL, tensors(), shards=2)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    moved = index["weight_map"].pop("lm_head.weight")
    file.write_text(json.dumps(index))
    assert refused(tmp_path) == f"{tmp_path}: tensor lm_head.weight [40, 64] is not in the index, though {moved} has it"
    index["weight_map"]["invented.weight"] = moved
    names = index["weight_map"]
    other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}.get(names["model.norm.weight"], min(names.values()))
    names["model.norm.weight"] = other
    file.write_text(json.dumps(index))
    message = refused(tmp_path)
    assert "invented.weight is not in" in message
    assert f"model.norm.weight is not in {other}" in message


def test_an_index_decides_where_a_tensor_is(tmp_path: Path) -> None:
    """A later shard may lay a tensor over an older copy, and old ones may linger that no index names."""
    whole = tensors()
    write_model(tmp_path, SMALL, whole, shards=2)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    newer = {"lm_head.weight": whole["lm_head.weight"] * 2, "old.weight": np.zeros(3, np.float32)}
    write_safetensors(tmp_path / "model-overlay-00001.safetensors", newer)
    index["weight_map"]["lm_head.weight"] = "./model-overlay-00001.safetensors"
    file.write_text(json.dumps(index))
    for other in ("model.fp16.safetensors.index.json", "consolidated.safetensors.index.json"):
        (tmp_path / other).write_text('{"weight_map": {"a": "b"}}')
    read = Checkpoint(tmp_path)
    read.validate(SMALL)
    np.testing.assert_array_equal(read["lm_head.weight"], newer["lm_head.weight"])
    file.unlink()
    assert "none is model.safetensors.index.json" in refused(tmp_path)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("", "text.", "of 35 tensors have 'text.' before them (model."),
        ("model.", "", "of 34 tensors lack 'model.' (model.layers.0.self_attn.kv_a_proj_with_mqa.weight is called layers.0."),
        ("model.", "transformer.decoder.", "of 34 tensors have 'transformer.decoder.' for 'model.' (model.layers."),
    ],
)
def test_names_with_another_prefix_are_one_line(tmp_path: Path, ours: str, theirs: str, said: str) -> None:
    named = {theirs + key.removeprefix(ours) if key.startswith(ours) else key: value for key, value in tensors().items()}
    message = refused(write_model(tmp_path, SMALL, named))
    assert said in message and "\n" not in message


def test_element_types_of_what_is_skipped_do_not_matter(tmp_path: Path) -> None:
    """Nor does metadata that is null. The part is read by no kernel, and kept byte for byte by `kdgen quantize`."""
    whole = tensors() | {"vision_tower.scale": np.arange(3, dtype=np.uint8), "model.layers.2.eh_proj.weight": np.arange(4, dtype=np.uint8)}
    file = write_model(tmp_path, SMALL, whole) / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    entries["__metadata__"] = None
    for name in ("vision_tower.scale", "model.layers.2.eh_proj.weight"):
        entries[name]["dtype"] = "F8_E8M0"
    header(file, entries, data[8 + length :])
    Checkpoint(tmp_path).validate(SMALL)
    with safetensors.safe_open(file, "np") as theirs:
        assert len(theirs.keys()) == len(whole)
    entries["lm_head.weight"]["dtype"], entries["lm_head.weight"]["shape"] = "F8_E8M0", [40, 128]
    header(file, entries, data[8 + length :])
    assert "lm_head.weight has shape [40, 128]" in refused(tmp_path)


POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_git_lfs_pointer_is_called_one(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, SMALL, tensors(), shards=2)
    (tmp_path / name).write_bytes(POINTER)
    message = refused(tmp_path)
    assert message.startswith(f"{tmp_path / name}: ") and "Git LFS pointer" in message and "`git lfs pull`" in message
    assert "\n" not in message


@pytest.mark.parametrize("dtype", [None, np.float32])
def test_a_head_that_differs_from_the_embedding_is_used(tmp_path: Path, dtype: type | None) -> None:
    tied = SMALL.model_copy(update={"tie_word_embeddings": True})
    whole = tensors()
    copy = whole["model.embed_tokens.weight"].copy() if dtype is None else whole["model.embed_tokens.weight"].astype(dtype)
    for head, untied in ((whole["lm_head.weight"], True), (copy, False)):
        read = Checkpoint(write_model(tmp_path, tied, whole | {"lm_head.weight": head}))
        assert as_stored(tied, read).tie_word_embeddings is not untied
        read.validate(as_stored(tied, read))
    without = {key: value for key, value in whole.items() if key != "lm_head.weight"}
    assert as_stored(tied, Checkpoint(write_model(tmp_path, tied, without))).tie_word_embeddings
    read = Checkpoint(write_model(tmp_path, tied, whole | {"lm_head.weight": whole["lm_head.weight"][:7]}))
    with pytest.raises(WeightError, match=r"lm_head.weight has shape \[7, 64\], the config says \[40, 64\]"):
        read.validate(as_stored(tied, read))


def header(file: Path, entries: object, data: bytes = b"") -> Path:
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}', "does not begin where the one before it ends"),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', "appears twice"),
        ('{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.encode("utf-16"), "its header is not JSON"),
        (b'{"__metadata__":5,"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', "__metadata__ is not a table of strings"),
    ],
)
def test_headers_that_safetensors_itself_or_no_kernel_reads(tmp_path: Path, entries: bytes, reason: str) -> None:
    """The rules of headers are tests/unit/test_kdtr.py's; these are some that decide what weights are."""
    file = header(tmp_path / "model.safetensors", entries, b"\0" * 16)
    message = refused(tmp_path)
    assert message.startswith(f"{file}: ") and reason in message


def test_a_name_that_would_forge_a_line(tmp_path: Path) -> None:
    message = refused(write_model(tmp_path, SMALL, tensors(), extra={"x\nkdgen: all is well": np.zeros(1, np.float32)}))
    assert "x\\nkdgen: all is well" in message and "\n" not in message


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    """As a hub's cache has it, once the file behind it is gone."""
    write_model(tmp_path, SMALL, tensors())
    (tmp_path / "model.safetensors").rename(tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("gone")
    assert refused(tmp_path) == f"{tmp_path}/model.safetensors: is no file, or a link that leads nowhere; download it again"


def test_an_unaligned_tensor_is_read(tmp_path: Path) -> None:
    values = np.arange(5, dtype=np.float32)
    text = json.dumps({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}).encode()
    text += b" " * (3 - len(text) % 4)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + values.tobytes())
    array = Checkpoint(tmp_path)["a"]
    assert array.flags.aligned
    np.testing.assert_array_equal(array, values)


def test_int4_shapes_that_contradict_the_weights(tmp_path: Path) -> None:
    whole = tensors(INT4)
    key = "model.layers.1.mlp.experts.1.down_proj.weight_shape"
    whole[key] = whole[key][::-1].copy()
    assert f"{key} says" in refused(write_model(tmp_path, INT4, whole), INT4)
    whole[key] = whole[key][::-1].astype(np.int32)  # as Kimi K2.5 stores it
    write_model(tmp_path, INT4, whole)
    Checkpoint(tmp_path).validate(INT4)


def test_a_config_that_contradicts_its_tensors(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL, tensors())
    assert "weight_packed" in refused(tmp_path, INT4)
    assert "model.layers.2." in refused(tmp_path, SMALL.model_copy(update={"num_hidden_layers": 3}))


def test_a_config_that_claims_billions_of_parts(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL, tensors())
    for key in ("num_hidden_layers", "n_routed_experts"):
        assert "and thousands more" in refused(tmp_path, SMALL.model_copy(update={key: 2**31 - 1}))


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert "holds no safetensors file" in refused(tmp_path)
    assert "holds no safetensors file" in refused(tmp_path / "nowhere")


@settings(max_examples=10)
@given(spec=specs(quantized=None, max_layers=2))
def test_random_weights_are_a_checkpoint_of_their_spec(tmp_path_factory: pytest.TempPathFactory, spec: Spec) -> None:
    if spec.draft is not None:  # whose tensors are among the others, and are published apart from them
        weights = random_weights(spec, 1)
        tensors = {key: weights[key] for group in spec.draft.tensors() for key in group.names()}
        Checkpoint(write_drafter(tmp_path_factory.mktemp("drafter"), spec.draft, tensors)).validate(spec.draft)
        spec = spec.with_draft(None)
    folder = write_model(tmp_path_factory.mktemp("model"), spec, random_weights(spec, 1))
    read = Checkpoint(folder)
    read.validate(spec)
    logits = reference_of(spec, read).forward([0, 1, 1]).logits
    assert logits.shape == (3, spec.vocab_size)
    assert np.isfinite(logits).all()


def test_random_weights_depend_on_seed_and_key_alone() -> None:
    first, again, other = random_weights(INT4, 1), random_weights(INT4, 1), random_weights(INT4, 2)
    for key in reversed(list(first)):
        np.testing.assert_array_equal(first[key].astype(np.float64), again[key].astype(np.float64))
    assert (first["lm_head.weight"] != other["lm_head.weight"]).any()
    bigger = random_weights(INT4.model_copy(update={"num_hidden_layers": 3}), 1)
    np.testing.assert_array_equal(bigger["lm_head.weight"], first["lm_head.weight"])
