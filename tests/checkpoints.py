"""Writes model folders as hubs publish them, for tests to read and to damage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.spec.drafter import DraftSpec
from kdgen.spec.model import Spec
from kdgen.spec.published_drafter import published_draft_config
from kdgen.spec.publishing import published_config
from kdgen.weights.checkpoint import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(file: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """One safetensors file, tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, array in tensors.items():
        header[key] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())


def write_model(
    folder: Path,
    spec: Spec,
    weights: Mapping[str, NDArray[Any]],
    shards: int = 1,
    prefix: str = "",
    extra: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    """``config.json`` and the weights, in so many shards with an index, keys prefixed; ``extra`` tensors are stored as they are named."""
    folder.mkdir(parents=True, exist_ok=True)
    config = published_config(spec)
    if prefix:
        config = {"model_type": "kimi_k25", "text_config": config, "vision_config": {"patch_size": 14}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"{prefix}{key}": array for key, array in weights.items()} | dict(extra or {})
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map: dict[str, str] = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[i::shards]}
        write_safetensors(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(a.nbytes for a in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_drafter(folder: Path, draft: DraftSpec, weights: Mapping[str, NDArray[Any]]) -> Path:
    """A DFlash drafter in z-lab's layout: ``config.json`` and ``model.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published_draft_config(draft)))
    write_safetensors(folder / "model.safetensors", weights)
    return folder
