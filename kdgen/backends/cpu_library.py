"""Kernels and the runtime as shared libraries, built by the host's C++ compiler through the cache."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from kdgen.backends.cpu_runtime import Runtime
from kdgen.backends.host_compiler import HostCompiler
from kdgen.codegen.cache import Cache
from kdgen.codegen.source import Source
from kdgen.errors import CompileError
from kdgen.files.resources import templates_dir
from kdgen.files.temporary import scratch_folder

_runtime_lock = threading.Lock()
SCHEMA = 1  # version of the cache entries; raise it when their meaning changes


_LIBRARY_OF = ".in"  # suffix of the cache entry that holds, for a kernel, the key of its library


def _library_root() -> Path:
    return templates_dir() / "lib" / "cpu"


@functools.cache
def _library_hash(root: Path) -> str:
    """A hash of all headers and of the runtime's sources."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _key(*parts: object) -> str:
    return hashlib.sha256(repr((SCHEMA, *parts)).encode()).hexdigest()


@functools.cache
def _scratch() -> Path:
    """A folder for libraries that the cache could not store. It is removed when the process ends."""
    kept = contextlib.ExitStack()
    atexit.register(kept.close)
    return kept.enter_context(scratch_folder("cpu"))


def _cached_library(
    key: str, text: str, *, compiler: HostCompiler, flags: Sequence[str], options: Sequence[str], what: str, linked: bytes = b""
) -> Path:
    """The shared library built from ``text``, from the cache if it holds an intact one. ``options`` are the linker's, ``linked`` is the
    content of a library that it needs."""
    cache = Cache.default()
    found = cache.get("cpu", key, ".so")
    if found is not None:
        return found
    with scratch_folder("cpu") as folder:
        source, output, other = (folder / name for name in ("unit.cpp", "unit.so", "linked.so"))
        source.write_text(text)
        if linked:
            other.write_bytes(linked)
        compiler.build(source, output, flags=flags, libraries=(*([str(other)] if linked else ()), *options), what=what)
        data = output.read_bytes()
    stored = cache.put("cpu", key, ".so", data)
    if stored is not None:
        return stored
    path = _scratch() / f"{key}.{threading.get_ident()}.so"
    path.write_bytes(data)
    return path


@functools.cache
def _runtime_for(compiler: HostCompiler, root: Path) -> Runtime:
    key = _key("runtime", compiler.identity, compiler.flags, _library_hash(root))
    text = '#include "runtime/runtime.cpp"\n'  # relative, because an absolute path might need quoting
    with Cache.default().alone([key]):
        path = _cached_library(
            key,
            text,
            compiler=compiler,
            flags=("-O3", f"-I{root}"),
            options=(f"-Wl,-soname,libkdgen-cpu-{key[:16]}.so", "-pthread"),
            what="the CPU backend's runtime",
        )
    return Runtime(path)


def runtime(compiler: HostCompiler) -> Runtime:
    """The runtime library, loaded once in this process. Raises CompileError when it does not compile."""
    with _runtime_lock:
        return _runtime_for(compiler, _library_root())


def _unit(sources: Sequence[Source]) -> str:
    """All kernels as one translation unit, each under its own file name, with their exports."""
    parts = ['#include "primitives.cuh"\n']
    for source in sources:
        parts.append(f'#line 1 "{source.name}.cu"\n{source.code}\n')
    parts.append('#line 1 "exports"\n')
    parts.extend(f"EMU_EXPORT({source.name})\n" for source in sources)
    return "".join(parts)


def kernel_libraries(
    compiler: HostCompiler, sources: Sequence[Source], checker: bool, compiling: Callable[[int], AbstractContextManager[object]]
) -> list[Path]:
    """The library of each kernel. Kernels without a library in the cache are compiled together, into one library, within the context
    ``compiling(their number)``.

    The key is a single kernel's, because plans for other contexts or ranks share most kernels, and compiling one takes longer than running
    it once.
    """
    root, cache = _library_root(), Cache.default()
    flags = ("-O1", *(("-DEMU_CHECKER", *compiler.checker_flags) if checker else ()))
    built_with = (compiler.identity, compiler.flags, flags, _library_hash(root))
    keys = [_key("kernel", *built_with, _unit([source])) for source in sources]
    found = _libraries_with(keys, cache)
    if None in found:
        linked = runtime(compiler)
        with cache.alone([key for key, path in zip(keys, found, strict=True) if path is None]):
            found = _libraries_with(keys, cache)  # another process has compiled some meanwhile, as ranks of one model do
            missing = [source for source, path in zip(sources, found, strict=True) if path is None]
            if missing:
                new_key = _key("kernels", *built_with, _unit(missing))
                with compiling(len(missing)):
                    new = _kernel_library(new_key, compiler, linked, missing, (*flags, f"-I{root}"))
                for key, path in zip(keys, found, strict=True):
                    if path is None:
                        cache.put("cpu", key, _LIBRARY_OF, new_key.encode())
                found = [path or new for path in found]
    return [path for path in found if path]


def _libraries_with(keys: Sequence[str], cache: Cache) -> list[Path | None]:
    """For the key of each kernel, a library in the cache that has it."""
    named = [(cache.read("cpu", key, _LIBRARY_OF) or b"").decode() for key in keys]  # the key of its library
    there = {key: cache.get("cpu", key, ".so") for key in dict.fromkeys(named) if key}
    return [there.get(key) for key in named]


def _kernel_library(key: str, compiler: HostCompiler, runtime: Runtime, sources: Sequence[Source], flags: Sequence[str]) -> Path:
    text, what = _unit(sources), f"kernel {', '.join(source.name for source in sources)}"
    try:
        return _cached_library(key, text, compiler=compiler, flags=flags, options=("-Wl,-z,defs",), what=what, linked=runtime.image)
    except CompileError as error:
        log = str(error).partition(":\n")[2]
        blamed = [s.name for s in sources if re.search(rf"(?<![\w.]){re.escape(s.name)}\.cu:\d+", log)]
        if not blamed:
            raise
        raise CompileError(f"kernel {', '.join(blamed)}: {' '.join(compiler.command)} failed:\n{log}") from error
