"""Files and folders under construction, which vanish with the process that makes them, or with the next one where it was killed.

Each is locked by its maker as long as it is at work: a name whose lock is free is abandoned, whatever its age. The lock is one of the
kernel's, which ends with the process however that ends.
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

#: Where there are no such locks (Windows, some network file systems), what nobody wrote to for so long counts as abandoned.
_SILENT_SECONDS = 3600
_TOKEN = "[0-9a-f]{32}"
_SCRATCH = "kdgen-"  #: how folders for compilers and formatters begin in the system's folder for temporary files


@contextlib.contextmanager
def temporary_file(folder: Path, before: str, after: str = "", mode: int = 0o666) -> Iterator[Path]:
    """A new empty file in ``folder``, called ``before``, 32 hex digits, ``after``. At the end it is removed, unless it has been renamed.

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
        with contextlib.suppress(OSError):  # a read-only file system refuses even what is not there
            path.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def temporary_folder(folder: Path, before: str, after: str = "", mode: int = 0o777) -> Iterator[Path]:
    """The same of a new folder, removed with all that is in it."""
    while True:
        path = folder / f"{before}{uuid.uuid4().hex}{after}"
        path.mkdir(mode)
        try:
            descriptor = None if sys.platform == "win32" else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process took it for abandoned before it could be locked
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
    """A new folder of this user's alone, among the system's temporary files. Raises OSError."""
    with temporary_folder(Path(tempfile.gettempdir()), f"{_SCRATCH}{kind}-", mode=0o700) as path:
        yield path


def remove_abandoned_scratch() -> None:
    """Remove the scratch folders of killed processes."""
    with contextlib.suppress(OSError):
        remove_abandoned(Path(tempfile.gettempdir()), _SCRATCH, pattern=f"[a-z]+-{_TOKEN}")


def remove_abandoned(folder: Path, before: str, after: str = "", pattern: str = _TOKEN) -> None:
    """Remove what killed processes left in ``folder`` under names that ``temporary_file`` or ``temporary_folder`` makes."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.name.startswith(before)]
    except OSError:
        return
    for name in names:
        if re.fullmatch(f"{re.escape(before)}{pattern}{re.escape(after)}", name):
            with contextlib.suppress(OSError):  # somebody else's, or somebody else is removing it
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
    """Lock what was just made. False: another process took it for abandoned in the moment before."""
    if _lock(descriptor) is not False:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), path.lstat())
    os.close(descriptor)
    return False


def _lock(descriptor: int) -> bool | None:
    """Whether this process has the lock now; None where the file system has none."""
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
