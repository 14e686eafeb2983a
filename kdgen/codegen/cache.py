"""A folder of build results. Keys depend only on content, not on paths or times, and entries may be removed at any moment.

An entry is one file, ``<folder>/<kind>/<first two digits of key>/<key>-<digest of its bytes>.<suffix>``. The digest in the name reveals a
corrupt, truncated or half-written entry, which counts as missing. The file has no header, so that a shared library can be loaded from it.
A process writes a temporary file and renames it, so that two processes may store the same entry at once. If the folder is full or
read-only, kdgen works without a cache and warns once on stderr.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, ClassVar

import platformdirs

from kdgen.files.temporary import remove_abandoned, temporary_file

if sys.platform != "win32":
    import fcntl

_ENTRY = re.compile(r"[0-9a-z]+-[0-9a-f]{32}\.[a-z0-9.]+|\.tmp-.*")
_TEMPORARY = ".tmp-"
_LOCKS = f"{_TEMPORARY}locks"  # an empty file: a place in it stands for a key


def digest(*parts: str | bytes) -> str:
    """A key: the SHA-256 of ``parts``, each preceded by its length, so that no two lists of parts give the same bytes."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


class Cache:
    """Build results in one folder, which need not exist yet."""

    _warned: ClassVar[bool] = False  # each process warns once

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def default(cls) -> Cache:
        """The user's cache: ``$KDGEN_CACHE_DIR``, or in the platform's folder for caches."""
        chosen = os.environ.get("KDGEN_CACHE_DIR")
        if not chosen:
            return cls(platformdirs.user_cache_path("kdgen"))
        try:
            return cls(Path(chosen).expanduser())
        except RuntimeError:  # ~ of a user without a home directory
            return cls(Path(chosen))

    def get(self, kind: str, key: str, suffix: str) -> Path | None:
        """The entry's file, or None if there is no intact one."""
        found = self._find(kind, key, suffix)
        return found[0] if found else None

    def read(self, kind: str, key: str, suffix: str) -> bytes | None:
        """The entry's bytes, or None if there is no intact one."""
        found = self._find(kind, key, suffix)
        return found[1] if found else None

    def put(self, kind: str, key: str, suffix: str, data: bytes) -> Path | None:
        """Store ``data``. Returns the entry's file, or None, after a warning, if it cannot be written."""
        target = self._shard(kind, key) / f"{key}-{_check(data)}.{suffix.lstrip('.')}"
        for attempt in (1, 2):
            try:
                _write(self.path, target, data)
                return target
            except FileNotFoundError as error:  # another process cleared the cache between mkdir and write
                if attempt == 2:
                    self._warn(error)
            except OSError as error:
                self._warn(error)
                break
        return None

    @contextlib.contextmanager
    def alone(self, keys: Iterable[str]) -> Iterator[None]:
        """Entered by one process at a time for each of ``keys``, so that the next finds in the cache what the first has made.

        Where there are no such locks, by all at once.
        """
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = held.enter_context((self.path / _LOCKS).open("wb"))
                for place in sorted({int(key[:15], 16) for key in keys}):  # in one order, or two processes could wait for each other
                    _lock(file, place)
            yield

    def clear(self) -> int:
        """Remove all entries, and no other files. Returns the number of removed files."""
        removed = 0
        for file in list(self._files()):
            with contextlib.suppress(OSError):
                file.unlink()
                removed += 1
            for directory in (file.parent, file.parent.parent):
                if self.path in directory.parents:
                    with contextlib.suppress(OSError):
                        directory.rmdir()
        return removed

    def size(self) -> int:
        """Bytes in the cache."""
        total = 0
        for file in self._files():
            with contextlib.suppress(OSError):
                total += file.stat().st_size
        return total

    def remove_abandoned(self) -> None:
        """Remove temporary files of killed processes."""
        remove_abandoned(self.path, _TEMPORARY)

    def _warn(self, error: OSError) -> None:
        if not Cache._warned:
            Cache._warned = True
            why = error.strerror or str(error)
            print(f"kdgen: warning: cannot write the cache {self.path} ({why}); set KDGEN_CACHE_DIR", file=sys.stderr)

    def _files(self) -> Iterator[Path]:
        found = itertools.chain(self.path.glob(f"{_TEMPORARY}*"), self.path.glob("*/??/*"))
        return (file for file in found if _ENTRY.fullmatch(file.name))

    def _shard(self, kind: str, key: str) -> Path:
        return self.path / kind / key[:2]

    def _find(self, kind: str, key: str, suffix: str) -> tuple[Path, bytes] | None:
        ending = "." + suffix.lstrip(".")
        try:
            names = sorted(entry.name for entry in os.scandir(self._shard(kind, key)) if entry.name.startswith(key + "-"))
        except OSError:
            return None
        for name in names:
            file = self._shard(kind, key) / name
            try:
                data = file.read_bytes()
            except OSError:
                continue
            if name == f"{key}-{_check(data)}{ending}":
                return file, data
        return None


def _lock(file: IO[bytes], place: int) -> None:
    """Wait for the lock of this byte of ``file``; it goes when the file is closed. Raises OSError."""
    if sys.platform != "win32":
        fcntl.lockf(file, fcntl.LOCK_EX, 1, place)


def _check(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _write(folder: Path, target: Path, data: bytes) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with temporary_file(folder, _TEMPORARY, mode=0o600) as temporary:
        temporary.write_bytes(data)
        temporary.replace(target)
