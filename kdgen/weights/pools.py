"""Random values, drawn once, that made-up weights are cut from."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

BF16 = np.dtype(ml_dtypes.bfloat16)
INT4_DEVIATION = math.sqrt(17.5)  #: the standard deviation of even_nibbles; a scale divides by it
SCALE_SPREAD = (0.75, 1.25)  #: how much scales vary


class Pools:
    """Random values, drawn once for a seed, that made-up weights are cut from. Their lengths are prime."""

    VALUES = 2**22 - 3
    TILES = 2**16 + 1  #: of INT4, which have 512 bytes of nibbles each

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._once = functools.cache(lambda make, *key: make(self, *key))

    def once(self, make: Callable[..., Array], *key: object) -> Array:
        """What ``make(self, *key)`` gives, made once."""
        return np.asarray(self._once(make, *key))

    @functools.cached_property
    def normals(self) -> NDArray[np.float32]:
        return self._generator(0).standard_normal(self.VALUES, np.float32)

    @functools.cached_property
    def nibbles(self) -> NDArray[np.uint8]:
        return even_nibbles(np.frombuffer(self._generator(1).bytes(self.TILES * 512), np.uint8)).view(np.uint8)

    def scales(self, deviation: float, count: int) -> Array:
        """bf16 scales with which ``nibbles`` have the standard deviation ``deviation``."""
        spread = self._generator(2).uniform(*SCALE_SPREAD, count)
        return np.asarray(spread * (deviation / INT4_DEVIATION)).astype(BF16)

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._seed, counter=stream << 128))


def even_nibbles(words: Array) -> Array:
    """Packed INT4 weights with 0 for the lowest value, -8: the others then have the mean 0, as rounded weights do. With another mean the
    activations of all tokens share a direction, and so their experts."""
    values = np.arange(256)
    low, high = values & 15, values >> 4
    table = (np.where(low, low, 8) | np.where(high, high, 8) << 4).astype(np.uint8)
    return np.asarray(table[words.view(np.uint8)].view(words.dtype))


def tiled(pool: Array, start: int, count: int) -> Iterator[Array]:
    """``count`` units (first axis) of ``pool`` from ``start`` on, again and again, as flat views of it."""
    start %= len(pool)
    while count:
        part = pool[start : start + count]
        yield part.reshape(-1)
        count -= len(part)
        start = 0
