"""Cache rows as kernels have them: in pages that lie anywhere in the pool, far beyond 2^31 numbers where the backend has such memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import DeviceArray
from kdgen.plan.cache_layout import from_tiles, to_tiles
from kdgen.plan.ir import PAGE_SLOTS
from kdgen.verify.kernels.harness import POISON, Array, Harness, spaced

NO_PAGE = 1 << 30  #: what tables list where a sequence has no page: nobody may go there


class PagedCache:
    """``rows`` [layers, sequences, slots, width] in pages of the kernel's cache, in a drawn order; poison behind the last slots.

    The sequences have drawn numbers, ``sequences``, and those of the table that are nobody's have no pages. ``layer_pages`` is how many
    pages lie between two layers. ``tiled``: pages are tiles, as ``kdgen.plan.cache_layout`` has them.
    """

    def __init__(self, harness: Harness, rows: Array, tiled: bool) -> None:
        layers, count, slots, width = rows.shape
        self._harness, self._tiled, pages = harness, tiled, -(-slots // PAGE_SLOTS)
        missing = poison_like(rows, layers, count, pages * PAGE_SLOTS - slots, width)
        whole = np.concatenate([rows, missing], axis=2).reshape(layers, count * pages, PAGE_SLOTS, width)
        self._shape = layers, count, pages * PAGE_SLOTS, width
        self._order = harness.rng.permutation(count * pages)  # place in the pool -> page
        self._parts = np.ascontiguousarray((to_tiles(whole) if tiled else whole)[:, self._order]).reshape(-1, PAGE_SLOTS, width)
        most = 2**31 // (PAGE_SLOTS * width) + count * pages  # the last page's place takes more than 32 bits
        places = np.arange(layers)[:, None] * most + spaced(count * pages, most)
        self.device, self._numbers = harness.spread(self._parts, places.reshape(-1), layers * most)
        apart = self.device.shape != self._parts.shape
        self.layer_pages = most if apart else count * pages
        self.sequences: NDArray[np.int32] = harness.rng.permutation(count + 2)[:count].astype(np.int32)
        self._table = np.full((count + 2, pages), NO_PAGE, np.int32)
        numbers = np.empty(count * pages, np.int32)
        numbers[self._order] = self._numbers[: count * pages]
        self._table[self.sequences] = numbers.reshape(count, pages)

    @property
    def arguments(self) -> Mapping[str, DeviceArray | int]:
        """The table, as kernels have it."""
        return {"page_table": self._harness.input(self._table), "sequence_pages": self._table.shape[1]}

    def read(self) -> Array:
        """What the cache holds now, [layers, sequences, slots up to whole pages, width]."""
        layers, count, slots, width = self._shape
        parts = self._harness.read_parts(self.device, self._numbers, self._parts).reshape(layers, -1, PAGE_SLOTS, width)
        pages = np.empty_like(parts)
        pages[:, self._order] = parts
        return (from_tiles(pages) if self._tiled else pages).reshape(layers, count, slots, width)

    def written(self, name: str, sequence: Array, slots: Array) -> Array:
        """The rows at ``slots`` of each ``sequence`` (0, 1, …) of the only layer, once all others are seen to be untouched."""
        cache = self.read()[0]
        written = np.zeros(cache.shape[:2], bool)
        written[sequence, slots] = True
        self._harness.findings.untouched(f"{name} in other slots", cache[~written])
        return np.asarray(cache[sequence, slots])


def poison_like(rows: Array, *shape: int) -> Array:
    """Poison of the type of ``rows``."""
    return np.full(math.prod(shape) * rows.itemsize, POISON, np.uint8).view(rows.dtype).reshape(shape)
