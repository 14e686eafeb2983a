"""From checkpoint tensors to the plan's layouts.

A ``Weight`` names its checkpoint sources, how they form one logical [batch, rows, cols] matrix (*assembly*) and how that
matrix lies in memory (*layout*). A packed tensor comes in parts of at most ``PART_BYTES`` (or one expert), packed a few at a
time on as many threads as there are CPUs, so that neither a stack of hundreds of experts nor a large matrix ever exists
twice in host memory. What a layout is, lane by lane, stands in tests/unit/test_pack.py as slow and obvious code.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kdgen.errors import WeightError
from kdgen.plan.ir import DType, Part, Plan, Weight
from kdgen.weights.ahead import in_order
from kdgen.weights.finite import first_bad_value, first_not_finite

Array = NDArray[np.generic]
Tensors = Callable[[str], Array]  #: checkpoint key to array

#: Raised whenever a layout's bytes change, so that files packed before are refused.
LAYOUT_VERSION = 2
#: Most bytes of a part that is no whole expert.
PART_BYTES = 32 * 2**20
#: Tensors up to this size are packed where they are asked for; more are worth threads.
_INLINE_BYTES = 2**21
#: Bytes of input that are rearranged at a time, so that everything stays in a core's cache.
_CACHE_BYTES = 2**18


class PackedWeights(ABC):
    """Weights in a plan's layouts, wherever they are from: checkpoint tensors packed on the way, a packed file, made-up values."""

    where = ""  #: the file or folder that they are read from, for messages; empty: none

    def check(self, plan: Plan) -> None:
        """Raises WeightError when these weights are not those that ``plan`` reads."""
        return

    @abstractmethod
    def parts(self, weight: Weight, layer: int) -> Iterator[Array]:
        """Consecutive flat pieces of one packed tensor, in ``weight.dtype``; together they are ``weight.stored_bytes`` long.

        A piece may be a view of memory that goes away with the next one. Raises WeightError for damaged input.
        """


class CheckpointWeights(PackedWeights):
    """Checkpoint tensors, packed when asked for, in parts of ``part_bytes`` at most. ``file_of`` says which file a tensor is in."""

    def __init__(
        self, tensors: Tensors, where: str = "", file_of: Callable[[str], object] | None = None, part_bytes: int = PART_BYTES
    ) -> None:
        self._tensors, self.where, self._file_of, self._part_bytes = tensors, where, file_of, part_bytes

    def parts(self, weight: Weight, layer: int) -> Iterator[Array]:
        try:
            yield from packed_parts(weight, layer, self._tensors, self._part_bytes)
        except _NotFiniteError as error:
            file = f"{self._file_of(error.key)}: " if self._file_of else ""
            raise WeightError(f"{file}{error}; the file is damaged: download it again") from None


def numpy_dtype(dtype: DType) -> np.dtype[np.generic]:
    """The NumPy dtype that holds ``dtype`` on the host."""
    names: dict[DType, object] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i32": np.int32, "f64": np.float64, "u8": np.uint8}
    return np.dtype(names[dtype])  # type: ignore[call-overload, no-any-return]


class _NotFiniteError(WeightError):
    """A checkpoint tensor, ``key``, holds a NaN or an infinity."""

    def __init__(self, key: str, index: tuple[int, ...], value: float, dtype: str | None) -> None:
        self.key = key
        what = f"is {value}" if dtype is None else f"is {value}, which is infinite in {dtype}"
        super().__init__(f"{key}: element {list(index)} {what}")


def packed(weights: Tensors | PackedWeights) -> PackedWeights:
    """``weights`` that give checkpoint tensors by key, as weights in the plan's layouts; those that are so already, as they are."""
    return weights if isinstance(weights, PackedWeights) else CheckpointWeights(weights)


def packed_parts(weight: Weight, layer: int, tensors: Tensors, part_bytes: int = PART_BYTES) -> Iterator[Array]:
    """Consecutive flat pieces of the packed tensor, in ``weight.dtype``; together they are ``weight.stored_bytes`` long. A piece has
    ``part_bytes`` at most, or one expert, or 16 rows.

    Raises WeightError for a value that is NaN or infinite, naming its checkpoint tensor.
    """
    part = tensors if weight.part is None else functools.partial(_part, weight.part, tensors)
    sources = [source.replace("{i}", str(layer)) for source in weight.sources]
    packing = enumerate(_tasks(weight, sources, part, part_bytes))
    tasks = (functools.partial(_finite, weight, sources, tensors, place, task) for place, task in packing)
    if weight.stored_bytes <= _INLINE_BYTES:
        return (task() for task in tasks)
    return in_order(tasks)


def _finite(weight: Weight, sources: list[str], tensors: Tensors, place: int, task: Callable[[], Array]) -> Array:
    """What ``task`` packs, once it is known to hold no NaN and no infinity. INT4 is packed an expert a task."""
    packed = task()
    if first_bad_value(weight, 0, packed) is None:
        return packed
    one = [f"{source}_scale" if weight.group_size else source for source in sources]
    experts = [str(place)] if "{e}" in "".join(one) else [""]
    for key in (source.replace("{e}", expert) for expert in experts for source in one):
        values = tensors(key)
        found, dtype = first_not_finite(values), None
        if found is None:
            found, dtype = first_not_finite(values.astype(numpy_dtype(weight.dtype))) if not weight.group_size else None, weight.dtype
        if found is not None:
            raise _NotFiniteError(key, tuple(map(int, np.unravel_index(found, values.shape))), float(values.flat[found]), dtype)
    raise WeightError(f"{weight.device_name(0)}: was damaged while it was packed")


def _tasks(weight: Weight, sources: list[str], tensors: Tensors, part_bytes: int) -> Iterator[Callable[[], Array]]:
    """One call a part. What a call maps of the checkpoint is let go when it returns (a matrix's, when its last part is done)."""
    if weight.of_experts:
        pack = _int4_expert if weight.group_size else _expert
        for expert in range(weight.logical[0]):
            yield functools.partial(pack, weight, [source.replace("{e}", str(expert)) for source in sources], tensors)
    elif weight.assembly in ("w_uk", "w_uv"):
        yield lambda: _whole(weight, _absorbed(weight, tensors(sources[0])))
    elif weight.layout == "row_major" and weight.logical[1] == 1:
        yield lambda: _whole(weight, np.concatenate([tensors(source).reshape(-1) for source in sources]))
    else:
        stack = _stack(weight, [tensors(source) for source in sources])
        _, rows, cols = weight.logical
        if weight.layout == "k_major":
            step = max(1, part_bytes // (rows * 4))
            yield from (functools.partial(_columns, weight, stack, at, min(at + step, cols)) for at in range(0, cols, step))
        else:
            step = max(1, part_bytes // (cols * 4 * 16)) * 16
            yield from (functools.partial(_rows, weight, stack, at, min(at + step, rows)) for at in range(0, rows, step))


def _part(part: Part, tensors: Tensors, key: str) -> Array:
    """A rank's part of a checkpoint matrix, as a view: of a mapped file, only its pages are read. INT4 words and scales are cut alike."""
    matrix = tensors(key)
    size = matrix.shape[part.axis] // part.count
    return matrix[part.index * size : (part.index + 1) * size] if part.axis == 0 else matrix[:, part.index * size : (part.index + 1) * size]


# ---- assemblies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stack:
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


def _stack(weight: Weight, arrays: list[Array]) -> _Stack:
    whole = len(arrays) == 1 or weight.gate_up_tile in (0, len(arrays[0]))  # gate, then up, is no interleaving
    return _Stack(tuple(arrays), 0 if whole else weight.gate_up_tile)


def _absorbed(weight: Weight, kv_b: Array) -> Array:
    """W_UK transposed ([heads, kv_lora, nope]) or W_UV ([heads, v, kv_lora]) out of kv_b_proj [heads * (nope + v), kv_lora]."""
    heads, rows, cols = weight.logical
    kv_lora = kv_b.shape[1]
    per_head = kv_b.reshape(heads, -1, kv_lora)
    if weight.assembly == "w_uk":
        return per_head[:, :cols].swapaxes(1, 2)
    return per_head[:, per_head.shape[1] - rows :]


# ---- parts --------------------------------------------------------------------------------------------------------------


def _rows(weight: Weight, stack: _Stack, start: int, stop: int) -> Array:
    return _whole(weight, stack.rows(start, stop)[None])


def _columns(weight: Weight, stack: _Stack, start: int, stop: int) -> Array:
    """Inputs start … stop of every output, k_major."""
    narrow = _Stack(tuple(array[:, start:stop] for array in stack.arrays), stack.tile)
    return _whole(weight, narrow.rows(0, weight.logical[1])[None])


def _expert(weight: Weight, sources: list[str], tensors: Tensors) -> Array:
    stack = _stack(weight, [tensors(source) for source in sources])
    return _whole(weight, stack.rows(0, weight.logical[1])[None])


def _int4_expert(weight: Weight, sources: list[str], tensors: Tensors) -> Array:
    words, scales = ([tensors(f"{source}_{part}") for source in sources] for part in ("packed", "scale"))
    _, rows, cols = weight.logical
    if weight.layout == "int4_mma_a" and weight.gate_up_tile == 8 and rows % 16 == 0 and cols % 64 == 0:
        # 8 gate rows, then 8 up rows: the two halves of a tile, where they lie
        gate, up = (array.view(np.uint32).reshape(rows // 16, 8, -1) for array in words)
        gate_scales, up_scales = (_scale_pairs(array, weight.group_size).reshape(rows // 16, 8, -1) for array in scales)
        return _int4_tiles(gate, up, gate_scales, up_scales)
    pack = pack_int4_mma_a if weight.layout == "int4_mma_a" else pack_int4_k_major
    return pack(_stack(weight, words).rows(0, rows), _stack(weight, scales).rows(0, rows), weight.group_size)


def _whole(weight: Weight, matrix: Array) -> Array:
    values = matrix.astype(numpy_dtype(weight.dtype), copy=False)
    rounded = (weight.layout, weight.dtype) == ("row_major", "bf16") and matrix.dtype == np.float32
    if rounded and not np.array_equal(values.astype(np.float32), matrix):
        raise WeightError(f"{weight.sources[0]}: holds float32 values that bfloat16 lacks; router_dtype: float32 in the spec keeps them")
    if weight.layout == "mma_a":
        return pack_mma_a(values)
    if weight.layout == "k_major":
        return pack_k_major(values)
    return np.ascontiguousarray(values).reshape(-1)


# ---- layouts ------------------------------------------------------------------------------------------------------------


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
