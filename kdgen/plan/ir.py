"""The plan's data model: frozen, JSON-able, and the only thing that later stages read.

Nothing here decides anything; ``kdgen.plan.build`` does. Sizes are in elements unless a name says bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

DType = Literal["f32", "bf16", "i32", "f64", "u8"]
ITEM_BYTES: dict[DType, int] = {"f32": 4, "bf16": 2, "i32": 4, "f64": 8, "u8": 1}


@dataclass(frozen=True)
class Extent:
    """A grid dimension: ``times * ceil(tokens / per_tokens)``, at most ``cap`` when that is set; ``per_tokens`` 0 is a constant."""

    times: int = 1
    per_tokens: int = 0
    cap: int = 0

    def value(self, tokens: int) -> int:
        n = self.times * -(-tokens // self.per_tokens) if self.per_tokens else self.times
        return min(n, self.cap) if self.cap else n


ONE = Extent()


@dataclass(frozen=True)
class Cost:
    """What a launch over M token rows must do at least: bytes moved and floating-point operations, both affine in M.

    For kernels whose weights depend on routing, ``bytes_fixed`` counts the experts that one token hits and
    ``bytes_per_token`` only activations.
    """

    bytes_fixed: int = 0
    bytes_per_token: int = 0
    flops_per_token: int = 0

    def bytes(self, tokens: int) -> int:
        return self.bytes_fixed + self.bytes_per_token * tokens

    def flops(self, tokens: int) -> int:
        return self.flops_per_token * tokens


@dataclass(frozen=True)
class Kernel:
    """One generated ``<name>.cu`` with one entry point ``<name>``.

    ``params`` is the template's frozen context dataclass (its ``p``). ``smem`` is dynamic shared memory in bytes.
    """

    name: str
    template: str
    params: object
    block: int
    grid: tuple[Extent, Extent, Extent]
    smem: int
    cost: Cost
    summary: str


ArgKind = Literal["buffer", "layer_buffer", "weight", "layer_weight", "int"]


@dataclass(frozen=True)
class Arg:
    """A launch argument.

    ``buffer``/``weight``: pointer to the named tensor. ``layer_buffer``: pointer to the named buffer's slice for the
    current layer (its leading dimension). ``layer_weight``: pointer to weight ``layers.<current layer>.<name>``.
    ``int``: the int32 ``value``.
    """

    kind: ArgKind
    name: str = ""
    value: int = 0


@dataclass(frozen=True)
class Launch:
    kernel: str
    args: tuple[Arg, ...]


@dataclass(frozen=True)
class Stage:
    """Launches in order; with ``layers`` = (first, stop) the whole list repeats once a layer."""

    launches: tuple[Launch, ...]
    layers: tuple[int, int] | None = None


@dataclass(frozen=True)
class Program:
    name: str
    stages: tuple[Stage, ...]

    def launches(self) -> Iterator[tuple[Launch, int]]:
        """Every launch in order with its layer (0 outside layer stages)."""
        for stage in self.stages:
            for layer in range(*stage.layers) if stage.layers else (0,):
                for launch in stage.launches:
                    yield launch, layer


@dataclass(frozen=True)
class Buffer:
    """Device memory other than weights. ``state`` outlives steps (lengths, trees, caches); ``workspace`` is dead between programs."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    role: Literal["state", "workspace"]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


#: How a weight's logical matrix is put together from checkpoint tensors (kdgen.weights.pack has one function each).
Assembly = Literal["single", "concat", "gate_up", "w_uk", "w_uv", "experts", "experts_gate_up"]
#: How the logical [batch, rows, cols] matrix is laid out in memory (kdgen.weights.pack has one function each).
Layout = Literal["row_major", "k_major", "mma_a", "int4_k_major", "int4_mma_a"]


@dataclass(frozen=True)
class Weight:
    """A device tensor made from checkpoint tensors.

    ``logical`` is (batch, rows, cols): ``rows`` outputs, ``cols`` inputs; batch counts heads or experts (1 otherwise).
    ``sources`` are checkpoint keys (without a ``language_model.`` prefix); ``{e}`` stands for each expert index.
    ``gate_up_tile`` is how many gate rows precede their up rows in the interleaving of ``gate_up`` assemblies.
    ``stored_bytes`` is the packed size, padding included.
    """

    name: str
    dtype: DType
    logical: tuple[int, int, int]
    assembly: Assembly
    layout: Layout
    sources: tuple[str, ...]
    stored_bytes: int
    gate_up_tile: int = 0
    group_size: int = 0


@dataclass(frozen=True)
class Limits:
    """Run-time sizes a plan is made for. None of them changes a kernel's text or an output's bits."""

    max_tokens: int = 64
    max_context: int = 4096
    max_sequences: int = 1


@dataclass(frozen=True)
class Plan:
    """Everything later stages need, for one spec and one compute dtype."""

    spec_name: str
    spec_sha256: str
    compute: Literal["f32", "bf16"]
    limits: Limits
    kernels: tuple[Kernel, ...]
    weights: tuple[Weight, ...]
    buffers: tuple[Buffer, ...]
    programs: tuple[Program, ...]
    notes: tuple[str, ...]

    def kernel(self, name: str) -> Kernel:
        return next(k for k in self.kernels if k.name == name)

    def program(self, name: str) -> Program:
        return next(p for p in self.programs if p.name == name)

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)
