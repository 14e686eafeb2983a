"""Primitives that are hardware operations: a tiny kernel for each, whose arguments can be told apart, traced to its instructions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kdgen.errors import KdgenError
from kdgen.verify.ptx.machine import Machine
from kdgen.verify.ptx.memory import Memory
from kdgen.verify.ptx.parse import Kernel

WORDS = 256  #: of every array that a probe is given


@dataclass(frozen=True)
class Probe:
    """A kernel and the hardware operations that it must consist of, in order.

    ``body`` sees ``out`` (u32), ``s`` (512 bytes of shared memory) and ``parameters``. In ``expected`` an operand is the name of the
    parameter that it has the value of (``src``; ``p+16`` is an address, ``p[4]`` a word), a place in shared memory (``s+16``), or what an
    operation gave (``r0`` is the first result). A line that not all threads have begins with its thread, ``t2:``. ``out`` are the words
    that the kernel leaves in ``out``. ``threads`` run of a cluster of ``blocks`` blocks, of which this is ``rank``. ``answers`` are those
    of mbarrier.try_wait. ``kept`` are ordinary instructions, all of these kinds, that the compiler would drop if the assembly did not name
    their registers.
    """

    covers: tuple[str, ...]
    parameters: str
    body: str
    expected: tuple[str, ...]
    out: tuple[str, ...] = ()
    threads: int = 1
    blocks: int = 1
    rank: int = 0
    answers: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()

    def text(self, number: int) -> str:
        parameters = f"u32* out{', ' if self.parameters else ''}{self.parameters}"
        return (
            f'extern "C" __global__ void probe_{number}({parameters}) {{\n'
            f"  SHARED_ARRAY(unsigned char, s, [512]);\n  (void)s;\n  {self.body.strip()}\n}}\n"
        )


def source_of(probes: Sequence[Probe]) -> str:
    return '#include "primitives.cuh"\n' + "".join(probe.text(number) for number, probe in enumerate(probes))


def problem(probe: Probe, kernel: Kernel) -> str:
    """How the kernel that NVRTC made of ``probe`` differs from what is expected, or ""."""
    memory = Memory()
    out = memory.add("out", np.zeros(WORDS, np.uint32))
    arguments = [out.address]
    for number, (kind, name) in enumerate(_declared(probe.parameters)):
        arguments.append(_argument(memory, kind, name, number))
    specials = {"%cluster_nctarank": probe.blocks, "%cluster_ctarank": probe.rank, "%clusterid.x": 0x5C105, "%nctaid.x": 1}
    machine = Machine(kernel, arguments, memory, threads=probe.threads, specials=specials, answers=probe.answers)
    called = ", ".join(probe.covers)
    try:
        events = tuple(machine.run())
    except KdgenError as error:
        return f"{called}: {error}"
    for place in range(max(len(events), len(probe.expected))):
        ours, theirs = (lines[place] if place < len(lines) else "nothing" for lines in (events, probe.expected))
        if ours != theirs:
            return f"{called}: operation {place} is\n    {ours}\n  and should be\n    {theirs}"
    kept = tuple(each.opcode for each in kernel.code if each.opcode in probe.kept)
    if kept != probe.kept:
        return (
            f"{called}: the compiler keeps {', '.join(kept) or 'nothing'} of {', '.join(probe.kept)}: registers are not named as they were"
        )
    words = tuple(machine.name_of(int(word)) for word in out.words[: len(probe.out)])
    if words != probe.out:
        return f"{called}: leaves {', '.join(words)} instead of {', '.join(probe.out)}"
    if out.words[len(probe.out) :].any():
        return f"{called}: writes more than {len(probe.out)} words"
    return ""


def _declared(parameters: str) -> list[tuple[str, str]]:
    """Types and names."""
    each = [declaration.strip() for declaration in parameters.split(",") if declaration.strip()]
    return [(found[1].strip(), found[2]) for declaration in each if (found := re.fullmatch(r"(.*?)(\w+)", declaration))]


def _argument(memory: Memory, kind: str, name: str, number: int) -> int:
    """A parameter's bits: an array whose words have names, a truth (``yes`` and ``no``), or a value of its own. ``memory`` names them."""
    if kind.endswith("*"):
        first = 0x21000000 + number * 0x10000
        words = np.arange(first, first + WORDS, dtype=np.uint32)
        memory.names |= {int(word): f"{name}[{place}]" for place, word in enumerate(words)}
        return memory.add(name, words).address
    if kind == "bool":
        return int(name == "yes")
    value = 0x11000000 + number * 0x1001
    if kind == "u64":
        value = value << 32 | 0x12000000 + number * 0x1001
    memory.names[value] = name
    return value


def by_number(kernels: Sequence[Kernel]) -> Mapping[int, Kernel]:
    """The kernels of ``source_of``, by the numbers of their probes."""
    return {int(kernel.name.removeprefix("probe_")): kernel for kernel in kernels if kernel.name.startswith("probe_")}
