"""The search for NaN and infinity among weights, against a look at each value: every such value, in every place, however parts are cut."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike

from kdgen.plan.ir import Layout, Weight
from kdgen.plan.weights import sized
from kdgen.weights import finite
from kdgen.weights.finite import first_not_finite
from kdgen.weights.formats import first_bad_value

BAD = (np.nan, -np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_value_in_each_place(monkeypatch: pytest.MonkeyPatch, dtype: DTypeLike, transposed: bool) -> None:
    monkeypatch.setattr(finite, "_CHUNK_VALUES", 8)
    largest = float(ml_dtypes.finfo(dtype).max)
    for place, bad in product(range(21), BAD):
        values = np.array([largest, -largest, -0.0] * 7, dtype).reshape(3, 7)
        values = values.T if transposed else values
        assert first_not_finite(values) is None, "the largest number is finite"
        values[np.unravel_index(place, values.shape)] = bad
        assert first_not_finite(values) == place


def test_integers_have_none() -> None:
    assert first_not_finite(np.full(3, -1, np.int32)) is None


@pytest.mark.parametrize(("layout", "unit"), [("int4_k_major", 2), ("int4_mma_a", 576)])
def test_scales_of_int4_in_parts_of_any_size(layout: Layout, unit: int) -> None:
    """Words may look like NaNs; a bad scale is found in whatever part it lies, and named by its first byte there."""
    logical, group = (3, 16, 64), 32
    weight = sized(Weight("w", "u8", logical, "experts", layout, ("w",), 0, group_size=group))
    size = weight.stored_bytes
    expert = size // 3
    scales = [at for at in range(0, size, 2) if at % expert >= 512]
    whole = np.full(size, 0xFF, np.uint8)
    for at in scales:
        whole[at : at + 2] = np.array([1.0], ml_dtypes.bfloat16).view(np.uint8)
    for length, at, bad in product((unit, 288 * 2, 1152, size), scales[::5], BAD):
        damaged = whole.copy()
        damaged[at : at + 2] = np.array([bad], ml_dtypes.bfloat16).view(np.uint8)
        found = [(start, first_bad_value(weight, start, damaged[start : start + length])) for start in range(0, size, length)]
        assert [start + place for start, place in found if place is not None] == [at]
