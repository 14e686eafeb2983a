"""Temporary files and folders, which the process that makes them removes, or the next process if it was killed.

A process locks each of its files as long as it uses it, and the operating system releases locks when the process ends. So a file whose lock
is free is abandoned.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

#: Without locks (on Windows, and on some network file systems), a file counts as abandoned when it was not written for this time.
_SILENT_SECONDS = 3600
_TOKEN = "[0-9a-f]{32}"
_SCRATCH = "kdgen-"  #: prefix of folders for compilers and formatters in the system's folder for temporary files


@contextlib.contextmanager
def temporary_file(folder: Path, before: str, after: str = "", mode: int = 0o666) -> Iterator[Path]:
    """A new empty file in ``folder``. Its name is ``before``, 32 hex digits, ``after``. At the end it is removed unless it was renamed.

    Raises OSError.
    """
    while True:
        path = folder / f"{before}{uuid.uuid4().hex}{after}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), mode)
        if _taken(descriptor, path):
            break
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # a read-only file system refuses this even without the file
            path.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def temporary_folder(folder: Path, before: str, after: str = "", mode: int = 0o777) -> Iterator[Path]:
    """The same for a new folder, which is removed with its content."""
    while True:
        path = folder / f"{before}{uuid.uuid4().hex}{after}"
        path.mkdir(mode)
        try:
            descriptor = None if sys.platform == "win32" else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process removed it as abandoned before it was locked
            continue
        if descriptor is None or _taken(descriptor, path):
            break
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """A new folder in the system's folder for temporary files, accessible only to this user. Raises OSError."""
    with temporary_folder(Path(tempfile.gettempdir()), f"{_SCRATCH}{kind}-", mode=0o700) as path:
        yield path


def remove_abandoned_scratch() -> None:
    """Remove the scratch folders of killed processes."""
    with contextlib.suppress(OSError):
        remove_abandoned(Path(tempfile.gettempdir()), _SCRATCH, pattern=f"[a-z]+-{_TOKEN}")


def remove_abandoned(folder: Path, before: str, after: str = "", pattern: str = _TOKEN) -> None:
    """Remove from ``folder`` the files and folders of ``temporary_file`` and ``temporary_folder`` that killed processes left."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.name.startswith(before)]
    except OSError:
        return
    for name in names:
        if re.fullmatch(f"{re.escape(before)}{pattern}{re.escape(after)}", name):
            with contextlib.suppress(OSError):  # it is another user's, or another process removes it
                _remove_if_abandoned(folder / name)


def _remove_if_abandoned(path: Path) -> None:
    kind = path.lstat().st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        return
    descriptor = None if sys.platform == "win32" else os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mine = None if descriptor is None else _lock(descriptor)
        if mine is False or (mine is None and not _silent(path)):
            return
        shutil.rmtree(path) if stat.S_ISDIR(kind) else path.unlink()
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _taken(descriptor: int, path: Path) -> bool:
    """Lock what was just made. False if another process removed it as abandoned just before."""
    if _lock(descriptor) is not False:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), path.lstat())
    os.close(descriptor)
    return False


def _lock(descriptor: int) -> bool | None:
    """Whether this process has the lock now; None if the file system has no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def _silent(path: Path) -> bool:
    return time.time() - max(part.lstat().st_mtime for part in (path, *path.glob("*"))) > _SILENT_SECONDS
