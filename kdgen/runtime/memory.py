"""A plan's device memory: weights and buffers, and launches bound to their addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import AllGather, Argument, Backend, DeviceArray, Launch, Pointer
from kdgen.plan.ir import ITEM_BYTES, Arg, Extent, Plan, Program, RowKind
from kdgen.weights.formats import numpy_dtype
from kdgen.weights.pack import PackedWeights


@dataclass(frozen=True)
class BoundLaunch:
    """A launch with its arguments resolved to device addresses; None stands for its rows."""

    rows: RowKind
    kernel: str
    grid: tuple[Extent, Extent, Extent]
    block: int
    smem: int
    args: tuple[Argument | None, ...]

    def at(self, rows: int, context: int, sequences: int, processors: int) -> Launch:
        x, y, z = (extent.value(rows, context, sequences, processors) for extent in self.grid)
        return Launch(self.kernel, (x, y, z), self.block, self.smem, tuple(rows if arg is None else arg for arg in self.args))


@dataclass(frozen=True)
class BoundGather:
    """A gather with its buffers resolved."""

    rows: RowKind
    name: str
    source: Pointer
    target: Pointer
    row_bytes: int

    def at(self, rows: int, context: int, sequences: int, processors: int) -> AllGather:
        return AllGather(self.name, self.source, self.target, rows * self.row_bytes)


class Memory:
    """What a plan's programs read and write on one device. ``progress`` is called with (bytes done, bytes in all) of the weights.

    Raises BackendError when memory is short, and WeightError when the weights do not fit the plan or are damaged.
    """

    def __init__(
        self, plan: Plan, backend: Backend, weights: PackedWeights, draft_weights: PackedWeights,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        self._plan, self._backend = plan, backend
        self._weights = self._load_weights(weights, draft_weights, progress)
        self.buffers: dict[str, DeviceArray] = {}
        self._everywhere: dict[str, DeviceArray] = {}  # addresses of a buffer on every rank
        for each in plan.buffers:
            if each.role == "inbox":
                self.buffers[each.name], self._everywhere[each.name] = backend.inbox(each.shape, each.dtype)
            else:
                self.buffers[each.name] = backend.empty(each.shape, each.dtype)
            if each.role == "counter":
                self.write(each.name, np.zeros(each.shape, numpy_dtype(each.dtype)))

    def write(self, buffer: str, values: NDArray[np.generic]) -> None:
        """Copy ``values`` to the start of a buffer."""
        self._backend.write(self.buffers[buffer], np.ascontiguousarray(values))

    def bind(self, program: Program) -> tuple[BoundLaunch | BoundGather, ...]:
        """The program's launches and collectives, one after another for all layers, with addresses for names."""
        kernels, gathers = {k.name: k for k in self._plan.kernels}, {g.name: g for g in self._plan.gathers}
        steps: list[BoundLaunch | BoundGather] = []
        for launch, layer in program.launches():
            if gather := gathers.get(launch.kernel):
                source, target = Pointer(self.buffers[gather.source]), Pointer(self.buffers[gather.target])
                steps.append(BoundGather(launch.rows, gather.name, source, target, gather.row_bytes))
                continue
            kernel = kernels[launch.kernel]
            args = tuple(self._argument(arg, layer) for arg in launch.in_order(kernel))
            steps.append(BoundLaunch(launch.rows, kernel.name, kernel.grid, kernel.block, kernel.smem, args))
        return tuple(steps)

    def _argument(self, arg: Arg, layer: int) -> Argument | None:
        if arg.kind == "rows":
            return None
        if arg.kind == "int":
            return arg.value
        if arg.kind == "ranks":
            return Pointer(self._everywhere[arg.name])
        if arg.kind == "weight":
            return Pointer(self._weights[arg.name], arg.value)
        if arg.kind == "layer_weight":
            return Pointer(self._weights[f"layers.{layer + arg.value}.{arg.name}"])
        array = self.buffers[arg.name]
        return Pointer(array, layer * array.nbytes // array.shape[0] if arg.kind == "layer_buffer" else arg.value)

    def _load_weights(
        self, weights: PackedWeights, draft_weights: PackedWeights, progress: Callable[[int, int], None] | None
    ) -> dict[str, DeviceArray]:
        weights.check(self._plan)
        wanted = [(weight, weights) for weight in self._plan.weights] + [(weight, draft_weights) for weight in self._plan.draft_weights]
        total, done = sum(weight.total_bytes for weight, _ in wanted), 0
        if progress:
            progress(done, total)
        loaded = {}
        for weight, source in wanted:
            for layer in range(*weight.layers) if weight.layers else (0,):
                array = self._backend.empty((weight.stored_bytes // ITEM_BYTES[weight.dtype],), weight.dtype)
                at = 0
                for part in source.parts(weight, layer):
                    self._backend.write(array, part, at)
                    at += part.size
                    done += part.nbytes
                    if progress:
                        progress(done, total)
                loaded[weight.device_name(layer)] = array
        return loaded
