"""Routed experts to INT4, in the format that Kimi K2 is published in: compressed-tensors pack-quantized, symmetric, group 32.

Round to nearest, group by group. Every other tensor is copied byte for byte, and the folder keeps its arrangement: the same
shards under the same names, an index where there was one, and whatever else the model needs (tokenizer, generation defaults).
"""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kdgen.errors import KdgenError, WeightError
from kdgen.spec.model import MAX_JSON_BYTES, Quantization, Spec
from kdgen.spec.published import WRAPPERS, load_config
from kdgen.spec.publishing import published_quantization
from kdgen.spec.yaml_text import read_text
from kdgen.weights.ahead import in_order
from kdgen.weights.checkpoint import PREFIX, Checkpoint, Entry, as_stored
from kdgen.weights.finite import first_not_finite
from kdgen.weights.stream import Announced, remove_leavings, temporary_beside, write_stream

Array = NDArray[Any]

QUANTIZATION = Quantization(group_size=32)
_EXPERT = re.compile(r"model\.layers\.([0-9]{1,10})\.mlp\.experts\.[0-9]+\.(gate|up|down)_proj\.weight")
#: Further files of a folder that are copied: small texts that describe the model.
_COMPANIONS = (".json", ".txt", ".jinja", ".md", ".model", ".tiktoken", ".py")
_COPY_BYTES = 32 * 2**20
_CACHE_VALUES = 2**16


def quantize_matrix(weight: Array, group_size: int) -> tuple[NDArray[np.int32], Array]:
    """Float [N, K] to (packed int32 [N, K/8], scale bfloat16 [N, K/group_size]), as ``kdgen.reference.int4.encode`` has it, faster.

    Division in float32 rounds as in float64 where weights are bfloat16: a quotient of two bfloat16 values is a half or nowhere near.
    Raises ValueError for a weight that is not finite.
    """
    rows, cols = weight.shape
    packed = np.empty((rows, cols // 2), np.uint8)
    scales = np.empty((rows, cols // group_size), ml_dtypes.bfloat16)
    block = max(1, _CACHE_VALUES // cols)
    for at in range(0, rows, block):
        groups = weight[at : at + block].astype(np.float32).reshape(-1, cols // group_size, group_size)
        largest = np.abs(groups).max(axis=2)
        if not np.isfinite(largest).all():  # a maximum is NaN as soon as one value is
            raise ValueError("weights to quantize must be finite")
        scale = (largest / np.float32(7.5)).astype(ml_dtypes.bfloat16)
        # An all-zero group, or one whose scale underflows, decodes to zeros with any scale.
        scale[scale == 0] = 1
        scales[at : at + block] = scale
        groups /= scale.astype(np.float32)[:, :, None]
        np.rint(groups, out=groups)
        np.clip(groups, -8, 7, out=groups)
        groups += 8
        stored = groups.reshape(-1, cols).astype(np.uint8)
        np.bitwise_or(stored[:, 0::2], stored[:, 1::2] << np.uint8(4), out=packed[at : at + block])
    return packed.view(np.int32), scales


def quantize_model(source: Path, out: Path, progress: Callable[[int, int], None]) -> tuple[Spec, int]:
    """Write ``source``'s model with INT4 experts to the folder ``out``, which appears whole or not at all.

    Returns the new model's spec and how many matrices were quantized. ``progress`` is called with bytes read and in all. Raises
    SpecError for a config, WeightError for weights that are damaged or not finite, KdgenError for a model that has no experts to
    quantize or when ``out`` is there already.
    """
    remove_leavings(out)
    if not source.is_dir():
        what = "is no folder" if source.exists() else "there is no such folder"
        raise KdgenError(f"{source}: {what}; `kdgen quantize` takes that of a published model, with config.json and safetensors")
    described = load_config(source)
    checkpoint = Checkpoint(source)
    spec = as_stored(described, checkpoint)
    checkpoint.validate(spec)
    _check(source, spec, out)
    config = _config(source, spec, checkpoint)
    try:
        with temporary_beside(out) as temporary:
            quantized = _write_shards(checkpoint, spec, temporary, progress)
            for file in sorted(source.iterdir()):
                if file.is_file() and file.suffix in _COMPANIONS and not file.name.endswith(".safetensors.index.json"):
                    shutil.copyfile(file, temporary / file.name)
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            written = Checkpoint(temporary)
            written.validate(as_stored(load_config(temporary), written))
            temporary.replace(out)
    except OSError as error:
        raise WeightError(f"{out}: cannot be written: {error.strerror or error}") from error
    return as_stored(load_config(out), Checkpoint(out)), quantized


def _check(source: Path, spec: Spec, out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise KdgenError(f"{out}: is there already; choose another folder or remove it")
    if not out.absolute().parent.is_dir():
        raise KdgenError(f"{out}: its folder {out.parent} does not exist")
    if spec.quantization is not None:
        values = json.loads(read_text(source / "config.json", MAX_JSON_BYTES))
        key = "quantization_config" if values.get("quantization_config") else "text_config.quantization_config"
        raise KdgenError(f"{source / 'config.json'}: {key}: the routed experts are INT4 already; there is nothing to do, use it as it is")
    if not spec.has_moe:
        raise KdgenError(f"{spec.name} has no routed experts, and they are what is quantized")
    group = QUANTIZATION.group_size
    for key, width in (("hidden_size", spec.hidden_size), ("moe_intermediate_size", spec.moe_intermediate_size)):
        if width % group:
            raise KdgenError(f"{spec.name}: the group size of {group} does not divide {key} {width}")


def _config(source: Path, spec: Spec, checkpoint: Checkpoint) -> dict[str, Any]:
    """``config.json`` as it was, with a ``quantization_config`` that ignores every module that is not quantized, the
    multi-token-prediction layers beyond the last decoder layer included."""
    values: dict[str, Any] = json.loads(read_text(source / "config.json", MAX_JSON_BYTES))
    text = values["text_config"] if values["model_type"] in WRAPPERS else values
    numbers = {int(found[1]) for key in checkpoint if (found := re.match(r"model\.layers\.([0-9]{1,10})\.", key))}
    beyond = [rf"re:.*\.layers\.{number}\..*" for number in sorted(numbers) if number >= spec.num_hidden_layers]
    text["quantization_config"] = published_quantization(QUANTIZATION, beyond)
    return values


def _write_shards(checkpoint: Checkpoint, spec: Spec, out: Path, progress: Callable[[int, int], None]) -> int:
    shards = checkpoint.shards
    total, done, quantized = sum(entry.nbytes for shard in shards.values() for entry in shard.values()), 0, 0
    used = {key for group in spec.tensors() for key in group.names()}
    weight_map: dict[str, str] = {}
    size = 0
    progress(done, total)
    for file, shard in shards.items():
        entries = sorted(shard.items(), key=lambda item: item[1].offset)
        announced = [tensor for key, entry in entries for tensor in _announce(key, entry, spec)]
        quantized += sum(_is_expert(key, spec) for key, _ in entries)

        def pieces(entries: list[tuple[str, Entry]] = entries) -> Iterator[tuple[str, Array]]:
            nonlocal done
            tasks = (task for key, entry in entries for task in _tasks(key, entry, spec, key.removeprefix(PREFIX) in used))
            for read, found in in_order(tasks):
                yield from found
                done += read
                progress(done, total)

        write_stream(out / file.name, announced, pieces(), {"format": "pt"})
        weight_map |= {tensor.name: file.name for tensor in announced}
        size += sum(tensor.nbytes for tensor in announced)
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return quantized


def _is_expert(key: str, spec: Spec) -> bool:
    match = _EXPERT.fullmatch(key.removeprefix(PREFIX))
    return match is not None and int(match[1]) < spec.num_hidden_layers  # layers beyond are no decoder layers


def _announce(key: str, entry: Entry, spec: Spec) -> list[Announced]:
    if not _is_expert(key, spec):
        return [Announced(key, entry.dtype, entry.shape, entry.nbytes)]
    rows, cols = entry.shape
    words, groups = cols // 8, cols // QUANTIZATION.group_size
    return [
        Announced(f"{key}_packed", "I32", (rows, words), rows * words * 4),
        Announced(f"{key}_scale", "BF16", (rows, groups), rows * groups * 2),
        Announced(f"{key}_shape", "I64", (2,), 16),
    ]


#: What a task gives: bytes read, and pieces of the tensors they became.
_Found = tuple[int, list[tuple[str, Array]]]


def _tasks(key: str, entry: Entry, spec: Spec, used: bool) -> Iterator[Callable[[], _Found]]:
    if _is_expert(key, spec):
        yield functools.partial(_quantized, key, entry)
        return
    for at in range(0, entry.nbytes, _COPY_BYTES):
        yield functools.partial(_copied, key, entry, at, min(_COPY_BYTES, entry.nbytes - at), used)


def _copied(key: str, entry: Entry, at: int, nbytes: int, used: bool) -> _Found:
    """A part of a tensor as it is; ``used`` says that decoding reads it, so that a value that would be refused there is refused now."""
    part = np.fromfile(entry.file, np.uint8, nbytes, offset=entry.offset + at)
    if used and (found := first_not_finite(part.view(entry.numpy_dtype))) is not None:
        place = [int(n) for n in np.unravel_index(at // entry.numpy_dtype.itemsize + found, entry.shape)]
        value = float(part.view(entry.numpy_dtype)[found])
        raise WeightError(f"{entry.file}: {key}: element {place} is {value}; the file is damaged: download it again")
    return nbytes, [(key, part)]


def _quantized(key: str, entry: Entry) -> _Found:
    weight = np.fromfile(entry.file, entry.numpy_dtype, math.prod(entry.shape), offset=entry.offset).reshape(entry.shape)
    try:
        words, scales = quantize_matrix(weight, QUANTIZATION.group_size)
    except ValueError as error:
        raise WeightError(f"{entry.file}: {key}: {error}") from None
    return entry.nbytes, [(f"{key}_packed", words), (f"{key}_scale", scales), (f"{key}_shape", np.array(entry.shape, np.int64))]
