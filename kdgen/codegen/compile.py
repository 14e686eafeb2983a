"""From CUDA text to machine code: NVRTC compiles to a cubin for one architecture, through the cache.

It needs neither a GPU nor a CUDA driver. ``cuda.core`` is imported only to compile, because the import takes half a second. If the cache
has every kernel, only NVRTC's version is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from kdgen.codegen.cache import Cache, digest
from kdgen.codegen.machine_code import has_broken_copies
from kdgen.codegen.source import Source
from kdgen.errors import BackendError, CompileError, KdgenError
from kdgen.files.requirements import requirement
from kdgen.plan.arch import Target, target_for, targets

#: cuda.core replaces entries of sys.modules during its import, so a second thread that imports it then would get half a package.
_IMPORTING = threading.Lock()

#: Part of every cache key. Raise it when the format of entries changes, or when other facts are read from the log.
SCHEMA = 2

#: The macro that makes primitives.cuh compile copies without a cache policy.
NO_CACHE_POLICY = "NO_CACHE_POLICY"


@dataclass(frozen=True)
class Flags:
    """The compiler flags, the same for every kernel and variant. The compiler may not contract a*b+c: it could do so in one inlined copy
    of a function and not in another, and their bits would differ. Kernels that need an FMA call ``fmaf``.
    """

    std: str = "c++17"
    fma: bool = False
    ftz: bool = False
    prec_div: bool = True
    prec_sqrt: bool = True
    ptxas_options: str = "-v"
    no_cache: bool = True  # NVRTC's own cache returns no log, from which registers and spills are read


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel for one architecture, and the resources that ptxas reported. Sizes are bytes."""

    name: str
    arch: str
    code: bytes = dataclasses.field(repr=False)
    registers: int
    static_smem: int
    dynamic_smem: int
    stack: int
    spill_stores: int
    spill_loads: int
    log: str = dataclasses.field(repr=False)
    seconds: float  #: NVRTC's time when it was compiled
    cached: bool  #: whether it was in the cache
    nvrtc: str

    @property
    def smem(self) -> int:
        """Shared memory of a block, in bytes."""
        return self.static_smem + self.dynamic_smem

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0


def compile_cubin(source: Source, arch: str, include: Path, cache: Cache | None = None) -> Cubin:
    """``source`` compiled for ``arch`` with the headers of directory ``include``.

    Raises CompileError (kernel, template, arch, compiler log) when the text does not compile or needs more shared memory than the
    architecture has, KdgenError for an unknown arch, BackendError when there is no NVRTC.
    """
    target = require_arch(arch)
    return _compile(source, target, include, _headers_digest(include), cache)


def everywhere(sources: Sequence[Source], archs: Sequence[str]) -> list[tuple[Source, str]]:
    """Every source for every arch, arch by arch: an argument for ``compile_all``."""
    return [(source, arch) for arch in archs for source in sources]


def compile_all(
    work: Sequence[tuple[Source, str]],
    include: Path,
    *,
    jobs: int | None = None,
    cache: Cache | None = None,
    on_done: Callable[[Cubin], None] | None = None,
    compiling: Callable[[int], AbstractContextManager[object]] | None = None,
) -> list[Cubin]:
    """Every (source, arch) compiled, in the given order. ``on_done`` is called in this thread when one is ready. Unless the cache has all,
    they are compiled within the context ``compiling(number of those that it lacks)``.

    Raises what compile_cubin raises; if several kernels fail, one CompileError has all their messages.
    """
    targets_by_arch = {arch: require_arch(arch) for _, arch in work}
    headers = _headers_digest(include)
    # Threads, because NVRTC releases the GIL: 24 bf16 matrix kernels on 2 cores took 4.4 s in one thread, 3.0 s in two threads
    # and 2.9 s in two processes, each of which would have to import cuda.core.
    pool = ThreadPoolExecutor(jobs or os.cpu_count() or 1)
    failures: dict[int, CompileError] = {}
    done: dict[int, Cubin] = {}
    meanwhile = contextlib.ExitStack()
    try:
        if compiling and (missing := sum(not _is_cached(source, targets_by_arch[arch], headers, cache) for source, arch in work)):
            meanwhile.enter_context(compiling(missing))
        futures = {
            pool.submit(_compile, source, targets_by_arch[arch], include, headers, cache): i for i, (source, arch) in enumerate(work)
        }
        for future in as_completed(futures):
            i = futures[future]
            try:
                done[i] = future.result()
            except CompileError as error:
                failures[i] = error
            else:
                if on_done:
                    on_done(done[i])
    finally:
        pool.shutdown(cancel_futures=True)
        meanwhile.close()
    if len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        raise CompileError("\n\n".join(str(failures[i]) for i in sorted(failures)))
    return [done[i] for i in range(len(work))]


@functools.cache
def nvrtc_version() -> str:
    """NVRTC's version, e.g. ``13.0 (wheel 13.0.88)``. The library does not report its patch level; the wheel has it.

    Raises BackendError when the library cannot be loaded.
    """
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise _no_nvrtc(error) from error
    try:
        wheel = importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError:
        return f"{major}.{minor}"
    return f"{major}.{minor} (wheel {wheel})"


@functools.cache
def supported_archs() -> tuple[str, ...]:
    """The targets that the installed NVRTC can compile for.

    Raises BackendError when the library cannot be loaded.
    """
    from cuda.bindings import nvrtc

    try:
        _, numbers = nvrtc.nvrtcGetSupportedArchs()
    except RuntimeError as error:
        raise _no_nvrtc(error) from error
    return tuple(target.arch for target in targets() if int(re.sub(r"\D", "", target.arch)) in numbers)


def _no_nvrtc(error: RuntimeError) -> BackendError:
    return BackendError(f"cannot load NVRTC; pip install '{requirement('nvidia-cuda-nvrtc')}' ({str(error).strip()})")


def require_arch(arch: str) -> Target:
    """The target called ``arch``. Raises KdgenError when kdgen does not know it or the installed NVRTC cannot compile for it."""
    target = target_for(arch)
    if arch not in supported_archs():
        raise KdgenError(f"NVRTC {nvrtc_version()} cannot compile for {arch}; it supports {', '.join(supported_archs())}")
    return target


def _headers_digest(include: Path) -> str:
    """A digest of the names and contents of all files that a kernel can include."""
    parts: list[str | bytes] = []
    for file in sorted(include.iterdir()):
        if file.is_file():
            parts += [file.name, file.read_bytes()]
    return digest(*parts)


def _key(source: Source, target: Target, headers: str) -> str:
    """A digest of all inputs of NVRTC and of its version. It has the include folder's contents, not its path."""
    return digest(f"schema {SCHEMA}", source.name, source.code, headers, repr(Flags()), nvrtc_version(), target.arch)


def _is_cached(source: Source, target: Target, headers: str, cache: Cache | None) -> bool:
    return cache is not None and cache.get("cubin", _key(source, target, headers), ".entry") is not None


def _compile(source: Source, target: Target, include: Path, headers: str, cache: Cache | None) -> Cubin:
    key = _key(source, target, headers)
    entry = cache.read("cubin", key, ".entry") if cache else None
    cached = entry is not None
    if entry is None:
        entry = _run_nvrtc(source, target, include)
        if cache:
            cache.put("cubin", key, ".entry", entry)
    header, code = entry.split(b"\n", 1)
    facts = json.loads(header)
    cubin = _cubin(source, target, code, facts["log"], facts["seconds"], cached)
    if cubin.static_smem > target.smem_static_max or cubin.smem > target.smem_per_block:
        raise CompileError(
            f"{_where(source, target)}: {cubin.static_smem} bytes of static and {cubin.dynamic_smem} of dynamic shared memory; "
            f"a block may have {target.smem_per_block}, {target.smem_static_max} of them static"
        )
    return cubin


def _run_nvrtc(source: Source, target: Target, include: Path) -> bytes:
    """Compile. Returns a line of JSON (log, seconds) and the cubin. If ptxas encodes cache policies wrongly, compile again without them."""
    started = time.perf_counter()
    code, log = _machine_code(source, target, include, ())
    if has_broken_copies(code):
        code, log = _machine_code(source, target, include, (NO_CACHE_POLICY,))
        if has_broken_copies(code):
            raise CompileError(
                f"{_where(source, target)}: NVRTC {nvrtc_version()} encodes its copies wrongly; try another nvidia-cuda-nvrtc"
            )
    facts = {"log": _tidy(log), "seconds": round(time.perf_counter() - started, 4)}
    return json.dumps(facts).encode() + b"\n" + code


def _machine_code(source: Source, target: Target, include: Path, macros: tuple[str, ...]) -> tuple[bytes, str]:
    """The cubin, and ptxas' log."""
    with _IMPORTING:
        from cuda.core import Program, ProgramOptions

    flags = Flags()
    options = ProgramOptions(
        name=f"{source.name}.cu",
        arch=target.arch,
        include_path=str(include),
        define_macro=list(macros) or None,
        std=flags.std,
        fma=flags.fma,
        ftz=flags.ftz,
        prec_div=flags.prec_div,
        prec_sqrt=flags.prec_sqrt,
        ptxas_options=flags.ptxas_options,
        no_cache=flags.no_cache,
    )
    log = io.StringIO()
    program = Program(source.code, "c++", options)
    try:
        # Keep only the bytes, not the ObjectCode: without a driver even its repr can deadlock.
        return bytes(program.compile("cubin", logs=log).code), log.getvalue()
    except Exception as error:  # cuda.core's NVRTCError, which no public module exports
        reason = _first_lines(str(error).split("compilation log:", 1)[-1].strip(" \0\n"))
        raise CompileError(f"{_where(source, target)} does not compile:\n{reason}") from error
    finally:
        del program  # the traceback keeps this frame alive, and cuda.core prints a traceback when the garbage collector frees a Program


def _first_lines(log: str, most: int = 40) -> str:
    """The first ``most`` lines: an instruction that an architecture lacks is reported at each of its uses."""
    lines = log.splitlines()
    return "\n".join(lines if len(lines) <= most else [*lines[:most], f"… and {len(lines) - most} more lines"])


def _tidy(log: str) -> str:
    """``log`` without NULs at its end, and without the line that differs between runs."""
    lines = log.rstrip("\0\n").splitlines()
    return "\n".join(line for line in lines if "Compile time" not in line)


def _cubin(source: Source, target: Target, code: bytes, log: str, seconds: float, cached: bool) -> Cubin:
    def numbers(pattern: str) -> list[int]:
        return [int(found) for found in re.findall(pattern, log)]

    registers = numbers(r"Used (\d+) registers")
    if len(registers) != 1:
        raise CompileError(f"{_where(source, target)}: the text has {len(registers)} kernels instead of 1; the log is\n{log}")
    return Cubin(
        name=source.name,
        arch=target.arch,
        code=code,
        registers=registers[0],
        static_smem=sum(numbers(r"(\d+) bytes smem")),
        dynamic_smem=source.smem,
        # a function that is not inlined has its own frame
        stack=max(numbers(r"(\d+) bytes cumulative stack size") + numbers(r"(\d+) bytes stack frame"), default=0),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        log=log,
        seconds=seconds,
        cached=cached,
        nvrtc=nvrtc_version(),
    )


def _where(source: Source, target: Target) -> str:
    """The kernel, the template its header names, and the architecture."""
    template = re.search(r"[\w./-]+\.cu\.j2", source.text[:2000])
    return f"kernel {source.name} ({template[0] if template else 'no template'}, {target.arch})"
