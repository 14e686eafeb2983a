"""kdgen import: what is written, that it decodes to the same bits, and that nothing is written when something is wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from checkpoints import write_model
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.cli import main
from kdgen.errors import WeightError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Weight
from kdgen.runtime.decode import decode_plain
from kdgen.runtime.model import open_model
from kdgen.runtime.pipeline import open_engine
from kdgen.runtime.request import Request
from kdgen.spec.model import Quantization, load_spec
from kdgen.spec.published import load_config
from kdgen.weights.kdtr import KdtrMetadata, TensorInfo, open_kdtr, write_kdtr
from kdgen.weights.pack import CheckpointWeights, packed_parts
from kdgen.weights.packed import PackedFile
from kdgen.weights.random import random_weights

SMALL = load_spec("tiny").model_copy(update={"num_hidden_layers": 2, "vocab_size": 40, "n_routed_experts": 2, "hidden_size": 64})
INT4 = SMALL.model_copy(update={"quantization": Quantization(group_size=32)})
FAMILIES = {"bf16": SMALL, "int4": INT4}


def kdgen(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="kdgen")


def refused(*arguments: str) -> str:
    result = kdgen(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", INT4, random_weights(INT4, 5), shards=2)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_is_the_packed_model(tmp_path: Path, family: str, compute: Compute) -> None:
    spec = FAMILIES[family]
    folder, out = write_model(tmp_path / "model", spec, random_weights(spec, 5)), tmp_path / "model.kdtr"
    result = kdgen("import", str(folder), str(out), "--dtype", compute, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["schema"], report["dtype"], report["spec_sha256"]) == ("kdgen.import/1", compute, spec.sha256)
    assert report["bytes"] == out.stat().st_size

    packed = PackedFile(out)
    assert packed.spec == spec.model_copy(update={"name": "model"})
    assert packed.compute == compute
    plan = build_plan(spec, compute)
    packed.check(plan)
    whole = safetensors.numpy.load_file(out)
    weights = random_weights(spec, 5)
    for weight in plan.weights:
        for layer in range(*weight.layers) if weight.layers else (0,):
            expected = b"".join(part.tobytes() for part in packed_parts(weight, layer, weights.__getitem__))
            assert b"".join(part.tobytes() for part in packed.parts(weight, layer)) == expected
            assert whole.pop(weight.device_name(layer)).tobytes() == expected
    assert not whole
    assert report["tensors"] == len(open_kdtr(out).tensors)


def test_it_decodes_to_the_same_bits(tmp_path: Path, folder: Path, cpu_backend: Backend) -> None:
    out = tmp_path / "model.kdtr"
    assert kdgen("import", str(folder), str(out)).exit_code == 0
    seen = []
    for path in (folder, out):
        engine = open_engine(open_model(path), 40, backend="cpu").engine
        seen.append((decode_plain(engine, Request([1, 2, 3], 20)).tokens, engine.logits(1).tobytes(), engine.cache_rows().tobytes()))
    assert seen[0] == seen[1]


def test_an_existing_file_needs_force(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "model.kdtr"
    out.write_text("mine")
    assert "exists already; --force replaces it" in refused("import", str(folder), str(out))
    assert out.read_text() == "mine"
    result = kdgen("import", str(folder), str(out), "--force")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{out}: ")
    PackedFile(out)


def test_places_that_will_not_do(tmp_path: Path, folder: Path) -> None:
    assert "must end in .kdtr" in refused("import", str(folder), str(tmp_path / "model.bin"))
    assert "does not exist" in refused("import", str(folder), str(tmp_path / "no" / "model.kdtr"))
    assert "there is no such model" in refused("import", str(tmp_path / "nothing"), str(tmp_path / "model.kdtr"))


def left_over(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {"model"}


def test_damage_writes_nothing(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = dict(random_weights(INT4, 5))
    key = "model.layers.1.mlp.experts.1.down_proj.weight_scale"
    tensors[key] = tensors[key].copy()
    tensors[key][0, 0] = np.inf
    folder, out = write_model(tmp_path / "model", INT4, tensors), tmp_path / "model.kdtr"
    said = refused("import", str(folder), str(out))
    assert f"{folder}/model.safetensors: {key}: element [0, 0] is inf; the file is damaged: download it again" in said
    del tensors[key]
    write_model(folder, INT4, tensors)
    assert f"tensor {key} [64, 4] is missing" in refused("import", str(folder), str(out))
    os.truncate(folder / "model.safetensors", 5000)
    assert "model.safetensors: not a safetensors file, or cut off" in refused("import", str(folder), str(out))
    assert left_over(tmp_path) == set()


def flip(file: Path, byte: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(byte)
        value = stream.read(1)[0]
        stream.seek(byte)
        stream.write(bytes([value ^ 1]))


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_a_flipped_bit_is_refused(tmp_path: Path, folder: Path, compute: Compute) -> None:
    out = tmp_path / "model.kdtr"
    assert kdgen("import", str(folder), str(out), "--dtype", compute).exit_code == 0
    whole = out.read_bytes()
    kdgen("import", str(folder), str(out), "--dtype", compute, "--force")
    assert out.read_bytes() == whole, "a second run writes the same bytes"
    assert "; all checksums match\n" in kdgen("inspect", "--verify", str(out)).stdout
    assert json.loads(kdgen("inspect", "--verify", "--json", str(out)).stdout)["verified"] is True
    place = next(each for each in open_kdtr(out).header.tensors if each.name == "layers.1.experts_down")
    flip(out, place.begin + 5)
    said = f"{out}: bytes 0 to {place.nbytes - 1} of tensor layers.1.experts_down are not those that were written: the file is damaged"
    assert refused("inspect", "--verify", str(out)).endswith(f"{said}; run kdgen import again\n")
    assert said in refused("generate", "--model", str(out), "--prompt-ids", "1", "--backend", "cpu")
    assert kdgen("inspect", str(out)).exit_code == 0
    out.write_bytes(whole)
    flip(out, whole.index(b"rms_norm_eps") + 18)
    said = refused("inspect", str(out))
    assert f"{out}: its header is not what was written" in said and said.endswith("; run kdgen import again\n")
    assert f"{folder}: this is a folder; --verify takes a .kdtr file" in refused("inspect", "--verify", str(folder))
    assert "holds no checksums to compare with" in refused("inspect", "--verify", str(folder / "model-00001-of-00002.safetensors"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_a_value_that_is_not_finite_is_named_wherever_it_is(tmp_path: Path, family: str, compute: Compute) -> None:
    """In a published folder by its tensor and place, in each kind of tensor that holds floats; in a .kdtr whose checksums say that it was
    written so, by the device's tensor."""
    spec = FAMILIES[family]
    plan, whole, out = build_plan(spec, compute), dict(random_weights(spec, 5)), tmp_path / "x.kdtr"
    floats = [key for key, values in whole.items() if values.dtype.kind not in "iu"]
    kinds = {re.sub(r"[0-9]+", "0", key): key for key in floats}  # the last of each kind
    assert len(kinds) > 15
    for number, key in enumerate(kinds.values()):
        values = whole[key].copy()
        place = np.unravel_index(values.size * 2 // 3, values.shape)
        values[place] = (np.nan, np.inf, -np.inf)[number % 3]
        packed = CheckpointWeights({**whole, key: values}.__getitem__, "model", lambda key: f"file of {key}")
        index = re.escape(str(list(map(int, place))))
        with pytest.raises(WeightError, match=rf"^file of {key}: {key}: element {index} is (nan|inf|-inf); the file is damaged"):
            for weight in plan.weights:
                for layer in range(*weight.layers) if weight.layers else (0,):
                    for _ in packed.parts(weight, layer):
                        pass
    for weight in plan.weights:
        layer = weight.layers[1] - 1 if weight.layers else 0
        parts = np.concatenate(list(packed_parts(weight, layer, whole.__getitem__)))
        scales = weight.group_size and (parts.size // 576 * 576 - 2 if weight.layout == "int4_mma_a" else parts.size - 2)
        (parts[scales : scales + 2].view(np.uint16) if weight.group_size else parts)[-1] = 0x7F80 if weight.group_size else np.nan
        metadata = KdtrMetadata("packed", json.dumps(spec.model_dump(mode="json")), json.dumps({"compute": compute}))
        write_kdtr(out, [TensorInfo(weight.device_name(layer), weight.dtype, parts.shape)], [(weight.device_name(layer), parts)], metadata)
        with pytest.raises(
            WeightError, match=rf"x\.kdtr: (byte|element) [0-9]+ of tensor {weight.device_name(layer)} begins a value that is"
        ):
            list(PackedFile(out).parts(weight, layer))


def test_an_interrupt_and_a_full_disk_leave_nothing(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model.kdtr"

    def interrupted(weight: Weight, layer: int, tensors: object, part_bytes: int) -> Iterator[NDArray[Any]]:
        if weight.name == "o_proj":
            raise KeyboardInterrupt
        return packed_parts(weight, layer, tensors, part_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr("kdgen.weights.pack.packed_parts", interrupted)
    assert kdgen("import", str(folder), str(out)).exit_code == 130
    monkeypatch.undo()
    monkeypatch.setattr("kdgen.weights.stream.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert "MB, and its disk has 0 MB left" in refused("import", str(folder), str(out))
    monkeypatch.undo()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kdgen.weights.stream.os.fsync", full)
    assert "cannot be written: No space left on device" in refused("import", str(folder), str(out))
    assert left_over(tmp_path) == set()


# ---- files that are no longer, or never were, what a plan reads -----------------------------------------------------------------


def imported(tmp_path: Path, folder: Path) -> Path:
    out = tmp_path / "model.kdtr"
    assert kdgen("import", str(folder), str(out)).exit_code == 0
    return out


def rewritten(path: Path, metadata: KdtrMetadata, names: dict[str, str] | None = None) -> Path:
    """The same tensors under other metadata, some renamed."""
    opened = open_kdtr(path)
    renamed = [TensorInfo((names or {}).get(info.name, info.name), info.dtype, info.shape) for info in opened.tensors]
    tensors = [(new.name, opened[info.name].copy()) for new, info in zip(renamed, opened.tensors, strict=True)]
    write_kdtr(path, renamed, tensors, metadata)
    return path


def generate(path: Path) -> str:
    return refused("generate", "--model", str(path), "--prompt-ids", "1,2", "--backend", "cpu")


def test_other_layouts_are_refused(tmp_path: Path, folder: Path) -> None:
    out = imported(tmp_path, folder)
    metadata = open_kdtr(out).metadata
    layout = json.loads(metadata.layout)
    older = KdtrMetadata(metadata.kind, metadata.spec, json.dumps(layout | {"version": 0}))
    versions = f"(version 0, now {layout['version']})"
    assert f"packed for other layouts {versions}; `kdgen import` the model again" in generate(rewritten(out, older))
    layout["weights"][-1]["gate_up_tile"] = 16
    other = KdtrMetadata(metadata.kind, metadata.spec, json.dumps(layout))
    assert "its list of weights is another" in generate(rewritten(out, other))
    assert "its tensors are not those" in generate(rewritten(out, metadata, {"norm": "morn"}))


def test_files_that_hold_something_else(tmp_path: Path, folder: Path) -> None:
    out = imported(tmp_path, folder)
    metadata = open_kdtr(out).metadata
    assert "holds 'reference', not packed weights" in generate(rewritten(out, KdtrMetadata("reference", metadata.spec, metadata.layout)))
    for spec, layout in (("[]", metadata.layout), (metadata.spec, "[]"), (metadata.spec, "{}"), (metadata.spec, '{"compute": "f64"}')):
        assert "damaged .kdtr metadata" in generate(rewritten(out, KdtrMetadata("packed", spec, layout)))
    broken = KdtrMetadata("packed", json.dumps(json.loads(metadata.spec) | {"hidden_size": -1}), metadata.layout)
    assert "hidden_size = -1" in generate(rewritten(out, broken))
    other = KdtrMetadata("packed", json.dumps(json.loads(metadata.spec) | {"vocab_size": 41}), metadata.layout)
    assert "packed for other layouts" in generate(rewritten(out, other))
    half = KdtrMetadata("packed", metadata.spec, metadata.layout, '{"tokenizer.json": "\\ud800"}')
    assert "tokenizer.json: is not UTF-8 text" in refused("generate", "--model", str(rewritten(out, half)), "--prompt", "x")
    os.truncate(out, out.stat().st_size - 1)
    assert "cut off" in generate(out)


def test_another_compute_type_is_refused(tmp_path: Path, folder: Path) -> None:
    out = imported(tmp_path, folder)
    message = refused("generate", "--model", str(out), "--prompt-ids", "1,2", "--backend", "cpu", "--dtype", "f32")
    assert "packed for --dtype bf16; import them again for f32" in message


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, folder: Path) -> None:
    packed = PackedFile(imported(tmp_path, folder))
    os.truncate(tmp_path / "model.kdtr", 20000)
    weight = next(weight for weight in build_plan(load_config(folder)).weights if weight.name == "experts_down")
    with pytest.raises(WeightError, match="was cut off while it was read"):
        list(packed.parts(weight, 1))


def test_memory_stays_far_below_the_model(tmp_path: Path) -> None:
    """256 MB of weights, none larger than 17 MB: the process must not grow by half of that."""
    spec = SMALL.model_copy(update={"hidden_size": 512, "moe_intermediate_size": 512, "n_routed_experts": 160})
    folder = write_model(tmp_path / "model", spec, random_weights(spec, 1), shards=3)
    script = (
        "import resource, sys\nfrom click.testing import CliRunner\nfrom kdgen.cli import main\n"
        "import kdgen.weights.packed, kdgen.plan.build, kdgen.runtime.model, kdgen.cli.output\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "result = CliRunner().invoke(main, ['import', sys.argv[1], sys.argv[2]])\n"
        "print(result.exit_code, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder), str(tmp_path / "m.kdtr")], capture_output=True, text=True, check=True)
    code, grown = map(int, done.stdout.split())
    assert code == 0
    assert (tmp_path / "m.kdtr").stat().st_size > 250e6
    assert grown < 100, f"{grown} MiB"


def test_a_read_only_file_system_is_not_called_full(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(".tmp"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, mode)

    real = os.open
    monkeypatch.setattr("kdgen.files.temporary.os.open", read_only)
    monkeypatch.setattr("kdgen.weights.stream.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    out = tmp_path / "model.kdtr"
    assert refused("import", str(folder), str(out)).endswith(f"kdgen: error: {out}: cannot be written: Read-only file system\n")
