"""``kdgen doctor``: what kdgen needs, and what this machine has."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from dataclasses import dataclass

import click

from kdgen import __version__
from kdgen.backends.gpu import Gpu, find_gpu
from kdgen.backends.host_compiler import find as find_cxx
from kdgen.cli.output import emit_json, emit_table, size_text
from kdgen.codegen.cache import Cache
from kdgen.codegen.compile import nvrtc_version, supported_archs
from kdgen.codegen.format import clang_format_version
from kdgen.errors import KdgenError


@dataclass(frozen=True)
class Package:
    name: str
    version: str | None


@dataclass(frozen=True)
class CacheState:
    path: str
    exists: bool
    writable: bool
    bytes: int


@dataclass(frozen=True)
class DoctorReport:
    kdgen: str
    python: str
    platform: str
    cpus: int
    packages: tuple[Package, ...]
    nvrtc: str | None
    archs: tuple[str, ...]
    clang_format: str | None
    cxx_compiler: str | None  #: for the CPU backend
    gpu: Gpu | None
    gpu_reason: str | None  #: why no GPU can be used
    cache: CacheState
    problems: tuple[str, ...]  #: what this machine lacks, and what to do about it


def examine() -> DoctorReport:
    """Examine this machine. The only change is a probe file in the cache's folder, removed at once."""
    problems: list[str] = []
    nvrtc: str | None = None
    archs: tuple[str, ...] = ()
    formatter: str | None = None
    try:
        nvrtc, archs = nvrtc_version(), supported_archs()
    except KdgenError as error:
        problems.append(str(error))
    try:
        formatter = clang_format_version()
    except KdgenError as error:
        problems.append(str(error))
    gpu = find_gpu()
    compiler: str | None = None
    try:
        found = find_cxx()
        compiler = f"{' '.join(found.command)}: {found.identity.splitlines()[0]}"
    except KdgenError as error:
        problems.append(str(error))
    cache = cache_state(Cache.default())
    if not cache.writable:
        problems.append(f"the cache {cache.path} cannot be written; set KDGEN_CACHE_DIR")
    names = ("cuda-core", "cuda-bindings", "numba-cuda", "nvidia-cuda-nvrtc", "numpy", "ml_dtypes", "jinja2", "safetensors", "tokenizers")
    return DoctorReport(
        kdgen=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cpus=os.cpu_count() or 1,
        packages=tuple(Package(name, installed_version(name)) for name in names),
        nvrtc=nvrtc,
        archs=archs,
        clang_format=formatter,
        cxx_compiler=compiler,
        gpu=None if isinstance(gpu, str) else gpu,
        gpu_reason=gpu if isinstance(gpu, str) else None,
        cache=cache,
        problems=tuple(problems),
    )


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_state(cache: Cache) -> CacheState:
    """The cache's state. It is writable if a file can be made in its folder, or in the nearest parent that exists."""
    exists = cache.path.is_dir()
    nearest = next(place for place in (cache.path, *cache.path.absolute().parents) if place.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".tmp-"):
            writable = True
    except OSError:
        writable = False
    return CacheState(str(cache.path), exists, writable, cache.size())


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.doctor/1), to attach to a bug report.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Report versions, compilers, GPU and cache. The exit code is 1 if something that kdgen needs is missing."""
    report = examine()
    if as_json:
        emit_json("kdgen.doctor/1", report)
    else:
        rows = [
            ("kdgen", report.kdgen),
            ("Python", f"{report.python} on {report.platform}, {report.cpus} CPUs"),
            *((package.name, package.version or "not installed") for package in report.packages),
            ("NVRTC", f"{report.nvrtc}: {', '.join(report.archs)}" if report.nvrtc else "none"),
            ("clang-format", report.clang_format or "none"),
            ("C++ compiler", report.cxx_compiler or "none"),
            ("GPU", gpu_text(report)),
            ("cache", f"{report.cache.path} ({size_text(report.cache.bytes)}{'' if report.cache.writable else ', not writable'})"),
            *(("problem", problem) for problem in report.problems),
        ]
        emit_table(("", ""), rows)
    if report.problems:
        ctx.exit(1)


def gpu_text(report: DoctorReport) -> str:
    gpu = report.gpu
    if gpu is None:
        return f"none ({report.gpu_reason})"
    cuda = ".".join(map(str, gpu.driver_cuda))
    return f"{gpu.name}, {gpu.arch}, {gpu.multiprocessors} SMs, {size_text(gpu.memory_bytes)}, driver for CUDA {cuda}"
