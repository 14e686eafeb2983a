"""PTX text to instructions: as much of the language as NVRTC writes for the primitives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kdgen.errors import KdgenError

#: Bits of a type. Predicates are kept as one.
TYPE_BITS = {"pred": 1, **{f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)}}


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``guard`` is the register of its predicate, "" without one; ``asm``: it was written as inline assembly."""

    opcode: str
    operands: tuple[str, ...]
    guard: str
    negated: bool
    asm: bool

    @property
    def words(self) -> list[str]:
        return self.opcode.split(".")


@dataclass(frozen=True)
class Shared:
    """A variable in shared memory. ``size`` in bytes; 0: as much as the launch gives."""

    symbol: str
    align: int
    size: int

    @property
    def name(self) -> str:
        """What the text calls it: ``s`` is ``_ZZ7probe_1E8s_shared``."""
        return re.sub(r"^_ZZ.*E\d+|_shared$", "", self.symbol)


@dataclass(frozen=True)
class Kernel:
    """An entry. ``widths`` gives the bits of each class of registers, ``labels`` the instruction that each label stands before."""

    name: str
    parameters: tuple[str, ...]
    directives: str
    shared: tuple[Shared, ...]
    widths: tuple[tuple[str, int], ...]
    code: tuple[Instruction, ...]
    labels: tuple[tuple[str, int], ...]

    def width(self, register: str) -> int:
        """Bits of ``register``, e.g. ``%rd1``, or a name that inline assembly declares."""
        stem = register.rstrip("0123456789") if register.startswith("%") else register
        return next(bits for name, bits in self.widths if name == stem)


_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d*)\]")
_ENTRY = re.compile(r"(\w+)\((.*?)\)(.*?)\{(.*)\n\}", re.DOTALL)


def parse(ptx: str) -> list[Kernel]:
    """Every entry of a module, in order. Raises KdgenError for what cannot be read."""
    head, *entries = ptx.split(".visible .entry ")
    found = [_ENTRY.match(entry) for entry in entries]
    return [_kernel(each[1], each[2], each[3], each[4], _shared(head)) for each in found if each]


def _shared(text: str) -> tuple[Shared, ...]:
    return tuple(Shared(symbol, int(align), int(size or 0)) for align, symbol, size in _SHARED.findall(text))


def _kernel(name: str, parameters: str, directives: str, body: str, outside: tuple[Shared, ...]) -> Kernel:
    code: list[Instruction] = []
    labels: list[tuple[str, int]] = []
    widths: list[tuple[str, int]] = []
    for statement, asm in _statements(body):
        if label := re.fullmatch(r"(\$?\w+):", statement):
            labels.append((label[1], len(code)))
        elif register := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement):
            widths += [(each.strip().partition("<")[0], TYPE_BITS[register[1]]) for each in register[2].split(",")]
        elif not statement.startswith("."):  # .shared, .pragma
            code.append(_instruction(statement, asm))
    declared = tuple(parameter.split()[-1] for parameter in parameters.split(",") if parameter.strip())
    return Kernel(name, declared, directives, (*outside, *_shared(body)), tuple(widths), tuple(code), tuple(labels))


def _statements(body: str) -> Iterator[tuple[str, bool]]:
    """Statements and labels, and whether each lies in inline assembly."""
    asm = False
    for part in re.split(r"(// (?:begin|end) inline asm)", body):
        if part.startswith("// "):
            asm = "begin" in part
            continue
        text = re.sub(r"//.*", "", part)
        text = re.sub(r"^\s*\{\s*(?=\.reg)|;\s*\}\s*$", ";", text)  # a block of inline assembly
        text = re.sub(r"(\$L\w+):", r"\1:;", text)
        for statement in text.split(";"):
            if statement := " ".join(statement.split()):
                yield statement, asm


def _instruction(statement: str, asm: bool) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)", statement)
    if found is None:
        raise KdgenError(f"this is no instruction that can be read: {statement}")
    negated, guard, opcode, operands = found.groups()
    return Instruction(opcode, tuple(_operands(operands)), guard or "", bool(negated), asm)


def _operands(text: str) -> Iterator[str]:
    """At commas outside braces and brackets."""
    depth, begin = 0, 0
    for place, each in enumerate(text):
        depth += (each in "{[") - (each in "}]")
        if each == "," and depth == 0:
            yield text[begin:place].strip()
            begin = place + 1
    if text[begin:].strip():
        yield text[begin:].strip()
