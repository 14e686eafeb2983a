"""INT4 packing, over every nibble and over random matrices."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdgen.reference import int4


def test_every_nibble_in_every_place() -> None:
    for place in range(8):
        for value in range(-8, 8):
            q = np.full((1, 8), -8, np.int8)
            q[0, place] = value
            packed = int4.pack(q)
            assert packed.view(np.uint32)[0, 0] == (value + 8) << (4 * place)
            np.testing.assert_array_equal(int4.unpack(packed, 8), q)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_pack_and_unpack(rows: int, cols: int, seed: int) -> None:
    q = np.random.default_rng(seed).integers(-8, 8, (rows, cols)).astype(np.int8)
    packed = int4.pack(q)
    assert packed.shape == (rows, -(-cols // 8))
    assert packed.dtype == np.int32
    np.testing.assert_array_equal(int4.unpack(packed, cols), q)


@given(st.sampled_from((32, 64, 128)), st.integers(1, 3), st.floats(1e-30, 1e30), st.integers(0, 2**32 - 1))
def test_encode_rounds_to_the_nearest_step(group: int, groups: int, size: float, seed: int) -> None:
    weight = np.random.default_rng(seed).normal(size=(3, group * groups)) * size
    weight[0, :group] = 0
    packed, scale = int4.encode(weight, group)
    assert scale.dtype == ml_dtypes.bfloat16
    largest = np.abs(weight.reshape(3, groups, group)).max(axis=2)
    np.testing.assert_array_equal(scale[1:], (largest[1:] / 7.5).astype(ml_dtypes.bfloat16))
    step = np.repeat(scale.astype(np.float64), group, axis=1)
    # Half a step anywhere, but for what lies beyond −8 or 7 steps: the scale makes the largest 7.5, give or take bfloat16's rounding.
    error = np.abs(int4.decode(packed, scale, weight.shape[1]) - weight)
    assert (error <= step * (0.5 + 8 / 256)).all()
    assert (int4.decode(packed, scale, weight.shape[1])[0, :group] == 0).all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="-8…7"):
        int4.pack(np.array([[8]], np.int8))
    with pytest.raises(ValueError, match="does not divide 48"):
        int4.encode(np.zeros((1, 48)), 32)
    with pytest.raises(ValueError, match="finite"):
        int4.encode(np.full((1, 32), np.nan), 32)
    with pytest.raises(ValueError, match="do not divide"):
        int4.decode(np.zeros((1, 8), np.int32), np.ones((1, 3)), 64)
