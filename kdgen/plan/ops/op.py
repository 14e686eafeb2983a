"""What an op is, and the arguments that it binds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from kdgen.plan.ir import Arg, Bound, Extent, Kernel, Launch, Limits, Parameter, RowKind
from kdgen.plan.shard import Shard
from kdgen.plan.tuning import Mode
from kdgen.spec.model import Spec

ROW_EXTENT = Extent(per_tokens=1)
SEQUENCE_EXTENT = Extent(per_sequence=True)
#: Parameters whose memory is ready before the embedding lets any kernel start: how many token rows a step has, and where they stand.
COUNT, PLACES = ("num_tokens",), ("num_tokens", "row_position")


@dataclass(frozen=True)
class Context:
    """What ops decide by: the model, the part of it that a rank has, how that computes, and the sizes that are planned for."""

    whole: Spec
    spec: Spec
    mode: Mode
    limits: Limits
    shard: Shard

    @property
    def tensor_cores(self) -> bool:
        """Whether matrices run on tensor cores: bf16, with kernels of their own."""
        return self.mode.compute == "bf16"

    @property
    def few_rows_sum_norms(self) -> bool:
        """Whether forwards of few rows normalise in the launch that sums over ranks."""
        return self.shard.exchange == "peer" and 1 < self.shard.ranks <= MAX_RANKS_OF_SUM_AND_NORM


#: Most ranks whose sums few rows have in one launch with the norm behind them, to which every rank sends all of its part, 57 KB a row of
#: K2.6. With eight, 8 rows are 3.2 MB, which take longer than the rounds about it, by which a rank sums an eighth of the columns for all;
#: two ranks are measured, more are arithmetic.
MAX_RANKS_OF_SUM_AND_NORM = 4


@dataclass(frozen=True)
class Argument:
    """A parameter of the kernel, and what a launch gives it."""

    parameter: Parameter
    value: Arg


@dataclass(frozen=True)
class Op(ABC):
    """One piece of work of a forward: the kernel that runs it, and the arguments that a launch binds to that kernel's parameters.

    The order of ``arguments`` is that of the C++ signature; nothing else repeats it.
    """

    c: Context

    @abstractmethod
    def kernel(self) -> Kernel:
        """The kernel, but for its parameters."""

    @abstractmethod
    def arguments(self) -> tuple[Argument, ...]:
        """Its parameters in order, each with what it is given."""

    @property
    def rows(self) -> RowKind:
        """Which rows the launch is over."""
        return "tokens"

    @property
    def row_groups(self) -> int:
        """How many such launches divide the rows among them."""
        return 1

    def lowered(self) -> tuple[Kernel | None, Launch]:
        """The kernel, with parameters, and the launch. A collective has no kernel."""
        arguments, kernel = self.arguments(), self.kernel()
        tiles = () if kernel.row_tiles is None else (number("row_tiles", kernel.row_tiles),)
        every = (*arguments, *tiles)
        kernel = replace(kernel, parameters=tuple(each.parameter for each in every))
        bound = tuple(Bound(each.parameter.name, each.value) for each in every)
        return kernel, Launch(kernel.name, bound, self.rows, self.row_groups)


# ---- arguments ------------------------------------------------------------------------------------------------------


def buffer(name: str, offset: int = 0) -> Arg:
    """A pointer into the buffer ``name``, ``offset`` bytes behind its start."""
    return Arg("buffer", name, offset)


def weight(name: str) -> Arg:
    return Arg("weight", name)


def layer_weight(name: str, ahead: int = 0) -> Arg:
    """A pointer to the tensor ``name`` of the layer that is ``ahead`` layers behind the current one."""
    return Arg("layer_weight", name, ahead)


def layer_buffer(name: str) -> Arg:
    """A pointer to the current layer's slice of a buffer."""
    return Arg("layer_buffer", name)


def reads(ctype: str, name: str, value: Arg | None = None) -> Argument:
    """A pointer that the kernel reads through; without ``value`` to the buffer of that name."""
    return Argument(Parameter(f"const {ctype}*", name), value or buffer(name))


def writes(ctype: str, name: str, value: Arg | None = None) -> Argument:
    """A pointer that the kernel writes through, or reads and writes; without ``value`` to the buffer of that name."""
    return Argument(Parameter(f"{ctype}*", name), value or buffer(name))


def stored(ctype: str, name: str, value: Arg | None = None) -> Argument:
    """A pointer to what only the host writes, before any step: weights and tables. It may be read before a kernel waits."""
    return Argument(Parameter(f"const {ctype}* __restrict__", name), value or buffer(name))


def reads_ints(names: str) -> tuple[Argument, ...]:
    """Pointers to int32 buffers of these names, with spaces between them."""
    return tuple(reads("int", name) for name in names.split())


def writes_ints(names: str) -> tuple[Argument, ...]:
    return tuple(writes("int", name) for name in names.split())


def reads_floats(names: str) -> tuple[Argument, ...]:
    return tuple(reads("float", name) for name in names.split())


def number(name: str, value: int) -> Argument:
    """An int32 that the plan knows."""
    return Argument(Parameter("int", name), Arg("int", value=value))


def rows_of_launch(name: str = "rows") -> Argument:
    """The launch's rows, as the host bounds them."""
    return Argument(Parameter("int", name), Arg("rows"))


def page_table(limits: Limits) -> tuple[Argument, ...]:
    """The pages of every sequence, which the host lists before a step needs them, and how many a sequence may have."""
    return stored("int", "page_table"), number("sequence_pages", limits.sequence_pages)


def inboxes(buffer_name: str) -> Argument:
    """The addresses of a buffer on every rank."""
    return Argument(Parameter("const u64*", "inboxes"), Arg("ranks", buffer_name))
