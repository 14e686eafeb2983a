"""The C++ compiler that builds kernels for the CPU: how it is found, identified and called."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kdgen.errors import BackendError, CompileError

Family = Literal["gcc", "clang", "zig"]

INSTALL_HINT = "Install one (`apt install g++`, or `pip install 'kdgen[compiler]'`), or set CXX to one."

_COMMON = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",  # templates' statics must not merge across libraries
    "-fno-strict-aliasing",  # kernels read memory as other types, as CUDA lets them
    "-ffp-contract=off",  # the same bytes at every optimisation level
    "-fno-math-errno",
    "-fwrapv",
    "-fsigned-char",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fstack-clash-protection",  # a stack frame larger than a page must not skip the guard page
    "-gdwarf-4",  # line tables in the version that line_table reads
    "-g1",
    "-w",
)


_ELF = b"\x7fELF"


@dataclass(frozen=True)
class HostCompiler:
    """A working compiler. ``identity`` is the output of ``--version`` and the options in its command; it is part of every cache key."""

    command: tuple[str, ...]
    family: Family
    identity: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags for compiling both kernels and runtime. They include this machine's vector instructions."""
        own = {
            "gcc": ("-fno-gnu-unique", "-U_FORTIFY_SOURCE"),
            "clang": ("-U_FORTIFY_SOURCE",),
            "zig": ("-U_FORTIFY_SOURCE", "-fno-sanitize=undefined"),
        }
        return (*_COMMON, *own[self.family], *machine_flags())

    @property
    def checker_flags(self) -> tuple[str, ...]:
        """Flags that make the compiler call the checker before each memory access, with the access's size in the source."""
        # -fno-tree-sra: otherwise a vector load could be split and checked as single words
        # The checker compares an address's alignment with the access's size. GCC does not split accesses, so it needs no
        # -fsanitize=alignment, which would double the time for a large kernel.
        gcc = ("--param", "tsan-instrument-func-entry-exit=0", "-fno-tree-sra")
        return ("-fsanitize=thread", *(gcc if self.family == "gcc" else ("-fsanitize=alignment",)))

    def build(self, source: Path, output: Path, *, flags: Sequence[str], libraries: Sequence[str], what: str) -> None:
        """Compile ``source`` and link it into the shared library ``output``.

        Two steps, because linking with ``-fsanitize=thread`` would add the sanitizer's own library.
        Raises CompileError with the compiler's log, or when the compiler wrote no library. ``what`` names the library in messages.
        """
        objects = output.with_suffix(".o")
        compile_only = [*self.command, *self.flags, *flags, "-x", "c++", "-c", str(source), "-o", str(objects)]
        link = [*self.command, "-shared", "-Wl,-Bsymbolic", str(objects), *libraries, "-o", str(output)]
        for command in (compile_only, link):
            try:
                # temporary files of a compiler that was stopped are removed with the folder
                done = _run(command, {**os.environ, "TMPDIR": str(output.parent)})
            except OSError as error:
                raise CompileError(f"{what}: cannot run {command[0]}: {error}") from error
            if done.returncode:
                if reason := _no_room(done.stderr + done.stdout):
                    raise CompileError(f"{what}: {command[0]} could not write its files in {output.parent.parent}: {reason}")
                raise CompileError(f"{what}: {' '.join(self.command)} failed:\n{done.stderr.strip() or done.stdout.strip()}")
        try:
            with output.open("rb") as file:
                written = file.read(len(_ELF)) == _ELF
        except FileNotFoundError:
            written = False
        if not written:
            raise CompileError(f"{what}: {' '.join(self.command)} wrote no shared library, so it is not a C++ compiler for Linux")


def _no_room(log: str) -> str:
    """Why the compiler could not write a file, or empty if its log does not say so. GCC reports this as its own internal error."""
    if "File size limit exceeded" in log or "File too large" in log:
        return "the file is larger than this process may write (ulimit -f)"
    return "its disk is full; TMPDIR names another folder" if "No space left on device" in log else ""


def find(environ: Mapping[str, str] = os.environ) -> HostCompiler:
    """The first working compiler of $CXX, g++, clang++, c++ and the ``ziglang`` package.

    Raises BackendError, which says what to install, when none works, or when $CXX is set and does not work.
    """
    if chosen := environ.get("CXX"):
        try:
            words = tuple(shlex.split(chosen))
        except ValueError:  # a quotation mark without its partner
            words = ()
        compiler = _probe(words, environ.get("PATH", ""))
        if compiler is None:
            raise BackendError(f"CXX is {chosen!r}, which is not a working C++ compiler. Unset it or correct it.")
        return compiler
    candidates: list[tuple[str, ...]] = [("g++",), ("clang++",), ("c++",)]
    if importlib.util.find_spec("ziglang") is not None:
        candidates.append((sys.executable, "-m", "ziglang", "c++"))
    for command in candidates:
        if compiler := _probe(command, environ.get("PATH", "")):
            return compiler
    raise BackendError(f"No C++ compiler found (looked for $CXX, g++, clang++, c++, ziglang). {INSTALL_HINT}")


@functools.cache
def _probe(command: tuple[str, ...], path: str) -> HostCompiler | None:
    """The compiler that ``command`` runs, or None if it does not run. ``path`` is the PATH to search.

    Raises BackendError when this process cannot start any other process, which is not the compiler's fault.
    """
    if not command:
        return None
    try:
        done = _run([*command, "--version"], {**os.environ, "PATH": path})
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            raise BackendError(
                f"the C++ compiler {command[0]} cannot be started: {error.strerror}: a limit (ulimit -a) is too low"
            ) from error
        return None
    identity = done.stdout.strip()
    if done.returncode or not identity:
        return None
    family: Family = "zig" if "ziglang" in command or "zig" in Path(command[0]).name else "clang" if "clang" in identity else "gcc"
    options = " ".join(part for part in command[1:] if part.startswith("-"))
    return HostCompiler(command, family, f"{identity} {options}".strip())


def _run(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with messages in English; its output may quote bytes of any encoding. Raises OSError.

    An exception, such as Ctrl-C, kills the command and its children, because the compiler proper is a child of the driver program.
    """
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
        env={**environ, "LC_ALL": "C"}, process_group=0,
    ) as process:  # fmt: skip
        try:
            printed, said = process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, printed, said)


@functools.cache
def machine_flags() -> tuple[str, ...]:
    """Flags for AVX2 and FMA instructions if the processor has them. Without FMA, ``fmaf`` is a slow library call."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    features = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return tuple(f"-m{name}" for name in ("avx2", "fma") if name in features)
