"""What checks run a kernel in: buffers full of poison, launches by parameter name, comparisons that remember the worst element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import Backend, DeviceArray, Pointer
from kdgen.backends.cpu import CpuBackend
from kdgen.errors import BackendError
from kdgen.plan.ir import DType, Kernel, Plan
from kdgen.plan.ops.same_bits import Twin
from kdgen.spec.model import Spec
from kdgen.weights.formats import numpy_dtype

Array = NDArray[Any]

#: Full runs a kernel over its whole shape. Slice launches the full-size kernel on a few row tiles over the full inputs, a few
#: experts, heads and layers, with memory for no more than those.
Size = Literal["full", "slice"]
POISON = 0xFF  #: every byte of memory that a kernel has yet to write: NaN as a float, -1 as an integer
GUARD_ROWS = 2  #: poisoned rows behind the last that a kernel may write
SURPLUS_ROWS = 33  #: token rows that a grid is too large by: more than a tile
SLICE_TILES = 2  #: row tiles, heads, experts or layers of a slice
TOKENS = (1, 3, 7, 8, 9, 33)  #: few, and around the tiles of 8 and 32 tokens


class Skip(Exception):
    """This kernel cannot be checked here; the message says why."""


@dataclass
class Findings:
    """What was wrong, and the element that came closest to its tolerance."""

    problems: list[str] = field(default_factory=list)
    ratio: float = 0.0  # of the worst element's error to its tolerance
    error: float = 0.0
    tolerance: float = 0.0
    bits: int = 0  # compared one by one

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def close(self, what: str, got: Array, expected: Array, tolerance: Array) -> None:
        """Every element of ``got`` within its own tolerance of ``expected``; a NaN never is."""
        with np.errstate(invalid="ignore"):
            error = np.abs(got.astype(np.float64) - expected)
        tolerance = np.broadcast_to(np.asarray(tolerance, np.float64), error.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(error <= tolerance, np.where(tolerance > 0, error / tolerance, 0.0), np.maximum(error / tolerance, 1.0))
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        if not ratio.size:
            return
        worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
        if ratio[worst] >= self.ratio:
            self.ratio, self.error, self.tolerance = float(ratio[worst]), float(error[worst]), float(tolerance[worst])
        if not (error <= tolerance).all():
            at = ", ".join(map(str, map(int, worst)))
            self.problem(
                f"{what}[{at}] is {got[worst]} instead of {expected[worst]:.9g} (tolerance {tolerance[worst]:.2g});"
                f" {int((~(error <= tolerance)).sum())} of {error.size} elements are wrong"
            )

    def equal(self, what: str, got: Array, expected: Array) -> None:
        """Integers, or floats that must be equal as values."""
        different = np.asarray(got != expected)
        if different.any():
            at = np.unravel_index(int(np.argmax(different)), different.shape)
            index = ", ".join(map(str, map(int, at)))
            self.problem(f"{what}[{index}] is {got[at]} instead of {np.asarray(expected)[at]}; {int(different.sum())} of {got.size} differ")

    def same_bits(self, what: str, got: Array, expected: Array) -> None:
        """Two results of one computation: any difference breaks the exactness contract."""
        self.bits += 8 * got.nbytes
        different = bits(got) != bits(expected)
        if different.any():
            at = np.unravel_index(int(np.argmax(different)), different.shape)
            index = ", ".join(map(str, map(int, at)))
            self.problem(f"{what}[{index}] has other bits: {got[at]} and {expected[at]}; {int(different.sum())} of {got.size} differ")

    def untouched(self, what: str, got: Array) -> None:
        """Memory that the kernel had no business with still holds its poison."""
        written = np.ascontiguousarray(got).reshape(-1).view(np.uint8) != POISON
        if written.any():
            self.problem(f"{what}: {int(written.sum())} bytes were written outside the rows asked for")


@dataclass(frozen=True)
class Grid:
    """The grid of a launch: the kernel's own for so many token rows, keys that a row may see, and sequences.

    ``replaced`` has other extents for single dimensions of it. A kernel whose blocks take up one tile of rows after another takes up the
    first ``row_tiles``, or all of them. ``kernel`` is another kernel of the plan, to be launched in place of the one that is checked. The
    grid is for more token rows than there are: hosts know an upper bound alone, and blocks beyond the last row must do nothing.
    """

    tokens: int = 1
    context: int = 1
    sequences: int = 1
    replaced: Mapping[int, int] = field(default_factory=dict)
    row_tiles: int | None = None
    kernel: Kernel | None = None

    def blocks(self, kernel: Kernel, processors: int) -> tuple[int, int, int]:
        x, y, z = (extent.value(self.tokens + SURPLUS_ROWS, self.context, self.sequences, processors) for extent in kernel.grid)
        return self.replaced.get(0, x), self.replaced.get(1, y), self.replaced.get(2, z)


def bits(values: Array) -> Array:
    """The same memory as unsigned integers of the item's size."""
    return np.ascontiguousarray(values).view(np.dtype(f"u{values.dtype.itemsize}"))


@dataclass
class Harness:
    """One kernel of one plan on one backend, with random inputs from ``rng``; frees on exit what it allocated."""

    backend: Backend
    spec: Spec
    plan: Plan
    kernel: Kernel
    rng: np.random.Generator
    size: Size = "full"
    tokens: tuple[int, ...] = TOKENS
    findings: Findings = field(default_factory=Findings)
    was_cut: bool = False  #: a slice that is less than the whole kernel
    _arrays: list[DeviceArray] = field(default_factory=list)

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def p(self) -> Any:
        """The template's parameters; each check knows its own template's."""
        return self.kernel.params

    @property
    def act(self) -> DType:
        return "bf16" if self.plan.compute == "bf16" else "f32"

    @property
    def sliced(self) -> bool:
        return self.size == "slice"

    def few(self, count: int, most: int = SLICE_TILES) -> int:
        """``count``, or where the kernel is sliced at most ``most``."""
        if not self.sliced or count <= most:
            return count
        self.was_cut = True
        return most

    @property
    def decode_twin(self) -> Kernel | None:
        """The kernel for few rows whose bits this one must give, if it is for many rows."""
        return self.plan.kernel(self.p.decode) if isinstance(self.p, Twin) else None

    # ---- memory ---------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        for array in self._arrays:
            self.backend.free(array)
        self._arrays.clear()

    def input(self, values: Array) -> DeviceArray:
        """``values`` on the device, in their own type and exactly their size."""
        names: dict[np.dtype[Any], DType] = {numpy_dtype(d): d for d in ("f32", "bf16", "i32", "f64", "u8")}
        array = self.backend.to_device(values, names[values.dtype])
        self._arrays.append(array)
        return array

    def inputs(self, values: Mapping[str, Array]) -> dict[str, DeviceArray]:
        """Arguments by parameter name: each array on the device."""
        return {name: self.input(array) for name, array in values.items()}

    def spread(self, values: Array, places: Array, count: int) -> tuple[DeviceArray, Array]:
        """``values`` [few, …] as those at ``places`` of ``count`` on the device, and where they are: a slice's items as far apart as all of
        the kernel's would be. A backend that has no memory for what lies between has them side by side.
        """
        if not isinstance(self.backend, CpuBackend) or self.backend.mode != "plain":
            return self.input(values), np.arange(len(values), dtype=np.int32)
        size = values[0].nbytes
        try:
            array = self.backend.vast((count, size), "u8")
        except BackendError:  # the system gives no process so many addresses
            return self.input(values), np.arange(len(values), dtype=np.int32)
        self._arrays.append(array)
        for place, value in zip(places, values, strict=True):
            self.backend.write(array, np.ascontiguousarray(value).reshape(-1).view(np.uint8), int(place) * size)
        return array, places

    def far_apart(self, parts: Array) -> tuple[DeviceArray, Array]:
        """A cache's ``parts`` [few, …] on the device, as ``spread`` has them, and their numbers. The last part's place takes more than 32
        bits.
        """
        count = 2**31 // parts[0].size + len(parts)
        return self.spread(parts, spaced(len(parts), count), count)

    def read_parts(self, array: DeviceArray, numbers: Array, like: Array) -> Array:
        """The parts of those numbers of what ``far_apart`` or ``spread`` made, with the type and shape of ``like`` [few, …]."""
        if array.shape == like.shape:  # side by side, as ``spread`` leaves them where there is no memory between them
            return np.asarray(self.read(array)[numbers])
        size = like[0].nbytes
        parts = [DeviceArray((size,), "u8", array.address + int(number) * size, size, array.handle) for number in numbers]
        return np.stack([self.read(part) for part in parts]).view(like.dtype).reshape(like.shape)

    def integer(self, value: int) -> DeviceArray:
        return self.input(np.array([value], np.int32))

    def poisoned(self, dtype: DType, *shape: int) -> DeviceArray:
        array = self.backend.empty(shape, dtype)
        self._arrays.append(array)
        if not self.backend.name.startswith("cpu"):  # whose memory is poisoned already, and known to its checker as unwritten
            self.backend.write(array, poison(dtype, *shape))
        return array

    def read(self, array: DeviceArray) -> Array:
        return self.backend.to_host(array)

    # ---- random inputs --------------------------------------------------------------------------------------------------

    def random(self, dtype: DType, *shape: int, scale: float = 1.0) -> Array:
        """Normal values, rounded to ``dtype``."""
        return np.asarray(self.rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(numpy_dtype(dtype))

    # ---- launch ---------------------------------------------------------------------------------------------------------

    def launch(self, grid: Grid, **arguments: DeviceArray | int) -> None:
        """Run the kernel, or the one that ``grid`` names, with an argument for each of its C++ parameters, by name.

        The number of row tiles is ``grid``'s. Raises ValueError where a parameter has no argument or an argument no parameter, and where a
        number is given for a pointer or memory for a number: the check is wrong, not the kernel.
        """
        kernel = grid.kernel or self.kernel
        if kernel.row_tiles is not None:
            arguments["row_tiles"] = kernel.row_tiles if grid.row_tiles is None else grid.row_tiles
        self.backend.launch(
            kernel.name,
            grid.blocks(kernel, self.backend.processors),
            kernel.block,
            kernel.smem,
            [each if isinstance(each, int) else Pointer(each) for each in in_order(kernel, arguments)],
        )


def in_order(kernel: Kernel, arguments: Mapping[str, DeviceArray | int]) -> list[DeviceArray | int]:
    """``arguments`` by parameter name, in the order of the kernel's parameters. Raises ValueError as ``Harness.launch`` does."""
    wanted = {parameter.name: parameter for parameter in kernel.parameters}
    if missing := [name for name in wanted if name not in arguments]:
        raise ValueError(f"a launch of {kernel.name} lacks {', '.join(missing)}")
    if unknown := [name for name in arguments if name not in wanted]:
        raise ValueError(f"{kernel.name} has no parameter {', '.join(unknown)}; its parameters are {', '.join(wanted)}")
    for name, parameter in wanted.items():
        if isinstance(arguments[name], int) == ("*" in parameter.type):
            given = "a number" if isinstance(arguments[name], int) else "memory"
            raise ValueError(f"a launch of {kernel.name} gives {given} for {parameter}")
    return [arguments[name] for name in wanted]


def spaced(few: int, count: int) -> NDArray[np.int32]:
    """So many of ``count`` items: the first, …, the last."""
    return np.asarray(np.arange(few) * (count - 1) // max(1, few - 1), np.int32)


def poison(dtype: DType, *shape: int) -> Array:
    kind = numpy_dtype(dtype)
    return np.full((*shape, kind.itemsize), POISON, np.uint8).view(kind)[..., 0]


def check_rows(
    harness: Harness, run: Callable[[NDArray[np.int64]], Mapping[str, Array]], expected: Mapping[str, tuple[Array, Array]]
) -> None:
    """A row-wise kernel over every token count, and its rows' bits in other positions and companies.

    ``run(rows)`` runs the kernel on the chosen rows of the inputs and returns its outputs [len(rows), ...]; ``expected`` has
    (values, tolerance) for all rows, as many as the largest token count.
    """
    most = max(harness.tokens)
    base = run(np.arange(most))
    harness.release()
    for name, (values, tolerance) in expected.items():
        if np.issubdtype(base[name].dtype, np.integer):
            harness.findings.equal(name, base[name], values)
        else:
            harness.findings.close(name, base[name], values, tolerance)
    for count in sorted({*harness.tokens, 1}):
        rows = harness.rng.permutation(most)[:count]
        again = run(rows)
        harness.release()
        for name in expected:
            harness.findings.same_bits(f"{name} of {count} rows", again[name], base[name][rows])


def guard(count: int) -> int:
    """Rows of an output buffer for ``count`` token rows."""
    return count + GUARD_ROWS


def split_guard(harness: Harness, name: str, values: Array, count: int) -> Array:
    """The first ``count`` rows, once the guard rows are seen to be untouched."""
    harness.findings.untouched(f"{name} beyond row {count}", values[count:])
    return values[:count]


Checker = Callable[[Harness], None]
Registry = dict[str, Checker]


def for_template(registry: Registry, names: Sequence[str]) -> Callable[[Checker], Checker]:
    """Register a check for the kernels of these templates."""

    def register(check: Checker) -> Checker:
        registry.update({name: check for name in names})
        return check

    return register
