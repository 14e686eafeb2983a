"""Formats of stored weights on the host: how each is packed, searched for NaN and infinity, and made up.

``kdgen.plan.formats`` says what plans know of the same formats. What a layout is, lane by lane, stands in tests/unit/test_pack.py as slow
and obvious code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kdgen.plan.formats import Format, Int4Groups, Plain, format_of
from kdgen.plan.ir import ITEM_BYTES, DType, Layout, Weight
from kdgen.spec.fields import TensorGroup
from kdgen.weights.finite import first_not_finite
from kdgen.weights.pools import BF16, INT4_DEVIATION, SCALE_SPREAD, Array, Pools, even_nibbles, tiled

#: Bytes of input that are rearranged at a time, so that everything stays in a core's cache.
_CACHE_BYTES = 2**18


def numpy_dtype(dtype: DType) -> np.dtype[np.generic]:
    """The NumPy dtype that holds ``dtype`` on the host."""
    names: dict[DType, object] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i32": np.int32, "f64": np.float64, "u8": np.uint8}
    return np.dtype(names[dtype])  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class Stack:
    """A matrix as the arrays whose rows make it up: one array after another, or ``tile`` rows of each in turn."""

    arrays: tuple[Array, ...]
    tile: int

    def rows(self, start: int, stop: int) -> Array:
        """Rows start … stop; whole rounds of tiles where there are tiles."""
        if self.tile:
            first, last = start // len(self.arrays), stop // len(self.arrays)
            turns = [array[first:last].reshape(-1, self.tile, array.shape[1]) for array in self.arrays]
            return np.stack(turns, axis=1).reshape(stop - start, -1)
        found, offset = [], 0
        for array in self.arrays:
            part = array[max(start - offset, 0) : max(stop - offset, 0)]
            found += [part] if len(part) else []
            offset += len(array)
        return found[0] if len(found) == 1 else np.concatenate(found)


def stack_of(weight: Weight, arrays: list[Array]) -> Stack:
    whole = len(arrays) == 1 or weight.gate_up_tile in (0, len(arrays[0]))  # gate, then up, is no interleaving
    return Stack(tuple(arrays), 0 if whole else weight.gate_up_tile)


class HostFormat(ABC):
    """What the host does with weights of one format."""

    #: What follows a matrix's key in the names of the checkpoint tensors that are packed, in the order of ``pack``'s ``parts``.
    suffixes: Sequence[str] = ("",)
    #: The one of them among whose values NaN and infinity are looked for.
    checked: str = ""

    def __init__(self, form: Format) -> None:
        self.form = form

    @abstractmethod
    def pack(self, layout: Layout, parts: Sequence[Array]) -> Array:
        """One matrix, as its checkpoint tensors, in ``layout``, flat."""

    def pack_stacks(self, weight: Weight, stacks: Sequence[Stack]) -> Array:
        """The same of tensors that are stacked from several."""
        return self.pack(weight.layout, [each.rows(0, weight.logical[1]) for each in stacks])

    @abstractmethod
    def first_bad_value(self, weight: Weight, start: int, part: Array) -> int | None:
        """The index in ``part``, a flat part of a packed tensor from its byte ``start`` on, of the first element that is NaN or infinite,
        or that begins such a value."""

    def is_padded(self, layout: Layout, rows: int, cols: int) -> bool:
        """Whether a matrix has less than whole row tiles of whole steps."""
        return layout == self.form.row_tiles and bool(rows % 16 or cols % self.form.step_inputs)

    @abstractmethod
    def made_up(self, weight: Weight, pools: Pools, deviation: float, start: int) -> Iterator[Array]:
        """One packed matrix of ``weight`` in flat pieces, from place ``start`` of the pools on. Its values have the standard deviation
        ``deviation``."""

    def random_part(self, group: TensorGroup, generator: np.random.Generator, deviation: float) -> Array:
        """A checkpoint tensor of a quantized matrix whose values have the standard deviation ``deviation``."""
        raise NotImplementedError(f"{self.form.name} has no tensors of kind {group.kind}")

    @abstractmethod
    def example(self, rng: np.random.Generator, rows: int, cols: int) -> list[Array]:
        """Checkpoint tensors of a matrix with every value that the format has; outputs for inputs of order one are of order one."""

    def term_sizes(self, parts: Sequence[Array]) -> NDArray[np.float64] | None:
        """[rows, cols] sizes of the terms that tensor cores add up for each weight, where they are larger than the weight."""
        return None


class PlainOnHost(HostFormat):
    """Numbers without scales."""

    def pack(self, layout: Layout, parts: Sequence[Array]) -> Array:
        (matrix,) = parts
        return pack_plain(layout, matrix.astype(numpy_dtype(self.form.dtype), copy=False)[None])

    def first_bad_value(self, weight: Weight, start: int, part: Array) -> int | None:
        return first_not_finite(part)

    def is_padded(self, layout: Layout, rows: int, cols: int) -> bool:
        return layout == self.form.row_tiles and rows % 16 != 0

    def made_up(self, weight: Weight, pools: Pools, deviation: float, start: int) -> Iterator[Array]:
        values = pools.once(_value_pool, weight.dtype, deviation)
        yield from tiled(values, start, weight.stored_bytes // ITEM_BYTES[weight.dtype] // weight.logical[0])

    def example(self, rng: np.random.Generator, rows: int, cols: int) -> list[Array]:
        return [(rng.standard_normal((rows, cols)) * cols**-0.5).astype(numpy_dtype(self.form.dtype))]


class Int4OnHost(HostFormat):
    """compressed-tensors ``pack-quantized``: words of eight nibbles, and a scale for each group of inputs."""

    suffixes, checked = ("_packed", "_scale"), "_scale"
    _SCALES_AT = 512  #: where a step's scales begin, in bytes

    def pack(self, layout: Layout, parts: Sequence[Array]) -> Array:
        words, scales = parts
        pack = pack_int4_mma_a if layout == self.form.row_tiles else pack_int4_k_major
        return pack(words, scales, self.form.group_size)

    def pack_stacks(self, weight: Weight, stacks: Sequence[Stack]) -> Array:
        _, rows, cols = weight.logical
        if weight.gate_up_tile != 8 or self.is_padded(weight.layout, rows, cols) or weight.layout != self.form.row_tiles:
            return super().pack_stacks(weight, stacks)
        # 8 gate rows, then 8 up rows: the two halves of a tile, where they lie
        words, scales = (each.arrays for each in stacks)
        gate, up = (array.view(np.uint32).reshape(rows // 16, 8, -1) for array in words)
        gate_scales, up_scales = (_scale_pairs(array, weight.group_size).reshape(rows // 16, 8, -1) for array in scales)
        return _int4_tiles(gate, up, gate_scales, up_scales)

    def first_bad_value(self, weight: Weight, start: int, part: Array) -> int | None:
        """Only scales can be NaN or infinite. ``part`` begins with a whole step of a row tile where the weights lie in them."""
        if weight.layout == self.form.row_tiles:
            steps = part.reshape(-1, self.form.step_bytes)
            found = first_not_finite(steps[:, self._SCALES_AT :].view(BF16))
            return None if found is None else found // 32 * self.form.step_bytes + self._SCALES_AT + found % 32 * 2
        batch, rows, cols = weight.logical
        expert, words = weight.stored_bytes // batch, rows * cols // 2  # an expert's words, then its scales
        for at in range(start // expert * expert, start + part.nbytes, expert):
            begin, end = max(at + words - start, 0), min(at + expert - start, part.nbytes)
            found = first_not_finite(part[begin:end].view(BF16)) if begin < end else None
            if found is not None:
                return begin + 2 * found
        return None

    def made_up(self, weight: Weight, pools: Pools, deviation: float, start: int) -> Iterator[Array]:
        _, rows, cols = weight.logical
        if weight.layout == self.form.row_tiles:
            yield from tiled(pools.once(_int4_tile_pool, deviation), start, rows // 16 * self.form.steps(cols))
            return
        yield from tiled(pools.nibbles[: pools.VALUES * 4].reshape(-1, 4), start, rows * cols // 8)
        scales = pools.once(_scale_pool, deviation)
        yield from (part.view(np.uint8) for part in tiled(scales, start, rows * cols // weight.group_size))

    def random_part(self, group: TensorGroup, generator: np.random.Generator, deviation: float) -> Array:
        if group.kind == "shape":
            return np.array(group.matrix, np.int64)
        if group.kind == "packed":
            return even_nibbles(generator.integers(-(2**31), 2**31, group.shape, np.int32))
        spread = generator.uniform(*SCALE_SPREAD, group.shape)
        return np.asarray(spread * (deviation / INT4_DEVIATION)).astype(BF16)

    def example(self, rng: np.random.Generator, rows: int, cols: int) -> list[Array]:
        words = rng.integers(-(2**31), 2**31, (rows, cols // 8), np.int32)
        scales = rng.uniform(0.5, 2, (rows, cols // self.form.group_size)) * (21.5 * cols) ** -0.5
        return [words, scales.astype(BF16)]

    def term_sizes(self, parts: Sequence[Array]) -> NDArray[np.float64]:
        """Tensor cores add up (128 + u) x and -136 x for (u - 8) x, u being the nibble: the root of the sum of their squares, times the
        scale."""
        words, scales = parts
        nibbles = words.view(np.uint32)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        sizes = np.hypot(nibbles.reshape(len(words), -1) + 128.0, 136.0)
        return np.asarray(sizes * np.repeat(scales.astype(np.float64), self.form.group_size, axis=1))


def on_host(form: Format) -> HostFormat:
    """What the host does with weights of a format."""
    return Int4OnHost(form) if isinstance(form, Int4Groups) else PlainOnHost(form)


def first_bad_value(weight: Weight, start: int, part: Array) -> int | None:
    """See HostFormat.first_bad_value."""
    return on_host(format_of(weight)).first_bad_value(weight, start, part)


def _value_pool(pools: Pools, dtype: DType, deviation: float) -> Array:
    return (pools.normals * np.float32(deviation)).astype(BF16).astype(numpy_dtype(dtype), copy=False)


def _scale_pool(pools: Pools, deviation: float) -> Array:
    return pools.scales(deviation, pools.VALUES)


def _int4_tile_pool(pools: Pools, deviation: float) -> Array:
    """[tiles, 576] as pack_int4_mma_a lays them out: every nibble is a value, so random bytes will do, and 32 scales."""
    tiles = np.empty((pools.TILES, Int4Groups.step_bytes), np.uint8)
    tiles[:, :512] = pools.nibbles.reshape(-1, 512)
    tiles[:, 512:] = pools.scales(deviation, pools.TILES * 32).view(np.uint8).reshape(-1, 64)
    return tiles


# ---- layouts ------------------------------------------------------------------------------------------------------------


def pack_plain(layout: Layout, values: Array) -> Array:
    """[batch, rows, cols] of a format without scales in ``layout``, flat."""
    if layout == Plain.row_tiles:
        return pack_mma_a(values)
    return pack_k_major(values) if layout == Plain.by_inputs else np.ascontiguousarray(values).reshape(-1)


def pack_k_major(matrix: Array) -> Array:
    """[batch, rows, cols] to [batch, cols, rows], flat."""
    batch, rows, cols = matrix.shape
    out = np.empty((batch, cols, rows), matrix.dtype)
    for row in range(0, rows, 16):  # blocks whose lines stay in the first cache while they are filled
        for col in range(0, cols, 1024):
            out[:, col : col + 1024, row : row + 16] = matrix[:, row : row + 16, col : col + 1024].swapaxes(1, 2)
    return out.reshape(-1)


def pack_mma_a(matrix: Array) -> Array:
    """bf16 [batch, rows, cols] to [batch, row tile, step, lane, 8]: each lane's A fragment of mma.m16n8k16, 16 bytes.

    Rows are padded with zeros to whole tiles of 16. Inside a step, fragment inputs 2t, 2t+1, 2t+8, 2t+9 hold inputs 4t .. 4t+3, so
    that a lane's B fragment is four consecutive elements of x.
    """
    batch, rows, cols = matrix.shape
    per_batch, steps = -(-rows // 16), cols // 16
    bits = np.ascontiguousarray(matrix).view(np.uint16)
    if rows % 16:
        bits = np.concatenate([bits, np.zeros((batch, per_batch * 16 - rows, cols), np.uint16)], axis=1)
    # row = 8 * high + g, input = 16 * step + 4 * t + 2 * half + odd; lane = 4 * g + t holds [half][high][odd]
    tiles = batch * per_batch
    pairs = bits.view(np.uint32).reshape(tiles, 2, 8, steps, 4, 2)
    out = np.empty((tiles, steps, 512), np.uint8)
    groups = out.view("V64")  # what the 4 lanes of a row pair hold: it moves as a whole
    block = max(1, _CACHE_BYTES // (cols * 32))
    lanes = np.empty((min(block, tiles), 8, steps, 4, 2, 2), np.uint32)
    for at in range(0, tiles, block):
        source = pairs[at : at + block]
        filled = lanes[: len(source)]
        for half in range(2):
            for high in range(2):
                filled[..., half, high] = source[:, high, ..., half]
        groups[at : at + block] = filled.reshape(-1, 8, steps, 16).view("V64")[..., 0].swapaxes(1, 2)
    return out.reshape(-1).view(ml_dtypes.bfloat16)


def pack_int4_mma_a(words: Array, scales: Array, group_size: int) -> NDArray[np.uint8]:
    """One expert, as published, to tiles of 16 rows by 64 inputs, 576 bytes each.

    ``words`` int32 [rows, cols / 8] holds eight q + 8 a word, lowest first; ``scales`` is bf16 [rows, cols / group]. A tile holds 32
    lanes x 4 words (inputs 0-31, then 32-63, two MMA steps each; inside a word register i of the A fragment is at bit 4 i, its odd
    input at 4 i + 16), then 32 scales: for each row g, rows g and g + 8 by the two halves. Rows and inputs are padded with zero
    scales; groups of 64 and 128 repeat their scale.
    """
    rows, width = words.shape
    tiles, steps = -(-rows // 16), -(-width // 8)
    q = _padded(words.view(np.uint32), (tiles * 16, steps * 8), 0x88888888).reshape(tiles, 2, 8, -1)
    s = _padded(_scale_pairs(scales, group_size), (tiles * 16, steps), 0).reshape(tiles, 2, 8, -1)
    return _int4_tiles(q[:, 0], q[:, 1], s[:, 0], s[:, 1])


def _scale_pairs(scales: Array, group_size: int) -> Array:
    """bf16 scales [rows, groups] to two a word, one a group of 32: uint32 [rows, steps of 64 inputs]."""
    bits = scales.view(np.uint16)
    if group_size > 32:
        bits = np.repeat(bits, group_size // 32, axis=1)
    if bits.shape[1] % 2:
        bits = np.pad(bits, ((0, 0), (0, 1)))
    return np.ascontiguousarray(bits).view(np.uint32)


def _int4_tiles(low: Array, high: Array, low_scales: Array, high_scales: Array) -> NDArray[np.uint8]:
    """Rows 0-7 and 8-15 of every tile: words [tiles, 8, cols / 8] and scale pairs [tiles, 8, steps], uint32, to packed tiles."""
    tiles, _, width = low.shape
    steps = width // 8
    packed = np.empty((tiles, steps, 576), np.uint8)
    groups = packed.view("V64")  # what the 4 lanes of a row pair hold, 8 times, then the scales
    block = min(tiles, max(1, _CACHE_BYTES // (width * 32)))
    scratch = np.empty((3, block, 8, width), np.uint32)
    lanes = np.empty((block, 8, steps, 4, 2, 2), np.uint32)  # [tile][g][step][t][half][word]
    pairs = np.empty((block, 8, steps, 2), np.uint32)
    for at in range(0, tiles, block):
        count = min(block, tiles - at)
        # input = 64 * step + 32 * half + 8 * t + 4 * word + 2 * pair + odd
        first, second = _fragment_words(low[at : at + count], high[at : at + count], scratch[:, :count])
        for half in range(2):
            lanes[:count, ..., half, 0] = first.reshape(count, 8, steps, 2, 4)[..., half, :]
            lanes[:count, ..., half, 1] = second.reshape(count, 8, steps, 2, 4)[..., half, :]
        groups[at : at + count, :, :8] = lanes[:count].reshape(count, 8, steps, 16).view("V64")[..., 0].swapaxes(1, 2)
        pairs[:count, ..., 0] = low_scales[at : at + count]
        pairs[:count, ..., 1] = high_scales[at : at + count]
        packed[at : at + count, :, 512:].view(np.uint64)[...] = pairs[:count].view(np.uint64)[..., 0].swapaxes(1, 2)
    return packed.reshape(-1)


def _fragment_words(low: Array, high: Array, scratch: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Published words of rows g and g + 8 to a lane's words for inputs 0-3 and for 4-7 of them, made in ``scratch`` [3, …].

    Two exchanges of bits: odd nibbles of the low rows with even ones of the high rows, then halves of the two words.
    """
    first, second, moved = scratch
    np.right_shift(low, 4, out=moved)
    moved ^= high
    moved &= np.uint32(0x0F0F0F0F)
    np.bitwise_xor(high, moved, out=second)  # inputs 1, 3, 5, 7, at bits 0, 8, 16, 24, high rows four bits higher
    moved <<= np.uint32(4)
    np.bitwise_xor(low, moved, out=first)  # inputs 0, 2, 4, 6
    np.right_shift(first, 16, out=moved)
    moved ^= second
    moved &= np.uint32(0xFFFF)
    second ^= moved
    moved <<= np.uint32(16)
    first ^= moved
    return first, second


def _padded(values: Array, shape: tuple[int, int], fill: int) -> Array:
    if values.shape == shape:
        return np.ascontiguousarray(values)
    out = np.full(shape, fill, values.dtype)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def pack_int4_k_major(words: Array, scales: Array, group_size: int) -> NDArray[np.uint8]:
    """One expert, as published, to words [cols / 8][rows], then bf16 scales [cols / group][rows]."""
    assert scales.shape[1] * group_size == words.shape[1] * 8
    return np.concatenate([pack_k_major(part[None]).view(np.uint8) for part in (words, scales)])
