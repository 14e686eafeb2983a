"""The plan's data model: frozen, JSON-able, and the only thing that later stages read.

Nothing here decides anything; ``kdgen.plan.build`` does. Sizes are in elements unless a name says bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from kdgen.plan.shard import WHOLE, Shard
from kdgen.spec.drafter import MAX_BLOCK

#: Targets that share a plan: ``sm_90a``, where a model's shapes let it use what only sm_90a has, and ``generic``, every target.
Family = Literal["generic", "sm_90a"]
DType = Literal["f32", "bf16", "i32", "f64", "u8"]
Compute = Literal["f32", "bf16"]  #: the type of activations and cache rows; sums are float32 in both
ITEM_BYTES: dict[DType, int] = {"f32": 4, "bf16": 2, "i32": 4, "f64": 8, "u8": 1}


@dataclass(frozen=True)
class Extent:
    """A grid dimension: ``times * ceil(tokens / per_tokens) * ceil(context / per_context)``, times the sequences of the step if
    ``per_sequence``; a zero divisor leaves its factor out.

    ``tokens`` and ``context`` (keys any row may see) are upper bounds that the host knows; blocks beyond the true sizes exit.
    ``cap`` bounds the result where it is set, and so do ``per_processor`` blocks for each of the device's multiprocessors.
    """

    times: int = 1
    per_tokens: int = 0
    per_context: int = 0
    per_sequence: bool = False
    cap: int = 0
    per_processor: int = 0

    def value(self, tokens: int, context: int, sequences: int = 1, processors: int = 1) -> int:
        n = self.times * sequences if self.per_sequence else self.times
        if self.per_tokens:
            n *= -(-tokens // self.per_tokens)
        if self.per_context:
            n *= -(-context // self.per_context)
        if self.per_processor:
            n = min(n, self.per_processor * processors)
        return min(n, self.cap) if self.cap else n


ONE = Extent()


@dataclass(frozen=True)
class Workload:
    """What a launch works on: token ``rows``, ``keys`` of the cache that any of them sees, ``draft_keys`` of the drafter's cache likewise
    (the mean over its layers), and distinct routed ``experts`` that the rows choose (in one layer, or expected: a fraction)."""

    rows: int
    keys: int = 0
    draft_keys: float = 0
    experts: float = 0


@dataclass(frozen=True)
class Cost:
    """What a launch must do at least: bytes that it moves, and floating-point operations.

    ``bytes_fixed`` are weights that every launch reads once, ``bytes_per_expert`` those of one routed expert, and ``bytes_per_row``
    activations of a token row. Keys of the cache are read once for all rows of a launch, so ``bytes_per_key`` does not depend on the number
    of rows; each row computes with every key that it sees.
    """

    bytes_fixed: int = 0
    bytes_per_row: int = 0
    operations_per_row: int = 0
    bytes_per_expert: int = 0
    bytes_per_key: int = 0
    bytes_per_draft_key: int = 0
    operations_per_row_and_key: int = 0

    def bytes(self, work: Workload) -> int:
        every_row = self.bytes_fixed + self.bytes_per_row * work.rows + self.bytes_per_key * work.keys
        return every_row + int(self.bytes_per_expert * work.experts) + int(self.bytes_per_draft_key * work.draft_keys)

    def operations(self, rows: int, keys_of_rows: int = 0) -> int:
        """``keys_of_rows``: the keys that each row sees, summed over the rows."""
        return self.operations_per_row * rows + self.operations_per_row_and_key * keys_of_rows

    def __add__(self, other: Cost) -> Cost:
        """The cost of both in one launch."""
        return Cost(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


#: What bench, plan and build report a kernel under.
Group = Literal[
    "attention projections", "attention over the cache", "dense MLPs", "routed experts", "shared experts", "embedding and logits",
    "norms and rows", "tree", "accept", "drafter", "draft context", "sums over ranks",
]  # fmt: skip
#: How a kernel can be timed: alone, again and again; only right behind the kernel that sends it what it waits for; or only in whole steps,
#: for it changes what later launches depend on.
Timing = Literal["alone", "behind its sender", "in steps"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel's C++ signature."""

    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


@dataclass(frozen=True)
class Kernel:
    """One generated ``<name>.cu`` with one entry point ``<name>``.

    ``params`` is the template's frozen context dataclass (its ``p``), and ``parameters`` are those of the C++ function, whose signature
    the template prints from them and which a launch gives arguments by name. ``smem`` is dynamic shared memory in bytes. A kernel whose
    blocks take up one tile of rows after another has their number, ``row_tiles``, as a parameter of that name. Where a GPU has clusters, a
    block's threads are divided among the ``cluster`` blocks of one, each of which has ``smem``. A GPU may start a kernel while the one
    before it still runs: ``early`` names the parameters through which it reads or writes before it has waited for that, besides those that
    are ``__restrict__``, which only the host writes. ``header`` is what its file says of
    all that (``kdgen.plan.describe``); it counts for nothing where kernels are compared.
    """

    name: str
    template: str
    params: object
    block: int
    grid: tuple[Extent, Extent, Extent]
    smem: int
    cost: Cost
    summary: str
    row_tiles: int | None = None
    cluster: int = 1
    early: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    group: Group = "norms and rows"
    timing: Timing = "alone"
    header: tuple[str, ...] = field(default=(), compare=False)

    def parameter(self, name: str) -> Parameter:
        return next(each for each in self.parameters if each.name == name)

    def writes(self, parameter: str) -> bool:
        """Whether there is a pointer of that name through which it writes."""
        return any(each.name == parameter and not each.type.startswith("const") for each in self.parameters)

    @property
    def signature(self) -> str:
        """The C++ function's parameters, as they stand between its parentheses."""
        return ", ".join(map(str, self.parameters))


RowKind = Literal["tokens", "logits"]  #: rows of a launch: the step's token rows, or those of them that have logits
ArgKind = Literal["buffer", "layer_buffer", "weight", "layer_weight", "int", "rows", "ranks"]


@dataclass(frozen=True)
class Arg:
    """A launch argument.

    ``buffer``/``weight``: pointer to the named tensor, ``value`` bytes behind its start. ``layer_buffer``: pointer to the named
    buffer's slice for the current layer (its leading dimension). ``layer_weight``: pointer to weight ``layers.<i>.<name>`` of
    the layer ``value`` layers behind the current one. ``int``: the int32 ``value``. ``rows``: the launch's rows, as the host bounds
    them (an int32). ``ranks``: pointer to the addresses of the named buffer on every rank, 8 bytes each.
    """

    kind: ArgKind
    name: str = ""
    value: int = 0


@dataclass(frozen=True)
class Bound:
    """An argument, bound to the kernel's parameter of that name."""

    parameter: str
    arg: Arg


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments, in any order, or a ``Gather`` by its name, which has none.

    ``row_groups``: so many such launches divide the rows among them.
    """

    kernel: str
    args: tuple[Bound, ...]
    rows: RowKind = "tokens"
    row_groups: int = 1

    def argument(self, parameter: str) -> Arg:
        """What ``parameter`` is given. Raises KeyError where it is given nothing."""
        return {bound.parameter: bound.arg for bound in self.args}[parameter]

    def in_order(self, kernel: Kernel) -> tuple[Arg, ...]:
        """The arguments in the order of ``kernel``'s parameters.

        Raises ValueError where the two do not have the same names, each once: the plan is wrong, not its user.
        """
        given = {bound.parameter: bound.arg for bound in self.args}
        wanted = [parameter.name for parameter in kernel.parameters]
        if len(given) != len(self.args) or sorted(given) != sorted(wanted):
            raise ValueError(f"a launch of {kernel.name} binds {[each.parameter for each in self.args]}; its parameters are {wanted}")
        return tuple(given[name] for name in wanted)


@dataclass(frozen=True)
class Gather:
    """A collective: the first rows of every rank's ``source``, one rank after another, go to every rank's ``target``.

    As many rows as the step has at most, ``row_bytes`` each.
    """

    name: str
    source: str
    target: str
    row_bytes: int


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
    """Device memory other than weights. ``state`` outlives steps (lengths, trees, caches); ``workspace`` is dead between programs.

    ``inbox`` is memory that other ranks write to, ``counter`` state that they keep in step with; both begin with zeros.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    role: Literal["state", "workspace", "inbox", "counter"]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


#: How a weight's logical matrix is put together from checkpoint tensors (kdgen.weights.pack has one function each).
Assembly = Literal["single", "concat", "gate_up", "w_uk", "w_uv", "experts", "experts_gate_up"]
#: How the logical [batch, rows, cols] matrix is laid out in memory: row_major, or a layout of its format (kdgen.plan.formats).
Layout = str


@dataclass(frozen=True)
class Part:
    """One of ``count`` equal parts of a matrix: its rows (outputs; ``axis`` 0) or its columns (inputs; 1)."""

    axis: Literal[0, 1]
    index: int
    count: int


@dataclass(frozen=True)
class Weight:
    """A device tensor made from checkpoint tensors.

    With ``layers`` = (first, stop) there is one such tensor a layer, called ``layers.<i>.<name>``.
    ``logical`` is (batch, rows, cols): ``rows`` outputs, ``cols`` inputs; batch counts heads or experts (1 otherwise).
    ``sources`` are checkpoint keys (without a ``language_model.`` prefix); ``{i}`` stands for the layer, ``{e}`` for each expert.
    ``part`` is what a rank takes of each source; None: all of it. ``logical`` is what it has then.
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
    layers: tuple[int, int] | None = None
    gate_up_tile: int = 0
    group_size: int = 0
    part: Part | None = None

    @property
    def of_experts(self) -> bool:
        """Whether ``logical`` counts routed experts in its batch."""
        return self.assembly in ("experts", "experts_gate_up")

    @property
    def total_bytes(self) -> int:
        """Packed bytes over all layers."""
        return self.stored_bytes * (self.layers[1] - self.layers[0] if self.layers else 1)

    def device_name(self, layer: int) -> str:
        """The tensor's name on the device; ``layer`` matters only where there is one a layer."""
        return f"layers.{layer}.{self.name}" if self.layers else self.name


MAX_NODES = 64  #: draft-tree nodes of a verify step, root included
PAGE_SLOTS = 64  #: slots of a page of the caches: a tile of keys, as attention on tensor cores reads it
MAX_PATH = MAX_BLOCK  #: longest path in a tree, root included
MAX_CANDIDATES = 64  #: candidate tokens kept of a draft row


@dataclass(frozen=True)
class Limits:
    """Run-time sizes a plan is made for. None of them changes a kernel's text or an output's bits.

    ``pages``: of the pool that sequences share; 0: as many as all of them can fill.
    """

    max_tokens: int = 64
    max_context: int = 4096
    max_sequences: int = 1
    pages: int = 0

    @property
    def max_rows(self) -> int:
        """Token rows of a step: a prefill's tokens, or a full tree of every sequence."""
        return max(self.max_tokens, self.max_sequences * MAX_NODES)

    @property
    def max_logits(self) -> int:
        """Rows of a step that have logits: a full tree of every sequence. Prefills have them of a few, or of all if there are no more."""
        return self.max_sequences * MAX_NODES

    @property
    def capacity(self) -> int:
        """Cache rows of a sequence: a draft tree may stand beyond the last position that is kept."""
        return self.max_context + MAX_NODES

    @property
    def sequence_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.capacity // PAGE_SLOTS)

    @property
    def pool_pages(self) -> int:
        """Pages of each layer's cache."""
        return self.pages or self.max_sequences * self.sequence_pages


@dataclass(frozen=True)
class Plan:
    """Everything later stages need, for one spec and one compute dtype, on one of the ranks that run it together.

    Plans of several ranks have the same kernels and programs, and differ in their weights and in which tokens are theirs.
    ``draft_weights`` are the drafter's, which come from a checkpoint of their own; there are none where the spec has no drafter.
    ``tiled_rows``: token rows from which on a prefill is the program for many rows, ``<program>_tiled``; 0 where there is none.
    ``num_experts_per_tok``: experts that a token has in a layer.
    ``special`` are whole plans for families of targets that do some of it in another way, with the same weights and state.
    """

    spec_name: str
    spec_sha256: str
    compute: Compute
    default_compute: Compute
    limits: Limits
    kernels: tuple[Kernel, ...]
    weights: tuple[Weight, ...]
    draft_weights: tuple[Weight, ...]
    buffers: tuple[Buffer, ...]
    programs: tuple[Program, ...]
    notes: tuple[str, ...]
    shard: Shard = WHOLE
    gathers: tuple[Gather, ...] = ()
    family: Family = "generic"
    special: tuple[Plan, ...] = ()
    tiled_rows: int = 0
    num_experts_per_tok: int = 0

    def on(self, family: Family) -> Plan:
        """The one plan for targets of ``family``: a special one, or this without any."""
        return next((plan for plan in self.special if plan.family == family), replace(self, special=()))

    @property
    def key_tiles(self) -> bool:
        """Whether the cache lies in tiles (``kdgen.plan.cache_layout``), of which attention on wgmma takes whole ones."""
        return self.family == "sm_90a"

    @property
    def is_default(self) -> bool:
        return self.compute == self.default_compute

    @property
    def directory(self) -> str:
        """The folder under ``generated/``."""
        return self.spec_name if self.is_default else f"{self.spec_name}-{self.compute}"

    def kernel(self, name: str) -> Kernel:
        return next(k for k in self.kernels if k.name == name)

    def program(self, name: str) -> Program:
        return next(p for p in self.programs if p.name == name)

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)
