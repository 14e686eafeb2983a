"""Reading input files, which must be regular files of bounded size.

With a pipe as ``config.json`` a command would wait for ever, and a device's content may never end. All input files are opened here.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

#: The largest file that is read as a whole.
MAX_TEXT_BYTES = 2**27
#: The first bytes of the small file that git keeps in place of a large one.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
#: The most values of a JSON file, counted by commas and colons, so that parsing takes at most a second and a gigabyte.
_MAX_VALUES = 5_000_000


def open_input(path: Path) -> BinaryIO:
    """``path``, opened for reading without buffering. Raises OSError, with a reason as its ``strerror``, unless it is a regular file.

    It also refuses a Git LFS pointer, whose file was not fetched.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a device"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    file = os.fdopen(descriptor, "rb", buffering=0)
    if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
        file.close()
        raise OSError(errno.ENODATA, "it is a Git LFS pointer instead of the file; `git lfs pull` fetches that", str(path))
    file.seek(0)
    return file


def read_input(path: Path, limit: int = MAX_TEXT_BYTES) -> bytes:
    """The bytes of ``path``. Raises OSError, with a reason as its ``strerror``, unless it is a regular file of at most ``limit`` bytes."""
    with open_input(path) as file:
        found = bytearray()
        while part := file.read(min(2**24, limit + 1 - len(found))):
            found += part
            if len(found) > limit:
                raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
        return bytes(found)


def parse_json(data: bytes) -> object:
    """The value of JSON in UTF-8. Raises ValueError or RecursionError when it is not JSON, has a key twice, or millions of values."""
    if data.count(b",") + data.count(b":") > _MAX_VALUES:
        raise ValueError(f"it has more than {_MAX_VALUES} values")
    return json.loads(data.decode(), object_pairs_hook=_without_doubles)


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key appears twice")
    return table
