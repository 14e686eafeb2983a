"""Formats of stored weights: everything that plans know of bf16, float32 and INT4 in groups.

``kdgen.weights.formats`` has the same formats on the host: how they are packed, checked and made up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kdgen.plan.ir import ITEM_BYTES, DType, Layout, Weight
from kdgen.plan.tuning import Mode
from kdgen.spec.model import Spec

TILE_ROWS = 16  #: outputs of a row tile, the m16 of an MMA


@dataclass(frozen=True)
class Format(ABC):
    """How the weights of a matrix are stored on the device.

    Tensor cores read a matrix as row tiles, and a row tile as steps: ``step_inputs`` inputs of its 16 rows in ``step_bytes`` bytes, scales
    included. Generic kernels read it input by input. ``group_size`` inputs share a scale; 0: the weights have no scales.
    """

    dtype: DType  #: the element type of the packed tensor
    group_size: int = 0

    name: ClassVar[str]
    row_tiles: ClassVar[Layout]  #: the layout that tensor cores read
    by_inputs: ClassVar[Layout]  #: the layout that generic kernels read
    step_inputs: ClassVar[int]
    step_bytes: ClassVar[int]
    step_registers: ClassVar[int]  #: registers of a lane that hold a step's inputs of 8 tokens
    bias_bytes: ClassVar[int]  #: bytes of shared memory in which a step keeps what its products have too much
    stage_steps: ClassVar[Sequence[int]]  #: steps of a stage of the experts' kernel for many rows, best first

    @property
    @abstractmethod
    def bits(self) -> float:
        """Bits that a weight takes in memory, its share of a scale included."""

    @property
    @abstractmethod
    def comment(self) -> str:
        """A sentence about the weights, for the head of a kernel's text."""

    @abstractmethod
    def c_type(self, tensor_cores: bool) -> str:
        """The C++ type that a kernel's parameter points to."""

    @abstractmethod
    def matrix_bytes(self, layout: Layout, rows: int, cols: int) -> int:
        """Packed size of one [rows, cols] matrix in ``layout``, padding included."""

    def layout(self, tensor_cores: bool) -> Layout:
        return self.row_tiles if tensor_cores else self.by_inputs

    def steps(self, cols: int) -> int:
        """Steps of a row tile; the last one may be padded."""
        return -(-cols // self.step_inputs)

    def tile_bytes(self, rows: int, cols: int) -> int:
        """Packed size of a [rows, cols] matrix in row tiles, whose rows are padded to whole tiles and whose inputs to whole steps."""
        return -(-rows // TILE_ROWS) * self.steps(cols) * self.step_bytes


@dataclass(frozen=True)
class Plain(Format):
    """bf16 or float32 numbers without scales."""

    name = "plain"
    row_tiles, by_inputs = "mma_a", "k_major"
    step_inputs, step_bytes, step_registers, bias_bytes = 16, 512, 2, 0
    stage_steps = (4, 2, 1)

    @property
    def bits(self) -> float:
        return 8 * ITEM_BYTES[self.dtype]

    @property
    def comment(self) -> str:
        return f"Weights are {self.c_type(False)}."

    def c_type(self, tensor_cores: bool) -> str:
        return "unsigned char" if tensor_cores else "float" if self.dtype == "f32" else "bf16"

    def matrix_bytes(self, layout: Layout, rows: int, cols: int) -> int:
        return self.tile_bytes(rows, cols) if layout == self.row_tiles else rows * cols * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Int4Groups(Format):
    """Nibbles q + 8, and a bf16 scale for each group of inputs. A step of a row tile has 512 bytes of nibbles, then two scales a row."""

    name = "int4"
    row_tiles, by_inputs = "int4_mma_a", "int4_k_major"
    step_inputs, step_bytes, step_registers, bias_bytes = 64, 576, 8, 2 * 32
    stage_steps = (2, 1)

    @property
    def bits(self) -> float:
        return 4 + 16 / self.group_size

    @property
    def comment(self) -> str:
        return f"INT4 weights q * scale, one scale for {self.group_size} inputs."

    def c_type(self, tensor_cores: bool) -> str:
        return "unsigned char"

    def matrix_bytes(self, layout: Layout, rows: int, cols: int) -> int:
        if layout == self.row_tiles:
            return self.tile_bytes(rows, cols)
        return cols // 8 * rows * 4 + cols // self.group_size * rows * 2


def plain_format(mode: Mode) -> Format:
    """The format of matrices that are not quantized."""
    return Plain("f32" if mode.weight == "float" else "bf16")


def expert_format(spec: Spec, mode: Mode) -> Format:
    """The format of the routed experts."""
    return Int4Groups("u8", spec.quantization.group_size) if spec.quantization else plain_format(mode)


def format_of(weight: Weight) -> Format:
    """The format that a device tensor is stored in."""
    if weight.layout in (Int4Groups.row_tiles, Int4Groups.by_inputs):
        return Int4Groups(weight.dtype, weight.group_size)
    return Plain(weight.dtype)
