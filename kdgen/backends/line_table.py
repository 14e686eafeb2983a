"""The source line of a machine instruction, read from the DWARF 4 line table of an ELF library.

It reads what gcc and clang write with ``-gdwarf-4 -g1``, so that errors can name a kernel's line without addr2line.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, order=True)
class Row:
    """Code from ``address`` on belongs to line ``line`` of ``file``; line 0 ends a sequence."""

    address: int
    line: int
    file: str


def lookup(library: Path, address: int) -> Row | None:
    """The line of the instruction at ``address``, relative to the library's load address; None if the table has none."""
    rows = _rows(library)
    i = bisect_right(rows, address, key=lambda row: row.address) - 1
    return rows[i] if i >= 0 and rows[i].line else None


@lru_cache(maxsize=8)
def _rows(library: Path) -> tuple[Row, ...]:
    try:
        section = _section(library.read_bytes(), b".debug_line")
        return tuple(sorted(_units(section), key=lambda row: (row.address, row.line > 0)))
    except (OSError, struct.error, IndexError, ValueError):
        return ()


def _section(elf: bytes, name: bytes) -> bytes:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, strings = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    names = headers[strings][4]
    for header in headers:
        start = names + header[0]
        if elf[start : elf.index(b"\0", start)] == name:
            return elf[header[4] : header[4] + header[5]]
    return b""


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self.at = at

    def take(self, code: str) -> int:
        value: int
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return text

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    def sleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value - (1 << shift) if byte & 0x40 else value


def _units(section: bytes) -> Iterator[Row]:
    at = 0
    while at < len(section):
        reader = _Reader(section, at)
        end = reader.take("I") + at + 4
        if reader.take("H") in (2, 3, 4):
            yield from _program(reader, end)
        at = end


def _program(r: _Reader, end: int) -> Iterator[Row]:
    """Run one unit's line number program (DWARF 4, section 6.2)."""
    version = struct.unpack_from("<H", r.data, r.at - 2)[0]
    start = r.take("I") + r.at
    min_length = r.take("B")
    if version >= 4:
        r.take("B")  # operations per instruction: 1 except on VLIW machines
    r.take("B")  # default is_stmt
    line_base, line_range, opcode_base = r.take("b"), r.take("B"), r.take("B")
    operands = [0, *(r.take("B") for _ in range(opcode_base - 1))]
    while r.string():  # directories
        pass
    files = [""]
    while name := r.string():
        files.append(name)
        for _ in range(3):
            r.uleb()
    r.at = start
    address, file, line = 0, 1, 1
    while r.at < end:
        opcode = r.take("B")
        if opcode >= opcode_base:  # special opcode: advances address and line, and adds a row
            adjusted = opcode - opcode_base
            address += adjusted // line_range * min_length
            line += line_base + adjusted % line_range
            yield Row(address, line, files[file])
        elif opcode == 0:
            length = r.uleb()
            after = r.at + length
            extended = r.take("B")
            if extended == 1:  # end of sequence
                yield Row(address, 0, "")
                address, file, line = 0, 1, 1
            elif extended == 2:
                address = r.take("Q")
            r.at = after
        elif opcode == 1:
            yield Row(address, line, files[file])
        elif opcode == 2:
            address += r.uleb() * min_length
        elif opcode == 3:
            line += r.sleb()
        elif opcode == 4:
            file = r.uleb()
        elif opcode == 8:
            address += (255 - opcode_base) // line_range * min_length
        elif opcode == 9:
            address += r.take("H")
        else:
            for _ in range(operands[opcode]):
                r.uleb()
