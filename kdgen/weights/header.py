"""The header of a safetensors file: which tensors it holds, and where.

safetensors is eight bytes of header length, a JSON header (name, dtype, shape and byte range of every tensor, and string metadata),
then the tensors one after another without gaps. A file that breaks one of these rules is refused, as safetensors' own reader refuses it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kdgen.errors import WeightError
from kdgen.files.inputs import open_input, parse_json
from kdgen.spec.fields import show, show_key

#: safetensors' own limit
_MAX_HEADER = 100_000_000
#: Generous limits on the characters of a name, the number of dimensions and their sizes, so that products of sizes stay cheap.
_MAX_NAME, _MAX_DIMENSIONS, _MAX_SIZE = 1000, 32, 2**63 - 1
_BITS: Mapping[str, int] = {
    name: bits
    for bits, names in {
        4: "F4",
        6: "F6_E2M3 F6_E3M2",
        8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        16: "U16 I16 F16 BF16",
        32: "U32 I32 F32",
        64: "U64 I64 F64 C64",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file, as its header has it. ``begin`` and ``end`` are bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A checked safetensors header: every tensor lies whole inside the file."""

    path: Path
    metadata: Mapping[str, str]
    tensors: tuple[TensorEntry, ...]
    file_bytes: int


def read_header(path: Path) -> Header:
    """Read and check the header of any safetensors file.

    Raises WeightError when the file cannot be read, is damaged or truncated, or is no safetensors file.
    """
    try:
        with open_input(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_bytes < 10 or length > min(_MAX_HEADER, file_bytes - 8):
                raise WeightError(f"{path}: not a safetensors file, or cut off in its header")
            text = file.read(length)
    except OSError as error:
        raise WeightError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{path}: not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise WeightError(f"{path}: not a safetensors file: its header is not a JSON object")
    metadata = content.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightError(f"{path}: damaged header: __metadata__ is not a table of strings")
    entries = sorted((_entry(path, name, value, 8 + length) for name, value in content.items()), key=lambda e: (e.begin, e.end))
    position = 8 + length
    for entry in entries:
        if entry.begin != position:
            raise WeightError(f"{path}: damaged header: tensor {entry.name!r} does not begin where the one before it ends")
        position = entry.end
    if position != file_bytes:
        state = "cut off" if position > file_bytes else "damaged"
        raise WeightError(f"{path}: {state}: {file_bytes} bytes, and its header describes {position}")
    return Header(path, metadata, tuple(entries), file_bytes)


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    shown = show_key(name)
    if len(name) > _MAX_NAME:
        raise WeightError(f"{path}: damaged header: a tensor's name has {len(name)} characters: {shown}")

    def numbers(key: str, most: int) -> list[int]:
        found = value.get(key) if isinstance(value, dict) else None
        if not isinstance(found, list) or len(found) > most or not all(type(n) is int and 0 <= n <= _MAX_SIZE for n in found):
            raise WeightError(f"{path}: damaged header: {key!r} of tensor {shown!r} is {show(found)}")
        return found

    shape, offsets = numbers("shape", _MAX_DIMENSIONS), numbers("data_offsets", 2)
    dtype = value.get("dtype") if isinstance(value, dict) else None
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if not isinstance(dtype, str) or bits is None:
        raise WeightError(f"{path}: tensor {shown!r} has unknown dtype {show(dtype)}")
    if len(offsets) != 2 or (offsets[1] - offsets[0]) * 8 != math.prod(shape) * bits:
        raise WeightError(f"{path}: damaged header: the size of tensor {shown!r} does not fit its shape {show(shape)} of {dtype}")
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])
