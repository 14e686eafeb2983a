"""Layouts lane by lane, as slow and obvious code, and the fast packers that must agree with it bit for bit."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import TILED, specs

from kdgen.plan.build import build_plan
from kdgen.plan.ir import Weight
from kdgen.spec.model import Quantization, Spec, load_spec
from kdgen.weights import formats, pack
from kdgen.weights.formats import pack_int4_k_major, pack_int4_mma_a, pack_k_major, pack_mma_a
from kdgen.weights.pack import LAYOUT_VERSION, packed_parts
from kdgen.weights.random import random_weights

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)

TINY = load_spec("tiny").model_copy(update={"num_hidden_layers": 2})
INT4 = TINY.model_copy(update={"quantization": Quantization(group_size=32)})
FAMILIES = {"bf16": TINY, "int4": INT4, "float32": TINY.model_copy(update={"dtype": "float32"})}


# ---- what the layouts are ---------------------------------------------------------------------------------------------------


def slow_mma_a(matrix: Array) -> Array:
    """One [rows, cols] matrix of 16-bit words to mma.m16n8k16 A fragments."""
    rows, cols = matrix.shape
    out = []
    for tile in range(0, rows, 16):
        for step in range(0, cols, 16):
            for lane in range(32):
                g, t = divmod(lane, 4)
                for half in range(2):
                    for high in range(2):
                        for odd in range(2):
                            row, col = tile + 8 * high + g, step + 4 * t + 2 * half + odd
                            out.append(matrix[row, col] if row < rows else 0)
    return np.array(out, np.uint16)


def slow_int4_mma_a(q: Array, scales: Array, group: int) -> Array:
    """One expert's stored nibbles [rows, cols] and 16-bit scales [rows, cols / group] to tiles of 576 bytes."""
    rows, cols = q.shape
    out: list[int] = []

    def nibble(row: int, col: int) -> int:
        return int(q[row, col]) if row < rows and col < cols else 8

    def scale(row: int, col: int) -> int:
        return int(scales[row, col // group]) if row < rows and col < cols else 0

    for tile in range(0, rows, 16):
        for step in range(0, cols, 64):
            for lane in range(32):
                g, t = divmod(lane, 4)
                for half in range(2):
                    for word in range(2):
                        value = 0
                        for high in range(2):
                            for pair in range(2):
                                for odd in range(2):
                                    col = step + 32 * half + 8 * t + 4 * word + 2 * pair + odd
                                    value |= nibble(tile + g + 8 * high, col) << (4 * (2 * pair + high) + 16 * odd)
                        out += value.to_bytes(4, "little")
            for g in range(8):
                for high in range(2):
                    for half in range(2):
                        out += scale(tile + g + 8 * high, step + 32 * half).to_bytes(2, "little")
    return np.array(out, np.uint8)


def published(q: Array) -> Array:
    """Stored nibbles [rows, cols] to int32 words, lowest nibble first."""
    words = np.zeros((q.shape[0], q.shape[1] // 8), np.uint32)
    for i in range(8):
        words |= q[:, i::8].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def draw_int4(seed: int, rows: int, cols: int, group: int) -> tuple[Array, Array]:
    generator = np.random.default_rng(seed)
    q = generator.integers(0, 16, (rows, cols)).astype(np.uint8)
    return q, generator.integers(1, 2**15, (rows, cols // group)).astype(np.uint16)


# ---- the packers ------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 99), batch=st.integers(1, 3), rows=st.integers(1, 40), steps=st.integers(1, 5))
def test_mma_a(seed: int, batch: int, rows: int, steps: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**16, (batch, rows, 16 * steps)).astype(np.uint16)
    expected = np.concatenate([slow_mma_a(matrix) for matrix in bits])
    np.testing.assert_array_equal(pack_mma_a(bits.view(BF16)).view(np.uint16), expected)


@given(seed=st.integers(0, 99), rows=st.integers(1, 40), groups=st.integers(1, 5), group=st.sampled_from((32, 64, 128)))
def test_int4_mma_a(seed: int, rows: int, groups: int, group: int) -> None:
    q, scales = draw_int4(seed, rows, groups * group, group)
    np.testing.assert_array_equal(pack_int4_mma_a(published(q), scales.view(BF16), group), slow_int4_mma_a(q, scales, group))


@given(seed=st.integers(0, 99), rows=st.integers(1, 40), groups=st.integers(1, 5), group=st.sampled_from((32, 64, 128)))
def test_int4_k_major(seed: int, rows: int, groups: int, group: int) -> None:
    q, scales = draw_int4(seed, rows, groups * group, group)
    expected = published(q).T.tobytes() + scales.T.tobytes()
    assert pack_int4_k_major(published(q), scales.view(BF16), group).tobytes() == expected


@given(batch=st.integers(1, 3), rows=st.integers(1, 40), cols=st.sampled_from((1, 7, 1023, 1024, 1025)))
def test_k_major(batch: int, rows: int, cols: int) -> None:
    matrix = np.arange(batch * rows * cols, dtype=np.float32).reshape(batch, rows, cols)
    np.testing.assert_array_equal(pack_k_major(matrix), matrix.transpose(0, 2, 1).reshape(-1))


@pytest.mark.parametrize("cache_bytes", [2**11, 2**13])  # 5 and 21 INT4 tiles at a time of 13, and 1 and 2 bf16 ones of 26
def test_several_cache_blocks(cache_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = np.random.default_rng(0).integers(0, 2**16, (2, 200, 96)).astype(np.uint16)
    q, scales = draw_int4(0, 200, 96, 32)
    whole = pack_mma_a(bits.view(BF16)), pack_int4_mma_a(published(q), scales.view(BF16), 32)
    monkeypatch.setattr(formats, "_CACHE_BYTES", cache_bytes)
    assert pack_mma_a(bits.view(BF16)).tobytes() == whole[0].tobytes()
    assert pack_int4_mma_a(published(q), scales.view(BF16), 32).tobytes() == whole[1].tobytes()


# ---- whole weights ----------------------------------------------------------------------------------------------------------


def parts_of(weight: Weight, layer: int, tensors: Callable[[str], Array], part_bytes: int = pack.PART_BYTES) -> list[bytes]:
    return [part.tobytes() for part in packed_parts(weight, layer, tensors, part_bytes)]


def counted(spec: Spec) -> dict[str, Array]:
    """Tensors of small whole numbers that depend on nothing but the key."""
    found: dict[str, Array] = {}
    for key, tensor in random_weights(spec, 0).items():
        numbers = (np.arange(tensor.size, dtype=np.uint64) * 2654435761 + zlib.crc32(key.encode())) >> 8
        found[key] = numbers.astype(np.uint32).view(np.int32) if key.endswith("_packed") else (numbers % 251).astype(np.float32)
        found[key] = found[key].reshape(tensor.shape).astype(tensor.dtype)
    return found


def packed(
    spec: Spec, compute: str, weights: Mapping[str, Array] | None = None, part_bytes: int = pack.PART_BYTES
) -> dict[str, bytes]:  # fmt: skip
    weights = weights or random_weights(spec, 1)
    plan = build_plan(spec, compute)  # type: ignore[arg-type]
    found = {}
    for weight in plan.weights:
        for layer in range(*weight.layers) if weight.layers else (0,):
            found[weight.device_name(layer)] = b"".join(parts_of(weight, layer, weights.__getitem__, part_bytes))
            assert len(found[weight.device_name(layer)]) == weight.stored_bytes, weight.name
    return found


@given(spec=specs(quantized=None), seed=st.integers(0, 9))
def test_every_weight_of_any_model_has_its_announced_size(spec: Spec, seed: int) -> None:
    packed(spec, "f32")


@given(spec=specs(sizes=TILED, quantized=None, dtypes=("bfloat16",)))
def test_small_parts_and_threads_change_nothing(spec: Spec) -> None:
    whole = {compute: packed(spec, compute) for compute in ("f32", "bf16")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_INLINE_BYTES", 0)
        for compute, expected in whole.items():
            assert packed(spec, compute, part_bytes=300) == expected


def test_what_fails_in_a_thread_fails_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_INLINE_BYTES", 0)
    weight = next(weight for weight in build_plan(TINY).weights if weight.name == "experts_down")
    weights = random_weights(TINY, 1)

    def tensors(key: str) -> Array:
        if "experts.5" in key:
            raise RuntimeError(f"no {key}")
        return weights[key]

    with pytest.raises(RuntimeError, match=r"no model\.layers\.1\.mlp\.experts\.5"):
        parts_of(weight, 1, tensors)
    next(packed_parts(weight, 1, tensors))  # and one that is given up leaves no thread behind


#: SHA-256 of whole packed models. A change here means files packed before are read wrongly: raise LAYOUT_VERSION with it.
FROZEN = {
    ("bf16", "bf16"): "1e2193f15e4e326b",
    ("bf16", "f32"): "d782d539621fc5ec",
    ("int4", "bf16"): "92e1a71a617b0be9",
    ("int4", "f32"): "f1b9bbc676b12d72",
    ("float32", "f32"): "3745b017c9a6990c",
}


@pytest.mark.parametrize(("family", "compute"), FROZEN)
def test_layouts_are_those_of_their_version(family: str, compute: str) -> None:
    state = hashlib.sha256()
    for name, data in packed(FAMILIES[family], compute, counted(FAMILIES[family])).items():
        state.update(name.encode() + data)
    assert (LAYOUT_VERSION, state.hexdigest()[:16]) == (2, FROZEN[family, compute])
