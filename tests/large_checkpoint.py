"""Writes a published checkpoint of a large spec in a minute or two, to measure loading with: values tiled from small random pools.

python tests/large_checkpoint.py k26 --layers 3 /data/k26-3    # 25 GB
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import NAMES
from numpy.typing import NDArray

from kdgen.runtime.model import shorten
from kdgen.spec.model import TensorGroup, load_spec
from kdgen.spec.publishing import published_config
from kdgen.weights.pools import BF16, INT4_DEVIATION
from kdgen.weights.random import RandomWeights
from kdgen.weights.stream import Announced, write_stream

POOL = 2**22 - 3  # prime, so that no two rows are alike
SHARD_BYTES = 5_000_000_000
DTYPES = {"matrix": BF16, "small": BF16, "packed": np.dtype(np.int32), "scale": BF16, "shape": np.dtype(np.int64)}


class Tiled:
    """Tensors of a spec in pieces: small ones drawn as RandomWeights has them, large ones from the pools."""

    def __init__(self, weights: RandomWeights) -> None:
        self._weights = weights
        self._generator = np.random.default_rng(weights.seed)

    def pieces(self, key: str, group: TensorGroup) -> Iterator[NDArray[Any]]:
        count = math.prod(group.shape)
        if count < 2**20 and group.kind != "scale":
            yield np.asarray(self._weights[key]).astype(DTYPES[group.kind])
            return
        stem = key.removesuffix("_scale").removesuffix("_packed")
        pool = self._words if group.kind == "packed" else self._values(self._weights.deviation(stem), group.kind == "scale")
        start = int(self._generator.integers(POOL))
        while count:
            piece = pool[start : start + count]
            yield piece
            count, start = count - len(piece), 0

    @functools.cached_property
    def _words(self) -> NDArray[np.int32]:
        return self._generator.integers(-(2**31), 2**31, POOL, np.int32)

    @functools.cache  # noqa: B019 - one object, for the life of the script
    def _values(self, deviation: float, scale: bool) -> NDArray[Any]:
        values = self._generator.uniform(0.75, 1.25, POOL) / INT4_DEVIATION if scale else self._generator.standard_normal(POOL)
        return (values * deviation).astype(BF16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    spec = load_spec(arguments.spec)
    spec = shorten(spec, arguments.layers or spec.num_hidden_layers)
    tiled = Tiled(RandomWeights(spec, 0))
    shards: list[list[tuple[Announced, TensorGroup]]] = [[]]
    size = 0
    for group in spec.tensors():
        for key in group.names():
            dtype = DTYPES[group.kind]
            tensor = Announced(key, NAMES[dtype], group.shape, math.prod(group.shape) * dtype.itemsize)
            if size + tensor.nbytes > SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append((tensor, group))
            size += tensor.nbytes
    arguments.folder.mkdir()
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        pieces = ((tensor.name, piece) for tensor, group in shard for piece in tiled.pieces(tensor.name, group))
        write_stream(arguments.folder / name, [tensor for tensor, _ in shard], pieces, {"format": "pt"})
        weight_map |= {tensor.name: name for tensor, _ in shard}
    (arguments.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (arguments.folder / "config.json").write_text(json.dumps(published_config(spec)))


if __name__ == "__main__":
    main()
