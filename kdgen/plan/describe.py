"""What a generated file's header says of its kernel: the launch, where it stands in a step, and what each argument is.

The lines are part of the kernel, so that a kernel has one text wherever a plan has it. They hold no figure that limits or ranks change:
dimensions that grow with limits are written as what they count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, groupby

from kdgen.plan.derive import derive, of_larger_limits, op_programs
from kdgen.plan.ir import Arg, Buffer, DType, Extent, Kernel, Launch, Limits, Parameter, Program, Weight
from kdgen.plan.memory import buffers
from kdgen.plan.ops.op import Context

#: C++'s name of what a buffer or weight holds.
_TYPES: Mapping[DType, str] = {"f32": "float32", "bf16": "bfloat16", "i32": "int32", "f64": "float64", "u8": "bytes"}
#: Names of one thing that a table row lists before it says how many others there are.
_LISTED = 2
#: Limits for which headers are written, whatever the plan's are: every program has every launch.
_LIMITS = Limits(max_tokens=1 << 12, max_context=1 << 12)


def described(kernels: tuple[Kernel, ...], tensors: Iterable[Weight], c: Context) -> tuple[Kernel, ...]:
    """``kernels`` with their headers. ``tensors`` are all weights that launches may name."""
    at_any_limits = replace(c, limits=_LIMITS)
    found = derive(op_programs(at_any_limits), of_larger_limits(at_any_limits))
    memory = _memory(c, found.buffers)
    memory |= {weight.name: _weight(weight) for weight in tensors}
    launches: dict[str, list[Launch]] = {kernel.name: [] for kernel in kernels}
    for launch in chain.from_iterable(map(_launches, found.programs)):
        launches.get(launch.kernel, []).append(launch)

    def header(kernel: Kernel) -> tuple[str, ...]:
        rows = [(each, _what([launch.argument(each.name) for launch in launches[kernel.name]], memory)) for each in kernel.parameters]
        return (*_launch(kernel), *_place(kernel, found.programs), "Arguments:", *_table(rows))

    return tuple(replace(kernel, header=header(kernel)) for kernel in kernels)


def share_headers(kernels: Iterable[Kernel], others: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """``kernels``, with those of ``others`` in place of the ones that are equal to them: a kernel has one header."""
    known = {kernel.name: kernel for kernel in others}

    def shared(kernel: Kernel) -> Kernel:
        other = known.get(kernel.name, kernel)
        return other if kernel == other else kernel

    return tuple(map(shared, kernels))


# ---- the launch and its place ---------------------------------------------------------------------------------------


def _launch(kernel: Kernel) -> tuple[str, str]:
    cluster = f", in clusters of {kernel.cluster} blocks" if kernel.cluster > 1 else ""
    block = f"{kernel.block // kernel.cluster} threads, {kernel.smem} bytes of dynamic shared memory{cluster}"
    return f"Grid: ({', '.join(map(_extent, kernel.grid))}).", f"Block: {block}."


def _extent(extent: Extent) -> str:
    factors = [str(extent.times)] if extent.times > 1 else []
    for name, divisor in (("rows", extent.per_tokens), ("context", extent.per_context)):
        if divisor:
            factors.append(name if divisor == 1 else f"ceil({name} / {divisor})")
    if extent.per_sequence:
        factors.append("sequences")
    product = " * ".join(factors) or "1"
    bounds = [product, *([f"{extent.per_processor} * SMs"] if extent.per_processor else []), *([str(extent.cap)] if extent.cap else [])]
    return product if len(bounds) == 1 else f"min({', '.join(bounds)})"


def _place(kernel: Kernel, programs: tuple[Program, ...]) -> Iterator[str]:
    """Which programs launch it, and its neighbours in one of them: decode, where it is there."""
    having = [program for program in programs if any(launch.kernel == kernel.name for launch in _launches(program))]
    if not having:
        return
    first = next((program for program in having if program.name == "decode"), having[0])
    names = list(dict.fromkeys(program.name.removesuffix("_sampled") for program in having))
    order = [name for name, _ in groupby(launch.kernel for launch in _launches(first))]
    places = [place for place, name in enumerate(order) if name == kernel.name]
    around = list(dict.fromkeys((order[place - 1] if place else "", (*order, "")[place + 1]) for place in places))
    before, behind = around[0]
    where = f"{f'after {before}' if before else 'first'} and {f'before {behind}' if behind else 'last'}"
    yield f"Programs: {', '.join(names)}; in {first.name} {where}{', and elsewhere' if len(around) > 1 else ''}."


def _launches(program: Program) -> Iterator[Launch]:
    """The launches of ``program``, those of a stage once, whatever the number of layers."""
    return (launch for stage in program.stages for launch in stage.launches)


# ---- arguments ------------------------------------------------------------------------------------------------------


def _table(rows: list[tuple[Parameter, str]]) -> Iterator[str]:
    types = [parameter.type.replace(" __restrict__", "") for parameter, _ in rows]
    names, wide = max(len(parameter.name) for parameter, _ in rows), max(map(len, types))
    for (parameter, what), type_ in zip(rows, types, strict=True):
        yield f"  {parameter.name:<{names}}  {type_:<{wide}}  {what}"


def _what(args: Iterable[Arg], memory: Mapping[str, str]) -> str:
    """What launches give for a parameter: whatever has one shape together, with that shape and its type."""
    names: dict[str, list[str]] = {}
    for arg in dict.fromkeys(args):
        those = names.setdefault(_shape(arg, memory), [])
        if arg.name not in those:
            those.append(arg.name)
    return "; ".join(f"{_listed(those)} {shape}".strip() for shape, those in names.items())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _shape(arg: Arg, memory: Mapping[str, str]) -> str:
    if arg.kind == "int":
        return "set by the plan"
    if arg.kind == "rows":
        return "rows of the launch, as the host bounds them"
    if arg.kind == "layer_buffer":
        return memory[arg.name].partition("]")[2] + ", of this layer"
    return memory[arg.name] + (", on every rank" if arg.kind == "ranks" else "")


def _weight(weight: Weight) -> str:
    batch, rows, cols = weight.logical
    dims = f"[{rows}][{cols}]" if rows > 1 else f"[{cols}]"
    layout = "" if weight.layout == "row_major" else f", packed as {weight.layout}"
    return f"[{batch}]{dims} {_TYPES[weight.dtype]}{layout}" if batch > 1 else f"{dims} {_TYPES[weight.dtype]}{layout}"


def _memory(c: Context, names: frozenset[str]) -> dict[str, str]:
    """Each buffer's shape and type; a dimension that follows from a limit is written as its formula in what that limit counts.

    The formulas are found by sizing buffers at limits of which one is changed at a time.
    """

    def sizes(limits: Limits) -> tuple[Buffer, ...]:
        return buffers(replace(c, limits=limits), names)

    def grown(limit: str) -> tuple[tuple[int, ...], tuple[tuple[Buffer, ...], ...]]:
        values = tuple(getattr(_LIMITS, limit) * factor for factor in (1, 2, 3))
        return values, tuple(sizes(replace(_LIMITS, **{limit: value})) for value in values)

    ways = [(name, *grown(limit)) for limit, name in (("max_tokens", "rows"), ("max_sequences", "sequences"), ("max_context", "context"))]

    def dimension(place: int, axis: int) -> str:
        for name, values, sized in ways:
            seen = tuple(each[place].shape[axis] for each in sized)
            if len(set(seen)) > 1:
                return _formula(name, values, seen)
        return str(ways[0][2][0][place].shape[axis])

    every = sizes(_LIMITS)
    dims = {each.name: "".join(f"[{dimension(place, axis)}]" for axis in range(len(each.shape))) for place, each in enumerate(every)}
    return {each.name: f"{dims[each.name]} {_TYPES[each.dtype]}" for each in every}


def _formula(name: str, values: tuple[int, ...], seen: tuple[int, ...]) -> str:
    """``seen`` as a linear function of ``values``, or the name alone where it is none."""
    slope, left = divmod(seen[1] - seen[0], values[1] - values[0])
    fits = not left and slope > 0 and seen[2] - seen[1] == slope * (values[2] - values[1])
    if not fits:
        return f"by {name}"
    rest = seen[0] - slope * values[0]
    return (f"{slope} {name}" if slope > 1 else name) + (f" + {rest}" if rest > 0 else "")
