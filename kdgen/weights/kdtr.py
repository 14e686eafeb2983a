"""The ``.kdtr`` container: a safetensors file whose metadata says what it holds. Any safetensors reader opens it.

Writing streams tensor by tensor, or in pieces, behind a header made from shapes known beforehand; reading maps a tensor when it is asked
for. Nothing is ever unpickled. The metadata holds a CRC-32 of the header and one of every piece of ``PIECE_BYTES`` of every tensor,
so that pieces are checked as they are read, several at a time. CRC-32 sees every error of up to 32 neighbouring bits; zlib computes it
faster than a core copies memory.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kdgen.errors import WeightError
from kdgen.plan.ir import DType
from kdgen.weights.ahead import in_order
from kdgen.weights.header import Header, TensorEntry, read_header
from kdgen.weights.stream import Announced, write_stream

FORMAT = "kdtr"
FORMAT_VERSION = 2  #: 1 had no checksums
#: Bytes that have a checksum of their own: a multiple of every item size, and of a packed INT4 tile's 576 bytes.
PIECE_BYTES = 576 * 2**16
_BLOCK_BYTES = 576 * 2**9  #: read at a time, likewise a multiple


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file to be written."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _numpy_dtypes()[self.dtype].itemsize


@dataclass(frozen=True)
class KdtrMetadata:
    """What a .kdtr file holds. ``spec`` and ``layout`` are JSON texts: the model, and how the tensors are packed; so is ``text``, a
    table of the small files that came with the model for text, by name.
    """

    kind: str  #: "packed" (weights in a plan's layouts) or "reference" (what a model should compute)
    spec: str
    layout: str
    text: str = "{}"


def _nothing(start: int, part: npt.NDArray[np.generic]) -> None:
    """Accepts every block."""


class Kdtr:
    """An open .kdtr file. Tensors are read-only and mapped one by one, read from disk as they are touched, let go when dropped."""

    def __init__(self, header: Header, metadata: KdtrMetadata) -> None:
        self.header, self.path = header, header.path
        self.metadata = metadata
        self.tensors = tuple(TensorInfo(entry.name, _dtype(header.path, entry), entry.shape) for entry in header.tensors)
        self._entries = {entry.name: entry for entry in header.tensors}
        self._checksums = _read_checksums(header)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        """The tensor called ``name``, its bytes unchecked.

        Raises WeightError when there is none.
        """
        entry = self._entry(name)
        dtype = _numpy_dtypes()[_dtype(self.path, entry)]
        if not entry.nbytes:
            return np.frombuffer(b"", dtype).reshape(entry.shape)
        mapped = np.asarray(np.memmap(self.path, np.uint8, "r", entry.begin, (entry.nbytes,)))
        return mapped.view(dtype).reshape(entry.shape)

    def parts(self, name: str, look: Callable[[int, npt.NDArray[np.generic]], None] = _nothing) -> Iterator[npt.NDArray[np.generic]]:
        """The tensor called ``name`` in flat pieces of at most ``PIECE_BYTES``, read and checked on a few threads.

        ``look`` is called there with blocks of each piece, and where they begin in the tensor, and may refuse them. Raises WeightError
        when there is no such tensor, the file cannot be read or has become shorter, or a piece is not what was written.
        """
        entry = self._entry(name)
        read = functools.partial(self._piece, entry, _numpy_dtypes()[_dtype(self.path, entry)], look)
        tasks = (functools.partial(read, at) for at in range(0, entry.nbytes, PIECE_BYTES))
        return (task() for task in tasks) if entry.nbytes <= PIECE_BYTES else in_order(tasks)

    @property
    def has_checksums(self) -> bool:
        """Whether the file has checksums. Files of format 1 have none."""
        return self._checksums is not None

    def verify(self) -> None:
        """Read every byte. Raises WeightError where one is not what was written."""
        for tensor in self.tensors:
            for _ in self.parts(tensor.name):
                pass

    def _piece(
        self, entry: TensorEntry, dtype: np.dtype[np.generic], look: Callable[[int, npt.NDArray[np.generic]], None], at: int
    ) -> npt.NDArray[np.generic]:
        part, checksum = np.empty(min(PIECE_BYTES, entry.nbytes - at), np.uint8), 0
        refused: WeightError | None = None  # damage that a checksum shows is called damage
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(entry.begin + at)
                for begin in range(0, part.nbytes, _BLOCK_BYTES):  # so that what is read is in a core's cache when it is checked
                    block = part[begin : begin + _BLOCK_BYTES]
                    if file.readinto(block.data) != block.nbytes:
                        raise WeightError(f"{self.path}: was cut off while it was read")
                    checksum = zlib.crc32(block.data, checksum)
                    try:
                        look(at + begin, block.view(dtype))
                    except WeightError as error:
                        refused = refused or error
        except OSError as error:
            raise WeightError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        if self._checksums is not None and _hex(checksum) != self._checksums[entry.name][at // PIECE_BYTES]:
            where = f"bytes {at} to {at + part.nbytes - 1} of tensor {entry.name}"
            raise WeightError(f"{self.path}: {where} are not those that were written: the file is damaged; run kdgen import again")
        if refused is not None:
            raise refused
        return part.view(dtype)

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise WeightError(f"{self.path}: no tensor {name!r}")
        return entry


def write_kdtr(
    path: Path, infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, npt.NDArray[np.generic]]], metadata: KdtrMetadata
) -> None:
    """Write ``tensors`` one at a time, in the order of ``infos``; ``path`` appears whole or not at all.

    Raises WeightError when a tensor is missing, superfluous or not of its dtype and shape, or when the file cannot be written.
    """
    write_kdtr_parts(path, infos, _checked(path, infos, tensors), metadata)


def write_kdtr_parts(
    path: Path, infos: Sequence[TensorInfo], parts: Iterable[tuple[str, npt.NDArray[np.generic]]], metadata: KdtrMetadata
) -> None:
    """``write_kdtr`` for tensors in any number of pieces, each with its tensor's name before it, in order.

    Raises WeightError when a tensor's pieces are fewer or more than its bytes, or when the file cannot be written.
    """
    announced = [Announced(info.name, _SAFETENSORS_NAMES[info.dtype], info.shape, info.nbytes) for info in infos]
    described = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "kind": metadata.kind,
        "spec": metadata.spec,
        "layout": metadata.layout,
        "text": metadata.text,
    }
    sums = _Checksums(announced)
    write_stream(path, announced, sums.watch(parts), described, lambda: {CHECKSUMS: sums.text(described)})


#: The metadata's key for JSON, {"header": CRC-32, "tensors": {name: CRC-32 of its pieces, one after another}}, in hex.
CHECKSUMS = "checksums"


class _Checksums:
    """CRC-32 of tensors' pieces as they pass; zeros until then."""

    def __init__(self, tensors: Sequence[Announced]) -> None:
        self._tensors = tensors
        self._found = {tensor.name: [0] * -(-tensor.nbytes // PIECE_BYTES) for tensor in tensors}

    def watch(self, parts: Iterable[tuple[str, npt.NDArray[np.generic]]]) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
        current, at = "", 0
        for name, part in parts:
            current, at = name, at if name == current else 0
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            found, begin = self._found.get(name, []), 0
            while begin < len(data) and at // PIECE_BYTES < len(found):
                end = begin + min(len(data) - begin, PIECE_BYTES - at % PIECE_BYTES)
                found[at // PIECE_BYTES] = zlib.crc32(data[begin:end].data, found[at // PIECE_BYTES])
                at, begin = at + end - begin, end
            yield name, part

    def text(self, metadata: Mapping[str, str]) -> str:
        described = [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in self._tensors]
        tensors = {name: "".join(map(_hex, found)) for name, found in self._found.items()}
        return json.dumps({"header": _header_checksum(metadata, described), "tensors": tensors}, separators=(",", ":"))


def _header_checksum(metadata: Mapping[str, str], tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> str:
    described = {name: [dtype, list(shape), nbytes] for name, dtype, shape, nbytes in tensors}
    return _hex(zlib.crc32(json.dumps([dict(metadata), described], sort_keys=True).encode()))


def _hex(checksum: int) -> str:
    return f"{checksum:08x}"


def _read_checksums(header: Header) -> Mapping[str, list[str]] | None:
    """Checksums of every tensor's pieces, in hex; None: a file of format 1. Raises WeightError when the header is not what was written."""
    if header.metadata.get("format_version") == "1":
        return None
    damaged = WeightError(f"{header.path}: its header is not what was written: the file is damaged; run kdgen import again")
    metadata = {key: value for key, value in header.metadata.items() if key != CHECKSUMS}
    try:
        found = json.loads(header.metadata[CHECKSUMS])
        stored = {str(name): text for name, text in found["tensors"].items()}
        texts = {entry.name: stored.pop(entry.name) for entry in header.tensors}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged from None
    pieces = {entry.name: -(-entry.nbytes // PIECE_BYTES) for entry in header.tensors}
    described = ((entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in header.tensors)
    fits = all(isinstance(text, str) and len(text) == 8 * pieces[name] for name, text in texts.items())
    if stored or not fits or found.get("header") != _header_checksum(metadata, described):
        raise damaged
    return {name: [text[at : at + 8] for at in range(0, len(text), 8)] for name, text in texts.items()}


def open_kdtr(path: Path) -> Kdtr:
    """Open a .kdtr file.

    Raises WeightError when it is damaged, truncated, not a .kdtr file, or of a newer format.
    """
    header = read_header(path)
    return Kdtr(header, kdtr_metadata(header))


def kdtr_metadata(header: Header) -> KdtrMetadata:
    """The .kdtr part of a safetensors header.

    Raises WeightError when there is none, or it is of another version or damaged.
    """
    found = header.metadata
    if found.get("format") != FORMAT:
        raise WeightError(f"{header.path}: a safetensors file, but not a .kdtr file")
    version = found.get("format_version", "")
    if version not in ("1", str(FORMAT_VERSION)):
        raise WeightError(f"{header.path}: .kdtr format {version or 'unknown'}; this kdgen reads formats 1 and {FORMAT_VERSION}")
    _read_checksums(header)
    for key in ("kind", "spec", "layout"):
        if key not in found:
            raise WeightError(f"{header.path}: damaged .kdtr metadata: no {key!r}")
    for key in ("spec", "layout", "text"):
        try:
            json.loads(found.get(key, "{}"))
        except (ValueError, RecursionError) as error:
            raise WeightError(f"{header.path}: damaged .kdtr metadata: {key!r} is not JSON") from error
    return KdtrMetadata(found["kind"], found["spec"], found["layout"], found.get("text", "{}"))


def _checked(
    path: Path, infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, npt.NDArray[np.generic]]]
) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    pending = iter(tensors)
    for info in infos:
        name, values = next(pending, ("", None))
        if values is None:
            raise WeightError(f"{path}: tensor {info.name!r} is missing")
        if name != info.name:
            raise WeightError(f"{path}: tensor {name!r} came where {info.name!r} was announced")
        if values.dtype != _numpy_dtypes()[info.dtype] or values.shape != info.shape:
            raise WeightError(f"{path}: tensor {name!r} is {values.dtype} {values.shape}, announced as {info.dtype} {info.shape}")
        yield name, values
    if (extra := next(pending, None)) is not None:
        raise WeightError(f"{path}: tensor {extra[0]!r} was not announced")


_SAFETENSORS_NAMES: Mapping[DType, str] = {"f32": "F32", "bf16": "BF16", "i32": "I32", "f64": "F64", "u8": "U8"}


def _dtype(path: Path, entry: TensorEntry) -> DType:
    for dtype, name in _SAFETENSORS_NAMES.items():
        if name == entry.dtype:
            return dtype
    raise WeightError(f"{path}: tensor {entry.name!r} is {entry.dtype}, which .kdtr files do not use")


def _numpy_dtypes() -> Mapping[DType, np.dtype[np.generic]]:
    kinds: dict[DType, str] = {"f32": "<f4", "i32": "<i4", "f64": "<f8", "u8": "u1"}
    return {**{key: np.dtype(kind) for key, kind in kinds.items()}, "bf16": np.dtype(ml_dtypes.bfloat16)}
