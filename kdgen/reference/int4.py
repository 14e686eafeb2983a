"""compressed-tensors ``pack-quantized`` INT4, symmetric: eight values to an int32, lowest bits first, stored as q + 8."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PER_WORD = 8
LOW, HIGH = -8, 7


def pack(q: NDArray[np.int8]) -> NDArray[np.int32]:
    """int8 [N, K] of values −8…7 to int32 [N, ⌈K/8⌉]; a last word that K does not fill is padded with stored zeros, as published.

    Raises ValueError for a value outside −8…7.
    """
    if q.size and (q.min() < LOW or q.max() > HIGH):
        raise ValueError(f"INT4 values must lie in {LOW}…{HIGH}")
    rows, cols = q.shape
    words = -(-cols // PER_WORD)
    stored = np.zeros((rows, words * PER_WORD), np.uint32)
    stored[:, :cols] = q.astype(np.int32) + 8
    shifted = stored.reshape(rows, words, PER_WORD) << np.arange(0, 32, 4, dtype=np.uint32)
    packed: NDArray[np.int32] = np.bitwise_or.reduce(shifted, axis=2).view(np.int32)
    return packed


def unpack(packed: NDArray[np.int32], cols: int) -> NDArray[np.int8]:
    """int32 [N, ⌈cols/8⌉] to int8 [N, cols]; the inverse of ``pack``."""
    nibbles = (np.ascontiguousarray(packed).view(np.uint32)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    return (nibbles.reshape(packed.shape[0], -1)[:, :cols].astype(np.int16) - 8).astype(np.int8)


def decode(packed: NDArray[np.int32], scale: Array, cols: int) -> NDArray[np.float64]:
    """W[n, k] = q[n, k] · scale[n, k // group], float64 [N, cols], exact. The group is cols / scale.shape[1].

    Raises ValueError when the scales do not divide the columns.
    """
    groups = scale.shape[1]
    if cols % groups:
        raise ValueError(f"{groups} scales a row do not divide {cols} columns")
    return unpack(packed, cols).astype(np.float64) * np.repeat(scale.astype(np.float64), cols // groups, axis=1)


def encode(weight: Array, group_size: int) -> tuple[NDArray[np.int32], Array]:
    """Round to nearest: float [N, K] to (packed int32 [N, K/8], scale bfloat16 [N, K/group_size]).

    The scale spans the group's largest magnitude over half the range of 15 steps, as compressed-tensors has it, and is rounded to
    bfloat16 before the values are divided by it. An all-zero group gets scale 1. Raises ValueError when group_size does not divide
    K or a weight is not finite.
    """
    rows, cols = weight.shape
    if cols % group_size:
        raise ValueError(f"group size {group_size} does not divide {cols} columns")
    groups = weight.astype(np.float64).reshape(rows, cols // group_size, group_size)
    if not np.isfinite(groups).all():
        raise ValueError("weights to quantize must be finite")
    largest = np.abs(groups).max(axis=2)
    scale = np.where(largest > 0, largest / 7.5, 1.0).astype(ml_dtypes.bfloat16)
    # A scale that underflows bfloat16 is 1 as well: the group decodes to zeros either way.
    scale = np.where(scale.astype(np.float64) > 0, scale, np.asarray(1, ml_dtypes.bfloat16))
    q = np.clip(np.rint(groups / scale.astype(np.float64)[:, :, None]), LOW, HIGH).astype(np.int8)
    return pack(q.reshape(rows, cols)), scale
