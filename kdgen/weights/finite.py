"""The search for weights that are NaN or infinite, once, as weights are read. Most of them would change tokens without any other sign.

NaN and infinity are the numbers whose exponent bits are all ones. So the largest of the numbers' bits, read as signed and as unsigned
integers, shows whether there is one, without a temporary array. The search runs at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_CHUNK_VALUES = 2**16  #: values that stay in a core's cache between the two reads of them


def first_not_finite(values: Array) -> int | None:
    """The flat index of the first element that is NaN or infinite. Integers have none; float8 is widened."""
    bits = values.dtype.itemsize
    if values.dtype.kind in "iub":
        return None
    if bits not in (2, 4, 8):
        return _first(~np.isfinite(values.astype(np.float32)).reshape(-1))
    signed, unsigned = np.dtype(f"<i{bits}"), np.dtype(f"<u{bits}")
    infinity = int(np.asarray(np.inf, values.dtype).view(unsigned))
    negative = infinity | 1 << (8 * bits - 1)
    at = 0
    for part in _chunks(values):
        if part.view(signed).max() >= infinity or part.view(unsigned).max() >= negative:
            found = _first(~np.isfinite(part.astype(np.float32) if bits == 2 else part).reshape(-1))
            return None if found is None else at + found
        at += part.size
    return None


def _chunks(values: Array) -> Iterator[Array]:
    """``values`` in their order, in pieces that stay in a core's cache; views where that is possible."""
    if values.ndim == 0 or values.flags.c_contiguous:
        flat = values.reshape(-1)
        yield from (flat[at : at + _CHUNK_VALUES] for at in range(0, len(flat), _CHUNK_VALUES))
        return
    if not values.size:
        return
    step = max(1, _CHUNK_VALUES * len(values) // values.size)
    yield from (values[at : at + step] for at in range(0, len(values), step))


def _first(bad: NDArray[np.bool_]) -> int | None:
    return int(bad.argmax()) if bad.any() else None
