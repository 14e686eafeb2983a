"""From checkpoint tensors to the plan's layouts.

A ``Weight`` names its checkpoint sources, how they form one logical [batch, rows, cols] matrix (*assembly*) and how that
matrix lies in memory (*layout*). Parts are yielded one batch entry (head group, expert) at a time, so that a stack of
hundreds of experts never exists twice in host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kdgen.plan.ir import DType, Plan, Weight

Array = NDArray[np.generic]
Tensors = Callable[[str], Array]  #: checkpoint key to array


class PackedWeights(ABC):
    """Weights in a plan's layouts, wherever they come from: checkpoint tensors packed on the way, a packed file, made-up values."""

    def check(self, plan: Plan) -> None:
        """Raises WeightError when these weights are not those that ``plan`` reads."""
        return

    @abstractmethod
    def parts(self, weight: Weight, layer: int) -> Iterator[Array]:
        """Consecutive flat pieces of one packed tensor, in ``weight.dtype``; together they are ``weight.stored_bytes`` long.

        A piece may be a view of memory that goes away with the next one. Raises WeightError for damaged input.
        """


class CheckpointWeights(PackedWeights):
    """Checkpoint tensors, packed when they are asked for."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def parts(self, weight: Weight, layer: int) -> Iterator[Array]:
        return packed_parts(weight, layer, self._tensors)


def numpy_dtype(dtype: DType) -> np.dtype[np.generic]:
    """The NumPy dtype that holds ``dtype`` on the host."""
    names: dict[DType, object] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i32": np.int32, "f64": np.float64, "u8": np.uint8}
    return np.dtype(names[dtype])  # type: ignore[call-overload, no-any-return]


def packed_parts(weight: Weight, layer: int, tensors: Tensors) -> Iterator[Array]:
    """Consecutive flat pieces of the packed tensor, in ``weight.dtype``; together they are ``weight.stored_bytes`` long."""
    sources = [source.replace("{i}", str(layer)) for source in weight.sources]
    if weight.group_size:
        for expert in range(weight.logical[0]):
            nibbles, scales = _int4_matrix(weight, [source.replace("{e}", str(expert)) for source in sources], tensors)
            pack = pack_int4_mma_a if weight.layout == "int4_mma_a" else pack_int4_k_major
            yield pack(nibbles, scales, weight.group_size)
    elif weight.assembly in ("experts", "experts_gate_up"):
        for expert in range(weight.logical[0]):
            yield _lay_out(weight, _matrix(weight, [source.replace("{e}", str(expert)) for source in sources], tensors)[None])
    elif weight.assembly in ("w_uk", "w_uv"):
        yield _lay_out(weight, _absorbed(weight, tensors(sources[0])))
    else:
        yield _lay_out(weight, _matrix(weight, sources, tensors)[None])


# ---- assemblies ---------------------------------------------------------------------------------------------------------


def _matrix(weight: Weight, sources: list[str], tensors: Tensors) -> Array:
    """The logical [rows, cols] matrix of one batch entry."""
    parts = [tensors(source) for source in sources]
    if weight.layout == "row_major" and weight.logical[1] == 1:  # a vector
        return np.concatenate([part.reshape(-1) for part in parts])[None]
    return _join(weight, parts)


def _join(weight: Weight, parts: list[Array]) -> Array:
    if weight.assembly in ("gate_up", "experts_gate_up"):
        gate, up = parts
        tile = weight.gate_up_tile
        width, cols = gate.shape
        return np.stack([gate.reshape(width // tile, tile, cols), up.reshape(width // tile, tile, cols)], axis=1).reshape(2 * width, cols)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _absorbed(weight: Weight, kv_b: Array) -> Array:
    """W_UK transposed ([heads, kv_lora, nope]) or W_UV ([heads, v, kv_lora]) out of kv_b_proj [heads * (nope + v), kv_lora]."""
    heads, rows, cols = weight.logical
    kv_lora = kv_b.shape[1]
    per_head = kv_b.reshape(heads, -1, kv_lora)
    if weight.assembly == "w_uk":
        return per_head[:, :cols].swapaxes(1, 2)
    return per_head[:, per_head.shape[1] - rows :]


def _int4_matrix(weight: Weight, sources: list[str], tensors: Tensors) -> tuple[NDArray[np.uint8], Array]:
    """(nibbles q + 8 as uint8 [rows, cols], scales bf16 [rows, cols / group])."""
    nibbles = [unpack_nibbles(tensors(f"{source}_packed")) for source in sources]
    scales = [tensors(f"{source}_scale") for source in sources]
    return _join(weight, nibbles).astype(np.uint8, copy=False), _join(weight, scales)  # type: ignore[arg-type]


def unpack_nibbles(words: Array) -> NDArray[np.uint8]:
    """compressed-tensors ``weight_packed`` int32 [N, K / 8], lowest nibble first, to uint8 [N, K] holding q + 8."""
    pairs = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(words.shape[0], -1)


# ---- layouts ------------------------------------------------------------------------------------------------------------


def _lay_out(weight: Weight, matrix: Array) -> Array:
    values = matrix.astype(numpy_dtype(weight.dtype), copy=False)
    if weight.layout == "mma_a":
        return pack_mma_a(values)
    return np.ascontiguousarray(values.swapaxes(1, 2) if weight.layout == "k_major" else values).reshape(-1)


def pack_mma_a(matrix: Array) -> Array:
    """bf16 [batch, rows, cols] to [batch, row tile, step, lane, 8]: each lane's A fragment of mma.m16n8k16, 16 bytes.

    Rows are padded with zeros to whole tiles of 16. Inside a step, fragment inputs 2t, 2t+1, 2t+8, 2t+9 hold inputs 4t .. 4t+3, so
    that a lane's B fragment is four consecutive elements of x.
    """
    batch, rows, cols = matrix.shape
    tiles = -(-rows // 16)
    bits = matrix.view(np.uint16)
    if rows % 16:
        bits = np.concatenate([bits, np.zeros((batch, tiles * 16 - rows, cols), np.uint16)], axis=1)
    # row = 8 * high + g, input = 16 * step + 4 * t + 2 * half + odd; lane = 4 * g + t holds [half][high][odd]
    split = bits.reshape(batch, tiles, 2, 8, cols // 16, 4, 2, 2)
    return np.ascontiguousarray(split.transpose(0, 1, 4, 3, 5, 6, 2, 7)).reshape(-1).view(ml_dtypes.bfloat16)


def pack_int4_mma_a(nibbles: NDArray[np.uint8], scales: Array, group_size: int) -> NDArray[np.uint8]:
    """One expert's nibbles (q + 8) [rows, cols] and bf16 scales [rows, cols / group] to tiles of 16 rows by 64 inputs, 576 bytes each.

    A tile holds 32 lanes x 4 words (inputs 0-31, then 32-63, two MMA steps each; inside a word register i of the A fragment is at bit
    4 i, its odd input at 4 i + 16), then 32 scales: for each row g, rows g and g + 8 by the two halves. Rows and inputs are padded
    with zero scales; groups of 64 and 128 repeat their scale.
    """
    rows, cols = nibbles.shape
    tiles, steps = -(-rows // 16), -(-cols // 64)
    q = np.full((tiles * 16, steps * 64), 8, np.uint8)
    q[:rows, :cols] = nibbles
    s = np.zeros((tiles * 16, steps * 2), np.uint16)
    s[:rows, : cols // 32] = np.repeat(scales.view(np.uint16), group_size // 32, axis=1)
    # row = 8 * high + g, input = 64 * step + 32 * half + 8 * t + 4 * word + 2 * register_pair + odd
    split = q.reshape(tiles, 2, 8, steps, 2, 4, 2, 2, 2)
    words = np.zeros((tiles, 8, steps, 2, 4, 2), np.uint32)
    for high in range(2):
        for pair in range(2):
            for odd in range(2):
                words |= split[:, high, ..., pair, odd].astype(np.uint32) << np.uint32(4 * (2 * pair + high) + 16 * odd)
    packed = np.empty((tiles, steps, 576), np.uint8)
    lanes = np.ascontiguousarray(words.transpose(0, 2, 1, 4, 3, 5))  # [tile][step][g][t][half][word]
    packed[..., :512] = lanes.reshape(tiles, steps, 128).view(np.uint8)
    by_row = np.ascontiguousarray(s.reshape(tiles, 2, 8, steps, 2).transpose(0, 3, 2, 1, 4))  # [tile][step][g][high][half]
    packed[..., 512:] = by_row.reshape(tiles, steps, 32).view(np.uint8)
    return packed.reshape(-1)


def pack_int4_k_major(nibbles: NDArray[np.uint8], scales: Array, group_size: int) -> NDArray[np.uint8]:
    """One expert to words [cols / 8][rows] (lowest nibble first along the inputs), then bf16 scales [cols / group][rows]."""
    rows, cols = nibbles.shape
    by_word = nibbles.reshape(rows, cols // 8, 8).astype(np.uint32)
    words = np.zeros((rows, cols // 8), np.uint32)
    for i in range(8):
        words |= by_word[..., i] << np.uint32(4 * i)
    assert scales.shape == (rows, cols // group_size)
    return np.concatenate(
        [np.ascontiguousarray(words.T).reshape(-1).view(np.uint8), np.ascontiguousarray(scales.T).reshape(-1).view(np.uint8)]
    )
