"""Made-up weights for models too large to draw value by value: packed tensors tiled from a small pool of random values.

Every tensor, expert and head starts elsewhere in its pool, whose length is prime, so that no two rows of a model are alike.
What decides routing and keeps activations in bounds (router, norms, biases) is drawn in full, as ``RandomWeights`` has it,
and the pools have that module's scales.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.ir import ITEM_BYTES, DType, Weight
from kdgen.spec.model import Spec
from kdgen.weights.pack import Array, PackedWeights, numpy_dtype, packed_parts
from kdgen.weights.random import BF16, INT4_DEVIATION, SCALE_SPREAD, RandomWeights, even_nibbles

#: Checkpoint bytes up to which ``RandomWeights`` is quick enough.
MOST_DRAWN = 2e9
_POOL_VALUES = 2**22 - 3  #: prime
_POOL_TILES = 2**16 + 1  #: prime; of INT4, 576 bytes each


def checkpoint_bytes(spec: Spec) -> int:
    """Bytes of a published checkpoint of ``spec``, as far as sizes follow from it: what may be stored in two types is counted as bf16."""
    item = {"matrix": 2 if spec.dtype == "bfloat16" else 4, "small": 2, "packed": 4, "scale": 2, "shape": 8}
    return sum(math.prod(group.shape) * group.count * times * item[group.kind] for group, times in spec.tensor_kinds())


class SyntheticWeights(PackedWeights):
    """Packed weights that depend on the seed, the plan's layouts and nothing else, made at the speed of a copy."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self._drawn = RandomWeights(spec, seed)
        self._seed = seed
        self._values = functools.cache(self._value_pool)
        self._tiles = functools.cache(self._tile_pool)
        self._scales = functools.cache(self._scale_pool)

    def parts(self, weight: Weight, layer: int) -> Iterator[Array]:
        batch, rows, cols = weight.logical
        vector_or_router = weight.layout == "row_major" and weight.name != "embed_tokens"
        padded = (weight.layout.endswith("mma_a") and rows % 16) or (weight.layout == "int4_mma_a" and cols % 64)
        if vector_or_router or padded:
            yield from packed_parts(weight, layer, self._drawn.__getitem__)
            return
        deviation = self._drawn.deviation(weight.sources[0].replace("{i}", str(layer)).replace("{e}", "0"))
        for entry in range(batch):
            rank = f":{weight.part.index}" if weight.part else ""  # ranks hold different parts
            digest = hashlib.sha256(f"{self._seed}:{weight.device_name(layer)}:{entry}{rank}".encode()).digest()
            start = int.from_bytes(digest[:8], "little")
            if weight.layout == "int4_mma_a":
                yield from _tiled(self._tiles(deviation), start, rows // 16 * (cols // 64))
            elif weight.layout == "int4_k_major":
                scales = rows * cols // weight.group_size
                yield from _tiled(self._words(), start, rows * cols // 8)
                yield from (part.view(np.uint8) for part in _tiled(self._scales(deviation, _POOL_VALUES), start, scales))
            else:
                yield from _tiled(self._values(weight.dtype, deviation), start, weight.stored_bytes // ITEM_BYTES[weight.dtype] // batch)

    def _value_pool(self, dtype: DType, deviation: float) -> Array:
        values = self._normals * np.float32(deviation)
        return values.astype(BF16).astype(numpy_dtype(dtype), copy=False)

    def _tile_pool(self, deviation: float) -> Array:
        """[tiles, 576] as pack_int4_mma_a lays them out: every nibble is a value, so random bytes will do, and 32 scales."""
        tiles = np.empty((_POOL_TILES, 576), np.uint8)
        tiles[:, :512] = self._bytes[: _POOL_TILES * 512].reshape(-1, 512)
        tiles[:, 512:] = self._scales(deviation, _POOL_TILES * 32).view(np.uint8).reshape(-1, 64)
        return tiles

    def _words(self) -> NDArray[np.uint8]:
        return self._bytes[: _POOL_VALUES * 4].reshape(-1, 4)

    def _scale_pool(self, deviation: float, count: int) -> Array:
        spread = self._generator(2).uniform(*SCALE_SPREAD, count)
        return np.asarray(spread * (deviation / INT4_DEVIATION)).astype(BF16)

    @functools.cached_property
    def _normals(self) -> NDArray[np.float32]:
        return self._generator(0).standard_normal(_POOL_VALUES, np.float32)

    @functools.cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        return even_nibbles(np.frombuffer(self._generator(1).bytes(_POOL_TILES * 512), np.uint8))

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._seed, counter=stream << 128))


def _tiled(pool: Array, start: int, count: int) -> Iterator[Array]:
    """``count`` units (first axis) of ``pool`` from ``start`` on, again and again, as flat views of it."""
    start %= len(pool)
    while count:
        part = pool[start : start + count]
        yield part.reshape(-1)
        count -= len(part)
        start = 0
