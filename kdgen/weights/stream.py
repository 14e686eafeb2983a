"""Writing safetensors files as a stream: the header first, from sizes known beforehand, then tensors in pieces of any size.

A file appears whole or not at all: what is being written has another name in the same folder, and is removed when anything
goes wrong, an interrupt included. A file that a killed writer left behind is removed when the same file is written again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kdgen.errors import WeightError
from kdgen.files.temporary import remove_abandoned, temporary_file, temporary_folder


@dataclass(frozen=True)
class Announced:
    """A tensor that will be written. ``dtype`` is safetensors' name of its element type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def write_stream(
    path: Path,
    tensors: Sequence[Announced],
    pieces: Iterable[tuple[str, NDArray[Any]]],
    metadata: Mapping[str, str],
    late: Callable[[], Mapping[str, str]] | None = None,
) -> None:
    """Write a safetensors file. ``pieces`` are (tensor's name, its next elements), in the order of ``tensors``.

    ``late`` gives the rest of the metadata, which is known once all pieces are there: it is called before them, too, and must give texts
    of the same lengths then. Raises WeightError when a name is taken twice, when a tensor's pieces are fewer or more than its bytes, when
    there is no room for the file or it cannot be written.
    """
    for name, count in Counter(["__metadata__", *(tensor.name for tensor in tensors)]).items():
        if count > 1:
            raise WeightError(f"{path}: tensor name {name!r} is taken twice")
    header = _header(tensors, {**metadata, **(late() if late else {})})
    remove_leavings(path)
    try:
        with temporary_file(path.parent, f".{path.name}.", ".tmp") as temporary:  # a read-only file system says so, and not that it is full
            _need_room(path, len(header) + sum(tensor.nbytes for tensor in tensors))
            with temporary.open("r+b") as file:
                _fill(path, file, header, tensors, pieces)
                if late:
                    final = _header(tensors, {**metadata, **late()})
                    if len(final) != len(header):
                        raise ValueError("metadata has changed its length while the file was written")
                    file.seek(0)
                    file.write(final)
                file.flush()
                os.fsync(file.fileno())  # a full disk may show only here
            temporary.replace(path)
    except OSError as error:
        raise WeightError(f"{path}: cannot be written: {error.strerror or error}") from error


def _fill(path: Path, file: BinaryIO, header: bytes, tensors: Sequence[Announced], pieces: Iterable[tuple[str, NDArray[Any]]]) -> None:
    file.write(header)
    waiting = iter(tensors)
    current, left = Announced("", "", (), 0), 0
    for name, piece in pieces:
        while left == 0 and name != current.name:
            current = next(waiting, Announced(name, "", (), 0))
            left = current.nbytes
        if name != current.name or piece.nbytes > left:
            raise WeightError(f"{path}: {piece.nbytes} bytes of tensor {name!r} came where {left} of {current.name!r} were due")
        file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        left -= piece.nbytes
    short = current.name if left else next((tensor.name for tensor in waiting if tensor.nbytes), None)
    if short is not None:
        raise WeightError(f"{path}: tensor {short!r} is missing or incomplete")


def temporary_beside(path: Path) -> AbstractContextManager[Path]:
    """A new folder beside ``path``, to become ``path``; one that is left at the end is removed."""
    return temporary_folder(path.parent, f".{path.name}.", ".tmp")


def remove_leavings(path: Path) -> None:
    """Remove what killed writers of ``path`` left beside it."""
    remove_abandoned(path.parent, f".{path.name}.", ".tmp")


def _need_room(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise WeightError(f"{path}: needs {needed / 1e6:,.0f} MB, and its disk has {free / 1e6:,.0f} MB left")


def _header(tensors: Sequence[Announced], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for tensor in tensors:
        described[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    return len(text).to_bytes(8, "little") + text
