"""A search of machine code for copies that ptxas encodes wrongly."""

from __future__ import annotations

import struct

#: Opcode of an LDGSTS (cp.async) whose shared-memory address is in a uniform register. ptxas 13.0.88 (sm_90a, sm_120a) uses it only for
#: copies with a cache policy, and puts the policy into an odd register: on an H200, tiny-wgmma's experts ended with "an illegal
#: instruction" (2026-11-30). Copies without a policy are encoded otherwise.
_UNIFORM_COPY = 0xDAE
_OPCODE = 0xFFF
_EXECUTABLE = 0x4  # SHF_EXECINSTR, in a section's flags


def has_broken_copies(cubin: bytes) -> bool:
    """Whether an instruction in ``cubin``, an ELF file for sm_70 or newer, is a copy with a policy that ptxas encodes wrongly.

    Raises ValueError when it is not an ELF file.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a little-endian 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for section in range(count):
        flags, _, begin, length = struct.unpack_from("<QQQQ", cubin, table + section * size + 8)
        if not flags & _EXECUTABLE:
            continue
        # an instruction has 16 bytes; its lowest bits are the opcode
        if any(first & _OPCODE == _UNIFORM_COPY for first, _ in struct.iter_unpack("<QQ", cubin[begin : begin + length // 16 * 16])):
            return True
    return False
