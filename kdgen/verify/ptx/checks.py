"""The part "primitives" of ``kdgen verify``: what only GPUs run, read in PTX. It needs NVRTC, and for arithmetic a C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter

from kdgen.backends.cpu import CpuBackend
from kdgen.errors import BackendError, CompileError, KdgenError
from kdgen.files.resources import templates_dir
from kdgen.verify.ptx import descriptor
from kdgen.verify.ptx.arithmetic import arithmetic, compare
from kdgen.verify.ptx.compiled import compile_ptx
from kdgen.verify.ptx.expected import KEPT, ORDERED, ORDERED_ONCE, clusters, probes, without_clusters, without_policy
from kdgen.verify.ptx.parse import Kernel, parse
from kdgen.verify.ptx.probes import Probe, by_number, problem, source_of
from kdgen.verify.ptx.signatures import Signature, differences, signatures
from kdgen.verify.report.checks import Check, Status

ARCH = "sm_90a"
#: What a check counted, in words, what is wrong, and how many bits it compared.
Found = tuple[str, Sequence[str], int]


def check_primitives() -> Iterator[Check]:
    """Functions, arithmetic, instructions and descriptors of ``templates/lib/gpu/primitives.cuh``. Without NVRTC, or without a C++
    compiler, what needs them is skipped."""
    for name, against, run in (
        ("functions of both sides", "text", functions),
        ("arithmetic against the CPU side", "PTX", computed),
        ("instructions and their operands", "PTX", instructions),
        ("descriptors, alignment, bounds", "PTX", descriptors),
    ):
        yield _check(name, against, run)


def _check(name: str, against: str, run: Callable[[Path], Found]) -> Check:
    began = perf_counter()
    status: Status
    detail, why, bits = "", "", 0
    try:
        detail, problems, bits = run(templates_dir() / "lib")
        status, why = "failed" if problems else "ok", "; ".join(problems[:3])
    except CompileError as error:
        status, why = "failed", str(error)
    except BackendError as error:  # no NVRTC, no C++ compiler
        status, why = "skipped", str(error)
    except KdgenError as error:
        status, why = "failed", str(error)
    seconds = perf_counter() - began
    return Check("primitives.cuh", ARCH, "primitives", name, against, status, detail=detail, why=why, seconds=seconds, bits=bits)


# ---- text -----------------------------------------------------------------------------------------------------------------


def functions(lib: Path) -> Found:
    """Both sides have the same functions; each is interpreted or has an instruction written down; what orders memory says so."""
    gpu, cpu = (signatures((lib / side / "primitives.cuh").read_text()) for side in ("gpu", "cpu"))
    problems = [*differences(gpu, cpu), *uncovered(gpu), *(said for each in gpu if (said := misordered(each, gpu)))]
    return f"{len(gpu)} functions, {len({each.name for each in gpu})} names", problems, 0


def uncovered(gpu: Sequence[Signature]) -> list[str]:
    """Functions without an interpretation or an expectation, and expectations of functions that are not there."""
    covered = {descriptor.COVERS}
    covered |= {signature for each in arithmetic() for signature in each.covers}
    covered |= {signature for each in (*probes(), *without_policy(), *without_clusters()) for signature in each.covers}
    there = {str(each) for each in gpu}
    return [
        *(f"{each} has no interpretation and no expected instruction in kdgen/verify/ptx" for each in sorted(there - covered)),
        *(f"kdgen/verify/ptx expects {each}, which primitives.cuh has not" for each in sorted(covered - there)),
    ]


def misordered(each: Signature, gpu: Sequence[Signature]) -> str:
    """Whether assembly stays where it is: PTX of a tiny kernel does not show what a compiler may move in a large one."""
    found = (each.volatile, each.memory)
    if each.name in ORDERED_ONCE:
        alike = [other for other in gpu if other.name == each.name]
        found = (any(other.volatile for other in alike), any(other.memory for other in alike))
    ordered = each.name in ORDERED | ORDERED_ONCE
    if found == (ordered or each.name in KEPT, ordered):
        return ""
    words = {(True, True): 'volatile with a "memory" clobber', (True, False): "volatile alone", (False, True): 'a "memory" clobber alone'}
    return f"{each}: its assembly is {words.get(found, 'neither volatile nor ordered with memory')}, unlike what expected.py says"


# ---- PTX ------------------------------------------------------------------------------------------------------------------


def _compiled(lib: Path, text: str, arch: str = ARCH, macros: Sequence[str] = ()) -> list[Kernel]:
    return parse(compile_ptx(text, arch, lib / "gpu", macros))


def computed(lib: Path) -> Found:
    cases = arithmetic()
    kernels = _compiled(lib, "\n".join(each.source.text for each in cases))
    device = CpuBackend("plain")
    device.load([each.source for each in cases])
    found = list(compare(device, cases, kernels))
    words = sum(count for _, count, _ in found)
    return f"{len(cases)} kernels interpreted, {words} words compared", [said for _, _, said in found if said], 32 * words


def instructions(lib: Path) -> Found:
    """For sm_90a; for clusters elsewhere, GPUs without them, and texts without cache policies."""
    count, problems = 0, []
    families: tuple[tuple[tuple[Probe, ...], str, tuple[str, ...]], ...] = (
        (probes(), ARCH, ()),
        (clusters(), "sm_120a", ()),
        (without_clusters(), "sm_80", ()),
        (without_policy(), ARCH, ("NO_CACHE_POLICY",)),
    )
    for cases, arch, macros in families:
        kernels = by_number(_compiled(lib, source_of(cases), arch, macros))
        said = [problem(each, kernels[number]) for number, each in enumerate(cases)]
        problems += [f"{arch}: {each}" for each in said if each]
        count += len(cases)
    return f"{count} kernels traced", problems, 0


def descriptors(lib: Path) -> Found:
    (kernel,) = _compiled(lib, descriptor.SOURCE)
    return "against the PTX ISA's table", list(descriptor.problems(kernel)), 0
