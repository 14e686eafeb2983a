from __future__ import annotations

import dataclasses
import struct

import pytest

from kdgen.codegen.compile import compile_cubin
from kdgen.codegen.machine_code import has_broken_copies
from kdgen.codegen.render import render
from kdgen.files.resources import templates_dir
from kdgen.plan.build import build_plan
from kdgen.verify.variants import variants


def elf(flags: int, *instructions: tuple[int, int]) -> bytes:
    """A file with an empty section and one of these instructions."""
    body = b"".join(struct.pack("<QQ", *each) for each in instructions)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 0x28, 64 + len(body))
    struct.pack_into("<HH", header, 0x3A, 64, 2)
    return bytes(header) + body + bytes(64) + struct.pack("<IIQQQQ", 0, 1, flags, 0, 64, len(body)) + bytes(24)


COPY = 0x000000004C707DAE, 0x0203E8000B981800  # LDGSTS.E.BYPASS.128 [R112+UR0], desc[UR1][R76.64]
OTHER = 0x0000000004707FAE, 0x0003E8000B981804  # LDGSTS.E.BYPASS.128 [R112], desc[UR4][R4.64]


def test_broken_copies_are_found_in_code_alone() -> None:
    assert has_broken_copies(elf(0x6, OTHER, COPY))
    assert not has_broken_copies(elf(0x6, OTHER, OTHER))
    assert not has_broken_copies(elf(0x6, (OTHER[0], COPY[0]))), "the upper half of an instruction has no opcode"
    assert not has_broken_copies(elf(0x2, COPY)), "that section holds data"


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="not a little-endian"):
        has_broken_copies(b"PTX")


@pytest.mark.parametrize(("spec", "arch", "name"), [("tiny-wgmma", "sm_90a", "experts_gate_up"), ("tiny-v2", "sm_120a", "q_a_kv_a_proj")])
def test_what_ptxas_encodes_wrongly_has_no_policy(spec: str, arch: str, name: str) -> None:
    """NVRTC 13.0.88 breaks these two with a policy; whatever another does, the kernel that is kept must be whole."""
    plan = build_plan(next(each for each in variants() if each.name == spec), "bf16").on("sm_90a" if arch == "sm_90a" else "generic")
    (rendered,) = render(dataclasses.replace(plan, kernels=(plan.kernel(name),)))
    cubin = compile_cubin(rendered.source, arch, templates_dir() / "lib" / "gpu")
    assert not has_broken_copies(cubin.code) and not cubin.spills
