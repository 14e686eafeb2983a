"""clang-format for generated code: the binary of the ``clang-format`` wheel, not one on PATH, whose version is unknown."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kdgen.codegen.cache import Cache, digest
from kdgen.errors import KdgenError
from kdgen.files.requirements import requirement
from kdgen.files.temporary import scratch_folder

#: Google's style with longer lines. Comments are not reflowed, so that the header's command stays on one line.
STYLE = "{BasedOnStyle: Google, Language: Cpp, ColumnLimit: 110, DerivePointerAlignment: false, ReflowComments: Never}"
_FORMATTED = ".cu"  # suffix of cache entries that hold a formatted text


def clang_format(text: str) -> str:
    """``text``, formatted. Raises KdgenError when the clang-format wheel is missing."""
    return clang_format_many([text])[0]


def clang_format_many(texts: Sequence[str]) -> list[str]:
    """Every text formatted, by one process.

    Raises KdgenError when the clang-format wheel is missing or its binary does not run.
    """
    if not texts:
        return []
    with scratch_folder("format") as folder:
        files = [folder / f"{i}.cu" for i in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_bytes(text.encode())
        # relative names, because clang-format treats a % in a path as a placeholder
        _run(f"--style={STYLE}", "-i", *(file.name for file in files), folder=folder)
        return [file.read_bytes().decode() for file in files]


def clang_format_cached(texts: Sequence[str], cache: Cache) -> list[str]:
    """Every text formatted. Those that ``cache`` lacks, for this version and style, are formatted by one process.

    Raises KdgenError as ``clang_format_many``.
    """
    keys = [digest(clang_format_version(), STYLE, text) for text in texts]
    found = {key: entry.decode() for key in keys if (entry := cache.read("text", key, _FORMATTED)) is not None}
    missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
    for key, formatted in zip(missing, clang_format_many([*missing.values()]), strict=True):
        found[key] = formatted
        cache.put("text", key, _FORMATTED, formatted.encode())
    return [found[key] for key in keys]


@functools.cache
def clang_format_version() -> str:
    """The version of the binary, e.g. ``20.1.8``. Raises KdgenError when the clang-format wheel is missing."""
    return _run("--version").split()[-1]


def _run(*arguments: str, folder: Path | None = None) -> str:
    try:
        result = subprocess.run([str(_binary()), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KdgenError(f"clang-format does not run ({error}); reinstall it: pip install --force-reinstall clang-format") from error
    if result.returncode != 0:
        raise KdgenError(f"clang-format failed: {result.stderr.strip()}")
    return result.stdout


def _binary() -> Path:
    package = importlib.util.find_spec("clang_format")
    if package is None or package.origin is None:
        raise KdgenError(f"clang-format is missing; pip install '{requirement('clang-format')}'")
    return Path(package.origin).absolute().parent / "data" / "bin" / ("clang-format.exe" if sys.platform == "win32" else "clang-format")
