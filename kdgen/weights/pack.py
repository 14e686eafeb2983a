"""From checkpoint tensors to the plan's layouts.

A ``Weight`` names its checkpoint sources, how they form one logical [batch, rows, cols] matrix (*assembly*) and how that
matrix lies in memory (*layout*). A tensor is packed in parts of at most ``PART_BYTES`` (or one expert), on as many
threads as there are CPUs, so that neither a stack of hundreds of experts nor a large matrix ever exists
twice in host memory. The layouts are in ``kdgen.weights.formats``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np

from kdgen.errors import WeightError
from kdgen.plan.formats import format_of
from kdgen.plan.ir import Part, Plan, Weight
from kdgen.weights.ahead import in_order
from kdgen.weights.finite import first_not_finite
from kdgen.weights.formats import Stack, first_bad_value, numpy_dtype, on_host, pack_plain, stack_of
from kdgen.weights.pools import Array

Tensors = Callable[[str], Array]  #: checkpoint key to array

#: Raised whenever a layout's bytes change, so that files packed before are refused.
LAYOUT_VERSION = 2
#: Most bytes of a part that is no whole expert.
PART_BYTES = 32 * 2**20
#: Tensors up to this size are packed in the caller's thread; larger ones are worth other threads.
_INLINE_BYTES = 2**21


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
    """What ``task`` packs, once it is known to hold no NaN and no infinity. Every task packs an expert where experts are packed."""
    packed = task()
    if first_bad_value(weight, 0, packed) is None:
        return packed
    checked = on_host(format_of(weight)).checked
    one = [f"{source}{checked}" for source in sources]
    experts = [str(place)] if "{e}" in "".join(one) else [""]
    for key in (source.replace("{e}", expert) for expert in experts for source in one):
        values = tensors(key)
        found, dtype = first_not_finite(values), None
        if found is None:
            found, dtype = None if checked else first_not_finite(values.astype(numpy_dtype(weight.dtype))), weight.dtype
        if found is not None:
            raise _NotFiniteError(key, tuple(map(int, np.unravel_index(found, values.shape))), float(values.flat[found]), dtype)
    raise WeightError(f"{weight.device_name(0)}: was damaged while it was packed")


def _tasks(weight: Weight, sources: list[str], tensors: Tensors, part_bytes: int) -> Iterator[Callable[[], Array]]:
    """One call a part. What a call maps of the checkpoint is let go when it returns (a matrix's, when its last part is done)."""
    if weight.of_experts:
        for expert in range(weight.logical[0]):
            yield functools.partial(_expert, weight, [source.replace("{e}", str(expert)) for source in sources], tensors)
    elif weight.assembly in ("w_uk", "w_uv"):
        yield lambda: _whole(weight, _absorbed(weight, tensors(sources[0])))
    elif weight.layout == "row_major" and weight.logical[1] == 1:
        yield lambda: _whole(weight, np.concatenate([tensors(source).reshape(-1) for source in sources]))
    else:
        stack = stack_of(weight, [tensors(source) for source in sources])
        _, rows, cols = weight.logical
        if weight.layout == "k_major":
            step = max(1, part_bytes // (rows * 4))
            yield from (functools.partial(_columns, weight, stack, at, min(at + step, cols)) for at in range(0, cols, step))
        else:
            step = max(1, part_bytes // (cols * 4 * 16)) * 16
            yield from (functools.partial(_rows, weight, stack, at, min(at + step, rows)) for at in range(0, rows, step))


def _part(part: Part, tensors: Tensors, key: str) -> Array:
    """A rank's part of a checkpoint matrix, as a view: only its pages of a mapped file are read. All tensors of a quantized matrix are cut
    alike."""
    matrix = tensors(key)
    size = matrix.shape[part.axis] // part.count
    return matrix[part.index * size : (part.index + 1) * size] if part.axis == 0 else matrix[:, part.index * size : (part.index + 1) * size]


# ---- assemblies ---------------------------------------------------------------------------------------------------------


def _absorbed(weight: Weight, kv_b: Array) -> Array:
    """W_UK transposed ([heads, kv_lora, nope]) or W_UV ([heads, v, kv_lora]) out of kv_b_proj [heads * (nope + v), kv_lora]."""
    heads, rows, cols = weight.logical
    kv_lora = kv_b.shape[1]
    per_head = kv_b.reshape(heads, -1, kv_lora)
    if weight.assembly == "w_uk":
        return per_head[:, :cols].swapaxes(1, 2)
    return per_head[:, per_head.shape[1] - rows :]


# ---- parts --------------------------------------------------------------------------------------------------------------


def _rows(weight: Weight, stack: Stack, start: int, stop: int) -> Array:
    return _whole(weight, stack.rows(start, stop)[None])


def _columns(weight: Weight, stack: Stack, start: int, stop: int) -> Array:
    """Inputs start … stop of every output, k_major."""
    narrow = Stack(tuple(array[:, start:stop] for array in stack.arrays), stack.tile)
    return _whole(weight, narrow.rows(0, weight.logical[1])[None])


def _expert(weight: Weight, sources: list[str], tensors: Tensors) -> Array:
    form = on_host(format_of(weight))
    return form.pack_stacks(weight, [stack_of(weight, [tensors(source + suffix) for source in sources]) for suffix in form.suffixes])


def _whole(weight: Weight, matrix: Array) -> Array:
    """``matrix`` [batch, rows, cols] of a format without scales, packed."""
    values = matrix.astype(numpy_dtype(weight.dtype), copy=False)
    rounded = (weight.layout, weight.dtype) == ("row_major", "bf16") and matrix.dtype == np.float32
    if rounded and not np.array_equal(values.astype(np.float32), matrix):
        raise WeightError(f"{weight.sources[0]}: holds float32 values that bfloat16 lacks; router_dtype: float32 in the spec keeps them")
    return pack_plain(weight.layout, values)
